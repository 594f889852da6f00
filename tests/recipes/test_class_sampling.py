"""The field `sampling`: how often an epoch has each class and each image."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.recipes.epoch_order import draw_by_class, order_samples
from lockstep.recipes.order import training_plans
from tests.recipes.cases import RECIPE, sizes_of
from tests.soak import EXAMPLES

KINDS = ("balanced", "square_root")
LABELS = np.repeat([0, 1, 2, 4], [100, 25, 4, 1])
"""Class 3 has no images. The square roots of the others' counts are 10, 5, 2 and 1."""


def draw_counts(labels: np.ndarray, kind: str, epoch: int = 0, seed: int = 0) -> np.ndarray:
    """Return how often an epoch has each image: int64 [images]."""
    samples = draw_by_class(kind, seed, epoch, labels)
    return np.bincount(samples, minlength=len(labels))


@EXAMPLES
@given(
    counts=st.lists(st.integers(0, 40), min_size=1, max_size=30).filter(any),
    kind=st.sampled_from(KINDS),
    seed=st.integers(0, 2**63 - 1),
    epoch=st.integers(0, 1000),
)
def test_classes_come_by_their_shares(counts: list[int], kind: str, seed: int, epoch: int) -> None:
    labels = np.repeat(np.arange(len(counts)), counts)
    often = draw_counts(labels, kind, epoch, seed)
    assert often.sum() == len(labels)
    weights = np.array(counts) > 0 if kind == "balanced" else np.sqrt(counts)
    shares = len(labels) * weights / weights.sum()
    for label, share in enumerate(shares):
        of_class = often[labels == label]
        assert abs(of_class.sum() - share) < 1
        if len(of_class):
            assert of_class.max() - of_class.min() <= 1


def test_labels_need_not_be_sorted() -> None:
    shuffled = np.random.default_rng(0).permutation(LABELS)
    often = draw_counts(shuffled, "balanced")
    assert set(np.bincount(shuffled, weights=often).tolist()) == {0, 32, 33}


def test_over_the_epochs_classes_and_images_have_their_exact_shares() -> None:
    epochs = 400
    often = sum(draw_counts(LABELS, "square_root", epoch) for epoch in range(epochs)) / epochs
    of_classes = np.bincount(LABELS, weights=often)
    shares = len(LABELS) * np.array([10, 5, 2, 0, 1]) / 18
    # A class has its share rounded up or down, whose deviation is at most a half.
    assert np.abs(of_classes - shares).max() < 5 * 0.5 / np.sqrt(epochs)
    # An image of class 0 comes once or not at all, with the same probability as the others.
    share = shares[0] / 100
    deviation = np.sqrt(share * (1 - share) / epochs)
    assert np.abs(often[LABELS == 0] - share).max() < 5 * deviation


def test_the_order_of_an_epoch_is_random() -> None:
    recipe = RECIPE.replace(sampling="balanced")
    orders = [order_samples(recipe, epoch, len(LABELS), LABELS) for epoch in range(200)]
    # The class of image 129, a quarter of the places, comes to each place equally often.
    rare = np.mean([order == 129 for order in orders], axis=0)
    assert np.abs(rare - 0.25).max() < 5 * np.sqrt(0.25 * 0.75 / 200)
    assert not np.array_equal(orders[0], orders[1])
    again = order_samples(recipe, 0, len(LABELS), LABELS)
    assert np.array_equal(again, orders[0])
    other = order_samples(recipe.replace(seed=1), 0, len(LABELS), LABELS)
    assert not np.array_equal(other, again)


@pytest.mark.parametrize("kind", KINDS)
def test_an_order_never_changes(kind: str) -> None:
    expected = {"balanced": [4, 1, 5, 0, 4, 2], "square_root": [5, 1, 4, 0, 3, 2]}
    labels = np.array([0, 0, 0, 0, 1, 1])
    order = order_samples(RECIPE.replace(sampling=kind), 0, 6, labels)
    assert order.tolist() == expected[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_steps_are_the_same_for_any_number_of_ranks_and_from_any_step(kind: str) -> None:
    recipe = RECIPE.replace(sampling=kind)
    sizes = sizes_of(len(LABELS))
    whole = [plan.samples for plan in training_plans(recipe, sizes, 0, labels=LABELS)]
    assert len(whole) == 3 * (len(LABELS) // 16)
    resumed = [plan.samples for plan in training_plans(recipe, sizes, 11, labels=LABELS)]
    assert np.array_equal(whole[11:], resumed)
    ranks = [training_plans(recipe, sizes, 0, labels=LABELS, rank=r, ranks=4) for r in range(4)]
    for samples, *plans in zip(whole, *ranks, strict=True):
        together = np.concatenate([plan.samples for plan in plans])
        assert sorted(samples) == sorted(together)


def test_many_classes_of_one_image_come_once_each() -> None:
    labels = np.arange(100_000)
    for kind in KINDS:
        assert (draw_counts(labels, kind) == 1).all()


def test_plain_sampling_needs_no_labels_and_other_sampling_does() -> None:
    assert sorted(order_samples(RECIPE, 0, 40)) == list(range(40))
    with pytest.raises(ValueError, match="sampling balanced needs the labels"):
        order_samples(RECIPE.replace(sampling="balanced"), 0, 40)
