"""The graph of NVIDIA's MXNet model of 2019, as its users have it in `-symbol.json`: written
without MXNet."""

import json
from collections.abc import Iterable
from typing import Any

from lockstep.models.architectures import Block, Conv, ModelSpec
from lockstep.recipes import Recipe
from lockstep.weights.formats.common import Names, name_convolutions, split_block_name
from lockstep.weights.formats.table import name_layers

NORM = {
    "weight": "gamma",
    "bias": "beta",
    "running_mean": "moving_mean",
    "running_var": "moving_var",
}
"""MXNet's names of the tensors of a batch norm."""
_VERSION = 10300
"""MXNet 1.3, the original's version. Newer versions read graphs of older ones; older versions warn
about newer graphs."""


def name_scopes(spec: ModelSpec) -> dict[Conv, tuple[str, str]]:
    """Return the original's names of every convolution and its batch norm."""
    kernels = name_convolutions(spec, "conv0", name_unit, "_conv", "_conv1sc")
    norms = name_convolutions(spec, "bn0", name_unit, "_bn", "_sc")
    return {conv: (kernel, norms[conv]) for conv, kernel in kernels.items()}


def name_tensors(spec: ModelSpec) -> Names:
    """Return the original's name, without `arg:` and `aux:`, of every canonical tensor."""
    scopes = name_scopes(spec)
    kernels = {conv: f"{kernel}_weight" for conv, (kernel, _) in scopes.items()}
    norms = {conv: f"{norm}_" for conv, (_, norm) in scopes.items()}
    return name_layers(kernels, norms, NORM, ("fc1_weight", "fc1_bias"))


def name_unit(block: Block) -> str:
    """Return the original's name of a block, such as "stage1_unit1" of "layer1.0"."""
    stage, number = split_block_name(block)
    return f"stage{stage}_unit{number + 1}"


class _Graph:
    """A graph that is built node by node. Its methods add nodes and return the number of the
    last."""

    def __init__(self, recipe: Recipe, names: Names, layout: str) -> None:
        self.nodes: list[dict[str, Any]] = []
        self._recipe = recipe
        self._scopes = name_scopes(recipe.spec)
        self._names = names
        self._layout = layout

    def add(
        self, operator: str, name: str, inputs: Iterable[int] = (), **attributes: object
    ) -> int:
        """Add a node and return its number."""
        node: dict[str, Any] = {"op": operator, "name": name}
        if attributes:
            node["attrs"] = {key: str(value) for key, value in sorted(attributes.items())}
        self.nodes.append(node | {"inputs": [[i, 0, 0] for i in inputs]})
        return len(self.nodes) - 1

    def add_variables(self, names: Iterable[str]) -> list[int]:
        """Add variables."""
        return [self.add("null", name) for name in names]

    def add_relu(self, x: int, name: str) -> int:
        """Add an activation."""
        return self.add("Activation", name, [x], act_type="relu")

    def add_convolution(self, x: int, conv: Conv) -> int:
        """Add a convolution and its batch norm."""
        kernel, norm = self._scopes[conv]
        tensors = (f"{conv.name}.weight", f"{conv.name}.bias")
        variables = [self._names[tensor] for tensor in tensors if tensor in self._names]
        x = self.add(
            "Convolution",
            kernel,
            [x, *self.add_variables(variables)],
            kernel=(conv.kernel, conv.kernel),
            stride=(conv.stride, conv.stride),
            pad=(conv.kernel // 2, conv.kernel // 2),
            num_filter=conv.outputs,
            num_group=conv.groups,
            no_bias=len(variables) == 1,
            layout=self._layout,
        )
        variables = [self._names[f"{conv.bn_name}.{suffix}"] for suffix in NORM]
        return self.add(
            "BatchNorm",
            norm,
            [x, *self.add_variables(variables)],
            eps=self._recipe.bn_epsilon,
            momentum=f"{1 - self._recipe.bn_momentum:.9g}",
            fix_gamma=False,
            axis=self._layout.index("C"),
        )

    def add_block(self, x: int, block: Block, number: int) -> int:
        """Add a residual block, the network's block `number`, from 0."""
        name = name_unit(block)
        y = x
        for i, conv in enumerate(block.convs, start=1):
            y = self.add_convolution(y, conv)
            if i < len(block.convs):
                y = self.add_relu(y, f"{name}_relu{i}")
        shortcut = x if block.shortcut is None else self.add_convolution(x, block.shortcut)
        total = self.add("elemwise_add", f"_plus{number}", [y, shortcut])
        return self.add_relu(total, f"{name}_relu{len(block.convs)}")

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
    """Return the original's graph of a model in fp32, from `data` (images) and `softmax_label` to
    probabilities. Variables may have other names, biases of convolutions included."""
    spec = recipe.spec
    names = names or name_tensors(spec)
    graph = _Graph(recipe, names, layout)
    x = graph.add_convolution(graph.add("null", "data"), spec.list_stem()[0])
    x = graph.add_relu(x, "relu0")
    x = graph.add(
        "Pooling",
        "pooling0",
        [x],
        kernel=(3, 3),
        stride=(2, 2),
        pad=(1, 1),
        pool_type="max",
        layout=layout,
    )
    for number, block in enumerate(spec.list_blocks()):
        x = graph.add_block(x, block, number)
    x = graph.add(
        "Pooling", "pool1", [x], kernel=(7, 7), global_pool=True, pool_type="avg", layout=layout
    )
    flat = graph.add("Flatten", "flatten0", [x])
    head = graph.add_variables([names["fc.weight"], names["fc.bias"]])
    fc = graph.add("FullyConnected", "fc1", [flat, *head], num_hidden=recipe.logits)
    graph.add("SoftmaxOutput", "softmax", [fc, graph.add("null", "softmax_label")])
    return graph.to_json().encode()
