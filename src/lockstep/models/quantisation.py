"""Int8 quantisation in training: which layers compute with int8 numbers, and the size of one step
of each.

Every convolution and the classifier take integers: their weights and their input. The integer of a
value x is

    q = round(x / scale), halves to the even number, limited to -128..127

and the layer computes with q * scale. Everything else stays as it is: batch norm, ReLU, pooling,
blur, squeeze-and-excitation and the sum of a block.

- Weights have one scale for each output channel: the largest magnitude of the channel's present
  weights / 127.
- The input has one scale for each layer: the largest magnitude that it had in the calibration
  before the run / 127.

Weights therefore use -127..127. The gradient with respect to x is that with respect to q * scale,
and 0 where x / scale rounds to less than -128 or more than 127. Scales have no gradient.

Sources: NVIDIA's PaddlePaddle code quantises the same layers and takes the same scales of weights;
arXiv:2004.09602. Its scales of inputs are moving averages over training. Rounding and limits are
those of ONNX's QuantizeLinear.
"""

import math
from collections.abc import Mapping

import numpy as np

from lockstep.models.architectures import ModelSpec
from lockstep.models.state import check_names
from lockstep.system.errors import CheckpointError, DivergedError

LOWEST = -128
LARGEST = 127
"""The limits of an integer."""
SMALLEST_SCALE = 2.0**-126
"""The smallest scale, for weights or inputs that are all 0: the smallest float32 whose reciprocal
is finite."""

Scales = dict[str, float]
"""The scale of the input of every layer, by the layer's name, such as "layer1.0.conv1" and "fc".
Each is a float32."""


def layers(spec: ModelSpec) -> tuple[str, ...]:
    """Return the names of the layers that are quantised, in torchvision's order: all convolutions
    and "fc"."""
    return (*(conv.name for conv in spec.list_convolutions()), "fc")


def input_scales(largest: Mapping[str, float]) -> Scales:
    """Return scales from the largest magnitude of every layer's input. Raises `DivergedError` if
    one is not finite."""
    for name, value in largest.items():
        if not math.isfinite(value):
            raise DivergedError(
                f"the calibration before training found {value} in the input of {name}; expected"
                " finite numbers: start from other --weights, or --set precision=fp32"
            )
    scales = {name: max(value / LARGEST, SMALLEST_SCALE) for name, value in largest.items()}
    return {name: float(np.float32(scale)) for name, scale in scales.items()}


def weight_scales(weight: np.ndarray) -> np.ndarray:
    """Return the scale of every output channel of a kernel [O, I, k, k] or classifier [O, I]:
    float32 [O]."""
    largest = np.abs(weight.astype(np.float32)).reshape(len(weight), -1).max(axis=1)
    return np.maximum(largest / np.float32(LARGEST), np.float32(SMALLEST_SCALE))


def check_scales(spec: ModelSpec, scales: Mapping[str, float]) -> None:
    """Raise `CheckpointError` unless every quantised layer, and nothing else, has a finite scale
    above 0."""
    check_names(layers(spec), scales, "scales")
    for name, scale in scales.items():
        if not (math.isfinite(scale) and scale >= SMALLEST_SCALE):
            raise CheckpointError(
                f"scales: that of {name} is {scale}, expected a finite number above 0"
            )
