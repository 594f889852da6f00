"""Exported ONNX models are evaluated as they are: the file itself is run."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, quantize_static
from PIL import Image

import lockstep
from lockstep.inference.session import list_export_runtimes
from lockstep.recipes import Execution, Recipe
from lockstep.weights import open_weights
from tests.backends.drawing import draw_images
from tests.inference.cases import MEAN, STD, random_tensors, save_tensors

ENGINES_OF_EXPORTS = list_export_runtimes()

REFERENCE = Execution(backend="reference", reference_dtype="float32")


@pytest.fixture
def weights(tiny_recipe: Recipe, tmp_path: Path) -> Path:
    recipe = tiny_recipe.replace(
        mean=MEAN, std=STD, eval_resize=40, antialias=True, exif_orientation=True
    )
    return save_tensors(tmp_path, recipe, random_tensors(recipe, 1))


@pytest.fixture
def exported(weights: Path, tmp_path: Path) -> Path:
    remarks = lockstep.load(weights).export(tmp_path / "model", to="onnx")["remarks"]
    assert [remark for remark in remarks if "PIL.ImageOps.exif_transpose" in remark]
    return tmp_path / "model"


@pytest.mark.parametrize("name", ENGINES_OF_EXPORTS)
def test_an_export_has_the_accuracy_of_its_weights(
    name: str, weights: Path, exported: Path, textures: Path
) -> None:
    expected = lockstep.load(weights).on(execution=REFERENCE).evaluate(textures).to_json()
    for source in (exported, exported / "model.onnx"):
        result = lockstep.load(source).on(name).evaluate(textures).to_json()
        assert (result["runtime"], result["source"]) == (name, str(exported / "model.onnx"))
        assert result["per_class"] == expected["per_class"]
        assert result["loss"] == pytest.approx(expected["loss"], rel=1e-5)


def test_exports_turn_photos_as_weights_do(exported: Path, weights: Path, tmp_path: Path) -> None:
    exif = Image.Exif()
    pixels = draw_images(1, 60)[0, :45]
    exif[0x0112] = 6
    Image.fromarray(pixels).save(tmp_path / "stored.png", exif=exif)
    expected = lockstep.load(weights).on("reference").predict(np.rot90(pixels, -1))
    for source, where in ((exported, None), (weights, "reference")):
        prediction = lockstep.load(source).on(where).predict(tmp_path / "stored.png")
        assert prediction.classes == expected.classes
        assert prediction.probabilities == pytest.approx(expected.probabilities, abs=2e-6)


class Calibration(CalibrationDataReader):  # type: ignore[misc]
    """Sixteen images."""

    def __init__(self, side: int) -> None:
        self._left = [{"images": draw_images(16, side)}]

    def get_next(self) -> dict[str, np.ndarray] | None:
        return self._left.pop() if self._left else None


@pytest.mark.parametrize("name", ENGINES_OF_EXPORTS)
def test_a_model_that_another_program_quantised_is_evaluated(
    name: str, weights: Path, exported: Path, textures: Path
) -> None:
    side = open_weights(weights).recipe.eval_crop
    file = exported / "model.onnx"
    quantize_static(file, file, Calibration(side), quant_format=QuantFormat.QDQ)
    result, expected = (
        lockstep.load(source).on(name).evaluate(textures).to_json()
        for source in (exported, weights)
    )
    assert result["loss"] != expected["loss"]
    assert result["loss"] == pytest.approx(expected["loss"], rel=0.1)


def round_logits(model: Any) -> None:
    """Round logits to multiples of 1000 by nodes that a reader of weights leaves out."""
    for name, constant in (("step", np.float32(1000)), ("zero", np.int8(0))):
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.array(constant), name))
    rounding = {"QuantizeLinear": ("logits", "whole"), "DequantizeLinear": ("whole", "rounded")}
    for operator, (value, result) in rounding.items():
        node = onnx.helper.make_node(operator, [value, "step", "zero"], [result])
        model.graph.node.insert(len(model.graph.node) - 2, node)
    for node in list(model.graph.node)[-2:]:
        node.input[0] = "rounded"


def test_the_file_itself_is_run_unless_a_backend_is_named(
    exported: Path, weights: Path, textures: Path
) -> None:
    of_weights = lockstep.load(weights).on(execution=REFERENCE).evaluate(textures).to_json()
    model = onnx.load(exported / "model.onnx")
    round_logits(model)
    onnx.save(model, exported / "model.onnx")
    result = lockstep.load(exported).evaluate(textures).to_json()
    assert result["runtime"] == "onnxruntime"
    assert result["loss"] == pytest.approx(np.log(10)), "all logits are 0"
    for where in ("native", None):
        result = lockstep.load(exported).on(where, execution=REFERENCE).evaluate(textures).to_json()
        assert result["loss"] == pytest.approx(of_weights["loss"], rel=1e-5)
