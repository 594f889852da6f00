"""A `ModelSpec` as MXNet operators: NCHW on a CPU, where oneDNN computes, and NHWC on a GPU."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import mxnet as mx
import numpy as np

from lockstep.backends.shared.layout import Layout
from lockstep.models.architectures import Block, Conv, Squeeze
from lockstep.models.state import check_fit
from lockstep.recipes import Recipe
from lockstep.recipes.trained_tensors import frozen_norms

Node = Any
"""An `mx.sym.Symbol` or an `mx.nd.NDArray`: MXNet has no annotations."""

Moments = Callable[[Node, str], tuple[Node, Node]]
"""A function of float32 values and the name of their batch norm to mean and biased variance [C]."""

BFLOAT16 = np.dtype([("bfloat16", np.uint16)])
"""The type that stands for bf16 in MXNet's Python interface."""


class Pass:
    """One pass of a batch through a model, in the recipe's precision: as symbols, or computed
    operator by operator.

    `values` are the tensors by canonical name, in canonical layout. In training a batch norm that
    is not frozen overwrites its running statistics with the mean and biased variance of the batch.
    A graph does this in its backward pass, so that these values must be separate arrays.
    """

    def __init__(
        self,
        recipe: Recipe,
        values: Mapping[str, Node],
        size: tuple[int, int],
        *,
        training: bool,
        on_gpu: bool,
        moments: Moments | None = None,
    ) -> None:
        self._recipe = recipe
        self._values = values
        self._training = training
        self._on_gpu = on_gpu
        self._moments = moments
        self._layout = "NHWC" if on_gpu else "NCHW"
        self._ops = mx.sym if isinstance(values["fc.bias"], mx.sym.Symbol) else mx.nd
        self._frozen_norms = frozen_norms(recipe)
        self._size = size
        """Height and width of the activations that were computed last."""
        self.values_of_a_channel: dict[str, int] = {}
        """Number of values of a channel in one image, by the name of the batch norm that averages
        them."""

    def logits(
        self,
        images: Node,
        feature_factors: Node | None = None,
        branch_factors: Node | None = None,
    ) -> Node:
        """Return float32 logits [N, logits] of normalised images in the device's layout. Dropout
        multiplies features by `feature_factors`, float32 [N, features], and stochastic depth what
        blocks add by `branch_factors`, float32 [N, blocks]."""
        spec = self._recipe.spec
        x = self._round(images)
        for conv in spec.list_stem():
            x = self._relu(self._convolution(x, conv))
        stride = 1 if spec.pool_blurs else 2
        x = self._window(x, 3, stride, partial(self._max_pool, stride=stride))
        if spec.pool_blurs:
            x = self._blur(x, 2)
        for i, block in enumerate(spec.list_blocks()):
            factor = None
            if branch_factors is not None:
                factor = self._ops.slice_axis(branch_factors, axis=1, begin=i, end=i + 1)
            x = self._block(x, block, factor)
        x = self._ops.Flatten(
            self._ops.Pooling(
                x, global_pool=True, kernel=(1, 1), pool_type="avg", layout=self._layout
            )
        )
        if feature_factors is not None:
            x = self._ops.cast(self._round(x), dtype="float32") * feature_factors
        weight, bias = (self._round_tensor(name) for name in ("fc.weight", "fc.bias"))
        y = self._ops.FullyConnected(
            self._round(x), weight, bias, num_hidden=self._recipe.logits, name="fc"
        )
        return self._ops.cast(self._round(y), dtype="float32")

    def _round(self, x: Node) -> Node:
        """Return values rounded to the recipe's precision.

        MXNet has no fp16 products for CPUs. There the products are float32, of numbers that were
        rounded to fp16.
        """
        if self._recipe.precision == "bf16":
            return self._ops.amp_cast(x, dtype=BFLOAT16)
        if self._recipe.precision != "fp16":
            return x
        x = self._ops.cast(x, dtype="float16")
        return x if self._on_gpu else self._ops.cast(x, dtype="float32")

    def _round_tensor(self, name: str) -> Node:
        """Return a tensor of the model, rounded to the recipe's precision."""
        value = self._values[name]
        if self._training and self._recipe.precision == "bf16":
            # The backward pass of MXNet's cast to bf16 leaves a gradient that is accumulated as it
            # is. That of the identity adds to it.
            value = self._ops.identity(value)
        return self._round(value)

    def _block(self, x: Node, block: Block, factor: Node | None) -> Node:
        size = self._size
        shortcut = x if block.shortcut is None else self._convolution(x, block.shortcut)
        self._size = size
        for conv in block.convs[:-1]:
            x = self._relu(self._convolution(x, conv))
            if conv.blurs_after:
                x = self._blur(x, 2)
        x = self._convolution(x, block.convs[-1])
        if block.squeeze is not None:
            x = self._squeeze(x, block.squeeze)
        if factor is not None:
            factor = self._ops.reshape(factor, shape=(-1, 1, 1, 1))
            x = self._round(self._ops.broadcast_mul(self._ops.cast(x, dtype="float32"), factor))
        return self._relu(self._round(x + shortcut))

    def _squeeze(self, x: Node, squeeze: Squeeze) -> Node:
        """Return x with every channel times its factor."""
        mean = self._ops.Pooling(
            x, global_pool=True, kernel=(1, 1), pool_type="avg", layout=self._layout
        )
        hidden = self._relu(self._dense(self._round(mean), squeeze.first, squeeze.hidden))
        factors = self._ops.sigmoid(
            self._ops.cast(self._dense(hidden, squeeze.second, squeeze.channels), dtype="float32")
        )
        product = self._ops.broadcast_mul(
            self._ops.cast(x, dtype="float32"),
            self._ops.cast(self._round(factors), dtype="float32"),
        )
        return self._round(product)

    def _dense(self, x: Node, name: str, outputs: int) -> Node:
        """Return a 1x1 convolution with bias of one pixel of every image."""
        weight, bias = (self._round_tensor(f"{name}.{half}") for half in ("weight", "bias"))
        y = self._ops.Convolution(
            x,
            self._ops.transpose(weight, axes=(0, 2, 3, 1)) if self._on_gpu else weight,
            bias,
            kernel=(1, 1),
            num_filter=outputs,
            layout=self._layout,
            name=name,
        )
        return self._round(y)

    def _blur(self, x: Node, stride: int) -> Node:
        """Return x blurred: with stride 2 padded with mirrored pixels, with stride 1 with zeros.
        Update the size."""
        # Two means of 2x2 values make the kernel (1, 2, 1) x (1, 2, 1) / 16.
        mode = "reflect" if stride == 2 else "constant"
        x = self._ops.cast(x, dtype="float32")
        x = self._ops.transpose(x, axes=(0, 3, 1, 2)) if self._on_gpu else x
        x = self._ops.pad(x, mode=mode, pad_width=(0, 0, 0, 0, 1, 1, 1, 1))
        for step in (1, stride):
            x = self._ops.Pooling(x, kernel=(2, 2), stride=(step, step), pool_type="avg")
        self._size = (-(-self._size[0] // stride), -(-self._size[1] // stride))
        return self._round(self._ops.transpose(x, axes=(0, 2, 3, 1)) if self._on_gpu else x)

    def _prepare(self, x: Node, conv: Conv) -> Node:
        """Return the input of a convolution. Update the size."""
        if conv.before == "blur":
            return self._blur(x, 1)
        if conv.before == "average":
            x = self._ops.Pooling(
                x,
                kernel=(2, 2),
                stride=(2, 2),
                pool_type="avg",
                pooling_convention="full",
                count_include_pad=False,
                layout=self._layout,
            )
            self._size = (-(-self._size[0] // 2), -(-self._size[1] // 2))
            return self._round(x)
        return x

    def _convolution(self, x: Node, conv: Conv) -> Node:
        """Return the result of a convolution, after what comes before it, and the batch norm that
        follows it."""
        x = self._prepare(x, conv)

        def convolve(x: Node, pad: int) -> Node:
            kernel = self._round_tensor(f"{conv.name}.weight")
            return self._ops.Convolution(
                x,
                self._ops.transpose(kernel, axes=(0, 2, 3, 1)) if self._on_gpu else kernel,
                kernel=(conv.kernel, conv.kernel),
                stride=(conv.stride, conv.stride),
                pad=(pad, pad),
                num_filter=conv.outputs,
                num_group=conv.groups,
                no_bias=True,
                layout=self._layout,
                name=conv.name,
            )

        return self._batch_norm(
            self._round(self._window(x, conv.kernel, conv.stride, convolve)), conv.bn_name
        )

    def _max_pool(self, x: Node, pad: int, *, stride: int) -> Node:
        return self._ops.Pooling(
            x,
            kernel=(3, 3),
            stride=(stride, stride),
            pad=(pad, pad),
            pool_type="max",
            layout=self._layout,
        )

    def _window(
        self, x: Node, kernel: int, stride: int, slide: Callable[[Node, int], Node]
    ) -> Node:
        """Slide a window over images that are padded as in the recipe, and update the size."""
        # Both paddings are the same at stride 1.
        if stride == 1 or self._recipe.choose_padding(kernel) == "symmetric":
            y = slide(x, kernel // 2)
        else:
            # Zeros for the pool, too. A ReLU comes before it, whose gradient at 0 is 0, whichever
            # value is the largest.
            around = [
                (pad // 2, pad - pad // 2)
                for pad in (_same(length, kernel, stride) for length in self._size)
            ]
            y = slide(self._pad(x, around), 0) if any(map(any, around)) else slide(x, 0)
        self._size = (-(-self._size[0] // stride), -(-self._size[1] // stride))
        return y

    def _pad(self, x: Node, around: list[tuple[int, int]]) -> Node:
        """Return the images with zeros around them. The operator pads only the last two axes, and
        not in bf16."""
        x = self._ops.cast(x, dtype="float32")
        x = self._ops.transpose(x, axes=(0, 3, 1, 2)) if self._on_gpu else x
        x = self._ops.pad(x, mode="constant", pad_width=(0, 0, 0, 0, *around[0], *around[1]))
        return self._round(self._ops.transpose(x, axes=(0, 2, 3, 1)) if self._on_gpu else x)

    def _batch_norm(self, x: Node, name: str) -> Node:
        scale, bias, mean, variance = (
            self._values[f"{name}.{suffix}"]
            for suffix in ("weight", "bias", "running_mean", "running_var")
        )
        by_batch = self._training and name not in self._frozen_norms
        if by_batch:
            self.values_of_a_channel[name] = self._size[0] * self._size[1]
        if by_batch and self._moments is not None:
            return self._round(
                self._batch_norm_over_ranks(self._ops.cast(x, dtype="float32"), name, self._moments)
            )
        y = self._ops.BatchNorm(
            x,
            scale,
            bias,
            mean,
            variance,
            eps=self._recipe.bn_epsilon,
            momentum=0.0,
            fix_gamma=False,
            use_global_stats=not by_batch,
            axis=3 if self._on_gpu else 1,
            name=name,
        )
        return self._round(y)

    def _batch_norm_over_ranks(self, x: Node, name: str, moments: Moments) -> Node:
        shape = (1, 1, 1, -1) if self._on_gpu else (1, -1, 1, 1)
        mean, variance = moments(x, name)
        with mx.autograd.pause():
            for suffix, value in (("running_mean", mean), ("running_var", variance)):
                self._values[f"{name}.{suffix}"][:] = value
        scale, bias = (self._values[f"{name}.{suffix}"] for suffix in ("weight", "bias"))
        scale = scale / (variance + self._recipe.bn_epsilon).sqrt()
        centred = mx.nd.broadcast_sub(x, mean.reshape(shape))
        return mx.nd.broadcast_add(
            mx.nd.broadcast_mul(centred, scale.reshape(shape)), bias.reshape(shape)
        )

    def _relu(self, x: Node) -> Node:
        return self._ops.Activation(x, act_type="relu")


def variables(recipe: Recipe) -> dict[str, Node]:
    """Return a symbol for every tensor of the recipe's model, by canonical name."""
    return {tensor.name: mx.sym.var(tensor.name) for tensor in recipe.list_tensors()}


def _same(length: int, kernel: int, stride: int) -> int:
    """Return how much TensorFlow's SAME pads an axis, at both ends together."""
    return max((-(-length // stride) - 1) * stride + kernel - length, 0)


def load_module(recipe: Recipe, tensors: Mapping[str, np.ndarray]) -> Any:
    """Return the model as a `gluon.SymbolBlock` in evaluation mode: normalised NCHW images to
    logits.

    With padding "same", the padding is right only for images of the recipe's `eval_crop`.
    """
    check_fit(Layout(recipe).shapes, tensors, "weights")
    size = (recipe.eval_crop, recipe.eval_crop)
    images = mx.sym.var("data", dtype="float32")
    logits = Pass(recipe, variables(recipe), size, training=False, on_gpu=False).logits(images)
    block = mx.gluon.SymbolBlock([logits], [images])
    for name, parameter in block.collect_params().items():
        value = mx.nd.array(np.asarray(tensors[name], np.float32))
        parameter.shape = value.shape
        parameter.initialize(ctx=mx.cpu())
        parameter.set_data(value)
    return block
