"""2:4 structured sparsity: which weights of a trained model are kept when it is pruned.

Of every 4 consecutive weights along the inputs, at most 2 are kept. NVIDIA's sparse tensor cores
use this pattern. A kernel [out, in / groups, height, width] is treated as a matrix. Its columns are
the inputs. Its rows are, from the outermost, the kernel's columns, the kernel's rows and the
outputs. A classifier [out, in] is already a matrix. If a side of a matrix is not a multiple of 4,
it is padded with zeros.

- mask_1d keeps the 2 largest magnitudes of every 4 in a row.
- mask_2d_greedy keeps, in every 4 x 4 block, magnitudes from the largest on, if their row and
  column have less than 2 so far.
- mask_2d_best keeps, in every 4 x 4 block, the pattern with 2 in each row and column that has the
  largest sum of magnitudes.

Of equal magnitudes the later one is kept; of equal sums, the pattern that keeps earlier inputs.

Source: the algorithms are those of `paddle.incubate.asp`, with the same matrix, padding and skipped
layers. Paddle differs in two points. Its mask_2d_best sums signed weights, so that it keeps the
most positive ones, although its manual says the largest norm. Of equal magnitudes, its choice
depends on the processor.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import combinations, product

import numpy as np

from lockstep.models.architectures import STEM_KERNELS


def make_masks(
    tensors: Mapping[str, np.ndarray],
    algorithm: str,
    excluded: Collection[str] = (),
    stem_channels: int = 3,
) -> dict[str, np.ndarray]:
    """Return which weights are kept: name -> bool array of the tensor's shape.

    Every kernel [out, in / groups, height, width] and classifier [out, in] with at least 4 inputs
    that is not `excluded` gets a mask. A stem [out, 3, height, width] has too few inputs. If
    `stem_channels` is 4, it is pruned as one that has a fourth input with weights of 0. `algorithm`
    is one of `ALGORITHMS`.
    """

    def inputs(name: str, value: np.ndarray) -> int:
        return stem_channels if name in STEM_KERNELS else value.shape[1]

    return {
        name: _make_mask(value, ALGORITHMS[algorithm])
        for name, value in tensors.items()
        if value.ndim > 1 and inputs(name, value) >= 4 and name not in excluded
    }


def prune_tensors(
    tensors: Mapping[str, np.ndarray], masks: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Return the tensors that have a mask, with 0 where it is false, in their own shapes
    and dtypes."""
    return {
        name: np.where(mask, tensors[name], tensors[name].dtype.type(0))
        for name, mask in masks.items()
    }


@dataclass(frozen=True)
class Zeros:
    """The zeros of a tensor."""

    groups: int
    """Number of groups of 4 consecutive inputs. The last one of a row may have fewer; it is filled
    up with zeros."""
    sparse_groups: int
    """Number of groups with at least 2 zeros, those that fill it up included."""
    values: int
    """Number of values."""
    zeros: int
    """Number of values that are 0."""

    @property
    def is_sparse(self) -> bool:
        """Whether every group has at least 2 zeros."""
        return self.sparse_groups == self.groups


def count_zeros(tensors: Mapping[str, np.ndarray]) -> dict[str, Zeros]:
    """Return the zeros of every kernel [out, in / groups, height, width] and classifier [out, in]
    with at least 4 inputs.

    The stem is counted too. Its three inputs are filled up to a group, as in a stem of four
    channels.
    """
    counts = {}
    for name, value in tensors.items():
        if value.ndim > 1 and (value.shape[1] >= 4 or name in STEM_KERNELS):
            is_zero = np.moveaxis(value == 0, 1, -1).reshape(-1, value.shape[1])
            padded = np.pad(is_zero, ((0, 0), (0, -value.shape[1] % 4)), constant_values=True)
            groups = padded.reshape(-1, 4).sum(axis=1)
            counts[name] = Zeros(
                len(groups), int((groups >= 2).sum()), value.size, int((value == 0).sum())
            )
    return counts


def _make_mask(values: np.ndarray, keep: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    turned = np.abs(values.T.swapaxes(-1, -2))
    matrix = turned.reshape(-1, turned.shape[-1])
    rows, columns = matrix.shape
    kept = keep(np.pad(matrix, ((0, -rows % 4), (0, -columns % 4))))[:rows, :columns]
    return np.ascontiguousarray(kept.reshape(turned.shape).swapaxes(-1, -2).T)


def _mask_1d(matrix: np.ndarray) -> np.ndarray:
    fours = matrix.reshape(-1, 4)
    kept = np.ones(fours.shape, bool)
    np.put_along_axis(kept, np.argsort(fours, axis=1, kind="stable")[:, :2], False, axis=1)
    return kept.reshape(matrix.shape)


def _mask_2d_greedy(matrix: np.ndarray) -> np.ndarray:
    blocks = _split_blocks(matrix)
    kept = np.zeros(blocks.shape, bool)
    in_row, in_column = np.zeros((2, len(blocks), 4), np.int8)
    every = np.arange(len(blocks))
    for cell in np.argsort(blocks, axis=1, kind="stable").T[::-1]:
        row, column = divmod(cell, 4)
        fits = (in_row[every, row] < 2) & (in_column[every, column] < 2)
        kept[every, cell] = fits
        in_row[every, row] += fits
        in_column[every, column] += fits
    return _join_blocks(kept, matrix.shape)


def _mask_2d_best(matrix: np.ndarray) -> np.ndarray:
    # In float64 a sum of eight float32 values of similar size is exact, so that the order of
    # addition does not matter.
    sums = _split_blocks(matrix).astype(np.float64) @ _list_patterns().T
    return _join_blocks(_list_patterns()[np.argmax(sums, axis=1)], matrix.shape)


@cache
def _list_patterns() -> np.ndarray:
    """Return the 90 patterns with 2 in each row and column: bool [90, 16]. Patterns that keep
    earlier columns come first."""
    rows = [np.isin(range(4), pair) for pair in combinations(range(4), 2)]
    blocks = np.array(list(product(rows, repeat=4)))
    return blocks[(blocks.sum(axis=1) == 2).all(axis=1)].reshape(-1, 16)


def _split_blocks(matrix: np.ndarray) -> np.ndarray:
    """Return the 4 x 4 blocks of a matrix, one per row: [blocks, 16]."""
    rows, columns = matrix.shape
    return matrix.reshape(rows // 4, 4, columns // 4, 4).swapaxes(1, 2).reshape(-1, 16)


def _join_blocks(blocks: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    rows, columns = shape
    return blocks.reshape(rows // 4, columns // 4, 4, 4).swapaxes(1, 2).reshape(shape)


ALGORITHMS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "mask_1d": _mask_1d,
    "mask_2d_greedy": _mask_2d_greedy,
    "mask_2d_best": _mask_2d_best,
}
"""Functions by name. Each takes a matrix of magnitudes, whose sides are multiples of 4, and returns
a bool mask of the same shape."""
