"""Int8 after training: calibrated on training images, measured on validation images, compared with
float64."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

import lockstep
from lockstep.inference.int8 import quantise_for_speed
from lockstep.models.quantisation import layers
from lockstep.system.errors import CheckpointError
from lockstep.weights import open_weights
from tests.inference.cases import (
    CLASSES,
    MEAN,
    STD,
    image_file,
    open_session,
    pictures,
    prepare_photo,
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
        ({"images": 0}, "0 calibration images"),
    ],
)
def test_int8_without_what_it_needs_is_refused(
    weights: Path, data: Path, options: dict[str, Any] | None, message: str, tmp_path: Path
) -> None:
    precision = "int8" if options is None else lockstep.Int8(data, **options)
    with pytest.raises(CheckpointError, match=message):
        lockstep.load(weights).export(tmp_path / "model", to="onnx", precision=precision)
    assert not (tmp_path / "model").exists()
