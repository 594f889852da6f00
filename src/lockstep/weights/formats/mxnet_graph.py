"""Graphs for MXNet, written without it: that of NVIDIA's model of 2019, as its users have it in
`-symbol.json`, one by the names of variables that have no graph (`assume_graph`),
and one that was read, for `lockstep.backends.mxnet.certificate`.

Without a graph the names are those of NVIDIA's symbols, or Gluon's, whose order is that of the
layers. Gluon either counts layers in the order of creation (`resnetv10_stage1_conv0_weight`) or
names the path to them (`features.4.0.body.0.weight`).

Source: MXNet 1.9.1, gluon/block.py, gluon/model_zoo/vision/resnet.py.
"""

import json
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.models.architectures import Block, Conv, ModelSpec
from lockstep.recipes import Recipe
from lockstep.system.files import write_json
from lockstep.weights.formats import numbers
from lockstep.weights.formats.account import check_outputs
from lockstep.weights.formats.common import Names, choose_model, match_model, order_shortcuts_first
from lockstep.weights.formats.mxnet_symbol import FLOATS, Node, Symbol
from lockstep.weights.formats.table import (
    OIHW,
    Layout,
    list_plain_models,
    list_shapes,
    name_convolutions,
    name_layers,
)
from lockstep.weights.weights_choice import WeightsChoice

NORM = {
    "weight": "gamma",
    "bias": "beta",
    "running_mean": "moving_mean",
    "running_var": "moving_var",
}
"""MXNet's names of the tensors of a batch norm."""
_VERSION = 10300
"""MXNet 1.3, NVIDIA's version. Newer versions read graphs of older ones; older versions warn
about newer graphs."""
_GLUON_NORM = NORM | {"running_mean": "running_mean", "running_var": "running_var"}
_LAYER = re.compile(
    r"(?P<scope>\w*?)(?:stage[0-9]+_)?(?:conv|batchnorm)[0-9]+_(?:weight|gamma)"
    r"|(?P<path>(?:_net\.)?features\.)[0-9.]+"
    r"(?:(?:body|bn_add_relu(?:\.bn)?|downsample)[0-9.]*)?(?:weight|gamma)"
)
_DENSE = re.compile(r"\w*dense[0-9]+_weight|(?:_net\.)?output\.weight")
_OF_ZOO = re.compile(r"resnetv1|features\.|\w*?stage[0-9]+_(conv|batchnorm)[0-9]+_")
_LAYOUTS: dict[str, Layout] = {
    "NCHW": {**OIHW, "stem": ("OIHW", "OJHW")},
    "NHWC": {**OIHW, "conv_weight": ("OHWI",), "stem": ("OHWI", "OHWJ")},
}
_PARTS = ("body", "bn_add_relu", "downsample")
"""The parts of a block, in the order of computation."""
_REQUIRED = re.compile(r"num_\w+|key")
"""Attributes that MXNet requires, though they change nothing here."""
_NEWEST_VERSION = 10901


def name_tensors(spec: ModelSpec) -> Names:
    """Return NVIDIA's name, without `arg:` and `aux:`, of every canonical tensor."""
    unit = "stage{stage}_unit{number}_"
    kernels = name_convolutions(
        spec, "conv0_weight", f"{unit}conv{{conv}}_weight", f"{unit}conv1sc_weight"
    )
    norms = name_convolutions(spec, "bn0_", f"{unit}bn{{conv}}_", f"{unit}sc_")
    return name_layers(kernels, norms, NORM, ("fc1_weight", "fc1_bias"))


class _Graph:
    """A graph that is built node by node. Its methods add nodes and return the number of the
    last."""

    def __init__(self, recipe: Recipe, names: Names, layout: str) -> None:
        self.nodes: list[dict[str, Any]] = []
        self._recipe = recipe
        self._scopes = name_tensors(recipe.spec)
        self._names = names
        self._layout = layout

    def add(self, operator: str, name: str, *inputs: int | str, **attributes: object) -> int:
        """Add a node, after those of its inputs that are names of variables."""
        numbers = [self.add("null", x) if isinstance(x, str) else x for x in inputs]
        node: dict[str, Any] = {"op": operator, "name": name}
        if attributes:
            node["attrs"] = {key: str(value) for key, value in sorted(attributes.items())}
        self.nodes.append(node | {"inputs": [[i, 0, 0] for i in numbers]})
        return len(self.nodes) - 1

    def add_relu(self, x: int, name: str) -> int:
        """Add an activation."""
        return self.add("Activation", name, x, act_type="relu")

    def add_convolution(self, x: int | str, conv: Conv) -> int:
        """Add a convolution and its batch norm."""
        kernel = f"{conv.name}.weight"
        biases = [self._names[name] for name in [f"{conv.name}.bias"] if name in self._names]
        x = self.add(
            "Convolution",
            self._scopes[kernel].removesuffix("_weight"),
            x,
            self._names[kernel],
            *biases,
            kernel=(conv.kernel, conv.kernel),
            stride=(conv.stride, conv.stride),
            pad=(conv.kernel // 2, conv.kernel // 2),
            num_filter=conv.outputs,
            num_group=conv.groups,
            no_bias=not biases,
            layout=self._layout,
        )
        return self.add(
            "BatchNorm",
            self._scopes[f"{conv.bn_name}.weight"].removesuffix("_gamma"),
            x,
            *[self._names[f"{conv.bn_name}.{suffix}"] for suffix in NORM],
            eps=self._recipe.bn_epsilon,
            momentum=f"{1 - self._recipe.bn_momentum:.9g}",
            fix_gamma=False,
            axis=self._layout.index("C"),
        )

    def add_block(self, x: int, block: Block, number: int) -> int:
        """Add a residual block, the network's block `number`, from 0."""
        name = self._scopes[f"{block.convs[0].name}.weight"].removesuffix("conv1_weight")
        y = x
        for i, conv in enumerate(block.convs, start=1):
            y = self.add_convolution(y, conv)
            if i < len(block.convs):
                y = self.add_relu(y, f"{name}relu{i}")
        shortcut = x if block.shortcut is None else self.add_convolution(x, block.shortcut)
        total = self.add("elemwise_add", f"_plus{number}", y, shortcut)
        return self.add_relu(total, f"{name}relu{len(block.convs)}")

    def to_json(self) -> str:
        """Return the graph as JSON; its output is the last node."""
        # The index of each node's first output; MXNet counts them again. A batch norm's mean and
        # variance are outputs too.
        rows = [0]
        for node in self.nodes:
            rows.append(rows[-1] + (3 if node["op"] == "BatchNorm" else 1))
        graph = {
            "nodes": self.nodes,
            "arg_nodes": [i for i, node in enumerate(self.nodes) if node["op"] == "null"],
            "node_row_ptr": rows,
            "heads": [[len(self.nodes) - 1, 0, 0]],
            "attrs": {"mxnet_version": ["int", _VERSION]},
        }
        return json.dumps(graph, indent=1, allow_nan=False) + "\n"


def build_symbol(recipe: Recipe, names: Names | None = None, layout: str = "NCHW") -> bytes:
    """Return NVIDIA's graph of a model in fp32, from `data` (images) and `softmax_label` to
    probabilities. Variables may have other names, biases of convolutions included."""
    spec = recipe.spec
    names = names or name_tensors(spec)
    graph = _Graph(recipe, names, layout)
    x = graph.add_convolution("data", spec.list_stem()[0])
    x = graph.add_relu(x, "relu0")
    window = {"kernel": (3, 3), "stride": (2, 2), "pad": (1, 1)}
    x = graph.add("Pooling", "pooling0", x, **window, pool_type="max", layout=layout)
    for number, block in enumerate(spec.list_blocks()):
        x = graph.add_block(x, block, number)
    x = graph.add(
        "Pooling", "pool1", x, kernel=(7, 7), global_pool=True, pool_type="avg", layout=layout
    )
    flat = graph.add("Flatten", "flatten0", x)
    head = (names["fc.weight"], names["fc.bias"])
    fc = graph.add("FullyConnected", "fc1", flat, *head, num_hidden=recipe.logits)
    graph.add("SoftmaxOutput", "softmax", fc, "softmax_label")
    return graph.to_json().encode()


def assume_graph(
    path: Path, recipe: Recipe, arrays: Mapping[str, np.ndarray], choice: WeightsChoice
) -> tuple[bytes, str]:
    """Return a graph in which a network has all of these variables, and a text on what is assumed.

    Raises `CheckpointError` if no network has.
    """
    layers = _order_layers(arrays)
    biases = {kernel: _name_bias(kernel) for kernel, _ in layers if _name_bias(kernel) in arrays}
    shapes = {name: a.shape for name, a in arrays.items() if name not in biases.values()}
    # All kernels lie alike, and that of the stem has more rows than channels.
    by_rows = any(len(s) == 4 and s[1] == s[2] != s[3] for s in shapes.values())
    layout = ("NCHW", "NHWC")[by_rows]
    matchings = []
    for model, spec in list_plain_models(choice, shapes):
        # Of Gluon's networks, those whose convolutions have biases stride in the first 1x1.
        if choice.model or not biases or spec.block == "basic" or spec.stride_in == "1x1":
            for names in _list_names(spec, layers, arrays):
                list_fits = partial(list_shapes, _LAYOUTS[layout])
                matchings.append(match_model((model, spec), names, shapes, list_fits))
    matching = choose_model(matchings, path, "MXNet", arrays)
    check_outputs(path, matching.logits)
    recipe = recipe.replace(model=matching.spec, logits=matching.logits)
    stride = {"1x1": "first 1x1"}.get(matching.spec.stride_in, "3x3")
    about = f"bottlenecks stride in their {stride}, and that batch norms add {recipe.bn_epsilon:g}"
    names = dict(matching.names)
    for tensor, name in matching.names.items():
        if name in biases:
            names[tensor.replace(".weight", ".bias")] = biases[name]
    return build_symbol(recipe, names, layout), about


def _order_layers(names: Collection[str]) -> list[tuple[str, str]]:
    """Return the kernels of Gluon's layers and the scopes of their batch norms, in the order of
    their counters or paths."""
    scopes = {}
    for match in filter(None, map(_LAYER.fullmatch, names)):
        scopes[match[0]] = match["scope"] or match["path"]
    # Layers of several scopes have no order. Those of one scope may be a network, with others.
    most = [scope for scope, _ in Counter(scopes.values()).most_common(1)]
    ordered = sorted((name for name in scopes if scopes[name] in most), key=_list_numbers)
    kernels = [name for name in ordered if name.endswith("weight")]
    norms = [name.removesuffix("gamma") for name in ordered if name.endswith("gamma")]
    return list(zip(kernels, norms, strict=False))


def _list_numbers(name: str) -> list[int]:
    """Return the numbers in a name, by which layers of one scope are in order."""
    for number, part in enumerate(_PARTS):
        name = name.replace(part, str(number))
    return list(map(int, re.findall("[0-9]+", name)))


def _name_bias(weight: str) -> str:
    return weight.removesuffix("weight") + "bias"


def are_gluons(names: Collection[str]) -> bool:
    """Return whether variables have the names of Gluon's model zoo, or of GluonCV's exports.

    The zoo's names begin with `resnetv1`, count layers within a stage, or are paths from
    `features`. NVIDIA's Gluon code counts layers through the whole network, and its blocks end with
    a layer `bn_add_relu`, which the zoo does not have.
    """
    return any(map(_OF_ZOO.match, names)) and not any("bn_add_relu" in name for name in names)


def _list_names(
    spec: ModelSpec, layers: list[tuple[str, str]], stored: Collection[str]
) -> Iterator[Names]:
    """Yield the names that a model's tensors may have."""
    yield name_tensors(spec)
    # Of several dense layers the last one is the classifier.
    dense = filter(_DENSE.fullmatch, stored)
    head = max(dense, key=_list_numbers, default="the classifier's weight")
    # MXNet's own models add the block's convolutions to its shortcut, and may create it first.
    for convs in (list(spec.list_convolutions()), order_shortcuts_first(spec)):
        missing = [(f"kernel {i}", f"batch norm {i}: ") for i in range(len(layers), len(convs))]
        kernels, norms = zip(*layers, *missing, strict=True)
        scopes = dict(zip(convs, norms, strict=False))
        table = dict(zip(convs, kernels, strict=False))
        yield name_layers(table, scopes, _GLUON_NORM, (head, _name_bias(head)))


def write_original(
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
    nodes = [_rebuild_node(symbol.nodes[number], places) for number in places]
    graph = {
        "nodes": nodes,
        "arg_nodes": [i for i, node in enumerate(nodes) if node["op"] == "null"],
        "heads": [[places[head], place, 0]],
        "attrs": {"mxnet_version": ["int", _NEWEST_VERSION]},
    }
    (folder / "symbol.json").write_text(json.dumps(graph, allow_nan=False), encoding="utf-8")
    names = arrays.keys() & {node["name"] for node in nodes}
    np.savez(
        folder / "arrays.npz",
        **{name: numbers(arrays[name]).astype(np.float32) for name in names},  # type: ignore[arg-type]
    )
    write_json(folder / "about.json", {"images": symbol.graph.inputs[0], "channels": channels})


def _rebuild_node(node: Node, places: Mapping[int, int]) -> dict[str, Any]:
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
