"""The layers of an MXNet ResNet in order: their variables, by the network's graph or by Gluon's
names.

A convolution may have a bias, as the 1x1 convolutions of Gluon's `resnet50_v1` do. Batch norm
subtracts the running mean from what the convolution returns, so that a bias b and a mean m compute
the same as no bias and the mean m - b. In training the mean of the batch contains the bias, which
therefore has no effect there.

Source: MXNet 1.9.1, gluon/model_zoo/vision/resnet.py.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np

from lockstep.models.architectures import ModelSpec
from lockstep.weights.formats.common import Names, check_floats
from lockstep.weights.formats.mxnet_graph import NORM
from lockstep.weights.formats.mxnet_symbol import Symbol

_GLUON_NORM = NORM | {"running_mean": "running_mean", "running_var": "running_var"}
_COUNTED = re.compile(
    r"(?P<scope>\w*?)(?:stage(?P<stage>[0-9]+)_)?(?:conv|batchnorm)(?P<number>[0-9]+)_\w+"
)
_PATH = re.compile(
    r"(?P<scope>(?:_net\.)?features\.)(?P<block>[0-9.]+)"
    r"(?:\.(?P<part>body|bn_add_relu(?:\.bn)?|downsample)(?P<layer>[0-9.]*))?\.[a-z_]+"
)
_DENSE = re.compile(r"\w*dense[0-9]+_weight|(_net\.)?output\.weight")
_OF_ZOO = re.compile(r"resnetv1|features\.|\w*?stage[0-9]+_(conv|batchnorm)[0-9]+_")
_PARTS = ("", "body", "bn_add_relu", "bn_add_relu.bn", "downsample")
"""The parts of a block, in the order of computation."""


@dataclass(frozen=True)
class Layers:
    """The variables of a network's layers in order."""

    kernels: list[str]
    norms: list[Names]
    """Each batch norm's variables by canonical suffix."""
    head: Names
    """The classifier's variables by canonical name."""
    biases: Names
    """The biases of convolutions by their kernels."""


def read_layers(symbol: Symbol) -> Layers:
    """Return the layers of a graph."""
    weight = "the classifier's weight"
    bias = "the classifier's bias"
    if len(symbol.heads) == 1:
        weight, bias = symbol.heads[0]
    layers = Layers([], [], {"fc.weight": weight, "fc.bias": bias}, {})
    for conv in symbol.convolutions:
        layers.kernels.append(conv.weight)
        layers.norms.append(conv.norm)
        if conv.bias:
            layers.biases[conv.weight] = conv.bias
    return layers


def order_layers(arrays: Mapping[str, np.ndarray]) -> Layers:
    """Return Gluon's layers in the order of their counters or paths."""
    places = {}
    for name in arrays:
        if (place := _find_place(name)) is not None:
            places[name] = place
    # With several scopes the order is unknown, and layers of equal shapes could be exchanged
    # without an error.
    names = []
    if len({scope for scope, *_ in places.values()}) == 1:
        names = sorted(places, key=lambda name: places[name])
    kernels = [name for name in names if name.endswith("weight")]
    norms = []
    for name in names:
        if name.endswith("gamma"):
            scope = name.removesuffix("gamma")
            norms.append({suffix: scope + leaf for suffix, leaf in _GLUON_NORM.items()})
    dense = list(filter(_DENSE.fullmatch, arrays))
    head = dense[0] if len(dense) == 1 else "the classifier's weight"
    biases = {kernel: _name_bias(kernel) for kernel in kernels if _name_bias(kernel) in arrays}
    return Layers(kernels, norms, {"fc.weight": head, "fc.bias": _name_bias(head)}, biases)


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


def map_biases(spec: ModelSpec, table: Names, layers: Layers) -> Names:
    """Return biases of convolutions by the canonical running means that they are folded into."""
    biases = {}
    for conv in spec.list_convolutions():
        kernel = table[f"{conv.name}.weight"]
        if kernel in layers.biases:
            biases[f"{conv.bn_name}.running_mean"] = layers.biases[kernel]
    return biases


def subtract_bias(mean: np.ndarray, bias: np.ndarray, name: str) -> np.ndarray:
    """Return the running mean [channels], float32, after a convolution without its bias.

    `name` is the bias's. Raises `CheckpointError` unless it has a number for each channel.
    """
    values = check_floats(name, bias, [mean.shape])
    return (mean.astype(np.float64) - values).astype(np.float32)


def describe_biases(biases: Collection[str]) -> tuple[str, ...]:
    """Return a remark on biases that were folded; none if there are none."""
    if not biases:
        return ()
    return (
        f"{len(biases)} convolutions have biases, such as {min(biases)}; they were folded into"
        " the running means of the batch norms after them, which computes the same",
    )
