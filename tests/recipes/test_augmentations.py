"""The entries of a recipe's augmentations, and each augmentation by itself."""

from typing import Any

import numpy as np
import pytest

from lockstep.recipes import Recipe
from lockstep.recipes.augmentation_list import import_augmentation, list_augmentations
from lockstep.system.errors import RecipeError

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
        (3, "augmentations: .* valid tuple"),
        ([3], r"expected names, or mappings such as \{name: solarise, probability: 0.2\}, not 3"),
        ([{"probability": 1}], "expected names, or mappings"),
        (["solarize"], "there is no augmentation 'solarize'. Did you mean solarise"),
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
    assert all(field.description for field in kind.model_fields.values())
    assert kind.of({k: v for k, v in augmentation.fields().items() if k != "name"}) == augmentation
    generator = np.random.default_rng(0)
    pixels = generator.integers(0, 256, (32, 32, 3), np.uint8)
    for numbers in (*generator.random((50, augmentation.numbers)), np.zeros(augmentation.numbers)):
        parameters = augmentation.draw(numbers.tolist())
        first, second = (augmentation.apply(pixels.copy(), parameters) for _ in range(2))
        assert (first.shape, first.dtype) == (pixels.shape, pixels.dtype)
        np.testing.assert_array_equal(first, second)
