"""ONNX models in ONNX Runtime, compared with the reference in float64.

Int8 after training is calibrated on training images and measured on validation images.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

import lockstep
from lockstep.inference.int8 import quantise_for_speed
from lockstep.models.quantisation import layers
from lockstep.models.state import State
from lockstep.recipes import Recipe
from lockstep.recipes.initial_weights import zero_momentum
from lockstep.system.errors import BackendError, CheckpointError
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
    image_file,
    open_session,
    pictures,
    prepare_photo,
    read_squares,
    save_random,
    save_tensors,
)


@pytest.fixture(scope="module")
def data(weights: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images, each in the folder of the class that the reference finds likeliest: its top-1 is 100
    %."""
    root = tmp_path_factory.mktemp("data")
    reference = lockstep.load(weights).on("reference").module()
    recipe = open_weights(weights).recipe
    for number in range(24):
        path = image_file(root, 40 + number, 57)
        label = int(reference(prepare_photo(path, recipe).astype(np.float64)).argmax())
        folder = root / ("train" if number % 2 else "val") / CLASSES[label]
        folder.mkdir(parents=True, exist_ok=True)
        path.rename(folder / path.name)
    return root


def logits_of(model: Path, x: np.ndarray) -> np.ndarray:
    [logits] = open_session(model).run(["logits"], {"input": x.astype(np.float32)})
    return np.asarray(logits)


@pytest.mark.parametrize("method", ["minmax", "entropy", "percentile"])
def test_int8_is_near_float64(weights: Path, data: Path, method: str, tmp_path: Path) -> None:
    int8 = lockstep.Int8(data, method=method, tolerance=10)
    model = lockstep.load(weights)
    result = model.export(tmp_path / "model", to="onnx", bare=True, precision=int8)
    loss = result["int8"]
    assert loss["top1_before"] == 100
    assert loss["top1_after"] >= 90
    assert loss["method"] == method
    assert (loss["calibration_images"], loss["validation_images"]) == (12, 12)
    model = onnx.load(str(tmp_path / "model" / "model.onnx"))
    metadata = {entry.key: entry.value for entry in model.metadata_props}
    assert json.loads(metadata["lockstep_int8"]) == loss
    x = ((pictures(32, 32) - MEAN) / STD).transpose(0, 3, 1, 2)
    wanted = lockstep.load(weights).on("reference").module()(x)
    off = np.abs(logits_of(tmp_path / "model" / "model.onnx", x) - wanted).max()
    assert 1e-4 < off / np.abs(wanted).max() < 0.1


def export_quantised(weights: Path, data: Path, target: Path) -> None:
    lockstep.load(weights).export(
        target, to="onnx", precision=lockstep.Int8(data, images=3, tolerance=10), compare=False
    )


def test_every_layer_computes_in_integers(weights: Path, data: Path, tmp_path: Path) -> None:
    export_quantised(weights, data, tmp_path / "model")
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.optimized_model_filepath = str(tmp_path / "optimised.onnx")
    onnxruntime.InferenceSession(
        str(tmp_path / "model" / "model.onnx"), options, providers=["CPUExecutionProvider"]
    )
    kinds = [node.op_type for node in onnx.load(str(tmp_path / "optimised.onnx")).graph.node]
    assert kinds.count("QLinearConv") == len(layers(open_weights(weights).recipe.spec)) - 1
    assert not {"Conv", "FusedConv", "Gemm"} & set(kinds)


def test_weights_have_seven_bits(weights: Path, data: Path, tmp_path: Path) -> None:
    export_quantised(weights, data, tmp_path / "model")
    graph = onnx.load(str(tmp_path / "model" / "model.onnx")).graph
    kernels = [
        onnx.numpy_helper.to_array(array) for array in graph.initializer if len(array.dims) == 4
    ]
    assert len(kernels) == len(layers(open_weights(weights).recipe.spec)) - 1
    assert {kernel.dtype for kernel in kernels} == {np.dtype(np.int8)}
    assert max(int(np.abs(kernel.astype(int)).max()) for kernel in kernels) <= 64


@pytest.mark.parametrize("symmetric", [False, True])
def test_every_layer_is_measured_in_int8(weights: Path, symmetric: bool) -> None:
    images = pictures(32, 32)
    model = onnx.load_from_string(
        quantise_for_speed(open_weights(weights), images, symmetric=symmetric)
    )
    makers = {name: node for node in model.graph.node for name in node.output}
    computing = [node for node in model.graph.node if node.op_type in ("Conv", "Gemm")]
    assert len(computing) == len(layers(open_weights(weights).recipe.spec))
    kinds = {makers[name].op_type for node in computing for name in node.input[:2]}
    assert kinds == {"DequantizeLinear"}
    [logits] = open_session(model.SerializeToString()).run(None, {"images": images})
    x = ((images - MEAN) / STD).transpose(0, 3, 1, 2)
    wanted = lockstep.load(weights).on("reference").module()(x)
    assert 1e-4 < np.abs(logits - wanted).max() / np.abs(wanted).max() < 0.1


def add_outlier(weights: Path, folder: Path) -> Path:
    """Write the same function, but one channel of the stem is 10,000 times as large: its layers
    divide by that."""
    opened = open_weights(weights)
    factor = np.float32(10_000)
    tensors = {name: value.copy() for name, value in opened.tensors.items()}
    for name in ("bn1.weight", "bn1.bias"):
        tensors[name][0] *= factor
    for name in ("layer1.0.conv1.weight", "layer1.0.downsample.0.weight"):
        tensors[name][:, 0] /= factor
    return save_tensors(folder, opened.recipe, tensors)


def test_the_tolerance_is_a_bound(weights: Path, data: Path, tmp_path: Path) -> None:
    source = add_outlier(weights, tmp_path / "run")
    with pytest.raises(CheckpointError, match=r"int8 .* 100.00 % .* 12"):
        lockstep.load(source).export(
            tmp_path / "model", to="onnx", precision=lockstep.Int8(data, tolerance=10)
        )
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (None, "int8 needs images, .*: --data DATA"),
        ({"method": "median"}, "there is no method 'median' to calibrate onnx with. Known: minmax"),
        ({"images": 0}, "images is 0 and tolerance"),
    ],
)
def test_int8_without_what_it_needs_is_refused(
    weights: Path, data: Path, options: dict[str, Any] | None, message: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=message):
        lockstep.load(weights).export(
            tmp_path / "model",
            to="onnx",
            precision="int8" if options is None else lockstep.Int8(data, **options),
        )
    assert not (tmp_path / "model").exists()


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
        "torchscript computes in float, but the weights were trained for int8; to quantise,"
        " export --to onnx"
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
