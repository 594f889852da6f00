"""A `ModelSpec` as PyTorch modules, with torchvision's names."""

from collections.abc import Callable
from itertools import repeat
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.backends.torch.fused_batch_norm import activate, activate_sum, drop_images
from lockstep.backends.torch.padding import same_padding
from lockstep.models.architectures import Block, Conv, ModelSpec, Squeeze
from lockstep.recipes import Recipe
from lockstep.recipes.stochastic_depth import drop_rates

torch.fx.wrap("same_padding")  # its sizes are those of the images: a tracer keeps the call


class Network(nn.Module):
    """ResNet or ResNeXt: normalised images [N, 3, H, W] to logits [N, logits].

    It computes what every framework computes in evaluation, without dropout and stochastic depth.
    """

    def __init__(self, spec: ModelSpec, recipe: Recipe, *, quantised: bool = False) -> None:
        super().__init__()
        *firsts, last = spec.list_stem()
        self.conv1 = (
            _DeepStem((*firsts, last), recipe, quantised)
            if firsts
            else _conv(last, recipe, quantised)
        )
        self.bn1 = _batch_norm(last, recipe)
        self.maxpool = (
            nn.Sequential(nn.MaxPool2d(3, stride=1, padding=1), _Blur(stride=2))
            if spec.pool_blurs
            else _MaxPool(recipe)
        )
        rates = drop_rates(recipe)
        stages: dict[str, list[nn.Module]] = {}
        for block in spec.list_blocks():
            stages.setdefault(block.name.split(".")[0], []).append(
                _Residual(block, recipe, quantised, rates[block.name])
            )
        for name, modules in stages.items():
            self.add_module(name, nn.Sequential(*modules))
        self._stages = list(stages)
        linear: type[nn.Linear] = nn.Linear
        if quantised:
            from lockstep.backends.torch.quantisation import QuantisedLinear

            linear = QuantisedLinear
        self.fc = linear(spec.features, recipe.logits)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits."""
        return self.fc(self.forward_features(images).mean(dim=(2, 3)))

    def forward_features(self, images: Tensor) -> Tensor:
        """Return the output of the last stage, [N, features, h, w]; its mean is classified."""
        x = self.forward_stem(images)
        for number in range(1, len(self._stages) + 1):
            x = self.stage(number)(x)
        return x

    def forward_stem(self, images: Tensor) -> Tensor:
        """Return the input of the first stage."""
        return self.maxpool(activate(self.bn1, self.conv1(images)))

    def stage(self, number: int) -> nn.Module:
        """Return a stage, 1 to 4. The output of the last one is averaged and classified."""
        return self.get_submodule(self._stages[number - 1])


class Model(Network):
    """The network as it is trained, with dropout and stochastic depth.

    With `quantised`, convolutions and classifier are those of
    `lockstep.backends.torch.quantisation`. With `recompute`, residual blocks keep only their inputs
    in training (`lockstep.backends.torch.recomputation`).
    """

    def __init__(
        self, spec: ModelSpec, recipe: Recipe, *, quantised: bool = False, recompute: bool = False
    ) -> None:
        super().__init__(spec, recipe, quantised=quantised)
        self._dropout = recipe.dropout
        self._recompute_block: Callable[..., Tensor] | None = None
        if recompute:
            from lockstep.backends.torch.recomputation import recompute_block

            self._recompute_block = recompute_block

    def forward(
        self,
        images: Tensor,
        kept_features: Tensor | None = None,
        kept_blocks: Tensor | None = None,
    ) -> Tensor:
        """Return the logits. Dropout leaves the `kept_features`, bool [N, features], and stochastic
        depth the `kept_blocks`, bool [N, blocks]."""
        x = (
            self._train_blocks(images, kept_blocks)
            if self.training
            else self.forward_features(images)
        )
        x = x.mean(dim=(2, 3))
        if kept_features is not None:
            x = x * (kept_features / (1 - self._dropout))
        return self.fc(x)

    def _train_blocks(self, images: Tensor, kept_blocks: Tensor | None) -> Tensor:
        x = self.forward_stem(images)
        columns = repeat(None) if kept_blocks is None else kept_blocks.unbind(dim=1)
        blocks = [block for name in self._stages for block in self.get_submodule(name).children()]
        recompute = self._recompute_block
        for block, kept in zip(blocks, columns, strict=False):
            x = block(x, kept) if recompute is None else recompute(block, x, kept)
        return x


class _DeepStem(nn.Module):
    """The convolutions of a deep stem, with the names that they have in timm's `nn.Sequential`. The
    batch norm of the last one is outside."""

    def __init__(self, convs: tuple[Conv, ...], recipe: Recipe, quantised: bool) -> None:
        super().__init__()
        self._names = [conv.name.split(".")[1] for conv in convs]
        for conv in convs:
            self.add_module(conv.name.split(".")[1], _conv(conv, recipe, quantised))
            if conv is not convs[-1]:
                self.add_module(conv.bn_name.split(".")[1], _batch_norm(conv, recipe))

    def forward(self, x: Tensor) -> Tensor:
        *firsts, last = self._names
        for name in firsts:
            x = self.get_submodule(name)(x)
            x = activate(self.get_submodule(str(int(name) + 1)), x)
        return self.get_submodule(last)(x)


class _Residual(nn.Module):
    def __init__(self, block: Block, recipe: Recipe, quantised: bool, drop_rate: float) -> None:
        super().__init__()
        self._depth = len(block.convs)
        self._drop_rate = drop_rate
        self._blurs_before = [conv.before == "blur" for conv in block.convs]
        self._blurs_after = [conv.blurs_after for conv in block.convs]
        for i, conv in enumerate(block.convs, start=1):
            self.add_module(f"conv{i}", _conv(conv, recipe, quantised))
            self.add_module(f"bn{i}", _batch_norm(conv, recipe))
        self.se = _Squeeze(block.squeeze) if block.squeeze is not None else None
        self.downsample = (
            _shortcut(block.shortcut, recipe, quantised) if block.shortcut is not None else None
        )
        self._blurs_shortcut = block.shortcut is not None and block.shortcut.before == "blur"
        if any(self._blurs_after):
            self.blur = _Blur(stride=2)
        elif any(self._blurs_before):
            self.blur = _Blur(stride=1)

    def forward(self, x: Tensor, kept: Tensor | None = None) -> Tensor:
        """Return the block's output. Stochastic depth leaves the convolutions of the `kept` images,
        bool [N]."""
        shortcut = x
        if self.downsample is not None:
            shortcut = self.downsample(self.blur(x) if self._blurs_shortcut else x)
        for i in range(1, self._depth):
            if self._blurs_before[i - 1]:
                x = self.blur(x)
            x = activate(self.get_submodule(f"bn{i}"), self.get_submodule(f"conv{i}")(x))
            if self._blurs_after[i - 1]:
                x = self.blur(x)
        x = self.get_submodule(f"conv{self._depth}")(x)
        norm = self.get_submodule(f"bn{self._depth}")
        if not self._drop_rate:
            kept = None
        if self.se is None and kept is None:
            return activate(norm, x, shortcut)
        x = norm(x)
        if self.se is not None:
            x = self.se(x)
        if kept is not None:
            x = drop_images(x, kept, self._drop_rate)
        return activate_sum(x, shortcut)


def _shortcut(conv: Conv, recipe: Recipe, quantised: bool) -> nn.Sequential:
    """Return a shortcut with the names that its convolution and batch norm have in the model. A
    blur before it is outside."""
    layers: list[nn.Module] = []
    if conv.before == "average":
        layers.append(nn.AvgPool2d(2, stride=2, ceil_mode=True, count_include_pad=False))
    elif conv.name.endswith("downsample.1"):
        layers.append(nn.Identity())
    return nn.Sequential(*layers, _conv(conv, recipe, quantised), _batch_norm(conv, recipe))


class _Squeeze(nn.Module):
    """Squeeze-and-excitation, with timm's names."""

    def __init__(self, squeeze: Squeeze) -> None:
        super().__init__()
        self.fc1 = nn.Conv2d(squeeze.channels, squeeze.hidden, 1)
        self.fc2 = nn.Conv2d(squeeze.hidden, squeeze.channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return x [N, C, H, W] with every channel times its factor."""
        hidden = F.relu(self.fc1(x.mean(dim=(2, 3), keepdim=True)), inplace=True)
        return x * self.fc2(hidden).sigmoid()


class _Blur(nn.Module):
    """A blur, as `lockstep.models.architectures.ModelSpec.blur` describes it: of stride 2 padded
    with mirrored pixels, or of stride 1 padded with zeros."""

    kernel: Tensor

    def __init__(self, stride: Literal[1, 2]) -> None:
        super().__init__()
        self._stride = stride
        line = torch.tensor([0.25, 0.5, 0.25])
        self.register_buffer("kernel", line[:, None] * line, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the blurred values of x [N, C, H, W]."""
        channels = x.shape[1]
        kernel = self.kernel.to(x.dtype).expand(channels, 1, 3, 3)
        if self._stride == 1:
            return F.conv2d(x, kernel, padding=1, groups=channels)
        # Not by `F.pad`: its gradient is not deterministic on GPUs, and ExecuTorch's kernel fails
        # with channels as the last axis in memory.
        x = torch.cat([x[:, :, 1:2], x, x[:, :, -2:-1]], dim=2)
        x = torch.cat([x[..., 1:2], x, x[..., -2:-1]], dim=3)
        return F.conv2d(x, kernel, stride=2, groups=channels)


class _SameConv(nn.Conv2d):
    """A convolution with TensorFlow's SAME padding."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(
            F.pad(input, same_padding(input, self.kernel_size[0], self.stride[0]))
        )


class _MaxPool(nn.Module):
    """A 3x3 max pool of stride 2."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.same = recipe.choose_padding(3) == "same"

    def forward(self, x: Tensor) -> Tensor:
        if self.same:
            return F.max_pool2d(F.pad(x, same_padding(x, 3, 2), value=float("-inf")), 3, stride=2)
        return F.max_pool2d(x, 3, stride=2, padding=1)


def _conv(conv: Conv, recipe: Recipe, quantised: bool) -> nn.Conv2d:
    is_same = recipe.choose_padding(conv.kernel) == "same" and conv.stride > 1
    kind: type[nn.Conv2d] = _SameConv if is_same else nn.Conv2d
    if quantised:
        from lockstep.backends.torch.quantisation import QuantisedConv, SameQuantisedConv

        kind = SameQuantisedConv if is_same else QuantisedConv
    return kind(
        conv.inputs,
        conv.outputs,
        conv.kernel,
        stride=conv.stride,
        padding=0 if is_same else conv.kernel // 2,
        groups=conv.groups,
        bias=False,
    )


def _batch_norm(conv: Conv, recipe: Recipe) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(conv.outputs, eps=recipe.bn_epsilon, momentum=recipe.bn_momentum)
