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
from lockstep.weights.formats.common import Names, choose_model, match_model, order_shortcuts_first
from lockstep.weights.formats.mxnet_graph import NORM, build_symbol, name_tensors
from lockstep.weights.formats.table import OIHW, Layout, list_plain_models, list_shapes, name_layers
from lockstep.weights.weights_choice import WeightsChoice

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
