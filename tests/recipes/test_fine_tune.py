"""The recipe `fine-tune`: values that are chosen from weights, images and device."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from lockstep.recipes import Recipe
from lockstep.recipes.fine_tune import choose_recipe
from lockstep.recipes.my_images import choose_recipe as choose_my_images
from lockstep.recipes.order import check_shares, steps_per_epoch
from lockstep.recipes.schedule import peak_lr
from lockstep.runs.notes import RunFacts, list_unusual_settings
from lockstep.system.errors import RecipeError
from tests.recipes.cases import COUNTS, PHOTOS

WEIGHTS = Recipe(
    model="resnet18",
    logits=7,
    padding="same",
    bn_epsilon=1e-3,
    mean=(1, 2, 3),
    std=(4, 5, 6),
    interpolation="bicubic",
    antialias=True,
    image_size=160,
    eval_resize=235,
    eval_crop=224,
    eval_offset_rounding="down",
    lr=7.0,
    epochs=3,
)


@pytest.mark.parametrize("is_known", [False, True], ids=["other classes", "known classes"])
@pytest.mark.parametrize("on_gpu", [False, True], ids=["cpu", "gpu"])
@pytest.mark.parametrize("images", COUNTS)
def test_any_number_of_images_has_a_small_rate(images: int, on_gpu: bool, is_known: bool) -> None:
    facts = replace(PHOTOS, images=images, on_gpu=on_gpu, is_known=is_known)
    recipe = choose_recipe(facts, Recipe())
    steps = steps_per_epoch(recipe, images)
    counts = np.ones(10, np.int64)
    assert list_unusual_settings(recipe, RunFacts(list("abcdefghij"), counts, counts, steps)) == []
    assert recipe.logits == 10
    own = choose_my_images(facts)
    assert (recipe.crop_area, recipe.weight_decay) == (own.crop_area, own.weight_decay)
    assert 0 < peak_lr(recipe) <= (0.002 if is_known else 0.016)


@pytest.mark.parametrize(("is_known", "few", "many"), [(False, 0.008, 0.016), (True, 0.002, 0.002)])
def test_the_rate_of_few_epochs_is_half(is_known: bool, few: float, many: float) -> None:
    facts = replace(PHOTOS, is_known=is_known)
    for epochs, rate in ((2, few), (7, few), (8, many), (20, many)):
        changes = {"epochs": epochs, "global_batch_images": 32}
        assert choose_recipe(facts, Recipe(), changes).lr == rate


def test_the_weights_decide_the_network_and_how_images_are_prepared() -> None:
    recipe = choose_recipe(PHOTOS, WEIGHTS)
    decided = {*WEIGHTS.preprocessing(), "model", "padding", "bn_epsilon", "image_size"}
    for name in decided - {"exif_orientation"}:
        assert getattr(recipe, name) == getattr(WEIGHTS, name), name
    assert recipe.exif_orientation
    assert recipe.logits == 10


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({"image_size": 48}, (48, 55, 48)),
        ({"image_size": 160, "eval_resize": 235, "eval_crop": 224}, (160, 235, 224)),
        # of a file that says only how evaluation prepares images
        ({"image_size": 224, "eval_resize": 55, "eval_crop": 48}, (48, 55, 48)),
        ({"image_size": 224, "eval_resize": 448, "eval_crop": 448}, (448, 448, 448)),
    ],
    ids=str,
)
def test_images_have_the_models_size(sizes: dict[str, int], expected: tuple[int, int, int]) -> None:
    recipe = choose_recipe(PHOTOS, Recipe(**sizes))
    assert (recipe.image_size, recipe.eval_resize, recipe.eval_crop) == expected


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"image_size": 64}, {"image_size": 64, "eval_resize": 73, "eval_crop": 64}),
        ({"eval_crop": 200}, {"image_size": 160, "eval_resize": 235, "eval_crop": 200}),
        ({"global_batch_images": 8}, {"lr": choose_recipe(PHOTOS, WEIGHTS).lr / 4}),
        ({"epochs": 1}, {"warmup_epochs": 0.1}),
        ({"model": "resnet34", "mean": (0, 0, 0)}, {"model": "resnet34", "std": (4, 5, 6)}),
        ({"exif_orientation": False, "lr": 1}, {"exif_orientation": False, "lr": 1.0}),
    ],
    ids=str,
)
def test_set_values_are_kept(changes: dict[str, Any], expected: dict[str, Any]) -> None:
    fields = choose_recipe(PHOTOS, WEIGHTS, changes).model_dump()
    assert {name: fields[name] for name in changes | expected} == changes | expected


def test_a_network_that_computes_less_trains_for_more_epochs() -> None:
    # ResNet-18 has 1.81 billion multiply-adds at 224 px, ResNet-50 4.09 (torchvision).
    assert choose_recipe(PHOTOS, Recipe()).epochs == 5
    assert choose_recipe(PHOTOS, Recipe(model="resnet18")).epochs == 11
    assert choose_recipe(PHOTOS, Recipe(model="resnext101-32x4d")).epochs == 5
    # At 64 px they have 0.15 and 0.34 billion.
    small = {"image_size": 64}
    assert choose_recipe(PHOTOS, Recipe(), small).epochs == 20
    assert choose_recipe(PHOTOS, Recipe(model="resnet18"), small).epochs == 40


def test_a_run_that_is_not_evaluated_does_not_stop_early() -> None:
    assert choose_recipe(PHOTOS, WEIGHTS).early_stopping_epochs > 0
    unseen = choose_recipe(replace(PHOTOS, is_evaluated=False), WEIGHTS)
    assert unseen.early_stopping_epochs == 0


def test_a_wrong_value_is_refused_by_name() -> None:
    with pytest.raises(RecipeError, match="epochs"):
        choose_recipe(PHOTOS, WEIGHTS, {"epochs": 0})


def test_names_of_tensors_are_those_of_the_weights_model() -> None:
    names = ["layer3.20.conv2.weight"]  # ResNet-50 has six blocks there
    large = choose_recipe(PHOTOS, Recipe(model="resnext101-32x4d"), {"sparsity_excluded": names})
    assert large.sparsity_excluded == tuple(names)
    with pytest.raises(RecipeError, match="has no tensor"):
        choose_recipe(PHOTOS, WEIGHTS, {"sparsity_excluded": names})


def test_the_images_of_a_step_divide_among_ranks_and_parts() -> None:
    check_shares(choose_recipe(replace(PHOTOS, units=3, images=100), WEIGHTS), 3)
