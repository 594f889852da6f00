"""The images of an evaluation, and how they are resized and cropped."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from lockstep.recipes import Recipe, load_recipe
from lockstep.recipes.order import centre_plan, evaluation_plans, order_evaluation_samples
from lockstep.recipes.recipe import own_geometry
from tests.recipes.cases import MIXED, RECIPE, SIZES, sizes_of
from tests.soak import EXAMPLES


@EXAMPLES
@given(images=st.integers(1, 200), batch=st.integers(1, 40), ranks=st.integers(1, 5))
def test_every_rank_has_as_many_plans_for_all_images(images: int, batch: int, ranks: int) -> None:
    shares = [
        list(evaluation_plans(RECIPE, sizes_of(images), batch, rank=rank, ranks=ranks))
        for rank in range(ranks)
    ]
    samples = np.concatenate([plan.samples for share in shares for plan in share])

    assert {len(share) for share in shares} == {math.ceil(images / (batch * ranks))}
    assert {len(plan.samples) for share in shares for plan in share} == {batch}
    np.testing.assert_array_equal(np.sort(samples[samples != -1]), np.arange(images))


@EXAMPLES
@given(images=st.integers(1, 200), batch=st.integers(1, 40), ranks=st.integers(1, 5))
def test_images_are_scored_rank_after_rank(images: int, batch: int, ranks: int) -> None:
    shares = [
        evaluation_plans(RECIPE, sizes_of(images), batch, rank=rank, ranks=ranks)
        for rank in range(ranks)
    ]
    expected = [
        sample
        for share in shares
        for plan in share
        for sample in plan.samples.tolist()
        if sample != -1
    ]

    assert order_evaluation_samples(images, batch, ranks).tolist() == expected


def test_two_ranks_score_ten_images_in_this_order() -> None:
    assert order_evaluation_samples(10, 2, 2).tolist() == [0, 1, 4, 5, 8, 9, 2, 3, 6, 7]


def test_an_evaluation_pads_at_the_end_of_its_last_plans_alone() -> None:
    plans = [list(evaluation_plans(RECIPE, SIZES, 16, rank=rank, ranks=2)) for rank in range(2)]

    assert [(plan.samples == -1).sum() for plan in plans[0]] == [0, 8]
    assert [(plan.samples == -1).sum() for plan in plans[1]] == [0, 16]
    assert plans[0][1].samples.tolist() == [*range(32, 40)] + [-1] * 8


def test_every_image_of_an_evaluation_is_cut_by_its_own_size() -> None:
    for plan in evaluation_plans(RECIPE, SIZES, 16, ranks=1):
        real = plan.samples[plan.samples >= 0]
        np.testing.assert_array_equal(plan.windows[: len(real), 2:], SIZES[real])


def torchvision_resize_and_crop(
    height: int, width: int, resize: int, crop: int
) -> tuple[list[int], list[int]]:
    """Compute torchvision's Resize(resize) and CenterCrop(crop), as in its documentation and
    source."""
    short = min(height, width)
    long = max(height, width)
    new_short = resize
    new_long = int(resize * long / short)
    new_width, new_height = (new_short, new_long) if width <= height else (new_long, new_short)
    top = round((new_height - crop) / 2.0)
    left = round((new_width - crop) / 2.0)
    return [new_height, new_width], [top, left]


@EXAMPLES
@given(
    size=st.tuples(st.integers(1, 6000), st.integers(1, 6000)),
    evaluation=st.tuples(st.integers(32, 300), st.integers(32, 300)),
)
def test_images_are_cut_as_torchvision(size: tuple[int, int], evaluation: tuple[int, int]) -> None:
    crop, resize = sorted(evaluation)
    plan = centre_plan(Recipe(eval_resize=resize, eval_crop=crop), np.array([0]), np.array([size]))

    expected = torchvision_resize_and_crop(*size, resize, crop)
    assert (plan.resized[0].tolist(), plan.offsets[0].tolist()) == expected


@pytest.mark.parametrize(
    ("size", "resized", "offset"),
    [
        ((375, 500), [256, 341], [16, 58]),
        ((500, 375), [341, 256], [58, 16]),
        ((256, 256), [256, 256], [16, 16]),
        ((100, 100), [256, 256], [16, 16]),
        ((400, 301), [340, 256], [58, 16]),
        # Half a pixel is rounded to the even number: (339 - 224) / 2 = 57.5, (337 - 224) / 2 =
        # 56.5.
        ((339, 256), [339, 256], [58, 16]),
        ((337, 256), [337, 256], [56, 16]),
    ],
)
def test_the_shorter_side_becomes_256_and_the_centre_224_is_cut_out(
    size: tuple[int, int], resized: list[int], offset: list[int]
) -> None:
    plan = centre_plan(Recipe(), np.array([0]), np.array([size]))

    assert plan.windows.tolist() == [[0, 0, *size]]
    assert plan.resized.tolist() == [resized]
    assert plan.offsets.tolist() == [offset]


@pytest.mark.parametrize(
    ("changes", "size", "resized", "offset"),
    [
        # 256 * 500 / 354 = 361.58; 256 * 683 / 512 = 341.5.
        ({"eval_side_rounding": "nearest"}, (354, 500), [256, 362], [16, 69]),
        ({"eval_side_rounding": "nearest"}, (375, 500), [256, 341], [16, 58]),
        ({"eval_side_rounding": "nearest"}, (683, 512), [342, 256], [59, 16]),
        # In float32, 376 * (256 / 376) is less than 256.
        ({"eval_side_rounding": "float32_down"}, (376, 500), [255, 340], [16, 58]),
        ({"eval_side_rounding": "float32_down"}, (375, 500), [256, 341], [16, 58]),
        ({"eval_side_rounding": "float32_down", "eval_crop": 256}, (376, 500), [256, 340], [0, 42]),
        # (341 - 224) / 2 = 58.5; (339 - 224) / 2 = 57.5.
        ({"eval_offset_rounding": "up"}, (375, 500), [256, 341], [16, 59]),
        ({"eval_offset_rounding": "up"}, (339, 256), [339, 256], [58, 16]),
        ({"eval_offset_rounding": "down"}, (375, 500), [256, 341], [16, 58]),
        ({"eval_offset_rounding": "down"}, (339, 256), [339, 256], [57, 16]),
    ],
)
def test_sides_and_offsets_are_rounded_as_the_recipe_says(
    changes: dict[str, Any], size: tuple[int, int], resized: list[int], offset: list[int]
) -> None:
    plan = centre_plan(Recipe(**changes), np.array([0]), np.array([size]))

    assert (plan.resized.tolist(), plan.offsets.tolist()) == ([resized], [offset])


def test_evaluation_flips_and_mixes_nothing() -> None:
    plan = next(evaluation_plans(MIXED.replace(flip_probability=1), SIZES, 16))

    assert not plan.flips.any()
    assert plan.coefficients is None
    assert plan.partners is None


def test_evaluation_filters_as_training_where_only_that_is_set(tmp_path: Path) -> None:
    file = tmp_path / "filtered.yaml"
    file.write_text("base: resnet50-paddle-90ep\nantialias: true\n")
    made = [Recipe(antialias=True), load_recipe("demo").replace(antialias=True), load_recipe(file)]
    assert [recipe.eval_antialias for recipe in made] == [True, True, True]
    assert not Recipe(antialias=True, eval_antialias=False).eval_antialias
    assert not Recipe(antialias=True, eval_antialias=False).replace(epochs=1).eval_antialias
    assert not Recipe(eval_antialias=True).antialias


@pytest.mark.parametrize("antialias", [False, True])
def test_a_recipe_without_a_geometry_has_torchvisions(antialias: bool, tmp_path: Path) -> None:
    fields = {
        name: value
        for name, value in Recipe(antialias=antialias).fields().items()
        if not name.startswith("eval_")
    }
    (tmp_path / "recipe.yaml").write_text(
        yaml.safe_dump(fields | {"eval_resize": 232, "eval_crop": 200})
    )
    recipe = load_recipe(tmp_path)
    assert (recipe.eval_antialias, recipe.eval_resize, recipe.eval_crop) == (antialias, 232, 200)
    assert own_geometry(recipe) == {}
