"""Sizes of training images that change by epoch."""

from itertools import islice
from typing import Any

import numpy as np
import pytest

from lockstep.recipes import Recipe
from lockstep.recipes.image_sizes import find_size, fix_size, list_sizes
from lockstep.recipes.order import check_batch_norm, training_plans
from lockstep.system.errors import RecipeError
from tests.recipes.cases import MIXED, SIZES

GROWING = MIXED.replace(image_sizes=[[0, 32], [1, 48]], epochs=3)


def test_a_size_is_that_of_the_last_pair_that_has_begun() -> None:
    # FFCV's rule for its 88 epochs (libffcv/ffcv-imagenet, rn50_88_epochs.yaml and get_resolution):
    # 160 to epoch 65, 192 from epoch 76 on, linear and rounded to 32 between them.
    recipe = Recipe(image_sizes=[[0, 160], [71, 192]], epochs=88)
    ramp = np.interp(np.arange(88), [65, 76], [160, 192])
    expected = (32 * np.round(ramp / 32)).astype(int)
    assert [find_size(recipe, epoch) for epoch in range(88)] == expected.tolist()
    assert find_size(Recipe(image_size=96), 7) == 96


def test_image_size_and_evaluation_follow() -> None:
    recipe = Recipe(image_sizes=[[0, 160], [71, 192]])
    assert (recipe.image_size, recipe.eval_crop, recipe.eval_resize) == (192, 192, 219)
    assert recipe.replace(epochs=5).image_sizes == ((0, 160), (71, 192))
    alone = recipe.replace(image_size=128)
    assert (alone.image_sizes, alone.image_size, alone.eval_crop) == ((), 128, 128)
    fixed = fix_size(recipe, 160)
    assert (fixed.image_sizes, fixed.image_size, fixed.eval_crop) == ((), 160, 192)


def test_a_recipe_shows_its_sizes() -> None:
    assert (
        "image_sizes:\n- [0, 160]\n- [71, 192]\n"
        in Recipe(image_sizes=[[0, 160], [71, 192]]).format_yaml()
    )


def test_sizes_that_a_run_does_not_reach_are_not_listed() -> None:
    recipe = Recipe(image_sizes=[[0, 160], [30, 128], [60, 192]], epochs=90)
    assert list_sizes(recipe) == [128, 160, 192]
    assert list_sizes(recipe.replace(epochs=60)) == [128, 160]
    assert list_sizes(Recipe(image_size=96)) == [96]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"image_sizes": [[1, 160]]}, r"must begin with epoch 0, .* not \[1\]"),
        ({"image_sizes": [[0, 160], [0, 192]]}, r"epochs must rise, not \[0, 0\]"),
        ({"image_sizes": [[0, 160]], "image_size": 192}, "ends with 160, but image_size is 192"),
        ({"image_sizes": [[0, 16]]}, "greater than or equal to 32"),
        ({"image_sizes": [160, 192]}, "image_sizes.0"),
        ({"image_sizes": "160"}, "image_sizes"),
        ({"image_sizes": [[0, 160]], "quantisation": "int8"}, "leave out image_sizes"),
    ],
    ids=str,
)
def test_wrong_sizes_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        Recipe(**fields)


def test_plans_have_the_size_of_their_epoch_and_the_windows_of_any_other() -> None:
    sizes = []
    one_size = training_plans(MIXED, SIZES, 0)
    for plan, other in zip(training_plans(GROWING, SIZES, 0), one_size, strict=True):
        sizes.append(plan.size)
        assert plan.resized.tolist() == [[plan.size, plan.size]] * 16
        for name in ("samples", "windows", "flips", "coefficients", "partners"):
            assert np.array_equal(getattr(plan, name), getattr(other, name))
    assert sizes == [32, 32, 48, 48, 48, 48]


def test_every_rank_and_a_resumed_run_change_the_size_at_the_same_step() -> None:
    for rank in range(2):
        plans = training_plans(GROWING, SIZES, 0, rank=rank, ranks=2, parts=2)
        assert [plan.size for plan in plans] == [32, 32, 48, 48, 48, 48]
    assert [plan.size for plan in islice(training_plans(GROWING, SIZES, 1), 2)] == [32, 48]


def test_batch_norm_is_checked_at_the_smallest_size() -> None:
    recipe = Recipe(image_sizes=[[0, 32], [1, 64]], global_batch_images=2)
    with pytest.raises(RecipeError, match="one image of 32 pixels"):
        check_batch_norm(recipe, ranks=2, parts=1)
    check_batch_norm(recipe.replace(image_size=64), ranks=2, parts=1)
