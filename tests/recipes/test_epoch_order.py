"""The field `order`: "permuted" and "windowed"."""

from typing import Any

import numpy as np
import pytest

from lockstep.recipes.epoch_order import Permutation, order_samples
from lockstep.recipes.order import training_plans
from lockstep.system.errors import RecipeError
from tests.recipes.cases import RECIPE, sizes_of

SHARDS = np.repeat(np.arange(20), [3, 9, 5, 7] * 5)
"""The shard of each of 120 images."""
WINDOWED = RECIPE.replace(order="windowed", window_shards=4)
PERMUTED = RECIPE.replace(order="permuted")


@pytest.mark.parametrize("count", [1, 2, 3, 17, 255, 256, 257, 1000, 70_001])
def test_a_permutation_has_every_number_once(count: int) -> None:
    order = Permutation(5, 3, count)[np.arange(count)]
    assert np.array_equal(np.sort(order), np.arange(count))


def test_a_permutation_of_a_billion_images_needs_no_array() -> None:
    positions = np.array([0, 1, 999_999_999])
    permutation = Permutation(0, 0, 10**9)
    samples = permutation[positions]
    assert len(permutation) == 10**9
    assert samples.tolist() == [191_700_461, 576_288_300, 992_704_765]
    assert np.array_equal(permutation[positions[::-1]], samples[::-1])


def test_permutations_are_uniform_over_epochs() -> None:
    epochs = 1500
    orders = np.array([Permutation(1, epoch, 6)[np.arange(6)] for epoch in range(epochs)])
    counts = np.array([np.bincount(column, minlength=6) for column in orders.T])
    expected = epochs / 6
    # Chi-square of every position has 5 degrees of freedom, whose 99.99 % quantile is 25.7.
    assert (((counts - expected) ** 2 / expected).sum(axis=1) < 25.7).all()
    pairs = np.bincount(orders[:, 0] * 6 + orders[:, 1], minlength=36).reshape(6, 6)
    pairs = pairs[~np.eye(6, dtype=bool)]
    expected = epochs / 30  # 29 degrees of freedom: 68.0
    assert ((pairs - expected) ** 2 / expected).sum() < 68.0


def test_neighbours_are_far_apart_in_a_permutation() -> None:
    order = Permutation(2, 0, 10_000)[np.arange(10_000)]
    distances = np.abs(np.diff(order))
    # The mean distance of two random places is a third; its deviation is 0.24 / sqrt(10,000).
    assert abs(distances.mean() / 10_000 - 1 / 3) < 5 * 0.0024
    assert np.corrcoef(order[:-1], order[1:])[0, 1] == pytest.approx(0, abs=0.05)


def test_windows_have_the_images_of_whole_shards() -> None:
    orders = [order_samples(WINDOWED, epoch, 120, shards=SHARDS)[:] for epoch in range(3)]
    for order in orders:
        assert np.array_equal(np.sort(order), np.arange(120))
        begin = 0
        unread = set(range(20))
        while unread:
            shards = set()
            end = begin
            while end < 120 and (len(shards) < 4 or SHARDS[order[end]] in shards):
                shards.add(int(SHARDS[order[end]]))
                end += 1
            assert len(shards) == 4
            assert shards <= unread
            assert end - begin == np.isin(SHARDS, list(shards)).sum()
            assert SHARDS[order[begin:end]].tolist() != sorted(SHARDS[order[begin:end]])
            unread -= shards
            begin = end
    assert len({tuple(SHARDS[order[:10]]) for order in orders}) == 3


@pytest.mark.parametrize("recipe", [WINDOWED, PERMUTED], ids=lambda recipe: recipe.order)
@pytest.mark.parametrize(
    "fields", [{}, {"repeated_augmentation": 3}, {"sampling": "balanced"}], ids=str
)
def test_ranks_and_resumed_runs_have_the_same_steps(recipe: Any, fields: Any) -> None:
    recipe = recipe.replace(**fields)
    how = {"labels": np.arange(120) % 7 % 3, "shards": SHARDS}
    sizes = sizes_of(120)
    whole = list(training_plans(recipe, sizes, 0, **how))
    samples = np.concatenate([plan.samples for plan in whole]).reshape(recipe.epochs, -1)
    if not fields:  # what does not fill a step is left out
        for epoch in samples:
            assert len(np.unique(epoch)) == len(epoch) > 120 - recipe.global_batch_images
    first = len(whole) // 2
    for ranks in (2, 4):
        shares = [
            list(training_plans(recipe, sizes, first, rank=rank, ranks=ranks, **how))
            for rank in range(ranks)
        ]
        for plan, *parts in zip(whole[first:], *shares, strict=True):
            together = np.concatenate([part.samples for part in parts])
            assert np.array_equal(np.sort(together), np.sort(plan.samples))


def test_windows_need_shards() -> None:
    with pytest.raises(RecipeError, match="lockstep data pack"):
        order_samples(WINDOWED, 0, 40)
