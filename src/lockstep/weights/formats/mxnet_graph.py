"""The graph of NVIDIA's MXNet model of 2019, as its users have it in `-symbol.json`: written
without MXNet."""

import json
from typing import Any

from lockstep.models.architectures import Block, Conv, ModelSpec
from lockstep.recipes import Recipe
from lockstep.weights.formats.common import Names
from lockstep.weights.formats.table import name_convolutions, name_layers

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


def name_tensors(spec: ModelSpec) -> Names:
    """Return the original's name, without `arg:` and `aux:`, of every canonical tensor."""
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
    """Return the original's graph of a model in fp32, from `data` (images) and `softmax_label` to
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
