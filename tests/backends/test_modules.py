"""Tests for every engine: the module that `load_module` returns."""

from collections.abc import Mapping
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from lockstep.backends import Backend
from lockstep.recipes import Recipe
from lockstep.system.errors import CheckpointError
from lockstep.verification.bounds import BOUNDS, distance
from tests.backends import oracle
from tests.backends.cases import Arrays, normalise, parameters
from tests.backends.conftest import Start, for_frameworks
from tests.backends.drawing import draw_images, draw_state


class LoadedModule:
    """A loaded module as a function of images, uint8 [N, H, W, 3], to logits [N, logits]."""

    def __init__(
        self,
        backend: Backend,
        native: ModuleType,
        recipe: Recipe,
        tensors: Mapping[str, np.ndarray],
    ) -> None:
        self.module: Any = backend.load_module(recipe, dict(tensors))
        self._native = native
        self._recipe = recipe

    def inputs(self, images: np.ndarray) -> Any:
        """Return images as the framework takes them."""
        return self._native.images(normalise(images, self._recipe))

    def __call__(self, images: np.ndarray) -> np.ndarray:
        return self._native.array(self.module(self.inputs(images)))


@pytest.fixture
def module(backend: Backend, native: ModuleType, tiny_recipe: Recipe) -> LoadedModule:
    return LoadedModule(backend, native, tiny_recipe, draw_state(tiny_recipe).tensors)


@pytest.mark.parametrize("padding", ["symmetric", "same"])
@pytest.mark.parametrize("size", [32, 37])
def test_a_loaded_module_has_the_logits_of_float64(
    backend: Backend, native: ModuleType, tiny_recipe: Recipe, padding: str, size: int
) -> None:
    recipe = tiny_recipe.replace(padding=padding, eval_crop=size, eval_resize=size)
    values = draw_state(recipe).tensors
    images = draw_images(5, size)
    logits = LoadedModule(backend, native, recipe, values)(images)
    assert (logits.dtype, logits.shape) == (native.FACTS.logits, (5, recipe.logits))
    assert distance(logits, oracle.logits(recipe, values, images)) < BOUNDS["logits"].value


@pytest.mark.parametrize("padding", ["symmetric", "same"])
def test_a_loaded_module_takes_images_of_any_size_and_shape(
    backend: Backend, native: ModuleType, tiny_recipe: Recipe, padding: str
) -> None:
    if padding == "same" and not native.FACTS.any_size:
        pytest.skip(
            "with SAME padding, this engine's module is for images of the recipe's eval_crop"
        )
    recipe = tiny_recipe.replace(padding=padding)
    values = draw_state(recipe).tensors
    images = draw_images(2, 80)
    module = LoadedModule(backend, native, recipe, values)
    for height, width in ((33, 32), (32, 33), (45, 64), (7, 80)):
        cut = images[:, :height, :width]
        assert distance(module(cut), oracle.logits(recipe, values, cut)) < BOUNDS["logits"].value, (
            height,
            width,
        )


def test_a_loaded_module_computes_what_the_engine_does(
    start: Start, module: LoadedModule, tiny_recipe: Recipe
) -> None:
    images = draw_images(4)
    assert distance(module(images), start(tiny_recipe).predict(images)) < BOUNDS["logits"].value


def test_a_loaded_module_has_memory_of_its_own(
    backend: Backend, native: ModuleType, tiny_recipe: Recipe
) -> None:
    values = draw_state(tiny_recipe).tensors
    images = draw_images(4)
    module = LoadedModule(backend, native, tiny_recipe, values)
    before = module(images)
    for value in values.values():
        value[:] = 0
    assert module(images).tobytes() == before.tobytes()


@for_frameworks
def test_running_statistics_of_a_loaded_module_are_not_for_training(
    module: LoadedModule, native: ModuleType, tiny_recipe: Recipe
) -> None:
    assert native.find_trained(module.module) == parameters(draw_state(tiny_recipe)).keys()


@for_frameworks
def test_gradients_reach_every_weight_of_a_loaded_module(
    module: LoadedModule, native: ModuleType, tiny_recipe: Recipe
) -> None:
    gradients: Arrays = native.gradients(module.module, module.inputs(draw_images(4)))
    assert gradients.keys() == parameters(draw_state(tiny_recipe)).keys()
    assert all(gradient.any() for gradient in gradients.values())


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("shape", r"fc\."),
        ("missing", r"missing \['fc.bias'\]"),
        ("unknown", "fc.biases.*mean fc.bias"),
    ],
)
def test_a_module_is_not_loaded_with_weights_of_another_model(
    backend: Backend, tiny_recipe: Recipe, fault: str, message: str
) -> None:
    values = draw_state(tiny_recipe.replace(logits=11) if fault == "shape" else tiny_recipe).tensors
    if fault == "missing":
        del values["fc.bias"]
    elif fault == "unknown":
        values["fc.biases"] = values["fc.bias"]
    with pytest.raises(CheckpointError, match=message):
        backend.load_module(tiny_recipe, values)
