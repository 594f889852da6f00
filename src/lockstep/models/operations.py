"""The work for one image: operations and bytes, counted from the architecture.

Operations are those of convolutions and the classifier; a multiply-add is two operations. Those of
squeeze-and-excitation count. Pools, blurs and sums do not. Bytes are what the kernels of a step
read and write if each kernel reads its inputs once and nothing stays in a cache between two
kernels. Those of pools, blurs and factors of channels are left out.
docs/reference/benchmark-figures.md explains both.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from lockstep.models.architectures import Conv, ModelSpec

VALUE_BYTES = {"fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2, "int8": 1}
"""Bytes of an activation, by precision."""
UPDATE_BYTES = 20
"""Bytes for the update of a parameter: weight, velocity and gradient (float32) are read, weight and
velocity written."""


@dataclass(frozen=True)
class Work:
    """Operations and bytes of one image."""

    flops: float
    bytes: float


@dataclass(frozen=True)
class Layer:
    """A convolution of one image: numbers of multiply-adds, input values, output values and kernel
    values."""

    macs: int
    inputs: int
    outputs: int
    weights: int


def layers(spec: ModelSpec, image_size: int, logits: int) -> Iterator[Layer]:
    """Yield every convolution of an image of `image_size` pixels a side, from the stem on, and
    finally the classifier."""
    size = image_size
    for conv in spec.list_stem():
        yield _layer(conv, size)
        size = _after(conv, size)
    size = _halve(size)  # the max pool
    for block in spec.list_blocks():
        entering = size
        for conv in block.convs:
            yield _layer(conv, size)
            size = _after(conv, size)
        if block.squeeze is not None:
            outside = block.squeeze.channels
            hidden = block.squeeze.hidden
            yield Layer(outside * hidden, outside, hidden, outside * hidden)
            yield Layer(outside * hidden, hidden, outside, outside * hidden)
        if block.shortcut is not None:
            yield _layer(block.shortcut, entering)
    classifier = spec.features * logits
    yield Layer(classifier, spec.features, logits, classifier)


def _layer(conv: Conv, size: int) -> Layer:
    weights = conv.outputs * conv.inputs // conv.groups * conv.kernel**2
    entering = _halve(size) if conv.before == "average" else size
    leaving = _halve(entering) if conv.stride == 2 else entering
    return Layer(
        weights * leaving**2, conv.inputs * entering**2, conv.outputs * leaving**2, weights
    )


def _after(conv: Conv, size: int) -> int:
    """Return the size after a convolution and what belongs to it."""
    is_halved = conv.stride == 2 or conv.before == "average" or conv.blurs_after
    return _halve(size) if is_halved else size


def _halve(size: int) -> int:
    """Return the size after a stride of 2. It is the same with symmetric padding and with
    TensorFlow's."""
    return -(-size // 2)


def forward_macs(spec: ModelSpec, image_size: int, logits: int) -> int:
    """Return the multiply-adds of one image's forward pass.

    >>> from lockstep.models.architectures import MODELS
    >>> round(forward_macs(MODELS["resnet50"], 224, 1000) / 1e9, 2)  # torchvision: 4.09
    4.09
    """
    return sum(layer.macs for layer in layers(spec, image_size, logits))


def work(
    spec: ModelSpec, image_size: int, logits: int, *, precision: str, batch: int, training: bool
) -> Work:
    """Return operations and bytes of one image in a batch of `batch` images.

    - Inference: every convolution reads its input and writes its output. Batch norm, ReLU and
      addition are part of it. An addition also reads the value of the shortcut.
    - Training: the forward pass and both gradients have the same multiply-adds, except that the
      gradient of the images is not needed. Batch norm reads its input twice and writes its output.
      In the backward pass it reads two tensors twice and writes one. Each gradient of a convolution
      reads its own inputs.

    The batch shares the weights.
    """
    all_layers = list(layers(spec, image_size, logits))
    convolutions = all_layers[:-1]
    classifier = all_layers[-1]
    macs = sum(layer.macs for layer in all_layers)
    weights = sum(layer.weights for layer in all_layers)
    added = sum(_count_added(spec, image_size))
    value_bytes = VALUE_BYTES[precision]
    batch_bytes = weights * value_bytes
    if training:
        first = convolutions[0]
        macs = 3 * macs - first.macs
        values = sum(3 * layer.inputs + 11 * layer.outputs for layer in convolutions)
        values -= first.inputs + first.outputs
        values += 3 * (classifier.inputs + classifier.outputs) + 2 * added
        batch_bytes = 3 * batch_bytes + UPDATE_BYTES * spec.count_parameters(logits)
    else:
        values = sum(layer.inputs + layer.outputs for layer in all_layers) + added
    return Work(2.0 * macs, values * value_bytes + batch_bytes / batch)


def _count_added(spec: ModelSpec, image_size: int) -> Iterator[int]:
    """Yield the number of values that each block's addition reads from the shortcut."""
    size = _halve(_halve(image_size))
    for block in spec.list_blocks():
        for conv in block.convs:
            size = _after(conv, size)
        yield block.convs[-1].outputs * size**2


def limit_images_per_sec(work: Work, gemm_gflops: float, copy_gb_per_sec: float) -> float:
    """Return the largest rate, in images per second, that matrix products and memory allow.

    >>> limit_images_per_sec(Work(flops=2e9, bytes=1e8), gemm_gflops=100, copy_gb_per_sec=10)
    50.0
    """
    return 1 / max(work.flops / (gemm_gflops * 1e9), work.bytes / (copy_gb_per_sec * 1e9))
