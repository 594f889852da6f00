"""Read the layers of an MXNet graph (`-symbol.json`) of a ResNet: its convolutions and the batch
norms after them.

A symbol is a list of nodes in the order of computation. A node has an operator ("null" for a
variable), a name, attributes as text, and its inputs, [node, output, version]. Attributes with the
operator's default value may be missing.

Source: nnvm's pass/saveload_json.cc, src/operator/nn of MXNet, and files that MXNet 1.9.1 wrote.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.system.errors import CheckpointError
from lockstep.system.regular_files import TEXT
from lockstep.weights.formats.stand_ins import read_whole

_PASSING = {"transpose", "Cast", "cast", "amp_cast", "identity", "_copy"}
"""Operators whose output has the same values as their input."""
_NORMS = {"BatchNorm", "BatchNormAddRelu"}
"""Batch norms. The second one exists only in NVIDIA's MXNet, and also adds the shortcut."""
_SUMS = {"elemwise_add", "_Plus", "_plus", "broadcast_add"}
_KNOWN = {"null", "Convolution", "Activation", "relu", "Pooling", "Flatten", "FullyConnected"}
_KNOWN |= {"Dropout", "SoftmaxOutput", "softmax", *_PASSING, *_NORMS, *_SUMS}
_ENDINGS = {"weight": "gamma", "bias": "beta", "running_mean": "mean", "running_var": "var"}
"""Endings of the names of a batch norm's variables, by canonical suffix."""

Pair = tuple[int, ...]


@dataclass(frozen=True)
class Convolution:
    """A convolution of a graph. Pairs are height and width."""

    weight: str
    kernel: Pair
    stride: Pair
    pad: Pair
    dilate: Pair
    groups: int
    layout: str
    """Layout of the images: "NCHW" (kernels are OIHW) or "NHWC" (kernels are OHWI)."""
    norm: dict[str, str]
    """Canonical suffix -> variable of the batch norm after the convolution; empty if there is none.
    """
    bias: str = ""
    """The variable of its bias; "" if it has none."""


@dataclass(frozen=True)
class Symbol:
    """The layers of a graph."""

    convolutions: tuple[Convolution, ...]
    """The convolutions, in the order of computation."""
    heads: tuple[tuple[str, str], ...]
    """Weight and bias of the fully connected layers."""
    epsilons: frozenset[float]
    """The values that batch norms add to the variance."""
    problems: tuple[str, ...]
    """Messages about parts of the graph that a ResNet does not have."""

    @property
    def layouts(self) -> dict[str, str]:
        """The layout of every convolution by its kernel's name."""
        return {conv.weight: conv.layout for conv in self.convolutions}


def load(path: Path) -> Symbol:
    """Read a graph. Raises `CheckpointError` if the file is damaged or not an MXNet graph."""
    data = read_whole(path, TEXT)
    try:
        return _Graph(json.loads(data)["nodes"]).read_symbol()
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{path} is damaged or not an MXNet graph: {type(error).__name__}, {error}. Copy it"
            " again, or remove it to recognise the model by its arrays alone."
        ) from None


class _Graph:
    """The nodes of a graph. Wrong nodes raise `ValueError`, `LookupError`, `TypeError` or
    `AttributeError`."""

    def __init__(self, nodes: list[dict[str, Any]]) -> None:
        self._nodes = nodes
        self._attributes: list[dict[str, Any]] = []
        for node in nodes:
            attributes: dict[str, Any] = {}
            if node["op"] != "null":
                # Versions of MXNet use three different names for attributes.
                for key in ("param", "attr", "attrs"):
                    attributes |= node.get(key, {})
            self._attributes.append(attributes)

    def read_symbol(self) -> Symbol:
        norms = {self._source(i, 0): i for i in self._find_nodes(*_NORMS)}
        convs = [self._read_convolution(i, norms.get(i)) for i in self._find_nodes("Convolution")]
        dense = self._find_nodes("FullyConnected")
        heads = [(self._variable(i, 1), self._variable(i, 2)) for i in dense]
        epsilons = {self._attribute(i, "eps", "0.001") for i in self._find_nodes(*_NORMS)}
        return Symbol(
            tuple(convs), tuple(heads), frozenset(map(float, epsilons)), tuple(self._problems())
        )

    def _find_nodes(self, *operators: str) -> list[int]:
        return [i for i, node in enumerate(self._nodes) if node["op"] in operators]

    def _attribute(self, node: int, name: str, default: str) -> str:
        value = self._attributes[node].get(name, default)
        if not isinstance(value, str):
            raise TypeError(f"{name} of node {node} is {value!r}, expected text")
        return default if value == "None" else value

    def _pair(self, node: int, name: str, default: str) -> Pair:
        return tuple(map(int, re.findall("[0-9]+", self._attribute(node, name, default))))

    def _source(self, node: int, i: int) -> int:
        """Return the node that computes the values of a node's input `i`."""
        source = self._nodes[node]["inputs"][i][0]
        # Inputs come before the nodes that use them, so the recursion ends.
        if not 0 <= source < node:
            raise ValueError(f"node {node} has the input {source}")
        return self._source(source, 0) if self._nodes[source]["op"] in _PASSING else source

    def _variable(self, node: int, i: int) -> str:
        """Return the name of the variable that is a node's input `i`; "" if it is none."""
        if i >= len(self._nodes[node]["inputs"]):
            return ""
        source = self._nodes[self._source(node, i)]
        return str(source["name"]) if source["op"] == "null" else ""

    def _read_convolution(self, node: int, norm: int | None) -> Convolution:
        return Convolution(
            self._variable(node, 1),
            self._pair(node, "kernel", ""),
            self._pair(node, "stride", "(1, 1)"),
            self._pair(node, "pad", "(0, 0)"),
            self._pair(node, "dilate", "(1, 1)"),
            int(self._attribute(node, "num_group", "1")),
            self._attribute(node, "layout", "NCHW"),
            {} if norm is None else self._read_norm(norm),
            self._variable(node, 2),
        )

    def _read_norm(self, node: int) -> dict[str, str]:
        inputs = range(len(self._nodes[node]["inputs"]))
        variables = [self._variable(node, i) for i in inputs]
        norm = {}
        for suffix, ending in _ENDINGS.items():
            names = [name for name in variables if name.endswith(ending)]
            if len(names) == 1:
                norm[suffix] = names[0]
        return norm

    def _problems(self) -> Iterator[str]:
        for operator in sorted({node["op"] for node in self._nodes} - _KNOWN):
            yield f"its graph has the operator {operator}, which a ResNet does not have"
        for i in self._find_nodes(*_NORMS):
            # The operator's default is True.
            if self._attribute(i, "fix_gamma", "True") != "False":
                yield (
                    f"the scale of {self._nodes[i]['name']} is fixed to 1 (fix_gamma), whatever"
                    " value the file has"
                )
        for i in self._find_nodes("Activation"):
            kind = self._attribute(i, "act_type", "")
            if kind != "relu":
                yield f"{self._nodes[i]['name']} is {kind}, expected relu"
        pools = [self._describe_pool(i) for i in self._find_nodes("Pooling")]
        if pools != ["max (3, 3) stride (2, 2) pad (1, 1)", "global avg"]:
            yield (
                f"it pools {' and '.join(pools) or 'nothing'}, expected max (3, 3) stride (2, 2)"
                " pad (1, 1) and global avg"
            )

    def _describe_pool(self, node: int) -> str:
        kind = self._attribute(node, "pool_type", "max")
        if self._attribute(node, "global_pool", "False") == "True":
            return f"global {kind}"
        kernel, stride, pad = (self._pair(node, name, "") for name in ("kernel", "stride", "pad"))
        pool = f"{kind} {kernel} stride {stride} pad {pad}"
        if self._attribute(node, "pooling_convention", "valid") != "valid":
            pool += " with another convention"
        return pool
