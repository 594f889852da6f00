"""When images are read next, beside the plans that read them."""

from typing import Any

import numpy as np
import pytest

from lockstep.recipes.next_steps import NEVER, foresee_steps
from lockstep.recipes.order import training_plans
from tests.recipes.cases import RECIPE, sizes_of

IMAGES = 50
RECIPES = {
    "shuffled": RECIPE.replace(epochs=3, global_batch_images=8),
    "windowed": RECIPE.replace(epochs=3, global_batch_images=8, order="windowed", window_shards=2),
}


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize(("rank", "ranks", "parts"), [(0, 1, 1), (1, 2, 2)])
def test_next_steps_are_the_plans(name: str, rank: int, ranks: int, parts: int) -> None:
    recipe = RECIPES[name]
    share: dict[str, Any] = {"rank": rank, "ranks": ranks, "parts": parts}
    share["shards"] = np.arange(IMAGES) % 7
    plans = [set(p.samples.tolist()) for p in training_plans(recipe, sizes_of(IMAGES), 0, **share)]
    list_next_steps = foresee_steps(recipe, IMAGES, **share)
    for first in range(len(plans)):
        end = (first // 6 + 2) * 6  # of the next epoch
        for sample, step in enumerate(list_next_steps(first).tolist()):
            steps = [s for s, plan in enumerate(plans) if first <= s < end and sample in plan]
            assert step == min(steps, default=NEVER)


def test_an_image_that_an_epoch_repeats_counts_where_it_comes_last() -> None:
    recipe = RECIPE.replace(epochs=1, global_batch_images=8, sampling="balanced")
    labels = np.repeat([0, 1], [IMAGES - 3, 3])
    plans = [p.samples for p in training_plans(recipe, sizes_of(IMAGES), 0, labels=labels)]
    steps = foresee_steps(recipe, IMAGES, labels=labels)(0)
    for sample in range(IMAGES):
        places = [step for step, samples in enumerate(plans) if sample in samples]
        assert steps[sample] == max(places, default=NEVER)


def test_nothing_is_known_of_an_order_without_an_array() -> None:
    steps = foresee_steps(RECIPE.replace(order="permuted", global_batch_images=8), IMAGES)
    assert (steps(0) == NEVER).all()
