"""Which model an MXNet file holds: by the names and shapes of its variables, and by its graph."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from lockstep.models.architectures import ModelSpec, Tensor, plain_models
from lockstep.weights.formats.common import (
    Matching,
    Names,
    Shape,
    add_layer,
    choose_model,
    is_stem,
    match_model,
    order_shortcuts_first,
    widen_stem,
)
from lockstep.weights.formats.mxnet_graph import NORM, name_scopes
from lockstep.weights.formats.mxnet_layers import Layers
from lockstep.weights.formats.mxnet_symbol import Convolution, Symbol


def match_arrays(
    path: Path, arrays: Mapping[str, np.ndarray], symbol: Symbol | None, layers: Layers
) -> Matching:
    """Return the model that has exactly these tensors, apart from biases, and computes what the
    graph computes."""
    biases = layers.biases.values()
    shapes = {name: value.shape for name, value in arrays.items() if name not in biases}
    layouts = symbol.layouts if symbol else {}
    missing = [f"{bias} is missing" for bias in biases if bias not in arrays]

    def match_table(model: tuple[str, ModelSpec], table: Names) -> Matching:
        matching = match_model(
            model,
            table,
            shapes,
            lambda tensor: list_shapes(tensor, layouts.get(table[tensor.name])),
        )
        spec = model[1]
        unlike = _compare_graph(spec, table, symbol) if symbol else _compare_strides(spec, layers)
        return replace(matching, problems=[*matching.problems, *missing, *unlike])

    matchings = [
        match_table(model, table)
        for model in plain_models().items()
        for table in _list_tables(model[1], layers)
    ]
    return choose_model(matchings, path, "MXNet", arrays)


def name_tensors(spec: ModelSpec) -> Names:
    """Return the original's name, without `arg:` and `aux:`, of every canonical tensor."""
    table = {"fc.weight": "fc1_weight", "fc.bias": "fc1_bias"}
    for conv, (kernel, norm) in name_scopes(spec).items():
        add_layer(table, conv, f"{kernel}_weight", NORM, f"{norm}_")
    return table


def _list_tables(spec: ModelSpec, layers: Layers) -> Iterator[Names]:
    """Yield the names that a model's tensors may have."""
    yield name_tensors(spec)
    # MXNet's own models add the block's convolutions to its shortcut, so that a graph computes the
    # shortcut first.
    for convs in (list(spec.list_convolutions()), order_shortcuts_first(spec)):
        table = dict(layers.head)
        for i, conv in enumerate(convs):
            kernel = f"the kernel of convolution {i}"
            if i < len(layers.kernels):
                kernel = layers.kernels[i]
            norm = {suffix: f"the {suffix} of batch norm {i}" for suffix in NORM}
            if i < len(layers.norms):
                norm |= layers.norms[i]
            add_layer(table, conv, kernel, norm)
        yield table


def list_shapes(tensor: Tensor, layout: str | None) -> list[Shape]:
    """Return the shapes a tensor may have in a layout, or in any layout for None; the original's
    shape comes first."""
    if tensor.role != "conv_weight":
        return [tensor.shape]
    sizes = [tensor.shape]
    if is_stem(tensor):
        sizes.append(widen_stem(tensor))
    shapes: list[Shape] = []
    if layout != "NHWC":
        shapes += sizes
    if layout in (None, "NHWC"):
        shapes += [(outputs, height, width, inputs) for outputs, inputs, height, width in sizes]
    return shapes


def _compare_strides(spec: ModelSpec, layers: Layers) -> Iterator[str]:
    """Yield a problem if a model strides otherwise than Gluon's networks whose convolutions have
    biases."""
    if layers.biases and spec.block == "bottleneck" and spec.stride_in != "1x1":
        yield (
            f"{len(layers.biases)} of its convolutions have biases, such as"
            f" {min(layers.biases.values())}, as in Gluon's resnet50_v1, which strides in its"
            " first 1x1"
        )


def _compare_graph(spec: ModelSpec, table: Names, symbol: Symbol) -> Iterator[str]:
    """Yield every difference between a graph and a model with these names."""
    yield from symbol.problems
    if len(symbol.epsilons) != 1 or not 0 < min(symbol.epsilons) < 1:
        yield (
            f"its graph's batch norms add {sorted(symbol.epsilons)} to the variance, expected one"
            " number below 1"
        )
    if symbol.heads != ((table["fc.weight"], table["fc.bias"]),):
        yield f"its graph has the fully connected layers {list(symbol.heads)}, expected one"
    graph = {conv.weight: conv for conv in symbol.convolutions}
    if len(graph) != len(symbol.convolutions):
        yield f"its graph has {len(symbol.convolutions)} convolutions of {len(graph)} kernels"
    for conv in spec.list_convolutions():
        name = table[f"{conv.name}.weight"]
        if name not in graph:
            yield f"its graph has no convolution with {name}"
            continue
        sizes = {
            "kernel": conv.kernel,
            "stride": conv.stride,
            "pad": conv.kernel // 2,
            "dilate": 1,
        }
        yield from _compare_sizes(graph[name], sizes)
        if graph[name].groups != conv.groups:
            yield f"in its graph, {name} has {graph[name].groups} groups, expected {conv.groups}"
        norm = graph[name].norm
        if norm != {suffix: table[f"{conv.bn_name}.{suffix}"] for suffix in NORM}:
            yield (
                f"in its graph, the batch norm after {name} has the variables"
                f" {sorted(norm.values())}"
            )


def _compare_sizes(convolution: Convolution, sizes: Mapping[str, int]) -> Iterator[str]:
    """Yield every difference of a graph's convolution from these sizes, the same on both axes."""
    for what, size in sizes.items():
        pair = getattr(convolution, what)
        if pair != (size, size):
            yield (
                f"in its graph, {convolution.weight} has the {what} {pair}, expected {(size, size)}"
            )
