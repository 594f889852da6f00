"""Random numbers by position: a number depends on its position, and not on the numbers that were
drawn before it.

NumPy's Philox4x64-10 (Salmon et al., SC'11) is a function of a key and a counter. The key is the
run's seed. The counter is (position, epoch, attempt, purpose). NumPy keeps the raw stream of a bit
generator fixed (NEP 19). Only this raw output is used here, and none of NumPy's distributions: the
numbers are the same with any version, thread count or number of ranks.
"""

from enum import IntEnum

import numpy as np


class Purpose(IntEnum):
    """What numbers are drawn for. Purposes never share a number. Never change the values: they are
    part of a run."""

    ORDER = 1
    CROP = 2
    FLIP = 3
    MIXUP_COEFFICIENT = 4
    MIXUP_PARTNER = 5
    WEIGHT = 6
    TEXTURE = 7
    DROPOUT = 8
    CLASS_SHARE = 9
    CLASS_IMAGE = 10
    AUGMENTATION = 11
    INTERPOLATION = 12
    STOCHASTIC_DEPTH = 20
    MIX_KIND = 21
    CUTMIX_COEFFICIENT = 22
    CUTMIX_BOX = 23
    PERMUTATION = 30
    SHARD_ORDER = 31


def draw(
    seed: int, purpose: Purpose, first: int, count: int, *, epoch: int = 0, attempt: int = 0
) -> np.ndarray:
    """Return four numbers for each of the positions `first` to `first + count - 1`: uint64 [count,
    4]."""
    bits = np.random.Philox(counter=[first, epoch, attempt, purpose], key=[seed, 0])
    return np.asarray(bits.random_raw(4 * count)).reshape(count, 4)


class Numbers:
    """Random numbers for a list of positions of an epoch, of which there are `count`. Those of
    consecutive positions are drawn together."""

    def __init__(self, seed: int, epoch: int, positions: np.ndarray) -> None:
        self.seed = seed
        self.epoch = epoch
        self.count = len(positions)
        runs = np.split(positions, np.flatnonzero(np.diff(positions) != 1) + 1)
        self.runs = [(int(run[0]), len(run)) for run in runs]

    def __call__(self, purpose: Purpose, attempt: int = 0) -> np.ndarray:
        """Return four numbers for each position: uint64 [N, 4]."""
        return np.concatenate(
            [draw(self.seed, purpose, *run, epoch=self.epoch, attempt=attempt) for run in self.runs]
        )

    def rows(self, purpose: Purpose, length: int, attempt: int = 0) -> np.ndarray:
        """Return a row of numbers for each position: uint64 [N, length]."""
        draws = -(-length // 4)
        how: dict[str, int] = {"epoch": self.epoch, "attempt": attempt}
        rows = [
            draw(self.seed, purpose, first * draws, count * draws, **how)
            for first, count in self.runs
        ]
        return np.concatenate(rows).reshape(self.count, 4 * draws)[:, :length]


def draw_keys(seed: int, purpose: Purpose, count: int, *, epoch: int) -> np.ndarray:
    """Return a number for each of the positions 0 to `count - 1`, to sort by: uint64 [count]."""
    return draw(seed, purpose, 0, -(-count // 4), epoch=epoch).reshape(-1)[:count]


def uniform(raw: np.ndarray) -> np.ndarray:
    """Turn uint64 into float64 uniform in [0, 1), by the upper 53 bits."""
    return (raw >> np.uint64(11)) * 2.0**-53


def normal(seed: int, purpose: Purpose, count: int, *, stream: int) -> np.ndarray:
    """Return standard normal numbers by the Box-Muller transform: float64 [count]. Streams are
    independent."""
    u = uniform(draw(seed, purpose, 0, -(-count // 4), epoch=stream)).reshape(-1, 2)
    radius = np.sqrt(-2 * np.log1p(-u[:, 0]))
    angle = 2 * np.pi * u[:, 1]
    return np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1).reshape(-1)[:count]
