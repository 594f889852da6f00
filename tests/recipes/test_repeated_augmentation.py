"""The field `repeated_augmentation`: which images an epoch has, and how often."""

import numpy as np
import pytest

from lockstep.recipes.epoch_order import order_samples, shuffle
from lockstep.recipes.order import training_plans
from tests.recipes.cases import RECIPE, sizes_of

IMAGES = 1000
SIZES = sizes_of(IMAGES)


@pytest.mark.parametrize(("copies", "ranks"), [(2, 1), (3, 4), (3, 8), (5, 2), (40, 4)])
def test_a_step_has_the_images_that_a_sampler_deals_out_to_its_ranks(
    copies: int, ranks: int
) -> None:
    # timm's RepeatAugSampler and torchvision's RASampler: each image several times in a row, in
    # turn to the ranks; a step takes the next ones of each.
    recipe = RECIPE.replace(global_batch_images=40, repeated_augmentation=copies)
    repeated = np.repeat(shuffle(recipe.seed, 1, IMAGES), copies)[:IMAGES]
    dealt = [repeated[rank::ranks] for rank in range(ranks)]
    order = order_samples(recipe, 1, IMAGES)
    for step in range(IMAGES // 40):
        own = slice(step * 40 // ranks, (step + 1) * 40 // ranks)
        expected = np.sort(np.concatenate([share[own] for share in dealt]))
        assert np.array_equal(np.sort(order[40 * step : 40 * (step + 1)]), expected)


def test_copies_have_different_crops_and_most_of_them_different_ranks() -> None:
    recipe = RECIPE.replace(global_batch_images=240, repeated_augmentation=3, epochs=1)
    shares = [training_plans(recipe, SIZES, 0, rank=rank, ranks=8) for rank in range(8)]
    together = 0
    for plans in zip(*shares, strict=True):
        samples = np.concatenate([plan.samples for plan in plans])
        assert np.unique(samples, return_counts=True)[1].tolist() == [3] * 80
        windows = np.concatenate([plan.windows for plan in plans])
        assert len(np.unique(windows, axis=0)) > 230
        together += sum(30 - len(np.unique(plan.samples)) for plan in plans)
    assert together < 0.1 * 4 * 240


def test_a_run_resumes_with_the_same_copies_on_any_number_of_ranks() -> None:
    sizes = SIZES[:100]
    labels = np.arange(100) % 7 % 3
    recipe = RECIPE.replace(repeated_augmentation=3, sampling="balanced")
    whole = list(training_plans(recipe, sizes, 5, labels=labels))
    again = list(training_plans(recipe, sizes, 0, labels=labels))[5:]
    halves = [
        training_plans(recipe, sizes, 5, labels=labels, rank=rank, ranks=2) for rank in (0, 1)
    ]
    assert len(whole) == len(again) == 3 * 6 - 5
    for plan, other, *plans in zip(whole, again, *halves, strict=True):
        assert plan.samples.tolist() == other.samples.tolist()
        assert plan.windows.tolist() == other.windows.tolist()
        together = np.concatenate([half.samples for half in plans])
        assert np.array_equal(np.sort(together), np.sort(plan.samples))


def test_classes_are_balanced_with_copies_too() -> None:
    labels = np.repeat([0, 1], [900, 100])
    recipe = RECIPE.replace(repeated_augmentation=2, sampling="balanced")
    counts = [
        np.bincount(labels[order_samples(recipe, epoch, IMAGES, labels)]) for epoch in range(40)
    ]
    # An epoch has 500 different places of the 1000 that sampling makes, 500 of each class: a
    # deviation of twice sqrt(500 / 4 / 2).
    share = np.mean(counts, axis=0)[0] / IMAGES
    assert abs(share - 0.5) < 5 * 2 * np.sqrt(62.5) / IMAGES / np.sqrt(40)
