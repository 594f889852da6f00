"""The architectures as data: what a model consists of, not how a framework computes it.

A `ModelSpec` is a row of numbers. `blocks` turns it into convolutions with names, shapes and
strides. `tensors` turns it into the name, shape and role of every tensor. Each backend builds its
modules from these. No other module of Lockstep describes a ResNet. Names are torchvision's, kernels
are OIHW, the classifier is (out, in).

Sources: ResNet, arXiv:1512.03385; v1.5 (stride in the 3x3), NVIDIA's ResNet-50 v1.5 pages; ResNeXt,
arXiv:1611.05431.
"""

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from lockstep.system.errors import RecipeError, nearest

Role = Literal["conv_weight", "bn_scale", "bn_bias", "bn_mean", "bn_var", "fc_weight", "fc_bias"]
ListedRole = Literal[Role, "shortcut_bn_scale", "shortcut_bn_bias"]
"""What a list of roles can hold: a role, or the part of it in shortcuts alone."""
STEM_KERNEL = "conv1.weight"
"""Name of the first kernel, whose inputs are the colours of an image."""
MOST_LAYERS = 1000
"""Maximum number of blocks in a stage. The deepest published ResNet, with 1,202 layers, has 200."""
MOST_CHANNELS = 2**16
TRAINED_ROLES: tuple[Role, ...] = ("conv_weight", "bn_scale", "bn_bias", "fc_weight", "fc_bias")


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """One architecture.

    `widths` are the channels of the four stages before expansion. `groups` are the groups of a
    bottleneck's 3x3 convolution (1: an ordinary convolution). `stride_in` says which convolution of
    a bottleneck block halves the resolution: "3x3" is v1.5, "1x1" is v1. A basic block always has
    the stride in its first 3x3. Raises `RecipeError` for numbers that do not make a model.
    """

    block: Literal["basic", "bottleneck"]
    layers: tuple[int, int, int, int]
    stem_width: int = 64
    widths: tuple[int, int, int, int] = (64, 128, 256, 512)
    groups: int = 1
    expansion: int = 4
    stride_in: Literal["3x3", "1x1"] = "3x3"

    def __post_init__(self) -> None:
        if min(*self.layers, *self.widths, self.stem_width, self.groups, self.expansion) < 1:
            raise RecipeError(
                "layers, widths, stem_width, groups and expansion of a model must be at least 1"
            )
        if (
            max(self.layers) > MOST_LAYERS
            or max(*self.widths, self.stem_width, self.expansion) > MOST_CHANNELS
        ):
            raise RecipeError(
                f"layers of a model must be at most {MOST_LAYERS} a stage, and widths, stem_width"
                f" and expansion at most {MOST_CHANNELS}: all of its tensors are listed before a"
                " run starts"
            )
        if self.block == "basic" and self.groups > 1:
            raise RecipeError(
                f"a basic block has no grouped convolution, but groups is {self.groups}; expected 1"
            )
        for width in self.widths:
            if width % self.groups:
                raise RecipeError(
                    f"a width of {width} channels does not divide into {self.groups} groups"
                )


_RESNEXT101 = ModelSpec(
    block="bottleneck", layers=(3, 4, 23, 3), groups=32, widths=(128, 256, 512, 1024), expansion=2
)

MODELS: dict[str, ModelSpec] = {
    "resnet18": ModelSpec(block="basic", layers=(2, 2, 2, 2), expansion=1),
    "resnet34": ModelSpec(block="basic", layers=(3, 4, 6, 3), expansion=1),
    "resnet50": ModelSpec(block="bottleneck", layers=(3, 4, 6, 3)),
    "resnet101": ModelSpec(block="bottleneck", layers=(3, 4, 23, 3)),
    "resnet152": ModelSpec(block="bottleneck", layers=(3, 8, 36, 3)),
    "resnet50-v1": ModelSpec(block="bottleneck", layers=(3, 4, 6, 3), stride_in="1x1"),
    "resnet101-v1": ModelSpec(block="bottleneck", layers=(3, 4, 23, 3), stride_in="1x1"),
    "resnet152-v1": ModelSpec(block="bottleneck", layers=(3, 8, 36, 3), stride_in="1x1"),
    "resnext101-32x4d": _RESNEXT101,
}


EXAMPLE = "model={block: bottleneck, layers: [2, 2, 2, 2]}"
"""A model without a name, as `--set` takes it: ResNet-26, with two bottlenecks a stage."""


def model_spec(model: str | ModelSpec) -> ModelSpec:
    """Return the spec of a named model, or the spec itself.

    Raises `RecipeError` for an unknown name.
    """
    if isinstance(model, ModelSpec):
        return model
    if model not in MODELS:
        raise RecipeError(
            f"there is no model {model!r}. {nearest(model, MODELS)} Other ResNets are described by"
            f" their blocks, such as ResNet-26: --set {EXAMPLE!r}"
        )
    return MODELS[model]


def narrow_model(spec: ModelSpec) -> ModelSpec:
    """Return a small model of the same kind, for fast checks.

    It has the same blocks, strides and groups, an eighth of the width, and at most two blocks a
    stage.

    >>> narrow_model(MODELS["resnext101-32x4d"]).widths
    (32, 32, 64, 128)
    """
    groups = spec.groups
    return replace(
        spec,
        layers=tuple(min(layers, 2) for layers in spec.layers),  # type: ignore[arg-type]
        stem_width=max(spec.stem_width // 8, 1),
        widths=tuple(  # type: ignore[arg-type]
            max(groups, width // 8 // groups * groups) for width in spec.widths
        ),
    )


@dataclass(frozen=True)
class Conv:
    """A convolution without bias, followed by a batch norm. `kernel` and `stride` are the same on
    both axes."""

    name: str
    bn_name: str
    inputs: int
    outputs: int
    kernel: int
    stride: int = 1
    groups: int = 1

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Shape of the kernel, OIHW."""
        return (self.outputs, self.inputs // self.groups, self.kernel, self.kernel)


@dataclass(frozen=True)
class Block:
    """A residual block: `convs` in order with ReLU between them, then `shortcut` (or the identity)
    is added, then ReLU."""

    name: str
    convs: tuple[Conv, ...]
    shortcut: Conv | None


def stem(spec: ModelSpec) -> Conv:
    """Return the first convolution (7x7, stride 2). ReLU and a 3x3 max pool of stride 2 follow."""
    return Conv("conv1", "bn1", 3, spec.stem_width, kernel=7, stride=2)


def blocks(spec: ModelSpec) -> Iterator[Block]:
    """Yield the residual blocks in order. Stage s (1 to 4) is called `layer{s}`, and its blocks
    `layer{s}.{i}`."""
    inputs = spec.stem_width
    for stage, (depth, width) in enumerate(zip(spec.layers, spec.widths, strict=True), start=1):
        for i in range(depth):
            stride = 2 if i == 0 and stage > 1 else 1
            name = f"layer{stage}.{i}"
            outputs = width * spec.expansion
            convs = _convs(spec, name, inputs, width, outputs, stride)
            shortcut = None
            if stride != 1 or inputs != outputs:
                names = (f"{name}.downsample.0", f"{name}.downsample.1")
                shortcut = Conv(*names, inputs, outputs, kernel=1, stride=stride)
            yield Block(name, convs, shortcut)
            inputs = outputs


def _convs(
    spec: ModelSpec, name: str, inputs: int, width: int, outputs: int, stride: int
) -> tuple[Conv, ...]:
    if spec.block == "basic":
        shapes = [(inputs, width, 3, stride, 1), (width, outputs, 3, 1, 1)]
    else:
        first, middle = (stride, 1) if spec.stride_in == "1x1" else (1, stride)
        shapes = [
            (inputs, width, 1, first, 1),
            (width, width, 3, middle, spec.groups),
            (width, outputs, 1, 1, 1),
        ]
    return tuple(
        Conv(f"{name}.conv{i}", f"{name}.bn{i}", c_in, c_out, kernel, stride, groups)
        for i, (c_in, c_out, kernel, stride, groups) in enumerate(shapes, start=1)
    )


def convolutions(spec: ModelSpec) -> Iterator[Conv]:
    """Yield every convolution of the model, in torchvision's order of names."""
    yield stem(spec)
    for block in blocks(spec):
        yield from block.convs
        if block.shortcut is not None:
            yield block.shortcut


def features(spec: ModelSpec) -> int:
    """Return the number of channels that enter the classifier."""
    return spec.widths[-1] * spec.expansion


@dataclass(frozen=True)
class Tensor:
    """Name, shape and role of one tensor of a model."""

    name: str
    shape: tuple[int, ...]
    role: Role

    @property
    def is_trained(self) -> bool:
        """Whether the optimizer updates it (batch norm statistics are not trained)."""
        return self.role in TRAINED_ROLES

    def is_listed(self, roles: Collection[ListedRole]) -> bool:
        """Return whether a list of roles includes it: by its role or, in a shortcut, by `shortcut_`
        and its role.

        >>> scale = Tensor("layer1.0.downsample.1.weight", (64,), "bn_scale")
        >>> scale.is_listed(["shortcut_bn_scale"])
        True
        """
        return self.role in roles or (
            ".downsample." in self.name and f"shortcut_{self.role}" in roles
        )


def tensors(spec: ModelSpec, logits: int) -> Iterator[Tensor]:
    """Yield every tensor of the model, in torchvision's order of names."""
    for conv in convolutions(spec):
        yield Tensor(f"{conv.name}.weight", conv.shape, "conv_weight")
        for suffix, role in _BATCH_NORM:
            yield Tensor(f"{conv.bn_name}.{suffix}", (conv.outputs,), role)
    yield Tensor("fc.weight", (logits, features(spec)), "fc_weight")
    yield Tensor("fc.bias", (logits,), "fc_bias")


_BATCH_NORM: tuple[tuple[str, Role], ...] = (
    ("weight", "bn_scale"),
    ("bias", "bn_bias"),
    ("running_mean", "bn_mean"),
    ("running_var", "bn_var"),
)


def parameter_count(spec: ModelSpec, logits: int) -> int:
    """Return the number of trained parameters.

    >>> parameter_count(MODELS["resnet50"], 1000), parameter_count(MODELS["resnext101-32x4d"], 1000)
    (25557032, 44177704)
    """
    return sum(math.prod(tensor.shape) for tensor in tensors(spec, logits) if tensor.is_trained)


def recognise(shapes: dict[str, tuple[int, ...]]) -> tuple[str, int]:
    """Return the name of the model with exactly these tensors, and its number of logits.

    v1 and v1.5 have the same tensors. The name of v1.5 is returned. Raises `RecipeError` if no
    model fits.
    """
    logits = math.prod(shapes.get("fc.bias", (0,)))
    for name, spec in MODELS.items():
        if {tensor.name: tensor.shape for tensor in tensors(spec, logits)} == shapes:
            return name, logits
    raise RecipeError(
        f"these {len(shapes)} tensors fit no known model. Known: {', '.join(MODELS)}."
    )
