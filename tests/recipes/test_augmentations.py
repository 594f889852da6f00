"""The entries of a recipe's augmentations, and each augmentation by itself."""

from typing import Any

import numpy as np
import pytest

from lockstep.recipes import Recipe
from lockstep.recipes.augmentation_list import import_augmentation, list_augmentations
from lockstep.recipes.field_descriptions import describe_fields
from lockstep.recipes.order import training_plans
from lockstep.system.errors import RecipeError
from tests.recipes.cases import RECIPE, SIZES

SOLARISE = {"name": "solarise", "probability": 0.5, "threshold": 128}


@pytest.mark.parametrize("entries", ["solarise", ["solarise"], SOLARISE, ({"name": "solarise"},)])
def test_an_entry_is_a_name_or_a_name_with_fields(entries: Any) -> None:
    recipe = Recipe(augmentations=entries)
    assert recipe.fields()["augmentations"] == [SOLARISE]
    again = Recipe.of(recipe.fields())
    assert again == recipe == recipe.replace(lr=0.1).replace(lr=recipe.lr)
    assert hash(again) == hash(recipe)
    assert recipe != Recipe(augmentations=[SOLARISE | {"threshold": 127}])


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (3, "augmentations: .* a list"),
        ([3], r"expected names, or mappings such as \{name: solarise, probability: 0.2\}, not 3"),
        ([{"probability": 1}], "expected names, or mappings"),
        (["solarize"], "there is no augmentation 'solarize'. Did you mean solarise"),
        (
            ["rand-m7-mstd0.5-inc1"],
            "timm's notation; expected {name: randaugment, dialect: timm, magnitude: 7,"
            " magnitude_std: 0.5, increasing: true}$",
        ),
        (["original-mstd0.5"], "expected {name: autoaugment, policy: original, magnitude_std: 0.5"),
        (["rand-tweights"], "there is no augmentation 'rand-tweights'"),
        ([{"name": "solarise", "p": 1}], "solarise: there is no field 'p'. Known: probability"),
        ([{"name": "solarise", "threshold": 257}], "solarise: threshold: .* 256, not 257"),
        (["fog.py:Fog()"], "expected module:Class, such as mymodule:Fog"),
    ],
)
def test_a_wrong_entry_is_explained(entries: Any, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        Recipe(augmentations=entries)


@pytest.mark.parametrize("name", list_augmentations())
def test_an_augmentation_has_defaults_documented_fields_and_gives_images(name: str) -> None:
    kind = import_augmentation(name)
    augmentation = kind()
    assert augmentation.name == name
    assert kind.__doc__
    assert set(describe_fields(kind)) == set(kind.model_fields)
    assert kind.of({k: v for k, v in augmentation.fields().items() if k != "name"}) == augmentation
    generator = np.random.default_rng(0)
    pixels = generator.integers(0, 256, (32, 32, 3), np.uint8)
    for numbers in (*generator.random((50, augmentation.numbers)), np.zeros(augmentation.numbers)):
        parameters = augmentation.draw(numbers.tolist())
        first, second = (augmentation.apply(pixels.copy(), parameters) for _ in range(2))
        assert (first.shape, first.dtype) == (pixels.shape, pixels.dtype)
        np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize(
    "entry",
    [
        {"name": "colour_jitter", "brightness": 1e3, "contrast": 1e3, "saturation": 1e3},
        {"name": "gaussian_blur", "sigma": [1e3, 1e3], "probability": 1},
        {"name": "gaussian_blur", "sigma": [1e-3, 1e-3], "probability": 1},
        {"name": "gaussian_blur", "sigma": [1e-3, 1e3], "dialect": "torchvision"},
        {"name": "random_erasing", "area": [1e-3, 1], "aspect": [1e-3, 1e3], "probability": 1},
        {"name": "randaugment", "full_magnitude": 10_000, "magnitude": 1},
        *(
            {
                **{"name": "randaugment", "dialect": "timm", "operations": 32},
                **{"magnitude": 1e3, "magnitude_max": 1e3, "full_magnitude": 1},
                "increasing": increasing,
            }
            for increasing in (False, True)
        ),
        {"name": "autoaugment", "policy": "v0", "magnitude_std": 1e3},
    ],
    ids=lambda entry: str(entry["name"]),
)
@pytest.mark.filterwarnings("error")
def test_the_largest_and_smallest_numbers_overflow_nothing(entry: dict[str, Any]) -> None:
    [augmentation] = Recipe(augmentations=[entry]).augmentations
    generator = np.random.default_rng(0)
    pixels = generator.integers(0, 256, (32, 32, 3), np.uint8)
    for numbers in generator.random((6, augmentation.numbers)):
        changed = augmentation.apply(pixels.copy(), augmentation.draw(numbers.tolist()))
        assert (changed.shape, changed.dtype) == (pixels.shape, pixels.dtype)
    for field, value in entry.items():
        if isinstance(value, float):
            with pytest.raises(RecipeError, match=field):
                Recipe(augmentations=[entry | {field: 1e5}])


def test_what_is_drawn_never_changes() -> None:
    """The numbers are part of a run: it must draw the same when it resumes with a later version."""
    timm = {"name": "randaugment", "dialect": "timm", "magnitude_std": 0.5}
    recipe = RECIPE.replace(augmentations=["randaugment", timm])
    plan = next(training_plans(recipe, SIZES, 0))
    assert plan.augmentations is not None
    operations = [operation for drawn in plan.augmentations[0] for operation in drawn]
    assert [operation.operator for operation in operations] == ["shear_x", "contrast", "colour"]
    assert [operation.interpolation for operation in operations] == ["nearest"] * 2 + ["bicubic"]
    numbers = [operation.number for operation in operations]
    assert numbers == pytest.approx([-0.0900000035762787, 0.7300000190734863, 1.9], rel=1e-12)
