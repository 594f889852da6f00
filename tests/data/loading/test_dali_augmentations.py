"""DALI's operators give the pixels of the host loader's augmentations, or are refused."""

from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.data.index import Index, open_index
from lockstep.data.loading.dali import DaliLoader
from lockstep.data.loading.host import HostLoader
from lockstep.data.loading.loaders import make_loader
from lockstep.recipes import Execution, Recipe
from lockstep.recipes.augmentation_list import list_augmentations
from lockstep.recipes.order import BatchPlan, training_plans
from lockstep.system.errors import RecipeError

SIZE = 48


@pytest.fixture(scope="module")
def index(textures: Path) -> Index:
    return open_index(textures / "train")


def load_both(index: Index, recipe: Recipe) -> tuple[np.ndarray, np.ndarray]:
    """Return the images of some steps, not resized, so that only augmentations can differ: uint8
    [N, size, size, 3], by DALI and by the host loader."""
    plans = []
    for plan in islice(training_plans(recipe, index.sizes, 0), 4):
        count = len(plan.samples)
        plans.append(
            BatchPlan(
                samples=plan.samples,
                windows=np.tile(np.array([0, 0, SIZE, SIZE], np.int32), (count, 1)),
                resized=np.full((count, 2), SIZE, np.int32),
                offsets=np.zeros((count, 2), np.int32),
                flips=plan.flips,
                size=SIZE,
                augmentations=plan.augmentations,
            )
        )
    both = []
    for kind in (DaliLoader, HostLoader):
        with kind(index, antialias=False, augmentations=recipe.augmentations, threads=2) as loader:
            both.append(np.concatenate([batch.pixels for batch in loader.batches(plans)]))
    return both[0], both[1]


def measure(index: Index, recipe: Recipe, *augmentations: Any) -> tuple[int, int]:
    """Return the largest difference of the loaders' images in levels, and how far the host
    loader's are from images that are not augmented."""
    plain, _ = load_both(index, recipe)
    dali, host = load_both(index, recipe.replace(augmentations=augmentations))
    return np.abs(dali.astype(int) - host).max(), np.abs(host.astype(int) - plain).max()


@pytest.mark.parametrize(
    ("augmentation", "most"),
    [
        ({"name": "solarise", "threshold": 100}, 0),
        ({"name": "greyscale", "probability": 0.5}, 0),
        ({"name": "colour_jitter", "probability": 0.7}, 0),
        ({"name": "colour_jitter", "brightness": 0, "contrast": 3, "saturation": 2.5}, 0),
        ({"name": "random_erasing", "probability": 0.7, "count": 3}, 0),
        ({"name": "gaussian_blur", "dialect": "torchvision", "sigma": [0.001, 9.0]}, 1),
    ],
)
def test_dali_augments_as_the_host_loader(
    augmentation: dict[str, Any], most: int, index: Index, tiny_recipe: Recipe
) -> None:
    difference, change = measure(index, tiny_recipe, augmentation)
    assert difference <= most
    assert change > 30


def test_dali_augments_in_the_order_of_the_recipe(index: Index, tiny_recipe: Recipe) -> None:
    chain = ("greyscale", "colour_jitter", "random_erasing", "solarise")
    assert measure(index, tiny_recipe, *chain)[0] == 0
    assert measure(index, tiny_recipe, *reversed(chain))[0] == 0


def test_dali_refuses_augmentations_of_other_pixels(index: Index, tiny_recipe: Recipe) -> None:
    refused = [
        {"name": "colour_jitter", "hue": 0.1},
        {"name": "random_erasing", "fill": "noise"},
        *("augmix", "autoaugment", "gaussian_blur", "randaugment", "three_augment"),
        *("trivialaugment_wide", "mine:Fog"),
    ]
    done = ["greyscale", "solarise"]
    names = [entry if isinstance(entry, str) else entry["name"] for entry in refused]
    assert sorted({*names, *done} - {"mine:Fog"}) == list_augmentations()
    for entry, name in zip(refused, names, strict=True):
        recipe = tiny_recipe.replace(augmentations=[*done, entry])
        with pytest.raises(RecipeError, match=rf"DALI .* of these augmentations: {name} \("):
            make_loader(index, recipe, Execution(loader="dali"))
    recipe = tiny_recipe.replace(augmentations=[*done, "randaugment", "augmix"])
    with pytest.raises(RecipeError, match=r": randaugment \(.*\), augmix \(.*--loader host"):
        make_loader(index, recipe, Execution(loader="dali"))
    make_loader(index, recipe, Execution(loader="dali"), evaluation=True)
