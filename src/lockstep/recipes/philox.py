"""Random numbers by position, not by history: what a run draws at a place never depends on what it drew before.

NumPy's Philox4x64-10 (Salmon et al., SC'11) is a function of a key and a counter. The key is the run's seed; the counter is
(position, epoch, attempt, purpose). NumPy keeps the raw stream of a bit generator fixed (NEP 19), so the numbers are the
same on any version, thread count or number of ranks; only raw output is used here, no distribution of NumPy's.
"""

from enum import IntEnum

import numpy as np


class Purpose(IntEnum):
    """What numbers are drawn for; different purposes never share a number. Values are part of a run: never change them."""

    ORDER = 1
    CROP = 2
    FLIP = 3
    MIXUP_COEFFICIENT = 4
    MIXUP_PARTNER = 5
    WEIGHT = 6
    TEXTURE = 7


def draw(seed: int, purpose: Purpose, first: int, count: int, *, epoch: int = 0, attempt: int = 0) -> np.ndarray:
    """Return four numbers for each of the positions first to first + count - 1: uint64 [count, 4]."""
    bits = np.random.Philox(counter=[first, epoch, attempt, purpose], key=[seed, 0])
    return np.asarray(bits.random_raw(4 * count)).reshape(count, 4)


def uniform(raw: np.ndarray) -> np.ndarray:
    """Turn uint64 into float64 evenly spread over [0, 1), by the upper 53 bits."""
    return (raw >> np.uint64(11)) * 2.0**-53


def normal(seed: int, purpose: Purpose, count: int, *, stream: int) -> np.ndarray:
    """Return standard normal numbers by Box and Muller's transform: float64 [count]. Streams are independent."""
    u = uniform(draw(seed, purpose, 0, -(-count // 4), epoch=stream)).reshape(-1, 2)
    radius = np.sqrt(-2 * np.log1p(-u[:, 0]))
    angle = 2 * np.pi * u[:, 1]
    return np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1).reshape(-1)[:count]
