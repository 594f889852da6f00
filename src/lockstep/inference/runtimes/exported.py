"""ONNX models of `lockstep export`, as they are deployed: the file itself is run, not the weights
in it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.models.state import State
from lockstep.recipes import Recipe
from lockstep.system.errors import CheckpointError, RecipeError
from lockstep.system.regular_files import WEIGHTS, read_regular
from lockstep.system.strict_json import parsed
from lockstep.weights import LOCKSTEP, Weights
from lockstep.weights.formats import onnx_graph, onnx_metadata, onnx_weights

_PASSED = ("Cast", "DequantizeLinear", "Identity", "QuantizeLinear")
"""Nodes that may follow softmax."""


@dataclass(frozen=True)
class ExportedModel:
    """An exported model. A runtime runs it if it is given `model`."""

    about: Weights
    """Preprocessing and classes, without weights. The recipe's precision is fp32, its model any."""
    logits: str
    """The value in the graph that softmax gets."""

    def model(self) -> bytes:
        """Return the model from squares, uint8 [N, S, S, 3], with the logits as its only output."""
        import onnx

        model = onnx.load_model_from_string(read_regular(self.about.source, WEIGHTS))
        onnx_metadata.take_squares(model, self.about.recipe.eval_crop)
        del model.graph.output[:]
        model.graph.output.append(onnx.ValueInfoProto(name=self.logits))
        data: bytes = model.SerializeToString()
        return data


def open_exported(path: Path) -> ExportedModel | None:
    """Return the model of `lockstep export --to onnx` that a path names: the file or its folder;
    None if it names none.

    The package onnx is needed only for ONNX files. Raises `CheckpointError` if the model lacks
    parts of the preprocessing, the images or softmax.
    """
    file = onnx_weights.find(path)
    if file is None:
        return None
    graph = onnx_graph.open_graph(file)
    if onnx_metadata.KEY not in graph.metadata:
        return None
    try:
        logits = _before_softmax(graph)
        recipe = _recipe(graph.metadata[onnx_metadata.KEY], _outputs(graph, logits))
    except (ValueError, LookupError, TypeError, RecipeError) as error:
        raise CheckpointError(
            f"{file} cannot be evaluated as an export: {error}; export it again"
        ) from None
    if graph.inputs != ("images",):
        raise CheckpointError(
            f"{file} takes {', '.join(graph.inputs)}; expected `images`, as an export with"
            " preprocessing takes them: export it without --bare"
        )
    classes = graph.classes if len(graph.classes) <= recipe.logits else ()
    about = Weights(
        recipe,
        State(0, {}, {}),
        classes,
        file,
        LOCKSTEP,
        calibration=onnx_metadata.read_threshold(graph.metadata),
    )
    return ExportedModel(about, logits)


def _recipe(text: str, logits: int) -> Recipe:
    values: Any = parsed(text)
    colours = {name: values[name] for name in ("mean", "std")}
    return onnx_metadata.apply_preprocessing(
        Recipe.of({"precision": "fp32", "logits": logits} | colours), text
    )


def _before_softmax(graph: onnx_graph.Graph) -> str:
    """Return the name of the value from which `probabilities` are computed."""
    node = graph.makers["probabilities"]
    while node.op_type in _PASSED:
        node = graph.makers[node.input[0]]
    if node.op_type != "Softmax":
        raise ValueError(f"its probabilities come from {node.op_type}, expected Softmax")
    return str(node.input[0])


def _outputs(graph: onnx_graph.Graph, name: str) -> int:
    """Return the number of logits: the length of the classifier's bias."""
    node = graph.makers[name]
    while node.op_type in _PASSED:
        node = graph.makers[node.input[0]]
    bias = graph.place(node.input[-1])[0]
    if bias is None:
        raise ValueError("its classifier has no bias")
    return int(graph.stored[bias].dims[-1])
