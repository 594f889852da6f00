"""Masks of 2:4 sparsity: compared with Paddle's, compared with all possible patterns, and checked
for general properties."""

import itertools
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from lockstep.models.architectures import MODELS
from lockstep.weights.sparsity import ALGORITHMS, make_masks
from tests.soak import EXAMPLES

every_algorithm = pytest.mark.parametrize("algorithm", ALGORITHMS)

PEER = Path(__file__).parent / "peers" / "with_paddle.py"
Found = dict[str, np.ndarray]


def mask(values: np.ndarray, algorithm: str) -> np.ndarray:
    return make_masks({"a": values}, algorithm)["a"]


# Paddle's masks


@pytest.fixture(scope="module")
def paddle(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """The masks of Paddle for the weights below, by every algorithm. Paddle runs in a separate
    process."""
    folder = tmp_path_factory.mktemp("paddle")
    np.savez(folder / "in.npz", **WEIGHTS)
    done = subprocess.run(
        [sys.executable, PEER, folder / "in.npz", folder / "out.npz"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(np.load(folder / "out.npz"))


def draw(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


# Kernels [out, in / groups, height, width] and classifiers [out, in]; some sides are multiples of 4
# and some are not.
SHAPES = [
    (8, 8, 3, 3),
    (16, 4, 1, 1),
    (5, 6, 3, 3),
    (4, 7, 1, 3),
    (3, 9, 5, 2),
    (1, 4, 1, 1),
    (10, 32),
    (7, 13),
    (1, 5),
]
TOO_FEW_INPUTS = [(8, 3, 7, 7), (4, 3)]
WEIGHTS = {str(shape): draw(shape) for shape in SHAPES + TOO_FEW_INPUTS}
# Magnitudes, because Paddle's mask_2d_best uses signed values.
STEM = np.abs(draw((8, 4, 7, 7), seed=1)) * np.array([1, 1, 1, 1e-6], np.float32)[:, None, None]
WEIGHTS["stem"] = STEM
WEIGHTS |= {f"magnitudes {name}": np.abs(value) for name, value in WEIGHTS.items()}
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


@every_shape
@every_algorithm
def test_masks_are_paddles_own(paddle: Found, algorithm: str, shape: tuple[int, ...]) -> None:
    # Paddle's mask_2d_best uses signed values instead of magnitudes; see the next test.
    name = f"magnitudes {shape}" if algorithm == "mask_2d_best" else f"{shape}"
    np.testing.assert_array_equal(mask(draw(shape), algorithm), paddle[f"{algorithm} {name}"])


def test_paddles_best_mask_is_worse_than_its_greedy_one_below_0(paddle: Found) -> None:
    magnitudes = np.abs(draw((8, 8, 3, 3)))
    kept = {
        algorithm: magnitudes[paddle[f"{algorithm} (8, 8, 3, 3)"]].sum() for algorithm in ALGORITHMS
    }
    assert kept["mask_2d_best"] < 0.9 * kept["mask_2d_greedy"]
    assert magnitudes[mask(draw((8, 8, 3, 3)), "mask_2d_best")].sum() > kept["mask_2d_greedy"]


@pytest.mark.parametrize("shape", TOO_FEW_INPUTS, ids=str)
@every_algorithm
def test_too_few_inputs_have_no_mask(paddle: Found, algorithm: str, shape: tuple[int, ...]) -> None:
    assert paddle[f"{algorithm} {shape}"].all()
    assert make_masks({"a": draw(shape)}, algorithm) == {}


@every_algorithm
def test_a_stem_is_pruned_as_if_it_had_four_channels(paddle: Found, algorithm: str) -> None:
    # A fourth weight begins like the others, and weight decay makes it a millionth in 90 epochs.
    kept = make_masks({"conv1.weight": STEM[:, :3]}, algorithm, stem_channels=4)["conv1.weight"]
    np.testing.assert_array_equal(kept, paddle[f"{algorithm} stem"][:, :3])
    assert 0 < np.count_nonzero(~kept) < kept.size
    assert make_masks({"conv1.weight": STEM[:, :3]}, algorithm) == {}


def test_the_smallest_of_three_colours_becomes_zero() -> None:
    magnitudes = np.abs(STEM[:, :3])
    kept = make_masks({"conv1.weight": STEM[:, :3]}, "mask_1d", stem_channels=4)["conv1.weight"]
    np.testing.assert_array_equal(kept, magnitudes > magnitudes.min(axis=1, keepdims=True))
    assert kept.flags.c_contiguous


# All possible patterns


def is_valid(block: np.ndarray) -> bool:
    return bool((block.sum(axis=0) == 2).all() and (block.sum(axis=1) == 2).all())


VALID = [
    block
    for bits in itertools.product([False, True], repeat=16)
    if is_valid(block := np.array(bits).reshape(4, 4))
]


def test_there_are_ninety_blocks_with_two_in_each_row_and_column() -> None:
    assert len(VALID) == 90


@pytest.mark.parametrize("seed", range(20))
def test_the_best_mask_is_the_best_of_all(seed: int) -> None:
    values = draw((4, 4), seed)
    best = max(VALID, key=lambda block: np.abs(values)[block].sum())
    np.testing.assert_array_equal(mask(values, "mask_2d_best"), best)


def greedy(values: np.ndarray) -> np.ndarray:
    kept = np.zeros((4, 4), bool)
    for place in sorted(np.ndindex(4, 4), key=lambda place: -abs(values[place])):
        kept[place] = True
        if kept.sum(axis=0).max() > 2 or kept.sum(axis=1).max() > 2:
            kept[place] = False
    return kept


@pytest.mark.parametrize("seed", range(20))
def test_the_greedy_mask_takes_the_largest_that_still_fits(seed: int) -> None:
    values = draw((4, 4), seed)
    np.testing.assert_array_equal(mask(values, "mask_2d_greedy"), greedy(values))


def test_known_blocks() -> None:
    # The examples in Paddle's manual.
    row = np.array([[0, 1, 5, 4], [2, 7, 3, 6]], np.float32)
    assert mask(row, "mask_1d").astype(int).tolist() == [[0, 0, 1, 1], [0, 1, 0, 1]]
    block = np.array([[9, 8, 3, 7], [9, 2, 1, 10], [5, 1, 3, 6], [2, 4, 6, 1]], np.float32)
    assert mask(block, "mask_2d_greedy").astype(int).tolist() == [
        [1, 1, 0, 0],
        [1, 0, 0, 1],
        [0, 0, 1, 1],
        [0, 1, 1, 0],
    ]
    block = np.array([[2, 8, 9, 9], [9, 1, 3, 9], [5, 6, 3, 9], [2, 4, 6, 9]], np.float32)
    assert block[mask(block, "mask_2d_greedy")].sum() == 56
    assert block[mask(block, "mask_2d_best")].sum() == 61


# General properties


def order_by_inputs(values: np.ndarray) -> np.ndarray:
    """Return a tensor as rows of inputs, for a kernel one row per position and output."""
    return np.moveaxis(values, 1, -1).reshape(-1, values.shape[1])


SOME_VALUES = st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, 1e-30, -3e30])  # with many ties
SOME_TENSORS = st.one_of(
    st.tuples(st.integers(1, 9), st.integers(4, 13)),
    st.tuples(st.integers(1, 9), st.integers(4, 13), st.integers(1, 3), st.integers(1, 3)),
).flatmap(
    lambda shape: arrays(
        np.float32, shape, elements=st.one_of(SOME_VALUES, st.floats(-9, 9, width=32))
    )
)


@EXAMPLES
@given(SOME_TENSORS)
def test_two_of_every_four_inputs_are_kept(values: np.ndarray) -> None:
    kept = mask(values, "mask_1d")
    assert (kept.shape, kept.dtype) == (values.shape, bool)
    for row, magnitudes in zip(order_by_inputs(kept), order_by_inputs(np.abs(values)), strict=True):
        for first in range(0, len(row) - 3, 4):
            four = row[first : first + 4]
            of_them = magnitudes[first : first + 4]
            assert four.sum() == 2
            assert of_them[four].min() >= of_them[~four].max()
        rest = row[len(row) // 4 * 4 :]
        of_them = magnitudes[len(row) // 4 * 4 :]
        assert rest.sum() <= 2
        assert rest.sum() == min(2, len(rest)) or not of_them[~rest].any(), (
            "only a zero gives way to what fills up"
        )


@EXAMPLES
@given(SOME_TENSORS)
def test_no_row_and_no_column_of_a_block_keeps_more_than_two(values: np.ndarray) -> None:
    for algorithm in ("mask_2d_greedy", "mask_2d_best"):
        kept = mask(values, algorithm)
        assert (kept.shape, kept.dtype) == (values.shape, bool)
        matrix = kept.T.swapaxes(-1, -2).reshape(-1, values.shape[1])
        for top, left in itertools.product(
            range(0, matrix.shape[0], 4), range(0, matrix.shape[1], 4)
        ):
            block = matrix[top : top + 4, left : left + 4]
            assert max(block.sum(axis=0).max(), block.sum(axis=1).max()) <= 2


@EXAMPLES
@given(arrays(np.float32, (4, 4), elements=st.one_of(SOME_VALUES, st.floats(-9, 9, width=32))))
def test_the_best_block_has_a_sum_that_none_exceeds(values: np.ndarray) -> None:
    magnitudes = np.abs(values).astype(np.float64)
    kept = mask(values, "mask_2d_best")
    assert is_valid(kept)
    assert magnitudes[kept].sum() >= max(magnitudes[block].sum() for block in VALID) * (1 - 1e-12)
    by_greed = mask(values, "mask_2d_greedy")
    if by_greed.sum() == 8:
        assert magnitudes[kept].sum() >= magnitudes[by_greed].sum() * (1 - 1e-12)


def test_greed_that_stops_at_seven_can_keep_more_than_the_best_of_eight() -> None:
    # Two in each of three rows and columns, and the corner: nothing else fits, and no block with
    # two in each has all seven.
    values = np.array([[1, 1, 0, 0], [0, 1, 1, 0], [1, 0, 1, 0], [0, 0, 0, 1]], np.float32)
    assert mask(values, "mask_2d_greedy").sum() == 7
    assert values[mask(values, "mask_2d_greedy")].sum() == 7
    assert values[mask(values, "mask_2d_best")].sum() == 6


# Ties


def test_of_equal_magnitudes_the_later_are_kept() -> None:
    assert mask(
        np.array([[1, -1, 1, -1], [2, 1, 2, 2], [0, 0, 0, 0], [1, 1, 0, 0]]), "mask_1d"
    ).astype(int).tolist() == [[0, 0, 1, 1], [0, 0, 1, 1], [0, 0, 1, 1], [1, 1, 0, 0]]
    block = mask(np.ones((4, 4)), "mask_2d_greedy").astype(int).tolist()
    assert block == [[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 1], [0, 0, 1, 1]]


def test_of_equal_sums_the_pattern_that_keeps_earlier_inputs_is_taken() -> None:
    block = mask(np.ones((4, 4)), "mask_2d_best").astype(int).tolist()
    assert block == [[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 1], [0, 0, 1, 1]]


@every_algorithm
def test_masks_are_the_same_whatever_the_memory_they_are_made_from(algorithm: str) -> None:
    values = draw((8, 8, 3, 3))
    turned = np.asfortranarray(values)
    assert mask(values, algorithm).tobytes() == mask(turned, algorithm).tobytes()
    assert mask(values, algorithm).flags.c_contiguous


# Tensors that get masks


@pytest.mark.parametrize("model", ["resnet18", "resnet50", "resnext101-32x4d"])
def test_half_of_the_weights_and_a_third_of_the_stem_are_pruned(model: str) -> None:
    shapes = {tensor.name: tensor.shape for tensor in MODELS[model].list_tensors(1000)}
    values = {name: np.broadcast_to(np.float32(1), shape) for name, shape in shapes.items()}
    masks = make_masks(values, "mask_1d", ("fc.weight",), stem_channels=4)
    assert set(masks) == {name for name, shape in shapes.items() if len(shape) == 4}
    stem = masks.pop("conv1.weight")
    assert 3 * np.count_nonzero(stem) == 2 * stem.size
    assert all(2 * np.count_nonzero(kept) == kept.size for kept in masks.values())


def test_what_is_not_excluded_has_a_mask_the_classifier_too() -> None:
    values = {"conv.weight": draw((8, 8, 1, 1)), "bn.weight": draw((8,)), "fc.weight": draw((8, 8))}
    assert set(make_masks(values, "mask_1d")) == {"conv.weight", "fc.weight"}
    assert set(make_masks(values, "mask_1d", ("conv.weight",))) == {"fc.weight"}
