"""The graph of NVIDIA's MXNet model of 2019, as its users have it in `-symbol.json`: written
without MXNet."""

import json
from collections.abc import Iterable
from typing import Any

from lockstep.models.architectures import Conv, ModelSpec, blocks, model_spec, stem
from lockstep.recipes import Recipe

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


def scopes(spec: ModelSpec) -> dict[Conv, tuple[str, str]]:
    """Return the original's names of every convolution and its batch norm."""
    found = {stem(spec): ("conv0", "bn0")}
    for block in blocks(spec):
        of_block = unit(block.name)
        found |= {
            conv: (f"{of_block}_conv{i}", f"{of_block}_bn{i}")
            for i, conv in enumerate(block.convs, start=1)
        }
        if block.shortcut is not None:
            found[block.shortcut] = (f"{of_block}_conv1sc", f"{of_block}_sc")
    return found


def unit(block: str) -> str:
    """Return the original's name of a block, such as "stage1_unit1" of "layer1.0"."""
    stage, number = block.removeprefix("layer").split(".")
    return f"stage{stage}_unit{int(number) + 1}"


class _Nodes:
    """A graph that is built node by node."""

    def __init__(self) -> None:
        self.nodes: list[dict[str, Any]] = []

    def add(
        self, operator: str, name: str, inputs: Iterable[int] = (), **attributes: object
    ) -> int:
        """Add a node and return its number."""
        node: dict[str, Any] = {"op": operator, "name": name}
        if attributes:
            node["attrs"] = {key: str(value) for key, value in sorted(attributes.items())}
        self.nodes.append(node | {"inputs": [[i, 0, 0] for i in inputs]})
        return len(self.nodes) - 1

    def text(self) -> str:
        """Return the graph as JSON; its output is the last node."""
        variables = [i for i, node in enumerate(self.nodes) if node["op"] == "null"]
        heads = [[len(self.nodes) - 1, 0, 0]]
        # The index of each node's first output; MXNet counts them again. A batch norm's mean and
        # variance are outputs too.
        rows = [0]
        for node in self.nodes:
            rows.append(rows[-1] + (3 if node["op"] == "BatchNorm" else 1))
        attributes = {"mxnet_version": ["int", _VERSION]}
        graph = {
            "nodes": self.nodes,
            "arg_nodes": variables,
            "node_row_ptr": rows,
            "heads": heads,
            "attrs": attributes,
        }
        return json.dumps(graph, indent=1, allow_nan=False) + "\n"


def symbol_of(recipe: Recipe) -> bytes:
    """Return the original's graph of a model in fp32 and NCHW, from `data` (images) and
    `softmax_label` to probabilities."""
    graph = _Nodes()
    spec = model_spec(recipe.model)
    named = scopes(spec)

    def relu(x: int, name: str) -> int:
        return graph.add("Activation", name, [x], act_type="relu")

    def normed(x: int, conv: Conv) -> int:
        kernel, norm = named[conv]
        weight = graph.add("null", f"{kernel}_weight")
        sizes = {
            what: (size, size) for what, size in (("kernel", conv.kernel), ("stride", conv.stride))
        }
        x = graph.add(
            "Convolution",
            kernel,
            [x, weight],
            **sizes,
            pad=(conv.kernel // 2, conv.kernel // 2),
            num_filter=conv.outputs,
            num_group=conv.groups,
            no_bias=True,
            layout="NCHW",
        )
        variables = [graph.add("null", f"{norm}_{leaf}") for leaf in NORM.values()]
        momentum = f"{1 - recipe.bn_momentum:.9g}"
        return graph.add(
            "BatchNorm",
            norm,
            [x, *variables],
            eps=recipe.bn_epsilon,
            momentum=momentum,
            fix_gamma=False,
            axis=1,
        )

    x = relu(normed(graph.add("null", "data"), stem(spec)), "relu0")
    x = graph.add(
        "Pooling",
        "pooling0",
        [x],
        kernel=(3, 3),
        stride=(2, 2),
        pad=(1, 1),
        pool_type="max",
        layout="NCHW",
    )
    for number, block in enumerate(blocks(spec)):
        of_block = unit(block.name)
        y = x
        for i, conv in enumerate(block.convs, start=1):
            y = normed(y, conv)
            if i < len(block.convs):
                y = relu(y, f"{of_block}_relu{i}")
        shortcut = x if block.shortcut is None else normed(x, block.shortcut)
        x = relu(
            graph.add("elemwise_add", f"_plus{number}", [y, shortcut]),
            f"{of_block}_relu{len(block.convs)}",
        )
    x = graph.add(
        "Pooling", "pool1", [x], kernel=(7, 7), global_pool=True, pool_type="avg", layout="NCHW"
    )
    flat = graph.add("Flatten", "flatten0", [x])
    head = [flat, graph.add("null", "fc1_weight"), graph.add("null", "fc1_bias")]
    fc = graph.add("FullyConnected", "fc1", head, num_hidden=recipe.logits)
    graph.add("SoftmaxOutput", "softmax", [fc, graph.add("null", "softmax_label")])
    return graph.text().encode()
