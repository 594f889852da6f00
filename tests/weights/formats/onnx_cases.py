"""Small models of `lockstep export`, for the tests that read them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from lockstep.inference import onnx_model
from lockstep.models.architectures import ModelSpec
from lockstep.recipes import Recipe
from lockstep.system.strict_json import to_json
from tests.inference.cases import random_tensors
from tests.weights.formats.cases import RESNEXT, Variables

LOGITS = 10


def recipe_of(model: str | ModelSpec = RESNEXT, **changes: Any) -> Recipe:
    return Recipe(model=model, logits=LOGITS, precision="fp32").replace(**changes)


def describe(recipe: Recipe) -> str:
    """Return the preprocessing as exports store it."""
    return to_json(recipe.preprocessing())


def export_model(recipe: Recipe, folder: Path, classes: tuple[str, ...] = ()) -> Variables:
    """Export random weights as `lockstep export` does, and return them."""
    tensors = random_tensors(recipe, 1)
    folder.mkdir()
    onnx.save(onnx_model.build_model(recipe, tensors, classes), str(folder / "model.onnx"))
    return tensors


def edit_model(path: Path, change: Callable[[Any], object]) -> None:
    model = onnx.load(str(path))
    change(model.graph)
    onnx.save(model, str(path))


IMAGES = np.random.default_rng(3).standard_normal((1, 3, 64, 64), np.float32)
