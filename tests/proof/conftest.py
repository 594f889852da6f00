"""A small model with its proof."""

from pathlib import Path

import numpy as np
import pytest

from lockstep.inference import onnx_model
from lockstep.proof.folder import Subject, write_proof
from lockstep.recipes import Recipe
from lockstep.weights.formats.onnx_photos import take_photos
from tests.inference.cases import CLASSES, random_tensors
from tests.proof.planted import MEAN, RESIZE, SIDE, STD


@pytest.fixture(scope="session")
def folder(tiny_recipe: Recipe, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An ONNX model of photos with its proof, and a bare one, `bare.onnx`. Tests must only read
    it."""
    folder = tmp_path_factory.mktemp("model")
    recipe = tiny_recipe.replace(
        eval_crop=SIDE,
        eval_resize=RESIZE,
        mean=MEAN,
        std=STD,
        exif_orientation=True,
        eval_antialias=True,
        interpolation="bilinear",
    )
    tensors = random_tensors(recipe, 1)
    tensors["fc.weight"] = tensors["fc.weight"] * np.float32(0.3)
    model = onnx_model.build_model(recipe, tensors, CLASSES, {}, onnx_model.Form(None, False))
    (folder / "model.onnx").write_bytes(take_photos(model, recipe).SerializeToString())
    subject = Subject(
        target="onnx",
        precision="fp32",
        recipe=recipe,
        tensors=tensors,
        classes=CLASSES,
        takes="photos",
        batch=None,
        backend="torch",
        bound=5e-3,
        why="pixels are rounded",
    )
    write_proof(folder, subject)
    bare = onnx_model.build_model(recipe, tensors, CLASSES, {}, onnx_model.Form(None, True))
    (folder / "bare.onnx").write_bytes(bare.SerializeToString())
    return folder
