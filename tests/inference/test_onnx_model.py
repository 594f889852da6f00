"""ONNX models in ONNX Runtime, compared with the reference in float64."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

import lockstep
from lockstep.recipes import Recipe
from lockstep.system.errors import BackendError
from tests.backends.cases import NARROWED, random_images
from tests.inference.cases import CLASSES, MEAN, STD, pictures, saved

SIZES = [(40, 40), (32, 57), (71, 33)]


def answers(model: Path, images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return ONNX Runtime's classes and probabilities."""
    session = onnxruntime.InferenceSession(str(model), providers=["CPUExecutionProvider"])
    classes, probabilities = session.run(["classes", "probabilities"], {"images": images})
    return classes, probabilities


def expected(weights: Path, images: np.ndarray) -> np.ndarray:
    """Return the reference's probabilities, float64."""
    x = ((images.astype(np.float64) - MEAN) / STD).transpose(0, 3, 1, 2)
    logits = lockstep.load(weights, backend="reference")(x)
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


@pytest.mark.parametrize("padding", ["symmetric", "same"])
@pytest.mark.parametrize("changes", NARROWED.values(), ids=list(NARROWED))
def test_onnx_runtime_has_the_probabilities_of_float64(
    tiny_recipe: Recipe, changes: dict[str, Any], padding: str, tmp_path: Path
) -> None:
    weights = saved(tiny_recipe.replace(mean=MEAN, std=STD, padding=padding, **changes), tmp_path)
    lockstep.export(weights, tmp_path / "model", to="onnx")
    for height, width in SIZES:
        images = pictures(height, width)
        classes, probabilities = answers(tmp_path / "model" / "model.onnx", images)
        wanted = expected(weights, images)
        assert (classes.dtype, probabilities.dtype) == (np.int64, np.float32)
        assert probabilities == pytest.approx(wanted, abs=1e-5)
        assert classes.tolist() == wanted.argmax(axis=1).tolist()
        assert wanted.max() < 0.95
        assert np.ptp(wanted, axis=0).max() > 0.01, "images are told apart"


def test_a_checkpoint_of_mxnets_is_exported(tmp_path: Path) -> None:
    recipe = lockstep.load_recipe("resnet50-mxnet-90ep").replace(model="resnet18", logits=len(CLASSES))
    weights = saved(recipe, tmp_path)
    lockstep.convert(weights, tmp_path / "model-0090.params", to="nvidia-mxnet", certificate=False)
    images = random_images(2, 64)
    for name, source in (("own", weights), ("mxnet", tmp_path / "model-0090.params")):
        lockstep.export(source, tmp_path / name, to="onnx")
    (_, own), (_, mxnet) = (answers(tmp_path / name / "model.onnx", images) for name in ("own", "mxnet"))
    assert own.tobytes() == mxnet.tobytes()


def test_the_names_of_the_classes_are_in_the_model(tiny_recipe: Recipe, tmp_path: Path) -> None:
    lockstep.export(saved(tiny_recipe, tmp_path), tmp_path / "model", to="onnx")
    model = onnx.load(str(tmp_path / "model" / "model.onnx"))
    assert json.loads({each.key: each.value for each in model.metadata_props}["classes"]) == list(CLASSES)


def test_without_the_package_it_is_told_how_to_get_it(
    tiny_recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(BackendError, match="pip install onnx=="):
        lockstep.export(saved(tiny_recipe, tmp_path), tmp_path / "model", to="onnx")
    assert not (tmp_path / "model").exists()


def test_a_folder_of_the_user_next_to_the_export_stays_as_it_is(tiny_recipe: Recipe, tmp_path: Path) -> None:
    (tmp_path / "unfinished-model").mkdir()
    (tmp_path / "unfinished-model" / "thesis.txt").write_text("mine")
    lockstep.export(saved(tiny_recipe, tmp_path), tmp_path / "model", to="onnx")
    assert (tmp_path / "unfinished-model" / "thesis.txt").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints", "model", "unfinished-model"]
