"""The graph of an MXNet file without one, by the names of its variables: `assume_graph`.

The names are those of NVIDIA's symbols, or Gluon's, whose order is that of the layers. Gluon either
counts layers in the order of creation (`resnetv10_stage1_conv0_weight`) or names the path to them
(`features.4.0.body.0.weight`).

Source: MXNet 1.9.1, gluon/block.py, gluon/model_zoo/vision/resnet.py.
"""

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from functools import partial
from pathlib import Path

import numpy as np

from lockstep.models.architectures import ModelSpec
from lockstep.recipes import Recipe
from lockstep.weights.formats.account import check_outputs
from lockstep.weights.formats.common import (
    Names,
    choose_model,
    match_model,
    order_shortcuts_first,
)
from lockstep.weights.formats.mxnet_graph import NORM, build_symbol, name_tensors
from lockstep.weights.formats.table import (
    OIHW,
    Layout,
    list_plain_models,
    list_shapes,
    name_layers,
)
from lockstep.weights.weights_choice import WeightsChoice

_GLUON_NORM = NORM | {"running_mean": "running_mean", "running_var": "running_var"}
_COUNTED = re.compile(
    r"(?P<scope>\w*?)(?:stage(?P<stage>[0-9]+)_)?(?:conv|batchnorm)(?P<number>[0-9]+)_\w+"
)
_PATH = re.compile(
    r"(?P<scope>(?:_net\.)?features\.)(?P<block>[0-9.]+)"
    r"(?:\.(?P<part>body|bn_add_relu(?:\.bn)?|downsample)(?P<layer>[0-9.]*))?\.[a-z_]+"
)
_DENSE = re.compile(r"\w*dense([0-9]+)_weight|(?:_net\.)?output\.weight")
_OF_ZOO = re.compile(r"resnetv1|features\.|\w*?stage[0-9]+_(conv|batchnorm)[0-9]+_")
_BY_CHANNELS: Layout = {**OIHW, "stem": ("OIHW", "OJHW")}
_BY_ROWS: Layout = {**OIHW, "conv_weight": ("OHWI",), "stem": ("OHWI", "OHWJ")}
_PARTS = ("", "body", "bn_add_relu", "bn_add_relu.bn", "downsample")
"""The parts of a block, in the order of computation."""


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
    matchings = []
    for model, spec in list_plain_models(choice, shapes):
        # Of Gluon's networks, those whose convolutions have biases stride in the first 1x1.
        if choice.model or not biases or spec.block == "basic" or spec.stride_in == "1x1":
            for names in _list_names(spec, layers, arrays):
                list_fits = partial(list_shapes, _BY_ROWS if by_rows else _BY_CHANNELS)
                matchings.append(match_model((model, spec), names, shapes, list_fits))
    matching = choose_model(matchings, path, "MXNet", arrays)
    check_outputs(path, matching.logits)
    recipe = recipe.replace(model=matching.spec, logits=matching.logits)
    layout = "NHWC" if by_rows else "NCHW"
    stride = "first 1x1" if matching.spec.stride_in == "1x1" else "3x3"
    about = f"bottlenecks stride in their {stride}, and that batch norms add {recipe.bn_epsilon:g}"
    names = dict(matching.names)
    for tensor, name in matching.names.items():
        if name in biases:
            names[tensor.replace(".weight", ".bias")] = biases[name]
    return build_symbol(recipe, names, layout), about


def _order_layers(names: Collection[str]) -> list[tuple[str, str]]:
    """Return the kernels of Gluon's layers and the scopes of their batch norms, in the order of
    their counters or paths."""
    places = {name: place for name in names if (place := _find_place(name)) is not None}
    # Layers of several scopes have no order. Those of one scope may be a network, with others.
    scopes = Counter(scope for scope, *_ in places.values())
    scope = max(scopes, key=lambda scope: scopes[scope], default="")
    ordered = sorted(filter(lambda name: places[name][0] == scope, places), key=lambda n: places[n])
    kernels = [name for name in ordered if name.endswith("weight")]
    norms = [name.removesuffix("gamma") for name in ordered if name.endswith("gamma")]
    return list(zip(kernels, norms, strict=False))


def _name_bias(weight: str) -> str:
    return weight.removesuffix("weight") + "bias"


def _find_place(name: str) -> tuple[str, list[int], int, list[int]] | None:
    """Return a sort key that orders the names of Gluon's layers as in the network; None for other
    names."""
    if match := _COUNTED.fullmatch(name):
        return match["scope"], [int(match["stage"] or 0), int(match["number"])], 0, []
    if match := _PATH.fullmatch(name):
        part = _PARTS.index(match["part"] or "")
        return match["scope"], _list_numbers(match["block"]), part, _list_numbers(match["layer"])
    return None


def _list_numbers(text: str | None) -> list[int]:
    return [int(number) for number in re.findall("[0-9]+", text or "")]


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
    dense = {name: int(match[1] or 0) for name in stored if (match := _DENSE.fullmatch(name))}
    head = max(dense, key=lambda name: dense[name], default="the classifier's weight")
    # MXNet's own models add the block's convolutions to its shortcut, and may create it first.
    for convs in (list(spec.list_convolutions()), order_shortcuts_first(spec)):
        missing = [(f"kernel {i}", f"batch norm {i}: ") for i in range(len(layers), len(convs))]
        pairs = dict(zip(convs, [*layers, *missing], strict=False))
        kernels = {conv: kernel for conv, (kernel, _) in pairs.items()}
        norms = {conv: norm for conv, (_, norm) in pairs.items()}
        yield name_layers(kernels, norms, _GLUON_NORM, (head, _name_bias(head)))
