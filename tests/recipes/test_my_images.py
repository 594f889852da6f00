"""The recipe `my-images`: values that are chosen from images and device, and values that follow
from given fields."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.recipes.my_images import choose_recipe, my_images
from lockstep.recipes.order import check_shares, steps_per_epoch
from lockstep.runs.notes import RunFacts, list_unusual_settings
from lockstep.runs.recipe_from_images import explain_choices
from lockstep.runs.resuming import complete_settings
from lockstep.system.errors import RecipeError
from tests.conftest import TINY
from tests.lines import check_lines
from tests.recipes.cases import COUNTS, PHOTOS


@pytest.mark.parametrize("on_gpu", [False, True], ids=["cpu", "gpu"])
@pytest.mark.parametrize("side", [20, 32, 100, 300, 4000])
@pytest.mark.parametrize("images", COUNTS)
def test_any_images_give_a_run_without_notes(images: int, side: int, on_gpu: bool) -> None:
    facts = replace(PHOTOS, images=images, shorter_side=side, on_gpu=on_gpu)
    recipe = choose_recipe(facts)
    steps = steps_per_epoch(recipe, images)
    every = np.ones(10, np.int64)
    assert list_unusual_settings(recipe, RunFacts(list("abcdefghij"), every, every, steps)) == []
    assert (recipe.logits, recipe.precision, recipe.eval_crop) == (10, "fp32", recipe.image_size)
    assert 64 <= recipe.image_size <= 224
    assert recipe.image_size % 32 == 0
    assert (steps >= 16) == (images >= 128), (
        "an epoch of many steps, where there are images for them"
    )


OF_MANY = {"global_batch_images": 128, "epochs": 90, "lr": 0.128, "warmup_epochs": 5.0}
USUAL = {"image_size": 64, "global_batch_images": 32, "epochs": 50, "lr": 0.032}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, USUAL | {"warmup_epochs": 3.0}),
        ({"images": 20}, OF_MANY | {"global_batch_images": 8, "epochs": 100, "lr": 0.008}),
        ({"images": 10**6}, {"epochs": 10, "weight_decay": 1 / 32768, "crop_area": (0.08, 1.0)}),
        ({"shorter_side": 256}, {"dct_scaling": True}),
        ({"shorter_side": 255}, {"dct_scaling": False}),
        ({"decodes_small": False}, {"dct_scaling": False, "exif_orientation": True}),
        (
            {"on_gpu": True, "precision": "bf16"},
            {"image_size": 224, "epochs": 200, "precision": "bf16", "dct_scaling": False},
        ),
        ({"on_gpu": True, "images": 10**6}, OF_MANY),
        ({"on_gpu": True, "shorter_side": 100}, {"image_size": 96, "eval_resize": 110}),
    ],
    ids=str,
)
def test_values_suit_images_and_device(changes: dict[str, Any], expected: dict[str, Any]) -> None:
    recipe = choose_recipe(replace(PHOTOS, **changes))
    assert {name: getattr(recipe, name) for name in expected} == expected


def test_what_is_given_is_kept_and_what_depends_on_it_follows() -> None:
    recipe = choose_recipe(
        PHOTOS, {"epochs": 9, "global_batch_images": 16, "image_size": 128, "seed": 7}
    )
    assert (recipe.epochs, recipe.warmup_epochs) == (9, 1.0)
    assert (recipe.global_batch_images, recipe.lr) == (16, 0.016)
    assert (recipe.image_size, recipe.eval_resize, recipe.eval_crop, recipe.dct_scaling) == (
        128,
        146,
        128,
        False,
    )
    assert recipe.seed == 7
    assert not choose_recipe(PHOTOS, {"exif_orientation": False}).exif_orientation
    assert choose_recipe(PHOTOS, {"epochs": 1}).warmup_epochs < 1
    assert choose_recipe(PHOTOS, {"eval_resize": 100, "warmup_epochs": 0, "lr": 1}).fields() | {
        "eval_crop": 64,
        "lr": 1.0,
    } == (choose_recipe(PHOTOS).fields() | {"eval_resize": 100, "warmup_epochs": 0.0, "lr": 1.0})


@pytest.mark.parametrize(
    "changes",
    [{"epochs": 0}, {"epochs": "many"}, {"image_size": 5}, {"epoch": 3}, {"lr": -1}],
    ids=str,
)
def test_a_wrong_value_is_refused_by_name(changes: dict[str, Any]) -> None:
    with pytest.raises(RecipeError, match=next(iter(changes))):
        choose_recipe(PHOTOS, changes)


@pytest.mark.parametrize("units", [1, 2, 3, 8, 48])
@pytest.mark.parametrize("images", [100, 1000])
def test_the_images_of_a_step_divide_among_ranks_and_parts(units: int, images: int) -> None:
    check_shares(choose_recipe(replace(PHOTOS, units=units, images=images)), units)


def test_what_was_chosen_and_why_is_told_in_two_lines() -> None:
    check_lines(
        explain_choices(my_images().rename("my-images"), PHOTOS, Path("RUN")),
        "^my-images: 10 logits, 64 px in fp32, 50 epochs of 31 steps of 32 images, "
        "peak learning rate 0.032 after 3 epochs of warm-up; .*RUN/recipe.yaml",
        "1,000 training images of 10 classes, .* 400 px, .* CPU .*fp32$",
    )


@pytest.mark.parametrize("recipe", [None, "my-images"])
def test_a_run_that_has_begun_is_not_settled_again(recipe: str | None, tmp_path: Path) -> None:
    assert complete_settings(tmp_path / "new", recipe, "data").recipe is None
    (tmp_path / "recipe.yaml").write_text(TINY.format_yaml())
    (tmp_path / "checkpoints").mkdir()
    assert complete_settings(tmp_path, recipe, "data").recipe is None, (
        "a command made it and then refused to train"
    )
    (tmp_path / "checkpoints" / "unfinished-step-00000000").mkdir()
    assert complete_settings(tmp_path, recipe, "data").recipe is None, "killed at its start"
    (tmp_path / "log.jsonl").touch()
    result = complete_settings(tmp_path, recipe, "data", changes={"seed": 3}).recipe
    assert result == TINY.replace(seed=3)


def test_another_recipe_is_what_it_is(tmp_path: Path) -> None:
    settings = complete_settings(tmp_path, TINY, "data", changes={"image_size": 64})
    assert settings.recipe == TINY.replace(image_size=64, eval_resize=73, eval_crop=64)
