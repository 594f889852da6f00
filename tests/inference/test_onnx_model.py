"""ONNX models in ONNX Runtime, compared with the reference in float64."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

import lockstep
from lockstep.models.quantisation import layers
from lockstep.models.state import State
from lockstep.recipes import Recipe
from lockstep.recipes.initial_weights import zero_momentum
from lockstep.system.errors import BackendError
from lockstep.weights import open_weights
from tests.backends import oracle
from tests.backends.cases import BLURRED, MODERN, NARROWED
from tests.backends.drawing import draw_images
from tests.edges import softmax
from tests.inference.cases import (
    CLASSES,
    MEAN,
    STD,
    compute_expected,
    open_session,
    pictures,
    read_squares,
    save_random,
)

SIZES = [(40, 40), (32, 57), (71, 33)]


def answers(model: Path, images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return ONNX Runtime's classes and probabilities."""
    outputs = open_session(model).run(["classes", "probabilities"], {"images": images})
    return outputs[0], outputs[1]


MODELS: dict[str, tuple[Any, str]] = {
    "narrow resnet50": (NARROWED["narrow resnet50"], "symmetric"),
    "narrow resnext101": (NARROWED["narrow resnext101-32x4d"], "same"),
    "modern parts": ({"model": MODERN}, "symmetric"),
    "a blur before convolutions": ({"model": BLURRED}, "flax"),
}


@pytest.mark.parametrize(("changes", "padding"), MODELS.values(), ids=MODELS)
def test_onnx_runtime_has_the_probabilities_of_float64(
    tiny_recipe: Recipe, changes: dict[str, Any], padding: str, tmp_path: Path
) -> None:
    weights = save_random(
        tiny_recipe.replace(mean=MEAN, std=STD, padding=padding, **changes), tmp_path
    )
    lockstep.load(weights).export(tmp_path / "model", to="onnx", compare=False)
    for height, width in SIZES:
        images = pictures(height, width)
        classes, probabilities = answers(tmp_path / "model" / "model.onnx", images)
        wanted = compute_expected(weights, images)
        assert (classes.dtype, probabilities.dtype) == (np.int64, np.float32)
        assert probabilities == pytest.approx(wanted, abs=1e-5)
        assert classes.tolist() == wanted.argmax(axis=1).tolist()
        assert wanted.max() < 0.95
        assert np.ptp(wanted, axis=0).max() > 5e-4, "images are told apart"


@pytest.mark.parametrize("padding", ["symmetric", "same"])
def test_onnx_runtime_quantises_alike(tiny_recipe: Recipe, padding: str, tmp_path: Path) -> None:
    recipe = tiny_recipe.replace(quantisation="int8", mean=MEAN, std=STD, padding=padding)
    # Many inputs are beyond the limits of these scales. Dark pixels reach -128.
    scales = dict.fromkeys(layers(recipe.spec), 0.0155)
    weights = save_random(recipe, tmp_path, scales)
    assert lockstep.load(weights).export(tmp_path / "model", to="onnx")["remarks"] == []
    images = pictures(32, 32)
    engine: Any = oracle.make_engine(recipe, [0.0])
    engine.write(State(0, open_weights(weights).tensors, zero_momentum(recipe)))
    squares = read_squares(images, recipe)
    in_float = softmax(engine.predict(squares).astype(np.float64))
    engine.quantise(scales)
    wanted = softmax(engine.predict(squares).astype(np.float64))
    _, probabilities = answers(tmp_path / "model" / "model.onnx", images)
    # Rounding is 1e-7, but where it decides a rounding to int8 a value moves by a whole scale.
    assert probabilities == pytest.approx(wanted, abs=1e-4)
    assert np.abs(in_float - wanted).max() > 0.03, "quantisation must be able to matter"


def test_every_quantised_layer_has_int8_weights(tiny_recipe: Recipe, tmp_path: Path) -> None:
    recipe = tiny_recipe.replace(quantisation="int8")
    names = layers(recipe.spec)
    weights = save_random(
        recipe, tmp_path, {name: 2.0**-number for number, name in enumerate(names)}
    )
    lockstep.load(weights).export(tmp_path / "model", to="onnx", compare=False)
    graph = onnx.load(str(tmp_path / "model" / "model.onnx")).graph
    made_by = {node.output[0]: node for node in graph.node}
    values = {largest.name: onnx.numpy_helper.to_array(largest) for largest in graph.initializer}
    layers_in_int8 = [node for node in graph.node if node.op_type in ("Conv", "Gemm")]
    assert len(layers_in_int8) == len(names)
    tensors = open_weights(weights).tensors
    for node in layers_in_int8:
        name = node.name if node.op_type == "Conv" else "fc"
        dequantize = made_by[node.input[0]]
        quantize = made_by[dequantize.input[0]]
        assert (quantize.op_type, dequantize.op_type) == ("QuantizeLinear", "DequantizeLinear")
        assert list(quantize.input[1:]) == list(dequantize.input[1:])
        scale, zero = (values[largest] for largest in quantize.input[1:])
        assert (scale, zero, zero.dtype) == (2.0 ** -names.index(name), 0, np.int8)
        integers, scales, zeros = (values[largest] for largest in made_by[node.input[1]].input)
        trained = tensors[f"{name}.weight"]
        largest = np.abs(trained).reshape(len(trained), -1).max(axis=1) / 127
        rounded = np.rint(trained / largest.reshape(-1, *(1,) * (trained.ndim - 1)))
        assert (integers.dtype, zeros.dtype, scales.shape) == (np.int8, np.int8, largest.shape)
        assert (integers == rounded).all()


def test_other_formats_compute_unquantised(tiny_recipe: Recipe, tmp_path: Path) -> None:
    recipe = tiny_recipe.replace(quantisation="int8")
    weights = save_random(recipe, tmp_path, dict.fromkeys(layers(recipe.spec), 1.0))
    exported = lockstep.load(weights).export(tmp_path / "model", to="torchscript", compare=False)
    assert exported["remarks"] == [
        "torchscript computes in float, but the weights were trained for int8; --to onnx quantises"
    ]
    images = pictures(32, 32)
    module = torch.jit.load(str(tmp_path / "model" / "model.pt"))
    squares = read_squares(images, recipe)
    in_float = softmax(oracle.logits(recipe, open_weights(weights).tensors, squares))
    probabilities = module(torch.tensor(images))["probabilities"].numpy()
    assert probabilities == pytest.approx(in_float, abs=1e-5)
    converted = lockstep.load(weights).save(tmp_path / "w.pth", to="torchvision", certificate=False)
    assert (
        "torchvision holds no scales of int8: its readers compute in float" in converted["remarks"]
    )


def test_a_checkpoint_of_mxnets_is_exported(tmp_path: Path) -> None:
    recipe = lockstep.load_recipe("resnet50-mxnet-90ep").replace(
        model="resnet18", logits=len(CLASSES)
    )
    weights = save_random(recipe, tmp_path)
    lockstep.load(weights).save(
        tmp_path / "model-0090.params", to="nvidia-mxnet", certificate=False
    )
    images = draw_images(2, 64)
    for name, source in (("own", weights), ("mxnet", tmp_path / "model-0090.params")):
        lockstep.load(source).export(tmp_path / name, to="onnx", compare=False)
    (_, own), (_, mxnet) = (
        answers(tmp_path / name / "model.onnx", images) for name in ("own", "mxnet")
    )
    assert own.tobytes() == mxnet.tobytes()


def test_class_names_are_in_the_model_and_next_to_it(tiny_recipe: Recipe, tmp_path: Path) -> None:
    lockstep.load(save_random(tiny_recipe, tmp_path)).export(
        tmp_path / "model", to="onnx", compare=False
    )
    names = (tmp_path / "model" / "classes.txt").read_text()
    assert names.splitlines() == list(CLASSES)
    model = onnx.load(str(tmp_path / "model" / "model.onnx"))
    assert json.loads(
        {entry.key: entry.value for entry in model.metadata_props}["classes"]
    ) == list(CLASSES)


def test_a_missing_package_is_named(
    tiny_recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(BackendError, match="pip install onnx=="):
        lockstep.load(save_random(tiny_recipe, tmp_path)).export(
            tmp_path / "model", to="onnx", compare=False
        )
    assert not (tmp_path / "model").exists()


def test_a_folder_next_to_the_export_is_unchanged(tiny_recipe: Recipe, tmp_path: Path) -> None:
    (tmp_path / "unfinished-model").mkdir()
    (tmp_path / "unfinished-model" / "thesis.txt").write_text("mine")
    lockstep.load(save_random(tiny_recipe, tmp_path)).export(
        tmp_path / "model", to="onnx", compare=False
    )
    assert (tmp_path / "unfinished-model" / "thesis.txt").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "checkpoints",
        "model",
        "unfinished-model",
    ]
