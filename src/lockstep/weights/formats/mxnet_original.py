"""A graph as MXNet computes it, rebuilt from the nodes that the reader accounted for: `write`.

`lockstep.backends.mxnet.original` computes it, on a CPU and in float32.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.system.files import write_json
from lockstep.weights.formats import numbers
from lockstep.weights.formats.mxnet_symbol import FLOATS, Node, Symbol

_REQUIRED = re.compile(r"num_\w+|key")
"""Attributes that MXNet requires, though they change nothing here."""
_VERSION = 10901


def write(
    symbol: Symbol, output: str, arrays: Mapping[str, np.ndarray], channels: int, folder: Path
) -> None:
    """Write the nodes of a graph that an output is computed from, and their variables.

    `channels` are those of images. Raises `ValueError` if MXNet computes a node only on GPUs, or
    only NVIDIA's does.
    """
    head, place = symbol.heads[symbol.graph.outputs.index(output)]
    needed = {head}
    for number in range(head, -1, -1):
        if number in needed:
            needed.update(source for source, _ in symbol.nodes[number].entries)
    places = {number: i for i, number in enumerate(sorted(needed))}
    nodes = [_build_node(symbol.nodes[number], places) for number in places]
    graph = {
        "nodes": nodes,
        "arg_nodes": [i for i, node in enumerate(nodes) if node["op"] == "null"],
        "heads": [[places[head], place, 0]],
        "attrs": {"mxnet_version": ["int", _VERSION]},
    }
    (folder / "symbol.json").write_text(json.dumps(graph, allow_nan=False), encoding="utf-8")
    names = arrays.keys() & {node["name"] for node in nodes}
    np.savez(
        folder / "arrays.npz",
        **{name: numbers(arrays[name]).astype(np.float32) for name in names},  # type: ignore[arg-type]
    )
    write_json(folder / "about.json", {"images": symbol.graph.inputs[0], "channels": channels})


def _build_node(node: Node, places: Mapping[int, int]) -> dict[str, Any]:
    if node.text("layout") == "NHWC" or node.kind == "batchnormaddrelu":
        raise ValueError(f"MXNet does not compute {node.operator} {node.name!r} on CPUs")
    attributes = dict(node.attributes)
    for name in node.unread:
        if not _REQUIRED.fullmatch(name):
            del attributes[name]
    if attributes.get("dtype") in FLOATS:
        attributes["dtype"] = "float32"
    inputs = [[places[source], output, 0] for source, output in node.entries]
    return {"op": node.operator, "name": node.name, "attrs": attributes, "inputs": inputs}
