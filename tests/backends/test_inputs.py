"""What every engine must do with its inputs: arrays of any layout, batches that are filled again,
no images at all."""

from types import ModuleType
from typing import Any

import numpy as np
import pytest

from lockstep.backends import Backend, World
from lockstep.recipes import Execution, Recipe
from lockstep.verification.bounds import BOUNDS, distance
from tests.backends.conftest import Start
from tests.backends.drawing import draw_images
from tests.backends.inputs import KINDS, check_arrays, check_far_logits, check_lent, check_refilled


@pytest.mark.parametrize("kind", KINDS)
def test_arrays_may_lie_in_memory_in_any_way(start: Start, tiny_recipe: Recipe, kind: Any) -> None:
    check_arrays(start, tiny_recipe, kind)


def test_a_batch_may_be_filled_again_for_the_next_one(start: Start, tiny_recipe: Recipe) -> None:
    check_refilled(start, tiny_recipe)


def test_lent_images_are_taken_and_given_back(
    native: ModuleType, world: World, start: Start, tiny_recipe: Recipe
) -> None:
    # They are in main memory. Engines on a GPU copy them there as other images.
    borrows = native.FACTS.borrows and not world.on_gpu
    check_lent(start, tiny_recipe, borrows=borrows, ahead=int(world.on_gpu))


@pytest.mark.parametrize("mixup", ["none", "sample"])
def test_far_logits_have_losses_of_float64(start: Start, tiny_recipe: Recipe, mixup: str) -> None:
    check_far_logits(start, tiny_recipe, mixup)


def test_one_image_may_stand_for_all_of_a_batch(start: Start, tiny_recipe: Recipe) -> None:
    # As from the synthetic loader: the memory of one image, N times.
    engine = start(tiny_recipe)
    images = np.broadcast_to(draw_images(1), (8, 32, 32, 3))
    result = distance(engine.predict(images), np.repeat(engine.predict(images[:1]), 8, axis=0))
    assert result < BOUNDS["logits"].value


def test_predicting_nothing_gives_no_logits(start: Start, tiny_recipe: Recipe) -> None:
    assert start(tiny_recipe).predict(draw_images(0)).shape == (0, tiny_recipe.logits)


@pytest.mark.parametrize("flag", [False, True])
def test_one_process_asks_itself(
    backend: Backend, monkeypatch: pytest.MonkeyPatch, flag: bool
) -> None:
    for name in ("RANK", "WORLD_SIZE", "TF_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    world = backend.world(Execution(device="cpu"))
    assert world.any(flag) == flag
    assert world.same(-3)
    world.close()
