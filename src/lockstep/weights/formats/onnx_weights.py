"""Weights of a ResNet in an ONNX model. `network` finds them by following the model's nodes.

Only preprocessing that is not in the file is assumed, with a remark. Models of `lockstep export`
have all of it in their metadata (`onnx_metadata`).
"""

from collections.abc import Iterator
from pathlib import Path

from lockstep.models.state import State
from lockstep.recipes import Recipe
from lockstep.system.errors import CheckpointError, RecipeError
from lockstep.weights.formats import network, onnx_graph, onnx_metadata
from lockstep.weights.formats.network import Network
from lockstep.weights.formats.onnx_graph import Graph
from lockstep.weights.opened_weights import Weights, list_arrays

NAME = "ONNX"

_FILE = "model.onnx"
_ASSUMED = (
    "the graph does not normalise its images, so the usual mean and std of ImageNet are assumed"
)


def matches(head: bytes, path: Path) -> bool:
    """Return whether a file holds an ONNX model."""
    return onnx_graph.is_onnx(path)


def find(path: Path) -> Path | None:
    """Return the `.onnx` file that a path names; None if it names none.

    A path is the file, or a folder that `lockstep export --to onnx` wrote.
    """
    file = path / _FILE if path.is_dir() else path
    return file if file.suffix == ".onnx" and file.is_file() else None


def read(path: Path, *, momentum: bool = False) -> Weights:
    """Read a ResNet or ResNeXt. A model has no velocities, whatever `momentum` is.

    Raises `CheckpointError` if the file is damaged or computes something else, and `BackendError`
    if the package onnx is missing.
    """
    graph = onnx_graph.opened(path)
    try:
        resnet = network.follow(graph)
        recipe = resnet.recipe()
    except (ValueError, LookupError, TypeError, RecursionError, RecipeError) as error:
        raise CheckpointError(f"{path} is not a ResNet that can be read: {error}") from None
    recipe, has_preprocessing, about = _with_preprocessing(graph, recipe, resnet)
    remarks = (*resnet.remarks, *about, *_remarks(graph, resnet))
    classes = graph.classes if len(graph.classes) <= recipe.logits else ()
    return Weights(
        recipe,
        State(0, resnet.tensors(), {}),
        classes,
        path,
        "ONNX",
        remarks,
        is_folded=resnet.folded > 0,
        has_preprocessing=has_preprocessing,
        stored=list_arrays(graph.described(), resnet.made(graph)),
        others=graph.others(),
    )


def _with_preprocessing(
    graph: Graph, recipe: Recipe, resnet: Network
) -> tuple[Recipe, bool, tuple[str, ...]]:
    """Return the recipe with the preprocessing that `lockstep export` wrote, whether it is there,
    and remarks."""
    assumed = () if resnet.normalises else (_ASSUMED,)
    text = graph.metadata.get(onnx_metadata.KEY)
    if text is None:
        return recipe, False, assumed
    try:
        return (
            onnx_metadata.with_preprocessing(recipe, text, normalises=resnet.normalises),
            True,
            (),
        )
    except ValueError as error:
        return recipe, False, (*assumed, f"its property {onnx_metadata.KEY} was left out: {error}")


def _remarks(graph: Graph, resnet: Network) -> Iterator[str]:
    yield from resnet.about_units()
    if any(node.op_type in network.ROUNDING for node in graph.nodes):
        yield (
            "its QuantizeLinear and DequantizeLinear were left out: the model computes in float"
            " here, with rounded weights"
        )
    if halves := graph.halves():
        yield (
            f"{len(halves)} constants, such as {halves[0]}, are not float32 and were converted"
            " to it"
        )
