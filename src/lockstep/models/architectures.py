"""The architectures as data: what a model consists of, not how a framework computes it.

A `ModelSpec` is a row of numbers. Its `list_blocks` turns it into convolutions with names, shapes
and strides, `list_tensors` into the name, shape and role of every tensor. Each backend builds its
modules from these. No other module of Lockstep describes a ResNet. Names are torchvision's, kernels
are OIHW, the classifier is (out, in).

Names of parts that torchvision does not have are timm's: the convolutions of a deep stem, shortcuts
with an average pool, and squeeze-and-excitation.

Sources: ResNet, arXiv:1512.03385; v1.5 (stride in the 3x3), NVIDIA's ResNet-50 v1.5 pages; ResNeXt,
arXiv:1611.05431; wide ResNet, arXiv:1605.07146; deep stem and average pool in shortcuts (ResNet-D),
arXiv:1812.01187; squeeze-and-excitation, arXiv:1709.01507; blur, arXiv:1904.11486. Forms and
numbers of the rows are those of torchvision 0.28, timm 1.0.31, NVIDIA's and FFCV's code.
"""

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from lockstep.system.errors import RecipeError, nearest

Role = Literal[
    "conv_weight", "bn_scale", "bn_bias", "bn_mean", "bn_var", "se_bias", "fc_weight", "fc_bias"
]
ListedRole = Literal[Role, "shortcut_bn_scale", "shortcut_bn_bias"]
"""What a list of roles can hold: a role, or the part of it in shortcuts alone."""
STEM_KERNELS = ("conv1.weight", "conv1.0.weight")
"""Names of the first kernel, of a plain and of a deep stem. Its inputs are the colours of an
image."""
MOST_LAYERS = 1000
"""Maximum number of blocks in a stage. The deepest published ResNet, with 1,202 layers, has 200."""
MOST_CHANNELS = 2**16
TRAINED_ROLES: tuple[Role, ...] = (
    "conv_weight",
    "bn_scale",
    "bn_bias",
    "se_bias",
    "fc_weight",
    "fc_bias",
)
Widths = tuple[int, int, int, int]
"""A number of channels for each of the four stages."""
NO_SQUEEZE: Widths = (0, 0, 0, 0)
DEEP_STEM = "a stem of three convolutions"
SHORTCUT_POOL = "average pools in shortcuts"
SQUEEZE = "squeeze-and-excitation"
BLUR = "blur"
PARTS = (DEEP_STEM, SHORTCUT_POOL, SQUEEZE, BLUR)
"""Parts that torchvision's ResNets do not have, in words."""
_STEM_MULTIPLES = {"plain": 1, "deep": 2, "tiered": 8}
"""The number that divides the width of a stem, by its kind."""


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
        and its role. `fc_bias` includes the biases of squeeze-and-excitation.

        >>> scale = Tensor("layer1.0.downsample.1.weight", (64,), "bn_scale")
        >>> scale.is_listed(["shortcut_bn_scale"])
        True
        """
        if self.role == "se_bias" and "fc_bias" in roles:
            return True
        return self.role in roles or (
            ".downsample." in self.name and f"shortcut_{self.role}" in roles
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
    before: Literal["", "average", "blur"] = ""
    """What its input passes first. "average": the mean of 2x2 values, with stride 2. "blur": a blur
    of stride 1, padded with zeros."""
    blurs_after: bool = False
    """Whether a blur of stride 2, padded with mirrored pixels, follows the ReLU after the batch
    norm."""

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Shape of the kernel, OIHW."""
        return (self.outputs, self.inputs // self.groups, self.kernel, self.kernel)


@dataclass(frozen=True)
class Squeeze:
    """Squeeze-and-excitation: two 1x1 convolutions with biases, `first` from `channels` to `hidden`
    channels and `second` back."""

    first: str
    second: str
    channels: int
    hidden: int

    def list_tensors(self) -> Iterator[Tensor]:
        """Yield its tensors."""
        for name, outputs, inputs in (
            (self.first, self.hidden, self.channels),
            (self.second, self.channels, self.hidden),
        ):
            yield Tensor(f"{name}.weight", (outputs, inputs, 1, 1), "conv_weight")
            yield Tensor(f"{name}.bias", (outputs,), "se_bias")


@dataclass(frozen=True)
class Block:
    """A residual block: `convs` in order with ReLU between them, then `squeeze` if there is one,
    then `shortcut` (or the identity) is added, then ReLU."""

    name: str
    convs: tuple[Conv, ...]
    shortcut: Conv | None
    squeeze: Squeeze | None = None


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """One architecture. Raises `RecipeError` for numbers that do not make a model."""

    __pydantic_config__: ClassVar = {"extra": "forbid"}

    block: Literal["basic", "bottleneck"]
    """Kind of residual block. "basic": two 3x3 convolutions. "bottleneck": 1x1, 3x3 and 1x1."""
    layers: tuple[int, int, int, int]
    """Number of blocks of each of the four stages."""
    stem: Literal["plain", "deep", "tiered"] = "plain"
    """First layers. "plain": one 7x7 convolution of stride 2. "deep": three 3x3 convolutions, the
    first with stride 2, with 1/2, 1/2 and all of `stem_width` outputs. "tiered": the same with 3/8,
    1/2 and all of them. A max pool of stride 2 follows."""
    stem_width: int = 64
    """Number of channels after the stem."""
    widths: Widths = (64, 128, 256, 512)
    """Channels of each stage before expansion."""
    groups: int = 1
    """Groups of a bottleneck's 3x3 convolution. 1: an ordinary convolution."""
    expansion: int = 4
    """A stage has this many times its width as outputs."""
    stride_in: Literal["3x3", "1x1"] = "3x3"
    """Which convolution of a bottleneck block halves the resolution: "3x3" is v1.5, "1x1" is v1. A
    basic block has the stride in its first 3x3."""
    shortcut_pool: bool = False
    """Whether shortcuts halve the resolution by the mean of 2x2 values, before a 1x1 convolution of
    stride 1. At an odd edge it is the mean of the values that exist."""
    squeeze_widths: Widths = NO_SQUEEZE
    """Squeeze-and-excitation of each stage: hidden channels, 0 for none. The output of a block's
    last batch norm is multiplied by sigmoid(second(ReLU(first(its mean over all pixels)))), one
    factor for each channel. `first` and `second` are 1x1 convolutions with biases."""
    blur: Literal["none", "before", "after"] = "none"
    """Blur with the 3x3 kernel (1, 2, 1) x (1, 2, 1) / 16 for each channel, where resolution is
    halved. "before": before every convolution of stride 2 but the first of the model, padded with
    zeros (FFCV). "after": within blocks, the convolution has stride 1, and a blur of stride 2
    follows its ReLU. In the stem, the max pool has stride 1, and a blur of stride 2 follows. It is
    padded with mirrored pixels (timm)."""

    def __post_init__(self) -> None:
        for name in ("layers", "widths", "squeeze_widths"):
            numbers = getattr(self, name)
            if len(numbers) != 4:
                raise RecipeError(
                    f"{name} of a model is {list(numbers)}; expected four numbers, one a stage"
                )
        if min(*self.layers, *self.widths, self.stem_width, self.groups, self.expansion) < 1:
            raise RecipeError(
                "layers, widths, stem_width, groups and expansion of a model must be at least 1"
            )
        if min(self.squeeze_widths) < 0:
            raise RecipeError("squeeze_widths of a model must be at least 0")
        if (
            max(self.layers) > MOST_LAYERS
            or max(*self.widths, *self.squeeze_widths, self.stem_width, self.expansion)
            > MOST_CHANNELS
        ):
            raise RecipeError(
                f"layers of a model must be at most {MOST_LAYERS} a stage, and widths,"
                f" squeeze_widths, stem_width and expansion at most {MOST_CHANNELS}: all of its"
                " tensors are listed before a run starts"
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
        least = _STEM_MULTIPLES[self.stem]
        if self.stem_width % least:
            raise RecipeError(
                f"a {self.stem} stem needs a stem_width that is a multiple of {least}, but it is"
                f" {self.stem_width}"
            )

    @property
    def parts(self) -> tuple[str, ...]:
        """What it has that torchvision's ResNets do not have, in words."""
        has_part = {
            DEEP_STEM: self.stem != "plain",
            SHORTCUT_POOL: self.shortcut_pool,
            SQUEEZE: self.squeeze_widths != NO_SQUEEZE,
            BLUR: self.blur != "none",
        }
        return tuple(part for part, is_there in has_part.items() if is_there)

    @property
    def pool_blurs(self) -> bool:
        """Return whether the max pool of the stem has stride 1, and a blur of stride 2 follows."""
        return self.blur == "after"

    @property
    def features(self) -> int:
        """Return the number of channels that enter the classifier."""
        return self.widths[-1] * self.expansion

    def list_stem(self) -> tuple[Conv, ...]:
        """Return the convolutions of the stem, each with a ReLU. The first one has stride 2. A
        3x3 max pool of stride 2 follows, or if `pool_blurs`, one of stride 1 and a blur of stride
        2."""
        width = self.stem_width
        if self.stem == "plain":
            return (Conv("conv1", "bn1", 3, width, kernel=7, stride=2),)
        first = width // 2 if self.stem == "deep" else width * 3 // 8
        return (
            Conv("conv1.0", "conv1.1", 3, first, kernel=3, stride=2),
            Conv("conv1.3", "conv1.4", first, width // 2, kernel=3),
            Conv("conv1.6", "bn1", width // 2, width, kernel=3),
        )

    def list_blocks(self) -> Iterator[Block]:
        """Yield the residual blocks in order. Stage s (1 to 4) is called `layer{s}`, and its blocks
        `layer{s}.{i}`."""
        inputs = self.stem_width
        stages = zip(self.layers, self.widths, self.squeeze_widths, strict=True)
        for stage, (depth, width, hidden) in enumerate(stages, start=1):
            for i in range(depth):
                stride = 2 if i == 0 and stage > 1 else 1
                name = f"layer{stage}.{i}"
                outputs = width * self.expansion
                convs = _convs(self, name, inputs, width, outputs, stride)
                shortcut = None
                if stride != 1 or inputs != outputs:
                    shortcut = _shortcut(self, name, inputs, outputs, stride)
                squeeze = None
                if hidden:
                    squeeze = Squeeze(f"{name}.se.fc1", f"{name}.se.fc2", outputs, hidden)
                yield Block(name, convs, shortcut, squeeze)
                inputs = outputs

    def list_convolutions(self) -> Iterator[Conv]:
        """Yield every convolution with a batch norm, in torchvision's order of names."""
        yield from self.list_stem()
        for block in self.list_blocks():
            yield from block.convs
            if block.shortcut is not None:
                yield block.shortcut

    def list_tensors(self, logits: int) -> Iterator[Tensor]:
        """Yield every tensor of the model, in torchvision's and timm's order of names."""
        for conv in self.list_stem():
            yield from _list_tensors(conv)
        for block in self.list_blocks():
            for conv in block.convs:
                yield from _list_tensors(conv)
            if block.squeeze is not None:
                yield from block.squeeze.list_tensors()
            if block.shortcut is not None:
                yield from _list_tensors(block.shortcut)
        yield Tensor("fc.weight", (logits, self.features), "fc_weight")
        yield Tensor("fc.bias", (logits,), "fc_bias")

    def count_parameters(self, logits: int) -> int:
        """Return the number of trained parameters.

        >>> MODELS["resnet50"].count_parameters(1000)
        25557032
        >>> MODELS["resnext101-32x4d"].count_parameters(1000)
        44177704
        """
        trained = (tensor for tensor in self.list_tensors(logits) if tensor.is_trained)
        return sum(math.prod(tensor.shape) for tensor in trained)


def _shortcut(spec: ModelSpec, name: str, inputs: int, outputs: int, stride: int) -> Conv:
    if not spec.shortcut_pool:
        conv = Conv(f"{name}.downsample.0", f"{name}.downsample.1", inputs, outputs, 1, stride)
        return _add_blur(spec, conv)
    conv = Conv(f"{name}.downsample.1", f"{name}.downsample.2", inputs, outputs, kernel=1)
    return replace(conv, before="average") if stride == 2 else conv


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
    convs = []
    for i, (c_in, c_out, kernel, step, groups) in enumerate(shapes, start=1):
        conv = Conv(f"{name}.conv{i}", f"{name}.bn{i}", c_in, c_out, kernel, step, groups)
        if spec.blur == "after" and step == 2:
            conv = replace(conv, stride=1, blurs_after=True)
        convs.append(_add_blur(spec, conv))
    return tuple(convs)


def _add_blur(spec: ModelSpec, conv: Conv) -> Conv:
    """Return a convolution of a block with the blur before it, if there is one."""
    return replace(conv, before="blur") if spec.blur == "before" and conv.stride == 2 else conv


_BATCH_NORM: tuple[tuple[str, Role], ...] = (
    ("weight", "bn_scale"),
    ("bias", "bn_bias"),
    ("running_mean", "bn_mean"),
    ("running_var", "bn_var"),
)


def _list_tensors(conv: Conv) -> Iterator[Tensor]:
    yield Tensor(f"{conv.name}.weight", conv.shape, "conv_weight")
    for suffix, role in _BATCH_NORM:
        yield Tensor(f"{conv.bn_name}.{suffix}", (conv.outputs,), role)


_SQUEEZE_16TH: Widths = (16, 32, 64, 128)
"""A sixteenth of the outputs of a bottleneck."""
_D: dict[str, Any] = {"stem": "deep", "shortcut_pool": True}
"""What ResNet-D changes."""
_S: dict[str, Any] = {"stem": "deep", "stem_width": 128}
_T: dict[str, Any] = _D | {"stem": "tiered"}
_SE: dict[str, Any] = {"squeeze_widths": _SQUEEZE_16TH}


def _resnet(*layers: int, **parts: Any) -> ModelSpec:
    """Return a ResNet of bottlenecks."""
    return ModelSpec(block="bottleneck", layers=layers, **parts)  # type: ignore[arg-type]


def _basic(*layers: int, **parts: Any) -> ModelSpec:
    return ModelSpec(block="basic", layers=layers, expansion=1, **parts)  # type: ignore[arg-type]


def _resnext(*layers: int, groups: int = 32, group_width: int = 4, **parts: Any) -> ModelSpec:
    """Return a ResNeXt whose groups have `group_width` channels in the first stage."""
    width = groups * group_width
    return _resnet(
        *layers,
        groups=groups,
        widths=(width, 2 * width, 4 * width, 8 * width),
        expansion=256 // width,
        **parts,
    )


MODELS: dict[str, ModelSpec] = {
    "resnet18": _basic(2, 2, 2, 2),
    "resnet34": _basic(3, 4, 6, 3),
    "resnet50": _resnet(3, 4, 6, 3),
    "resnet101": _resnet(3, 4, 23, 3),
    "resnet152": _resnet(3, 8, 36, 3),
    "resnet50-v1": _resnet(3, 4, 6, 3, stride_in="1x1"),
    "resnet101-v1": _resnet(3, 4, 23, 3, stride_in="1x1"),
    "resnet152-v1": _resnet(3, 8, 36, 3, stride_in="1x1"),
    "resnext101-32x4d": _resnext(3, 4, 23, 3),
    # NVIDIA's PyTorch code: 16 hidden channels in every stage.
    "se-resnext101-32x4d": _resnext(3, 4, 23, 3, squeeze_widths=(16, 16, 16, 16)),
    "resnet26": _resnet(2, 2, 2, 2),
    "wide_resnet50_2": _resnet(3, 4, 6, 3, widths=(128, 256, 512, 1024), expansion=2),
    "wide_resnet101_2": _resnet(3, 4, 23, 3, widths=(128, 256, 512, 1024), expansion=2),
    "resnext50-32x4d": _resnext(3, 4, 6, 3),
    "resnext101-32x8d": _resnext(3, 4, 23, 3, group_width=8),
    "resnext101-64x4d": _resnext(3, 4, 23, 3, groups=64),
    "resnet200": _resnet(3, 24, 36, 3),
    "resnet10t": _basic(1, 1, 1, 1, **_T),
    "resnet14t": _resnet(1, 1, 1, 1, **_T),
    "resnet18d": _basic(2, 2, 2, 2, **_D),
    "resnet26d": _resnet(2, 2, 2, 2, **_D),
    "resnet26t": _resnet(2, 2, 2, 2, **_T),
    "resnet34d": _basic(3, 4, 6, 3, **_D),
    "resnet50d": _resnet(3, 4, 6, 3, **_D),
    "resnet101d": _resnet(3, 4, 23, 3, **_D),
    "resnet152d": _resnet(3, 8, 36, 3, **_D),
    "resnet200d": _resnet(3, 24, 36, 3, **_D),
    "resnet50t": _resnet(3, 4, 6, 3, **_T),
    "resnet50c": _resnet(3, 4, 6, 3, stem="deep"),
    "resnet101c": _resnet(3, 4, 23, 3, stem="deep"),
    "resnet152c": _resnet(3, 8, 36, 3, stem="deep"),
    "resnet50s": _resnet(3, 4, 6, 3, **_S),
    "resnet101s": _resnet(3, 4, 23, 3, **_S),
    "resnet152s": _resnet(3, 8, 36, 3, **_S),
    "resnext50d-32x4d": _resnext(3, 4, 6, 3, **_D),
    "seresnet18": _basic(2, 2, 2, 2, squeeze_widths=(8, 8, 16, 32)),
    "seresnet34": _basic(3, 4, 6, 3, squeeze_widths=(8, 8, 16, 32)),
    "seresnet50": _resnet(3, 4, 6, 3, **_SE),
    "seresnet101": _resnet(3, 4, 23, 3, **_SE),
    "seresnet152": _resnet(3, 8, 36, 3, **_SE),
    "seresnet50t": _resnet(3, 4, 6, 3, **_T, **_SE),
    "seresnet152d": _resnet(3, 8, 36, 3, **_D, **_SE),
    "seresnet200d": _resnet(3, 24, 36, 3, **_D, **_SE),
    "seresnet269d": _resnet(3, 30, 48, 8, **_D, **_SE),
    "seresnext26d-32x4d": _resnext(2, 2, 2, 2, **_D, **_SE),
    "seresnext26t-32x4d": _resnext(2, 2, 2, 2, **_T, **_SE),
    "seresnext50-32x4d": _resnext(3, 4, 6, 3, **_SE),
    "seresnext101-32x4d": _resnext(3, 4, 23, 3, **_SE),
    "seresnext101-64x4d": _resnext(3, 4, 23, 3, groups=64, **_SE),
    "seresnext101-32x8d": _resnext(3, 4, 23, 3, group_width=8, **_SE),
    "seresnext101d-32x8d": _resnext(3, 4, 23, 3, group_width=8, **_D, **_SE),
    "resnetblur18": _basic(2, 2, 2, 2, blur="after"),
    "resnetblur50": _resnet(3, 4, 6, 3, blur="after"),
    "resnetblur50d": _resnet(3, 4, 6, 3, **_D, blur="after"),
    "resnetblur101d": _resnet(3, 4, 23, 3, **_D, blur="after"),
    "resnet50-ffcv": _resnet(3, 4, 6, 3, blur="before"),
}
"""Models by name. Of models with the same tensors, the first one is the one that a file without a
name is taken for."""


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

    It has the same parts, strides and groups, an eighth of the width, and at most two blocks a
    stage.

    >>> narrow_model(MODELS["resnext101-32x4d"]).widths
    (32, 32, 64, 128)
    """
    groups = spec.groups
    multiple = _STEM_MULTIPLES[spec.stem]
    return replace(
        spec,
        layers=tuple(min(layers, 2) for layers in spec.layers),  # type: ignore[arg-type]
        stem_width=max(spec.stem_width // 8 // multiple, 1) * multiple,
        widths=tuple(  # type: ignore[arg-type]
            max(groups, width // 8 // groups * groups) for width in spec.widths
        ),
        squeeze_widths=tuple(  # type: ignore[arg-type]
            -(-width // 8) for width in spec.squeeze_widths
        ),
    )
