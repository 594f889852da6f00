"""Tests for every engine with a framework: its loss scale, on gradients made by hand."""

from types import ModuleType
from typing import Any

import pytest

from lockstep.recipes import Recipe
from tests.backends.cases import FP16
from tests.backends.conftest import for_frameworks

pytestmark = for_frameworks


def make_scale(native: ModuleType, recipe: Recipe, **changes: Any) -> Any:
    return native.loss_scale(recipe.replace(**FP16, **changes))


@pytest.mark.parametrize("loss_scaling", ["static", "dynamic"])
def test_gradients_are_divided_by_the_scale(
    native: ModuleType, tiny_recipe: Recipe, loss_scaling: str
) -> None:
    scale = make_scale(native, tiny_recipe, loss_scaling=loss_scaling, loss_scale=128.0)
    assert native.take_step(scale, [[128.0, -64.0], [32.0]]) == [[0.5, 1.25], [0.875]]


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_one_nan_gradient_skips_a_step(native: ModuleType, tiny_recipe: Recipe, bad: float) -> None:
    scale = make_scale(native, tiny_recipe, loss_scaling="dynamic", loss_scale=128.0)
    result = native.take_step(scale, [[1.0, 2.0], [3.0, bad], [4.0]])
    assert result == [[1.0, 1.0], [1.0, 1.0], [1.0]]
    assert scale.read() == {"scale": 64.0, "good_steps": 0, "bad_steps": 0}


def test_large_finite_gradients_are_no_overflow(native: ModuleType, tiny_recipe: Recipe) -> None:
    # Their squares exceed float32.
    scale = make_scale(native, tiny_recipe, loss_scaling="dynamic", loss_scale=128.0)
    assert native.take_step(scale, [[3e38, -3e38]]) != [[1.0, 1.0]]
    assert scale.read() == {"scale": 128.0, "good_steps": 1, "bad_steps": 0}


@pytest.mark.parametrize(("loss_scaling", "value"), [("static", 128.0), ("none", 1.0)])
def test_a_scale_that_does_not_adapt_updates_whatever_comes(
    native: ModuleType, tiny_recipe: Recipe, loss_scaling: str, value: float
) -> None:
    scale = make_scale(native, tiny_recipe, loss_scaling=loss_scaling, loss_scale=128.0)
    assert native.take_step(scale, [[float("inf")]]) == [[float("-inf")]]
    assert native.take_step(scale, [[value]]) == [[0.5]]
    assert scale.read() == {}
