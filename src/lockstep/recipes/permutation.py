"""A random permutation that is computed position by position, without an array of all positions."""

import numpy as np

from lockstep.recipes.philox import Purpose, draw

_ROUNDS = 8
_LEAST_BITS = 2
"""Bits of half a number at least. In a smaller domain, few permutations could come out."""


class Permutation:
    """A permutation of 0 to count - 1, which is a function of (seed, epoch).

    It is a Feistel network (Luby and Rackoff, 1988) on numbers of an even number of bits. A result
    that is not below `count` is put in again until one is ("cycle walking", Black and Rogaway,
    2002); for 4 images or more that takes fewer than four turns on average. The function of a round
    adds the round's key and mixes the bits as SplitMix64 does (Steele, Lea and Flood, 2014).
    """

    def __init__(self, seed: int, epoch: int, count: int) -> None:
        self._count = count
        self._half = np.uint64(max(_LEAST_BITS, -(-(count - 1).bit_length() // 2)))
        self._mask = (np.uint64(1) << self._half) - np.uint64(1)
        self._keys = draw(seed, Purpose.PERMUTATION, 0, _ROUNDS // 4, epoch=epoch).reshape(-1)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, positions: np.ndarray) -> np.ndarray:
        """Return what is at some positions: int64, with the shape of `positions`."""
        values = self._permute(np.asarray(positions).astype(np.uint64))
        while (outside := values >= self._count).any():
            values[outside] = self._permute(values[outside])
        return values.astype(np.int64)

    def _permute(self, values: np.ndarray) -> np.ndarray:
        left = values >> self._half
        right = values & self._mask
        for key in self._keys:
            left, right = right, left ^ (_mix(right + key) & self._mask)
        return right << self._half | left


def _mix(values: np.ndarray) -> np.ndarray:
    """Return uint64 values in which every bit depends on all bits of its input."""
    values = (values ^ values >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ values >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return values ^ values >> np.uint64(31)
