"""ONNX models of `lockstep export` and of PyTorch's exporter; their results in ONNX Runtime are the
oracle. Their metadata hold the preprocessing and the classes."""

import json
import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

from lockstep import backends
from lockstep.inference import onnx_model
from lockstep.models.architectures import MODELS, ModelSpec, narrow_model
from lockstep.models.quantisation import layers
from lockstep.recipes import Recipe
from lockstep.system.errors import BackendError, CheckpointError
from lockstep.weights import Weights
from lockstep.weights.formats.onnx_metadata import apply_preprocessing
from lockstep.weights.formats.onnx_weights import find, matches, read
from lockstep.weights.inspection import find_oddities
from tests.inference.cases import open_session, random_tensors
from tests.lines import check_lines
from tests.weights.formats.cases import BASIC, EVALUATION, RESNEXT, assert_canonical
from tests.weights.formats.onnx_cases import IMAGES, edit_model, export_model, recipe_of

V1 = narrow_model(MODELS["resnet50-v1"])


def node_of(graph: Any, kind: str, number: int = 0) -> Any:
    return [node for node in graph.node if node.op_type == kind][number]


def export_torch(module: torch.nn.Module, path: Path, *, training: bool = False) -> None:
    """Export a module as PyTorch does. With `training` its batch norms stay nodes, else they are
    folded."""
    mode = torch.onnx.TrainingMode.PRESERVE if training else torch.onnx.TrainingMode.EVAL
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # this exporter is deprecated
        torch.onnx.export(
            module, (torch.zeros(1, 3, 64, 64),), str(path), dynamo=False, training=mode
        )


def make_module(recipe: Recipe) -> torch.nn.Module:
    return backends.load("torch").load_module(recipe, random_tensors(recipe, 2))


def run_onnxruntime(path: Path, images: np.ndarray) -> np.ndarray:
    session = open_session(path)
    [logits] = session.run(None, {session.get_inputs()[0].name: images})
    return logits


def run_reference(original: Weights, images: np.ndarray) -> np.ndarray:
    """Return the reference's logits of normalised images [N, 3, H, W]."""
    module = backends.load("reference").load_module(original.recipe, original.state.tensors)
    return module(images.astype(np.float64))


def assert_close(actual: np.ndarray, expected: np.ndarray) -> None:
    assert np.abs(actual - expected).max() < 1e-4 * np.abs(expected).max()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {
            "model": BASIC,
            "padding": "same",
            "mean": (100.0, 110.0, 120.5),
            "std": (50.0, 60.0, 70.0),
        },
        {"model": V1, "bn_epsilon": 1.001e-5, "padding": "flax"},
        {
            **{"interpolation": "bicubic", "antialias": True, "eval_resize": 235, "eval_crop": 224},
            "mean": (123.456789012, 1, 2),
        },
    ],
)
def test_an_export_is_read_bit_for_bit(changes: dict[str, Any], tmp_path: Path) -> None:
    recipe = recipe_of(**changes)
    tensors = export_model(recipe, tmp_path / "model", ("a", "b"))
    weights = read(tmp_path / "model" / "model.onnx")
    assert weights.recipe == recipe
    assert (weights.remarks, weights.origin, weights.classes) == ((), "ONNX", ("a", "b"))
    assert (weights.has_preprocessing, weights.folded_norms) == (True, ())
    assert_canonical(weights.state.tensors, tensors)


def test_a_known_model_has_its_name(tmp_path: Path) -> None:
    export_model(recipe_of("resnet18"), tmp_path / "model")
    assert read(tmp_path / "model" / "model.onnx").recipe.model == "resnet18"


def test_a_model_of_pytorch_has_its_weights(tmp_path: Path) -> None:
    recipe = recipe_of()
    tensors = random_tensors(recipe, 2)
    export_torch(backends.load("torch").load_module(recipe, tensors), tmp_path / "a", training=True)
    weights = read(tmp_path / "a")
    assert weights.recipe.replace(**EVALUATION) == recipe
    assert (weights.remarks, weights.stated) == ((), {"eval_crop"})
    assert_canonical(weights.state.tensors, tensors)


def test_a_graph_of_images_that_are_not_square_is_refused(tmp_path: Path) -> None:
    export_torch(make_module(recipe_of()), tmp_path / "a", training=True)
    model = onnx.load(tmp_path / "a")
    for axis, size in ((2, 128), (3, 64)):
        model.graph.input[0].type.tensor_type.shape.dim[axis].dim_value = size
    onnx.save(model, tmp_path / "b.onnx")
    with pytest.raises(CheckpointError, match="sides of 64 and 128 pixels, expected squares"):
        read(tmp_path / "b.onnx")


@pytest.mark.parametrize("model", [RESNEXT, BASIC, V1])
def test_a_model_with_folded_batch_norms_has_its_logits(model: ModelSpec, tmp_path: Path) -> None:
    recipe = recipe_of(model)
    export_torch(make_module(recipe), tmp_path / "a")
    kinds = {node.op_type for node in onnx.load(str(tmp_path / "a")).graph.node}
    assert "BatchNormalization" not in kinds
    weights = read(tmp_path / "a")
    assert (weights.recipe.model, weights.has_preprocessing) == (model, False)
    norms = [conv.bn_name for conv in model.list_convolutions()]
    assert weights.folded_norms == tuple(norms)
    assert "batch norms are folded into their convolutions" in weights.remarks[0]
    assert list(find_oddities(weights)) == []
    assert_close(run_reference(weights, IMAGES), run_onnxruntime(tmp_path / "a", IMAGES))


def test_a_folded_batch_norm_is_exactly_the_identity_in_float32(tmp_path: Path) -> None:
    recipe = recipe_of(BASIC)
    export_torch(make_module(recipe), tmp_path / "a")
    weights = read(tmp_path / "a")
    variance = weights.state.tensors["bn1.running_var"]
    assert (variance + np.float32(weights.recipe.bn_epsilon) == np.float32(1)).all()
    assert (weights.state.tensors["bn1.weight"] == 1).all()
    assert not weights.state.tensors["bn1.running_mean"].any()


class Normalising(torch.nn.Module):
    """A module that takes images from 0 to 1 and normalises them, as models of users do."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module
        self.register_buffer("mean", torch.tensor([0.4, 0.5, 0.6]).reshape(1, 3, 1, 1))
        self.register_buffer("std", torch.tensor([0.25, 0.5, 0.2]).reshape(1, 3, 1, 1))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.module((images - self.mean) / self.std)


def test_preprocessing_for_images_from_0_to_1_is_read(tmp_path: Path) -> None:
    recipe = recipe_of(BASIC)
    export_torch(Normalising(make_module(recipe)), tmp_path / "a")
    weights = read(tmp_path / "a")
    assert weights.recipe.mean == pytest.approx((102, 127.5, 153))
    assert weights.recipe.std == pytest.approx((63.75, 127.5, 51))
    assert "255 times as large" in weights.remarks[0]


def transpose_head(graph: Any, kind: str) -> None:
    """Store the classifier's weight as [in, out]; with "MatMul" another node adds its bias."""
    [weight] = [tensor for tensor in graph.initializer if tensor.name == "fc.weight"]
    values = np.ascontiguousarray(onnx.numpy_helper.to_array(weight).T)
    weight.CopyFrom(onnx.numpy_helper.from_array(values, "fc.weight"))
    node = node_of(graph, "Gemm")
    del node.attribute[:]
    if kind == "MatMul":
        node.op_type, node.output[0] = "MatMul", "product"
        del node.input[2]
        graph.node.append(onnx.helper.make_node("Add", ["fc.bias", "product"], ["logits"]))


@pytest.mark.parametrize("kind", ["Gemm", "MatMul"])
def test_a_classifier_may_be_stored_by_inputs(kind: str, tmp_path: Path) -> None:
    tensors = export_model(recipe_of(), tmp_path / "model")
    edit_model(tmp_path / "model" / "model.onnx", lambda graph: transpose_head(graph, kind))
    assert_canonical(read(tmp_path / "model" / "model.onnx").state.tensors, tensors)


def test_a_bias_before_a_batch_norm_is_subtracted_from_its_running_mean(tmp_path: Path) -> None:
    tensors = export_model(recipe_of(), tmp_path / "model")
    bias = np.arange(8, dtype=np.float32)

    def add_bias(graph: Any) -> None:
        graph.initializer.append(onnx.numpy_helper.from_array(bias, "bias"))
        node_of(graph, "Conv").input.append("bias")

    edit_model(tmp_path / "model" / "model.onnx", add_bias)
    weights = read(tmp_path / "model" / "model.onnx")
    check_lines(weights.remarks, "biases .* subtracted from the running means")
    changed = {"bn1.running_mean": tensors["bn1.running_mean"] - bias}
    assert_canonical(weights.state.tensors, tensors | changed)


def test_half_precision_is_converted(tmp_path: Path) -> None:
    tensors = export_model(recipe_of(), tmp_path / "model")
    file = tmp_path / "model" / "model.onnx"

    def halve(graph: Any) -> None:
        [kernel] = [tensor for tensor in graph.initializer if tensor.name == "conv1.weight"]
        kernel.CopyFrom(
            onnx.numpy_helper.from_array(tensors["conv1.weight"].astype(np.float16), "conv1.weight")
        )

    edit_model(file, halve)
    weights = read(file)
    check_lines(weights.remarks, r"^1 constants, such as conv1\.weight, are not float32")
    expected = tensors["conv1.weight"].astype(np.float16).astype(np.float32)
    assert weights.state.tensors["conv1.weight"].tobytes() == expected.tobytes()


def test_weights_in_a_file_next_to_the_model_are_read(tmp_path: Path) -> None:
    tensors = export_model(recipe_of(), tmp_path / "model")
    file = tmp_path / "model" / "model.onnx"
    where = {"save_as_external_data": True, "location": "weights", "size_threshold": 0}
    onnx.save(onnx.load(str(file)), str(file), **where)
    assert_canonical(read(file).state.tensors, tensors)


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ({"location": "../secret"}, "which is outside of the model's folder"),
        ({"location": "/etc/hostname"}, "which is outside of the model's folder"),
        ({"location": "link"}, "which is outside of the model's folder"),
        ({"location": "missing"}, "not next to the model"),
        (
            {"location": "model.onnx", "offset": "100000000"},
            r"needs 4704 bytes, which 'model\.onnx' does not have",
        ),
        (
            {"location": "model.onnx", "offset": "-8"},
            r"needs 4704 bytes, which 'model\.onnx' does not have",
        ),
        (
            {"location": "model.onnx", "length": "8"},
            r"needs 4704 bytes, which 'model\.onnx' does not have",
        ),
    ],
)
def test_bytes_of_other_folders_stay(entry: dict[str, str], reason: str, tmp_path: Path) -> None:
    export_model(recipe_of(), tmp_path / "model")
    (tmp_path / "secret").write_bytes(bytes(10_000))
    (tmp_path / "model" / "link").symlink_to(tmp_path / "secret")

    def point(graph: Any) -> None:
        [kernel] = [tensor for tensor in graph.initializer if tensor.name == "conv1.weight"]
        kernel.ClearField("raw_data")
        kernel.data_location = onnx.TensorProto.EXTERNAL
        for key, value in entry.items():
            kernel.external_data.add(key=key, value=value)

    file = tmp_path / "model" / "model.onnx"
    model = onnx.load(str(file))
    point(model.graph)
    file.write_bytes(model.SerializeToString())
    with pytest.raises(CheckpointError, match=reason):
        read(file)


def relu_to_gelu(graph: Any) -> None:
    node_of(graph, "Relu", 1).op_type = "Gelu"


def second_classifier(graph: Any) -> None:
    graph.node.append(onnx.helper.make_node("Gemm", ["probabilities", "fc.weight"], ["more"]))
    graph.output.add(name="more")


def dilate(graph: Any) -> None:
    node_of(graph, "Conv", 2).attribute.append(onnx.helper.make_attribute("dilations", [2, 2]))


def another_stride(graph: Any) -> None:
    for number, kind in ((2, [2, 2]), (1, [1, 1])):
        node = node_of(graph, "Conv", number)
        [strides] = [entry for entry in node.attribute if entry.name == "strides"]
        strides.ints[:] = kind


def another_padding(graph: Any) -> None:
    [pads] = [entry for entry in node_of(graph, "MaxPool").attribute if entry.name == "pads"]
    pads.ints[:] = [0, 0, 1, 1]


def pad_with_a_number(graph: Any) -> None:
    node_of(graph, "Conv", 1).attribute.append(onnx.helper.make_attribute("auto_pad", 3))


def resize(graph: Any) -> None:
    node_of(graph, "Cast").op_type = "Resize"


def divide_by_zero(graph: Any) -> None:
    [std] = [tensor for tensor in graph.initializer if tensor.name == "std"]
    std.CopyFrom(onnx.numpy_helper.from_array(np.zeros(3, np.float32), "std"))


def lying(graph: Any) -> None:
    graph.initializer[5].dims[0] = 2**40


def close_circle(graph: Any) -> None:
    node = node_of(graph, "Relu")
    graph.node.append(onnx.helper.make_node("Identity", ["round"], ["round"]))
    node.output[0] = "round"
    node_of(graph, "MaxPool").input[0] = "elsewhere"


REFUSED = {
    "another activation": (
        relu_to_gelu,
        r"is used by Gelu 'layer1.0.bn1.relu'; a ResNet has Relu or Add there",
    ),
    "more weights": (second_classifier, "Gemm 'more' follows the probabilities"),
    "dilations": (dilate, r"has strides \[1, 1\] and dilations \[2, 2\]"),
    "another stride": (
        another_stride,
        "but a ResNet of these blocks and widths has|expected four stages",
    ),
    "two paddings": (another_padding, "its windows are padded in 2 ways"),
    "a padding that is no text": (pad_with_a_number, "has the auto_pad 3, expected a string"),
    "a resize": (resize, "is used by Resize 'float images'; a ResNet has a convolution"),
    "a division by 0": (divide_by_zero, "divides or multiplies images by 0"),
    "a lying shape": (lying, "is not a ResNet that can be read"),
    "a circle": (close_circle, "'images' is used by nothing"),
}


@pytest.mark.parametrize(("change", "reason"), REFUSED.values(), ids=REFUSED)
def test_a_graph_that_computes_something_else_is_refused(
    change: Callable[[Any], object], reason: str, tmp_path: Path
) -> None:
    export_model(recipe_of(), tmp_path / "model")
    file = tmp_path / "model" / "model.onnx"
    edit_model(file, change)
    with pytest.raises(CheckpointError, match=reason):
        read(file)


def test_a_model_is_found_by_its_content(tmp_path: Path) -> None:
    export_model(recipe_of(), tmp_path / "model")
    file = tmp_path / "model" / "model.onnx"
    assert find(tmp_path / "model") == find(file) == file
    data = file.read_bytes()
    contents = {
        "whole": data,
        "cut": data[:-9],
        "empty": b"",
        "text": b"a file\n" * 99,
        "zip": b"PK\x03\x04" + bytes(99),
    }
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    assert [name for name in contents if matches(b"", tmp_path / name)] == ["whole"]
    assert find(tmp_path) is None
    assert find(tmp_path / "missing") is None


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    export_model(recipe_of(), tmp_path / "model")
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(BackendError, match="pip install onnx=="):
        read(tmp_path / "model" / "model.onnx")


def test_weights_given_int8_are_multiples_of_the_scales_of_their_channels(tmp_path: Path) -> None:
    recipe = recipe_of(quantisation="int8")
    tensors = random_tensors(recipe, 1)
    scales = dict.fromkeys(layers(recipe.spec), 0.5)
    (tmp_path / "model.onnx").write_bytes(
        onnx_model.build_model(recipe, tensors, (), scales).SerializeToString()
    )
    actual = read(tmp_path / "model.onnx").state.tensors
    for name in (f"{layer}.weight" for layer in scales):
        before, after = (
            values[name].astype(np.float64).reshape(len(values[name]), -1)
            for values in (tensors, actual)
        )
        steps = np.abs(before).max(axis=1, keepdims=True) / 127
        assert np.abs(after - before).max() > 0
        assert (np.abs(after - before) <= 0.5001 * steps).all()


def test_the_preprocessing_in_the_metadata_is_that_of_the_recipe(tmp_path: Path) -> None:
    export_model(
        recipe_of(eval_resize=235, interpolation="bicubic", exif_orientation=True),
        tmp_path / "model",
    )
    model = onnx.load(str(tmp_path / "model" / "model.onnx"))
    assert json.loads(
        {prop.key: prop.value for prop in model.metadata_props}["lockstep_preprocessing"]
    ) == {
        **{"mean": [123.675, 116.28, 103.53], "std": [58.395, 57.12, 57.375]},
        **{"interpolation": "bicubic", "antialias": False, "eval_resize": 235, "eval_crop": 224},
        **{"eval_antialias": False, "eval_side_rounding": "down", "eval_offset_rounding": "even"},
        **{"eval_sampling": "half_pixel", "exif_orientation": True},
    }


def test_metadata_without_a_geometry_is_read_as_torchvisions() -> None:
    fields = ("mean", "std", "interpolation", "antialias", "eval_resize", "eval_crop")
    recipe = recipe_of(antialias=True, eval_resize=235)
    described = json.dumps({name: recipe.fields()[name] for name in fields})
    assert apply_preprocessing(recipe_of(), described) == recipe


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (None, "Expecting value"),
        ({"eval_crop": None}, "expected a table of mean, std"),
        ({"eval_crop": "128"}, "eval_crop is '128', expected a value such as 128"),
        ({"antialias": 1}, "antialias is 1, expected a value such as False"),
        ({"interpolation": "nearest"}, "interpolation: Input should be 'bilinear' or 'bicubic'"),
        ({"eval_resize": 100}, r"eval_crop \(128\) must fit into eval_resize \(100\)"),
        (
            {"mean": [1.0, 2.0, 3.0]},
            r"its mean is \[1\.0, 2\.0, 3\.0\], but the graph's is \[123\.675, 116\.28, 103\.53\]",
        ),
    ],
)
def test_metadata_that_makes_no_sense_is_left_out_with_a_remark(
    changes: dict[str, Any] | None, reason: str, tmp_path: Path
) -> None:
    export_model(recipe_of(eval_crop=128), tmp_path / "model")
    file = tmp_path / "model" / "model.onnx"
    model = onnx.load(str(file))
    [entry] = [prop for prop in model.metadata_props if prop.key == "lockstep_preprocessing"]
    values = json.loads(entry.value) | (changes or {})
    entry.value = (
        ""
        if changes is None
        else json.dumps({name: value for name, value in values.items() if value is not None})
    )
    onnx.save(model, str(file))
    weights = read(file)
    assert (weights.recipe, weights.has_preprocessing) == (
        recipe_of(eval_resize=146, eval_crop=128),
        False,
    )
    [remark] = weights.remarks
    assert re.match(f"its property lockstep_preprocessing was left out: .*{reason}", remark)


def test_class_names_that_are_no_list_of_names_are_left_out(tmp_path: Path) -> None:
    export_model(recipe_of(), tmp_path / "model")
    model = onnx.load(str(tmp_path / "model" / "model.onnx"))
    onnx.helper.set_model_props(model, {"classes": json.dumps([1, 2])})
    onnx.save(model, str(tmp_path / "a"))
    assert read(tmp_path / "a").classes == ()


def test_a_name_that_is_not_utf_8_is_a_name(tmp_path: Path) -> None:
    tensors = export_model(recipe_of(), tmp_path / "model")
    file = tmp_path / "model" / "model.onnx"
    file.write_bytes(file.read_bytes().replace(b"conv1.weight", b"\xffonv1.weight"))
    assert_canonical(read(file).state.tensors, tensors)
