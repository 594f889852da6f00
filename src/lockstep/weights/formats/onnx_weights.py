"""Weights of a ResNet in an ONNX model. `network_walk` finds them by following the model's nodes.

Only preprocessing that is not in the file is assumed, with a remark. Models of `lockstep export`
have all of it in their metadata (`onnx_metadata`).
"""

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.models.state import State
from lockstep.system.errors import CheckpointError, RecipeError
from lockstep.weights.formats import onnx_graph, onnx_original
from lockstep.weights.formats.account import UNUSED, Part, account_for_constants
from lockstep.weights.formats.common import describe_converted
from lockstep.weights.formats.network_walk import follow
from lockstep.weights.formats.onnx_graph import OnnxGraph
from lockstep.weights.formats.onnx_metadata import KEY, read_calibration, read_preprocessing
from lockstep.weights.formats.protobuf import find_fields
from lockstep.weights.formats.resnet_graph import FLOAT_TYPES, ROUNDING, Network, label_node
from lockstep.weights.opened_weights import Weights, list_arrays
from lockstep.weights.weights_choice import DEFAULT_CHOICE, WeightsChoice

NAME = "ONNX"

_FILE = "model.onnx"
_FIELDS = {1: 0, 2: 2, 3: 2, 4: 2, 5: 0, 6: 2, 7: 2, 8: 2, 14: 2, 20: 2, 25: 2, 26: 2}
"""Fields of a ModelProto and their wire types: 0 is a number, 2 is bytes with their length."""
_VERSION = 1
_GRAPH = 7
_QUANTISED = re.compile(r"QLinear\w+|\w+Integer|DynamicQuantizeLinear|QGemm")
"""Operators that compute with integers."""


def matches(head: bytes, path: Path) -> bool:
    """Return whether a file is an ONNX model: a message that has the fields of one, a version and a
    graph among them."""
    return {_VERSION, _GRAPH} <= find_fields(path, _FIELDS).keys()


def find(path: Path) -> Path | None:
    """Return the `.onnx` file that a path names; None if there is none.

    A path is the file, or a folder that `lockstep export --to onnx` wrote.
    """
    file = path / _FILE if path.is_dir() else path
    return file if file.suffix == ".onnx" and file.is_file() else None


def read(path: Path, *, momentum: bool = False, choice: WeightsChoice = DEFAULT_CHOICE) -> Weights:
    """Read a ResNet or ResNeXt. A model has no velocities, whatever `momentum` is.

    Raises `CheckpointError` if the file is damaged or computes something else, and `BackendError`
    if the package onnx is missing.
    """
    graph = onnx_graph.open_graph(path)
    try:
        _check_nodes(graph)
        resnet = follow(graph)
        recipe = resnet.build_recipe()
        calibration = read_calibration(graph.metadata, path)
    except (ValueError, LookupError, TypeError, RecursionError, RecipeError) as error:
        raise CheckpointError(f"{path} is not a ResNet that can be read: {error}") from None
    recipe, places, about = read_preprocessing(
        recipe, graph.metadata.get(KEY), f"property {KEY}", normalises=resnet.normalises
    )
    remarks = (*resnet.remarks, *about, *_describe_graph(graph, resnet))
    sources = list(resnet.list_sources(graph))
    write = partial(onnx_original.write, graph, resnet.head.output)
    return Weights(
        recipe,
        State(0, resnet.build_tensors(), {}),
        resnet.permute_classes(graph.classes),
        path,
        "ONNX",
        remarks,
        stated=frozenset(places) or resnet.stated,
        preprocessing_from=places,
        assumed_as="keras" if resnet.takes == "bgr" else "",
        original=resnet.describe_original("ONNX Runtime", write, rounds=graph.rounds),
        parts=(*resnet.parts, *_account_for_rest(graph, {place for _, place in sources})),
        stored=list_arrays(graph.describe_arrays(), sources),
        others=graph.list_files(),
        calibration=calibration,
    )


def _check_nodes(graph: OnnxGraph) -> None:
    """Raise `ValueError` if a node is not one of ONNX's own operators, or computes with integers,
    or if images are not of a type that holds numbers up to 255."""
    for node in graph.nodes:
        label = label_node(node)
        is_alone = node.op_type in ROUNDING and not _is_of_pair(graph, node)
        if is_alone or _QUANTISED.fullmatch(node.op_type):
            raise ValueError(
                f"it is quantised: {label} is not one of a pair of {' and '.join(ROUNDING)} with"
                " one scale; export it with floats, or with such pairs"
            )
        if node.domain not in ("", "ai.onnx"):
            raise ValueError(f"{label} is an operator of {node.domain!r:.60}, expected ONNX's own")
    if graph.image_type not in (*FLOAT_TYPES, *onnx_graph.INTEGERS):
        raise ValueError(
            f"its images are of ONNX's type {graph.image_type}, expected floats or integers that"
            " hold 255"
        )


def _is_of_pair(graph: OnnxGraph, node: Any) -> bool:
    """Return whether a node that rounds is constant, or next to one that turns back what it does
    or what it turns back."""
    if graph.constant(node.output[0]) is not None:
        return True
    others = [graph.makers.get(node.input[0])]
    if node.op_type == ROUNDING[0]:
        others = [*graph.users.get(node.output[0], ())]
        others += [None for name in graph.outputs if name == node.output[0]]
    for other in others:
        if other is None or {node.op_type, other.op_type} != {*ROUNDING}:
            return False
        values = [[*map(graph.constant, one.input[1:])] for one in (node, other)]
        if len(values[0]) != len(values[1]):
            return False
        for one, two in zip(*values, strict=True):
            if one is None or two is None or not np.array_equal(one, two):
                return False
    return bool(others)


def _account_for_rest(graph: OnnxGraph, used: set[str]) -> Iterator[Part]:
    """Yield the account of nodes and constants that no tensor is made of."""
    for node in graph.unused:
        if node.op_type != "Constant":
            yield Part(label_node(node), "without effect", UNUSED)
    yield from account_for_constants(graph.stored, used, graph.name_users())


def _describe_graph(graph: OnnxGraph, resnet: Network) -> Iterator[str]:
    yield from resnet.describe_units()
    if any(node.op_type in ROUNDING for node in graph.nodes):
        yield (
            "its QuantizeLinear and DequantizeLinear were left out: the model computes in float"
            " here, with rounded weights"
        )
    yield from describe_converted(graph.list_halves(), "constants")
