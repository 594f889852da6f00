"""A `ModelSpec` as a graph of MXNet's symbols: NCHW on a CPU, where oneDNN computes, and NHWC on a GPU.

Variables have the canonical names of the tensors, and their layouts but for kernels on a GPU, which are OHWI.
"""

from collections.abc import Callable
from typing import Any

import mxnet as mx
import numpy as np

from lockstep.models import Block, Conv, blocks, model_spec, stem, tensors
from lockstep.recipes import Recipe

Symbol = Any
"""MXNet has no annotations."""

BFLOAT16 = np.dtype([("bfloat16", np.uint16)])
"""What MXNet calls bf16 in Python."""


class Graph:
    """A model for images of one size, in the recipe's precision.

    In training a batch norm writes the mean and biased variance of a batch over its running statistics, when the backward
    pass runs: what is bound to them must be arrays made for that.
    """

    def __init__(self, recipe: Recipe, size: tuple[int, int], *, training: bool, on_gpu: bool) -> None:
        self._recipe, self._training, self._on_gpu = recipe, training, on_gpu
        self._size = size
        self._variables = {
            tensor.name: mx.sym.var(tensor.name) for tensor in tensors(model_spec(recipe.model), recipe.logits)
        }
        self.values_of_a_channel: dict[str, int] = {}
        """Of one image, by the name of the batch norm that averages them."""

    def logits(self, images: Symbol) -> Symbol:
        """Return float32 logits [N, logits] of normalised images, float32 in the device's layout."""
        spec = model_spec(self._recipe.model)
        x = _relu(self._convolution(self._rounded(images), stem(spec)))
        x = self._window(x, 3, 2, self._max_pool)
        for block in blocks(spec):
            x = self._block(x, block)
        x = mx.sym.mean(mx.sym.cast(x, dtype="float32"), axis=(1, 2) if self._on_gpu else (2, 3))
        weight, bias = (self._rounded(self._variables[name]) for name in ("fc.weight", "fc.bias"))
        y = mx.sym.FullyConnected(self._rounded(x), weight, bias, num_hidden=self._recipe.logits, name="fc")
        return mx.sym.cast(self._rounded(y), dtype="float32")

    def _rounded(self, x: Symbol) -> Symbol:
        """Return values as the recipe's precision holds them.

        MXNet has no fp16 products for CPUs: there they are float32, of numbers that were rounded to fp16.
        """
        if self._recipe.precision == "bf16":
            return mx.sym.amp_cast(x, dtype=BFLOAT16)
        if self._recipe.precision != "fp16":
            return x
        x = mx.sym.cast(x, dtype="float16")
        return x if self._on_gpu else mx.sym.cast(x, dtype="float32")

    def _block(self, x: Symbol, block: Block) -> Symbol:
        size = self._size
        shortcut = x if block.shortcut is None else self._convolution(x, block.shortcut)
        self._size = size
        for conv in block.convs[:-1]:
            x = _relu(self._convolution(x, conv))
        return _relu(self._rounded(self._convolution(x, block.convs[-1]) + shortcut))

    def _convolution(self, x: Symbol, conv: Conv) -> Symbol:
        """A convolution and the batch norm behind it."""

        def convolved(x: Symbol, pad: int) -> Symbol:
            return mx.sym.Convolution(
                x,
                self._rounded(self._variables[f"{conv.name}.weight"]),
                kernel=(conv.kernel, conv.kernel),
                stride=(conv.stride, conv.stride),
                pad=(pad, pad),
                num_filter=conv.outputs,
                num_group=conv.groups,
                no_bias=True,
                layout="NHWC" if self._on_gpu else "NCHW",
                name=conv.name,
            )

        return self._batch_norm(self._rounded(self._window(x, conv.kernel, conv.stride, convolved)), conv.bn_name)

    def _max_pool(self, x: Symbol, pad: int) -> Symbol:
        layout = "NHWC" if self._on_gpu else "NCHW"
        return mx.sym.Pooling(x, kernel=(3, 3), stride=(2, 2), pad=(pad, pad), pool_type="max", layout=layout)

    def _window(self, x: Symbol, kernel: int, stride: int, slide: Callable[[Symbol, int], Symbol]) -> Symbol:
        """Slide a window over what is padded as the recipe says. The size moves on."""
        if self._recipe.padding == "symmetric" or stride == 1:  # the same thing at stride 1
            y = slide(x, kernel // 2)
        else:
            # Zeros for the pool too: what comes before it is a ReLU, and its gradient at 0 is 0 whatever is the largest.
            around = [(pad // 2, pad - pad // 2) for pad in (_same(length, kernel, stride) for length in self._size)]
            y = slide(self._padded(x, around), 0) if any(map(any, around)) else slide(x, 0)
        self._size = (-(-self._size[0] // stride), -(-self._size[1] // stride))
        return y

    def _padded(self, x: Symbol, around: list[tuple[int, int]]) -> Symbol:
        """Return zeros around the images. The operator pads the last two axes alone."""
        width = (0, 0, 0, 0, *around[0], *around[1])
        if not self._on_gpu:
            return mx.sym.pad(x, mode="constant", pad_width=width)
        padded = mx.sym.pad(mx.sym.transpose(x, axes=(0, 3, 1, 2)), mode="constant", pad_width=width)
        return mx.sym.transpose(padded, axes=(0, 2, 3, 1))

    def _batch_norm(self, x: Symbol, name: str) -> Symbol:
        scale, bias, mean, variance = (
            self._variables[f"{name}.{suffix}"] for suffix in ("weight", "bias", "running_mean", "running_var")
        )
        self.values_of_a_channel[name] = self._size[0] * self._size[1]
        y = mx.sym.BatchNorm(
            x,
            scale,
            bias,
            mean,
            variance,
            eps=self._recipe.bn_epsilon,
            momentum=0.0,
            fix_gamma=False,
            use_global_stats=not self._training,
            axis=3 if self._on_gpu else 1,
            name=name,
        )
        return self._rounded(y)


def _relu(x: Symbol) -> Symbol:
    return mx.sym.Activation(x, act_type="relu")


def _same(length: int, kernel: int, stride: int) -> int:
    """Return how much TensorFlow's SAME pads an axis, before and behind together."""
    return max((-(-length // stride) - 1) * stride + kernel - length, 0)
