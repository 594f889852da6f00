"""The work of an image: operations and bytes, counted from its architecture.

Operations are those of convolutions and the classifier; a multiply-add is two. Bytes are what the kernels of a step read and
write if each reads its inputs once and nothing stays in a cache between two kernels. docs/benchmarking.md has both in words.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from lockstep.models.architectures import Conv, ModelSpec, blocks, features, parameter_count, stem

VALUE_BYTES = {"fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2}
"""Of an activation, by precision."""
UPDATE_BYTES = 20
"""A parameter's: float32 weight, velocity and gradient are read, weight and velocity written."""


@dataclass(frozen=True)
class Work:
    """What one image costs."""

    flops: float
    bytes: float


@dataclass(frozen=True)
class Layer:
    """A convolution at work on one image: multiply-adds, and values that enter, leave and are in its kernel."""

    macs: int
    inputs: int
    outputs: int
    weights: int


def layers(spec: ModelSpec, image_size: int, logits: int) -> Iterator[Layer]:
    """Yield every convolution on an image of `image_size` pixels a side, the stem first, and the classifier last."""
    first = stem(spec)
    yield _layer(first, image_size)
    size = _halved(_after(first, image_size))  # the max pool
    for block in blocks(spec):
        entering = size
        for conv in block.convs:
            yield _layer(conv, size)
            size = _after(conv, size)
        if block.shortcut is not None:
            yield _layer(block.shortcut, entering)
    classifier = features(spec) * logits
    yield Layer(classifier, features(spec), logits, classifier)


def _layer(conv: Conv, size: int) -> Layer:
    weights = conv.outputs * conv.inputs // conv.groups * conv.kernel**2
    pixels = _after(conv, size) ** 2
    return Layer(weights * pixels, conv.inputs * size**2, conv.outputs * pixels, weights)


def _after(conv: Conv, size: int) -> int:
    return _halved(size) if conv.stride == 2 else size


def _halved(size: int) -> int:
    """Return the size after a stride of 2, whether padding is symmetric or TensorFlow's."""
    return -(-size // 2)


def forward_macs(spec: ModelSpec, image_size: int, logits: int) -> int:
    """Return the multiply-adds of one image's forward pass.

    >>> from lockstep.models.architectures import MODELS
    >>> round(forward_macs(MODELS["resnet50"], 224, 1000) / 1e9, 2)  # torchvision: 4.09
    4.09
    """
    return sum(layer.macs for layer in layers(spec, image_size, logits))


def work(spec: ModelSpec, image_size: int, logits: int, *, precision: str, batch: int, training: bool) -> Work:
    """Return operations and bytes of one image in a batch of so many.

    Inference: every convolution reads its input and writes its output, batch norm, ReLU and addition within; an addition
    reads the other side. Training: forward and both gradients have the same multiply-adds, but no gradient of the images is
    needed; batch norm reads its input twice and writes its output, and reads two tensors twice and writes one on the way
    back; a convolution's gradients read theirs each. Weights are shared by the batch.
    """
    found = list(layers(spec, image_size, logits))
    convolutions, classifier = found[:-1], found[-1]
    macs, weights = sum(layer.macs for layer in found), sum(layer.weights for layer in found)
    added = sum(_added(spec, image_size))
    if training:
        first = convolutions[0]
        macs = 3 * macs - first.macs
        values = sum(3 * layer.inputs + 11 * layer.outputs for layer in convolutions) - first.inputs - first.outputs
        values += 3 * (classifier.inputs + classifier.outputs) + 2 * added
        of_batch = 3 * weights * VALUE_BYTES[precision] + UPDATE_BYTES * parameter_count(spec, logits)
    else:
        values = sum(layer.inputs + layer.outputs for layer in found) + added
        of_batch = weights * VALUE_BYTES[precision]
    return Work(2.0 * macs, values * VALUE_BYTES[precision] + of_batch / batch)


def _added(spec: ModelSpec, image_size: int) -> Iterator[int]:
    """Yield the values that each block adds to its own."""
    size = _halved(_halved(image_size))
    for block in blocks(spec):
        for conv in block.convs:
            size = _after(conv, size)
        yield block.convs[-1].outputs * size**2
