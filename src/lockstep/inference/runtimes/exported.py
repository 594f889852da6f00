"""ONNX models of `lockstep export`, as they are deployed: the file itself is run, not the weights
in it.

Only the part from the resize of photos to the logits is run. The nodes outside of it must be those
that `lockstep export` writes, because others would be left out without notice.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.inference import onnx_model
from lockstep.models.state import State
from lockstep.recipes import Recipe
from lockstep.system.errors import CheckpointError, RecipeError
from lockstep.weights import LOCKSTEP, Weights
from lockstep.weights.formats import onnx_graph, onnx_metadata, onnx_weights
from lockstep.weights.formats.onnx_photos import check_resize

_PASSED = ("Cast", "DequantizeLinear", "Identity", "QuantizeLinear")
"""Nodes that may follow the classifier. They are run."""
_QUANTISED = ["Add", "Mul", "Cast", "MatMulInteger"]
"""The classifier of ONNX Runtime's dynamic quantiser, from its end."""
_FORMS = [(["images"], ["classes", "probabilities"]), (["input"], ["logits"])]
"""Inputs and outputs of models; the second form is bare."""


@dataclass(frozen=True)
class ExportedModel:
    """An exported model, read once: what was checked is what is run."""

    about: Weights
    """Preprocessing and classes, without weights. The recipe's precision is fp32, its model any."""
    skeleton: bytes
    """The model from squares, uint8 [N, S, S, 3], with the logits as its only output, and without
    large initializers."""
    arrays: dict[str, np.ndarray]
    """These initializers by name."""

    def model(self) -> bytes:
        """Return the model with all initializers inside."""
        import onnx

        model = onnx.load_model_from_string(self.skeleton)
        for tensor in model.graph.initializer:
            if tensor.name in self.arrays:
                tensor.CopyFrom(onnx.numpy_helper.from_array(self.arrays[tensor.name], tensor.name))
        data: bytes = model.SerializeToString()
        return data


def open_exported(path: Path) -> ExportedModel | None:
    """Return the model of `lockstep export --to onnx` that a path names: the file or its folder;
    None if there is none.

    The package onnx is needed only for ONNX files. Raises `CheckpointError` if the model lacks
    parts of the preprocessing, or has other inputs, outputs or nodes around the network than
    `lockstep export` writes.
    """
    file = onnx_weights.find(path)
    if file is None:
        return None
    graph = onnx_graph.open_graph(file, apart=True)
    metadata = graph.metadata
    if onnx_metadata.KEY not in metadata:
        return None
    try:
        logits = _find_logits(graph)
        recipe = Recipe.of({"precision": "fp32", "logits": _count_logits(graph, logits)})
        text = metadata[onnx_metadata.KEY]
        recipe = onnx_metadata.apply_preprocessing(recipe, text, normalises=False)
        check_resize(graph.model, recipe)
        calibration = onnx_metadata.read_calibration(metadata, file)
    except (ValueError, LookupError, TypeError, RecipeError) as error:
        raise CheckpointError(
            f"{file} cannot be evaluated as an export: {error}; export it again, or let Lockstep"
            " compute its weights: --runtime native"
        ) from None
    classes = graph.classes if len(graph.classes) <= recipe.logits else ()
    about = Weights(recipe, State(0, {}, {}), classes, file, LOCKSTEP, calibration=calibration)
    onnx_model.accept_squares(graph.model, recipe)
    del graph.model.graph.output[:]
    graph.model.graph.output.append(graph.onnx.ValueInfoProto(name=logits))
    try:
        arrays = {name: graph.read(name) for name in graph.apart}
    except ValueError as error:
        raise CheckpointError(f"{file} is damaged: {error}; export it again") from None
    onnx_model.place_elsewhere(graph.model, arrays)
    return ExportedModel(about, graph.model.SerializeToString(), arrays)


def _find_logits(graph: onnx_graph.OnnxGraph) -> str:
    """Return the name of the logits. Raises `ValueError` unless the model returns them, or their
    softmax and the number of the largest, and nothing else."""
    model = graph.model
    inputs = [value.name for value in model.graph.input]
    outputs = [value.name for value in model.graph.output]
    if (inputs, outputs) not in _FORMS or model.functions:
        raise ValueError(
            f"it takes {', '.join(inputs)}, returns {', '.join(outputs)} and defines"
            f" {len(model.functions)} functions; expected `images`, `classes` and `probabilities`,"
            " or `input` and `logits`, and no functions"
        )
    if outputs == ["logits"]:
        return "logits"
    softmax = _skip_rounding(graph, graph.makers["probabilities"])
    logits = str(softmax.input[0])
    _check_node(softmax, "Softmax", logits, axis=1)
    _check_node(graph.makers["classes"], "ArgMax", logits, axis=1, keepdims=0)
    return logits


def _skip_rounding(graph: onnx_graph.OnnxGraph, node: Any) -> Any:
    """Return the node before a quantiser's rounding of probabilities by half a percent at most;
    without such a rounding, return the node itself."""
    if node.op_type != "DequantizeLinear":
        return node
    before = graph.makers[node.input[0]]
    values: list[Any] = [graph.constant(name) for name in node.input[1:]]
    scale, zero = map(np.asarray, values)
    largest = float(scale) * (np.iinfo(zero.dtype).max - int(zero))
    is_close = float(scale) <= 0.01 and largest >= 0.99
    if before.op_type != "QuantizeLinear" or before.input[1:] != node.input[1:] or not is_close:
        return node
    return graph.makers[before.input[0]]


def _check_node(node: Any, kind: str, source: str, **attributes: int) -> None:
    """Raise `ValueError` unless a node is of this kind, and computes from one value."""
    values = {attribute.name: attribute.i for attribute in node.attribute}
    if not values.get("select_last_index"):
        values.pop("select_last_index", None)  # 0 is the default, which some programs write
    if node.domain or (node.op_type, [*node.input], values) != (kind, [source], attributes):
        raise ValueError(
            f"its {node.output[0]} come from {node.op_type} of {', '.join(node.input)} {values},"
            f" expected {kind} of {source} {attributes}"
        )


def _count_logits(graph: onnx_graph.OnnxGraph, name: str) -> int:
    """Return the number of logits: the length of the classifier's bias. Raises `ValueError` if
    other nodes come after the classifier."""
    node = graph.makers[name]
    for _ in graph.nodes:
        if node.op_type in _PASSED:
            node = graph.makers[node.input[0]]
    steps = [node]
    while len(steps) < 4 and steps[-1].op_type in _QUANTISED:
        steps.append(graph.makers[steps[-1].input[0]])
    bias = graph.place(node.input[-1])
    sizes = [] if bias is None else graph.stored[bias].dims
    if [step.op_type for step in steps] not in (["Gemm"], _QUANTISED) or len(sizes) != 1:
        raise ValueError(f"its {name} come from {node.op_type}, expected Gemm with a bias")
    return int(sizes[0])
