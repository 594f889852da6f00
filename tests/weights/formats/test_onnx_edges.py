"""ONNX models with a node more: computed as ONNX Runtime computes them, or refused by name."""

from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from lockstep.inference.onnx_model import Form, build_model
from lockstep.system.errors import CheckpointError
from lockstep.weights.formats import onnx_original
from lockstep.weights.formats.onnx_graph import open_graph
from lockstep.weights.formats.onnx_weights import read
from lockstep.weights.opened_weights import Weights
from tests.edges import Place, is_same_answer, sample
from tests.inference.cases import open_session, random_tensors
from tests.weights.formats.insertions_onnx import Insertion, insert, list_insertions
from tests.weights.formats.onnx_cases import LOGITS, recipe_of

RECIPE = recipe_of(image_size=64)
CHANNELS: dict[Place, int] = {
    "before the stem": 3,
    "between blocks": 32,
    "before the classifier": 128,
    "after it": LOGITS,
}
PHOTOS = np.random.default_rng(5).integers(0, 256, (2, 3, 64, 64)).astype(np.float32)
FROM_0_TO_1 = "images from 0 to 1"


@cache
def bare_model() -> Any:
    return build_model(RECIPE, random_tensors(RECIPE, 1), (), form=Form(bare=True))


def compute(model: Any, images: np.ndarray) -> np.ndarray:
    session = open_session(model.SerializeToString())
    return np.asarray(session.run(None, {session.get_inputs()[0].name: images})[0])


def prepare(weights: Weights) -> np.ndarray:
    """Return photos as the file takes them, according to the reader."""
    if any(FROM_0_TO_1 in remark for remark in weights.remarks):
        return PHOTOS / np.float32(255)
    return PHOTOS if "mean" in weights.stated else normalise(weights)


def normalise(weights: Weights) -> np.ndarray:
    mean, std = (
        np.array(colour, np.float32).reshape(3, 1, 1)
        for colour in (weights.recipe.mean, weights.recipe.std)
    )
    return (PHOTOS - mean) / std


def compute_as_read(weights: Weights) -> np.ndarray:
    """Return the logits of what was read, computed by ONNX Runtime too."""
    recipe = weights.recipe.replace(image_size=64)
    model = build_model(recipe, weights.tensors, (), form=Form(bare=True))
    return compute(model, normalise(weights))


@pytest.mark.parametrize(
    "insertion", sample(list(list_insertions(CHANNELS)), 11), ids=lambda parts: ": ".join(parts)
)
def test_a_node_more_is_computed_or_refused_by_name(insertion: Insertion, tmp_path: Path) -> None:
    edited = insert(bare_model(), insertion, CHANNELS)
    file = tmp_path / "model.onnx"
    onnx.save(edited, str(file))
    kinds = {node.op_type for node in edited.graph.node}
    named = (*(f"{kind} '" for kind in kinds), "has one output", "('y') name only the best classes")
    reason = ""
    try:
        weights = read(file)
    except CheckpointError as error:
        reason = str(error)
    if reason:
        assert any(text in reason for text in named)
    else:
        assert is_same_answer(compute(edited, prepare(weights)), compute_as_read(weights))


@pytest.mark.parametrize(
    "insertion",
    [
        ("after it", "Gather"),
        ("after it", "Slice"),
        ("after it", "Add of channels"),
        ("after it", "Div of a number"),
        ("after it", "one Sigmoid"),
        ("before the classifier", "BatchNormalization"),
        ("before the stem", "Sub of channels"),
        ("before the stem", "Slice backwards"),
    ],
    ids=lambda parts: ": ".join(parts),
)
def test_what_is_linear_is_folded(insertion: Insertion, tmp_path: Path) -> None:
    edited = insert(bare_model(), insertion, CHANNELS)
    file = tmp_path / "model.onnx"
    onnx.save(edited, str(file))
    weights = read(file)
    assert any(part.treatment == "folded" for part in weights.parts)
    assert is_same_answer(compute(edited, prepare(weights)), compute_as_read(weights))


def save(edited: Any, folder: Path) -> Path:
    onnx.save(edited, str(folder / "model.onnx"))
    return folder / "model.onnx"


def test_constants_that_are_apart_are_those_of_onnx(tmp_path: Path) -> None:
    model = bare_model()
    graph = open_graph(save(model, tmp_path), apart=True)
    large = {one.name: one for one in model.graph.initializer if len(one.raw_data) >= 1024}
    assert graph.apart.keys() == large.keys()
    for name, tensor in large.items():
        np.testing.assert_array_equal(graph.read(name), onnx.numpy_helper.to_array(tensor))
    assert sum(len(one.raw_data) for one in graph.model.graph.initializer) < model.ByteSize() / 10

    damaged = deepcopy(model)
    tensor = next(one for one in damaged.graph.initializer if one.name in large)
    tensor.raw_data = tensor.raw_data[:-4]
    with pytest.raises(ValueError, match="reshape"):
        open_graph(save(damaged, tmp_path), apart=True).read(tensor.name)
    damaged.graph.initializer.add().CopyFrom(tensor)  # two have one name
    assert open_graph(save(damaged, tmp_path), apart=True).apart == {}


def test_a_computed_reshape_of_the_logits_is_refused(tmp_path: Path) -> None:
    edited = insert(bare_model(), ("after it", "Reshape"), CHANNELS)
    make = onnx.helper.make_node
    edited.graph.node.insert(0, make("Constant", [], ["halves"], value_ints=[-1, 2, LOGITS // 2]))
    [reshape] = [node for node in edited.graph.node if node.op_type == "Reshape"]
    reshape.input[1] = "halves"
    with pytest.raises(CheckpointError, match="Reshape 'y' follows the logits"):
        read(save(edited, tmp_path))


def test_classes_that_a_matrix_mixes_have_no_names(tmp_path: Path) -> None:
    names = tuple(f"class {i}" for i in range(LOGITS))
    model = build_model(RECIPE, random_tensors(RECIPE, 1), names, form=Form(bare=True))
    metadata = list(model.metadata_props)
    for kind, classes in (("Identity", names), ("Gemm", ()), ("Gather", (names[-1], *names[:-1]))):
        edited = insert(model, ("after it", kind), CHANNELS)
        edited.metadata_props.extend(metadata)
        assert read(save(edited, tmp_path)).classes == classes


def test_integers_are_from_0_to_255(tmp_path: Path) -> None:
    edited = insert(bare_model(), ("before the stem", "Cast to doubles"), CHANNELS)
    edited.graph.input[0].type.tensor_type.elem_type = onnx.TensorProto.INT32
    weights = read(save(edited, tmp_path))
    assert (weights.recipe.mean, weights.recipe.std) == ((0.0,) * 3, (1.0,) * 3)
    assert is_same_answer(compute(edited, PHOTOS.astype(np.int32)), compute_as_read(weights))


MAKE = onnx.helper.make_node
NUMBERS = np.linspace(-3, 3.3, LOGITS).astype(np.float32)
COMPUTED: dict[str, list[Any]] = {
    "integers": [
        MAKE("Cast", ["numbers"], ["whole"], to=onnx.TensorProto.INT64),
        MAKE("Cast", ["whole"], ["c"], to=onnx.TensorProto.FLOAT),
    ],
    "halves": [
        MAKE("Mul", ["numbers", "large"], ["more"]),
        MAKE("Cast", ["more"], ["half"], to=onnx.TensorProto.FLOAT16),
        MAKE("Cast", ["half"], ["single"], to=onnx.TensorProto.FLOAT),
        MAKE("Div", ["single", "large"], ["c"]),
    ],
    "clipped": [
        MAKE("QuantizeLinear", ["numbers", "scale", "zero"], ["whole"]),
        MAKE("DequantizeLinear", ["whole", "scale", "zero"], ["c"]),
    ],
    "attributes": [MAKE("Constant", [], ["c"], value_floats=NUMBERS.tolist())],
    "a prior": [
        MAKE("Exp", ["numbers"], ["positive"]),
        MAKE("Reciprocal", ["positive"], ["one over"]),
        MAKE("Log", ["one over"], ["log"]),
        MAKE("Unsqueeze", ["log", "axes"], ["c"]),
        MAKE("Constant", [], ["axes"], value_ints=[0]),
    ],
}
"""Nodes that make a constant `c` of others."""


@pytest.mark.parametrize("nodes", COMPUTED.values(), ids=COMPUTED)
def test_constants_are_computed_as_by_onnx_runtime(nodes: list[Any], tmp_path: Path) -> None:
    edited = insert(bare_model(), ("after it", "Add of channels"), CHANNELS)
    constants = {"numbers": NUMBERS, "large": np.float32(300), "scale": np.float32(0.01)}
    constants["zero"] = np.int8(5)
    tensors = [onnx.numpy_helper.from_array(np.array(v), name) for name, v in constants.items()]
    [old] = [tensor for tensor in edited.graph.initializer if tensor.name == "c"]
    edited.graph.initializer.remove(old)
    edited.graph.initializer.extend(tensors)
    for node in nodes:
        edited.graph.node.insert(0, node)
    edited.graph.node.sort(key=lambda node: node not in nodes)
    weights = read(save(edited, tmp_path))
    assert is_same_answer(compute(edited, prepare(weights)), compute_as_read(weights))


def test_a_constant_opens_no_file_and_grows_no_larger(tmp_path: Path) -> None:
    edited = insert(bare_model(), ("after it", "Add of channels"), CHANNELS)
    edited.graph.node.insert(0, MAKE("Identity", ["c"], ["d"]))
    [add] = [node for node in edited.graph.node if node.output[0] == "y"]
    add.input[1] = "d"
    elsewhere = onnx.TensorProto(name="t", dims=[1], data_type=1, data_location=1)
    elsewhere.external_data.add(key="location", value="missing")
    edited.graph.node[0].attribute.append(onnx.helper.make_attribute("t", elsewhere))
    with pytest.raises(CheckpointError, match="Add 'y' follows the logits"):
        read(save(edited, tmp_path))
    edited.graph.node[0].CopyFrom(MAKE("Sub", ["c", "column"], ["d"]))
    edited.graph.initializer.append(onnx.numpy_helper.from_array(NUMBERS[:, None], "column"))
    with pytest.raises(CheckpointError, match="larger than the constants"):
        read(save(edited, tmp_path))


@pytest.mark.parametrize(
    ("kinds", "reason"),
    [
        (["QuantizeLinear"], "QuantizeLinear '0' is not one of a pair"),
        (["DequantizeLinear"], "DequantizeLinear '0' is not one of a pair"),
        (["DynamicQuantizeLinear"], "it is quantised: DynamicQuantizeLinear '0'"),
        (["QuantizeLinear", "DequantizeLinear"], ""),
    ],
)
def test_rounding_is_left_out_in_pairs_alone(kinds: list[str], reason: str, tmp_path: Path) -> None:
    edited = insert(bare_model(), ("after it", "Identity"), CHANNELS)
    edited.graph.node[-1].output[0] = value = "z"
    for i, kind in enumerate(kinds):
        inputs = [value] if kind.startswith("Dynamic") else [value, "scale"]
        edited.graph.node.append(MAKE(kind, inputs, [str(i)]))
        value = str(i)
    edited.graph.output[0].name = value
    edited.graph.initializer.append(onnx.numpy_helper.from_array(np.float32(0.5), "scale"))
    if reason:
        with pytest.raises(CheckpointError, match=reason):
            read(save(edited, tmp_path))
    else:
        read(save(edited, tmp_path))


def test_images_in_half_precision_are_compared_in_it(tmp_path: Path) -> None:
    edited = insert(bare_model(), ("before the stem", "Cast to doubles"), CHANNELS)
    edited.graph.input[0].type.tensor_type.elem_type = onnx.TensorProto.FLOAT16
    weights = read(save(edited, tmp_path))
    assert weights.original is not None
    assert weights.original.rounds
    (tmp_path / "rebuilt").mkdir()
    weights.original.write(tmp_path / "rebuilt")
    images = normalise(weights)
    outputs, _ = onnx_original.compute(tmp_path / "rebuilt", images)
    expected = compute(edited, images.astype(np.float16))
    np.testing.assert_allclose(outputs, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["Sub of channels", "Softmax"])
def test_nodes_with_the_names_of_lockstep_are_nodes_as_others(kind: str, tmp_path: Path) -> None:
    edited = insert(bare_model(), ("before the stem", kind), CHANNELS)
    for node in edited.graph.node:
        node.name = "preprocessing/0" if "y" in node.output else node.name
        node.input[:] = [{"input": "images", "y": "squares"}.get(name, name) for name in node.input]
        node.output[:] = [{"y": "squares"}.get(name, name) for name in node.output]
    edited.graph.input[0].name = "images"
    if kind == "Softmax":
        edited.metadata_props.extend(bare_model().metadata_props)
        with pytest.raises(CheckpointError, match="'images' is used by Softmax 'squares'"):
            read(save(edited, tmp_path))
    else:
        weights = read(save(edited, tmp_path))
        assert is_same_answer(compute(edited, prepare(weights)), compute_as_read(weights))


IMAGENET = (123.675, 116.28, 103.53)


@pytest.mark.parametrize(
    ("turns", "mean", "takes"),
    [
        (False, IMAGENET, "bytes"),
        (False, IMAGENET[::-1], "bgr bytes"),
        (True, IMAGENET, "bgr bytes"),
        (True, IMAGENET[::-1], "bytes"),
        (False, tuple(np.array(IMAGENET[::-1]) / 255), "bgr unit"),
        (True, (128.0, 128.0, 128.0), "bytes"),
        (True, (0.0, 0.0, 0.0), "normalised"),
    ],
)
def test_the_order_of_colours_is_that_of_the_mean(
    turns: bool, mean: tuple[float, ...], takes: str, tmp_path: Path
) -> None:
    kind = "Slice backwards" if turns else "Identity"
    edited = insert(bare_model(), ("before the stem", kind), CHANNELS)
    for node in edited.graph.node:
        node.input[:] = ["w" if name == "y" else name for name in node.input]
    edited.graph.node.insert(0, MAKE("Sub", ["y", "mean"], ["w"]))
    numbers = np.array(mean, np.float32).reshape(3, 1, 1)
    edited.graph.initializer.append(onnx.numpy_helper.from_array(numbers, "mean"))
    edited.graph.node.sort(key=lambda node: ["y", "w", *node.output].index(node.output[0]))
    weights = read(save(edited, tmp_path))
    assert weights.original is not None
    assert weights.original.takes == takes
    is_noted = any("changes the order of colours" in remark for remark in weights.remarks)
    assert is_noted == (turns and takes in ("normalised", "bytes") and len(set(mean)) == 1)
    images = prepare(weights)
    if takes.startswith("bgr"):
        images = images[:, ::-1]
    assert is_same_answer(compute(edited, images), compute_as_read(weights))


@pytest.mark.parametrize(
    ("mean", "variance", "scale", "takes"),
    [
        (0.45, 0.07, 0.1, "unit"),
        (115.0, 4000.0, 100.0, "bytes"),
        (0.1, 0.9, 1.0, ""),
        (-0.1, 1.1, 1.0, ""),
    ],
    ids=["from 0 to 1", "from 0 to 255", "normalised", "normalised, below 0"],
)
def test_a_norm_before_the_stem_knows_the_range_of_its_images(
    mean: float, variance: float, scale: float, takes: str, tmp_path: Path
) -> None:
    edited = insert(bare_model(), ("before the stem", "BatchNormalization"), CHANNELS)
    constants = {constant.name: constant for constant in edited.graph.initializer}
    for name, number in (("n0", scale), ("n1", 0.2), ("n2", mean), ("n3", variance)):
        numbers = np.full(3, number, np.float32)
        constants[name].CopyFrom(onnx.numpy_helper.from_array(numbers, name))
    file = save(edited, tmp_path)
    if not takes:
        with pytest.raises(CheckpointError, match="'y' before the first convolution was trained"):
            read(file)
        return
    weights = read(file)
    assert weights.original is not None
    assert weights.original.takes == takes
    assert is_same_answer(compute(edited, prepare(weights)), compute_as_read(weights))


def test_images_from_minus_1_to_1_are_refused(tmp_path: Path) -> None:
    edited = insert(bare_model(), ("before the stem", "Add of channels"), CHANNELS)
    numbers = np.array([1.0, 1.0, 1.0], np.float32).reshape(3, 1, 1)
    for constant in edited.graph.initializer:
        if constant.name == "c":
            constant.CopyFrom(onnx.numpy_helper.from_array(numbers, "c"))
    with pytest.raises(CheckpointError, match="convolution expect images whose mean is below 0"):
        read(save(edited, tmp_path))


def reduce(kind: str, value: str) -> list[Any]:
    return [MAKE(kind, [value], [f"{kind} of {value}"], axes=[1], keepdims=1)]


OTHERS: dict[str, tuple[list[Any], str]] = {
    "the largest probability": (reduce("ReduceMax", "p"), ""),
    "the largest logit": (reduce("ReduceMax", "logits"), ""),
    "entropy": (
        [MAKE("Log", ["p"], ["l"]), MAKE("Mul", ["p", "l"], ["m"]), *reduce("ReduceSum", "m")],
        "",
    ),
    "sharper probabilities": ([MAKE("Mul", ["p", "p"], ["s"])], ""),
    "other logits": ([MAKE("Relu", ["logits"], ["r"])], "Relu 'r' follows the logits"),
    "several labels": ([MAKE("Sigmoid", ["logits"], ["r"])], "Sigmoid 'r' gives each of its"),
    "the largest feature": (reduce("ReduceMax", "features"), ""),
}


@pytest.mark.parametrize(("nodes", "reason"), OTHERS.values(), ids=OTHERS)
def test_other_outputs_are_named(nodes: list[Any], reason: str, tmp_path: Path) -> None:
    edited = insert(bare_model(), ("after it", "Identity"), CHANNELS)
    edited.opset_import[0].version = 12  # axes are attributes
    edited.graph.node.extend([MAKE("Softmax", ["y"], ["p"], axis=1), *nodes])
    del edited.graph.output[:]
    edited.graph.output.add(name="p")
    edited.graph.output.add(name=nodes[-1].output[0])
    if reason:
        with pytest.raises(CheckpointError, match=reason):
            read(save(edited, tmp_path))
        return
    weights = read(save(edited, tmp_path))
    assert f"reading the output 'p', not '{nodes[-1].output[0]}'" in weights.remarks
    assert is_same_answer(compute(edited, prepare(weights)), compute_as_read(weights))
    del edited.graph.output[0]
    with pytest.raises(CheckpointError, match="follows the"):
        read(save(edited, tmp_path))
