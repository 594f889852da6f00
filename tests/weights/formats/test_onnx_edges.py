"""ONNX models with a node more: computed as ONNX Runtime computes them, or refused by name."""

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from lockstep.inference.onnx_model import Form, build_model
from lockstep.system.errors import CheckpointError
from lockstep.weights.formats.onnx_weights import read
from lockstep.weights.opened_weights import Weights
from tests.edges import Place, is_same_answer, sample
from tests.inference.cases import random_tensors
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
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
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
    "insertion", sample(list(list_insertions(CHANNELS)), 5), ids=lambda parts: ": ".join(parts)
)
def test_a_node_more_is_computed_or_refused_by_name(insertion: Insertion, tmp_path: Path) -> None:
    edited = insert(bare_model(), insertion, CHANNELS)
    file = tmp_path / "model.onnx"
    onnx.save(edited, str(file))
    kinds = {node.op_type for node in edited.graph.node}
    named = (*(f"{kind} '" for kind in kinds), "has one output", "'y' says only which classes")
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
