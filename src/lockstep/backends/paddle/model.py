"""A `ModelSpec` as plain Paddle operations, in eager mode or in a program.

Weights have canonical names and layouts. These are also Paddle's layouts (kernels OIHW), except for
the classifier, which is [out, in] here. Images and activations are NCHW on a CPU and NHWC on a GPU.
"""

from collections.abc import Callable, Mapping

import numpy as np
import paddle
import paddle.nn.functional as F

from lockstep.backends.paddle.world import Tensor
from lockstep.models.architectures import Block, Conv, Squeeze
from lockstep.models.state import check_fit
from lockstep.recipes import Recipe
from lockstep.recipes.trained_tensors import frozen_norms, rate_factors

COMPUTED_IN = {"bf16": "bfloat16", "fp16": "float16"}

Moments = Callable[[Tensor], tuple[Tensor, Tensor, int]]
"""A function of values [N, C, H, W] to mean and biased variance [C] in float32, and the number of
values of a channel."""


class Pass:
    """One pass of a batch through a model, in the recipe's precision."""

    def __init__(
        self,
        recipe: Recipe,
        values: Mapping[str, Tensor],
        *,
        training: bool,
        on_gpu: bool = False,
        moments: Moments | None = None,
        onednn: bool = False,
    ) -> None:
        self._recipe = recipe
        self._values = values
        self._training = training
        self._moments = moments
        self._on_gpu = on_gpu
        self._onednn = onednn
        self._layout = "NHWC" if on_gpu else "NCHW"
        self._plane = [1, 2] if on_gpu else [2, 3]
        self._dtype = COMPUTED_IN.get(recipe.precision)
        self._frozen_norms = frozen_norms(recipe)
        self.statistics: dict[str, Tensor] = {}
        """In training, the statistics of this batch for batch norms that are not frozen: means and
        unbiased variances, in float32."""
        self._trained = rate_factors(recipe)
        self.required: list[Tensor] = []
        """In training, values whose gradients must be computed as well as those of the trained
        tensors: Paddle's gradient of a batch norm needs those of its scale and its bias, and
        oneDNN's gradients of batch norms and products need that of the input."""

    def logits(
        self,
        images: Tensor,
        feature_factors: Tensor | None = None,
        branch_factors: Tensor | None = None,
    ) -> Tensor:
        """Return float32 logits [N, logits] of normalised images in this device's layout. Dropout
        multiplies features by `feature_factors`, float32 [N, features], and stochastic depth what
        blocks add by `branch_factors`, float32 [N, blocks]."""
        spec = self._recipe.spec
        x = self._round(images)
        for conv in spec.list_stem():
            x = F.relu(self._convolution(x, conv))
        x = self._pool(self._plain(x), 1 if spec.pool_blurs else 2)
        if spec.pool_blurs:
            x = self._blur(x, 2)
        for i, block in enumerate(spec.list_blocks()):
            factor = None if branch_factors is None else branch_factors[:, i]
            x = self._block(x, block, factor)
        x = self._average(self._plain(x).cast("float32"))
        if feature_factors is not None:
            x = self._round(x) * feature_factors
        x = self._round(x)
        if self._training and x.stop_gradient:
            self._require(x)
        if self._training and "fc.weight" not in self._trained:
            self._require(self._values["fc.weight"])
        weight, bias = (self._round(self._values[name]) for name in ("fc.weight", "fc.bias"))
        # The bias has two axes: with one axis, oneDNN's kernel fails on its gradient for a single
        # image.
        y = paddle.matmul(x, weight, transpose_y=True) + bias.reshape([1, -1])
        return self._round(y).cast("float32")

    def _round(self, x: Tensor) -> Tensor:
        """Return values rounded to the recipe's precision.

        On CPUs Paddle computes with 32 bits. There values are rounded, and so are gradients in the
        backward pass.
        """
        if self._dtype is None:
            return x
        # In plain layout, since oneDNN does not cast the gradients of all kernels.
        return (
            x.cast(self._dtype)
            if self._on_gpu
            else self._plain(x.cast(self._dtype).cast("float32"))
        )

    def _plain(self, x: Tensor) -> Tensor:
        """Return the same values in Paddle's own memory layout, which the gradients then also have
        in the backward pass.

        oneDNN's convolutions leave one order of channels in the forward pass and another in the
        backward pass. Batch norm and ReLU that get both use oneDNN's slow reference code. Then a
        step of ResNet-50 took 2.2 times as long.
        """
        return paddle.assign(x) if self._onednn else x

    def _block(self, x: Tensor, block: Block, factor: Tensor | None) -> Tensor:
        shortcut = x if block.shortcut is None else self._convolution(x, block.shortcut)
        for conv in block.convs[:-1]:
            x = F.relu(self._convolution(x, conv))
            if conv.blurs_after:
                x = self._blur(x, 2)
        x = self._convolution(x, block.convs[-1])
        if block.squeeze is not None:
            x = self._squeeze(x, block.squeeze)
        if factor is not None:
            x = self._round(x * factor.reshape([-1, 1, 1, 1]))
        return F.relu(self._round(x + shortcut))

    def _squeeze(self, x: Tensor, squeeze: Squeeze) -> Tensor:
        """Return x with every channel times its factor."""
        shape = [-1, 1, 1, squeeze.channels] if self._on_gpu else [-1, squeeze.channels, 1, 1]
        mean = self._round(self._average(self._plain(x).cast("float32")).reshape(shape))
        hidden = F.relu(self._dense(mean, squeeze.first))
        factors = F.sigmoid(self._dense(hidden, squeeze.second))
        return self._round(x * self._round(factors))

    def _dense(self, x: Tensor, name: str) -> Tensor:
        """Return a 1x1 convolution with bias of one pixel of every image."""
        weight, bias = (self._round(self._values[f"{name}.{half}"]) for half in ("weight", "bias"))
        y = F.conv2d(self._plain(x), weight, data_format=self._layout)
        shape = [1, 1, 1, -1] if self._on_gpu else [1, -1, 1, 1]
        return self._round(self._plain(y) + bias.reshape(shape))

    def _blur(self, x: Tensor, stride: int) -> Tensor:
        """Return x blurred: with stride 2 padded with mirrored pixels, with stride 1 with zeros."""
        x = self._plain(x).cast("float32")
        for axis in self._plane:
            x = _blur_axis(x, axis, stride)
        return self._round(x)

    def _prepare(self, x: Tensor, conv: Conv) -> Tensor:
        """Return the input of a convolution."""
        if conv.before == "average":
            y = F.avg_pool2d(
                self._plain(x), 2, 2, ceil_mode=True, exclusive=True, data_format=self._layout
            )
            return self._round(self._plain(y))
        return self._blur(x, 1) if conv.before == "blur" else x

    def _convolution(self, x: Tensor, conv: Conv) -> Tensor:
        """Return the result of a convolution, after what comes before it, and the batch norm that
        follows it."""
        x = self._prepare(x, conv)
        kernel = self._round(self._values[f"{conv.name}.weight"])
        padding = self._padding(x, conv.kernel, conv.stride)
        y = F.conv2d(
            self._plain(x),
            kernel,
            stride=conv.stride,
            padding=[before_or_after for pair in padding for before_or_after in pair],
            groups=conv.groups,
            data_format=self._layout,
        )
        return self._round(self._batch_norm(self._round(self._plain(y)), conv.bn_name))

    def _padding(self, x: Tensor, kernel: int, stride: int) -> list[tuple[int, int]]:
        """Return the padding before and after height and width."""
        # Both paddings are the same at stride 1.
        if stride == 1 or self._recipe.choose_padding(kernel) == "symmetric":
            return [(kernel // 2, kernel // 2)] * 2
        # TensorFlow's SAME: n pixels become ceil(n / stride). Missing pixels are added on both
        # sides, the odd one after.
        missing = [
            max((-(-x.shape[axis] // stride) - 1) * stride + kernel - x.shape[axis], 0)
            for axis in self._plane
        ]
        return [(all_ // 2, all_ - all_ // 2) for all_ in missing]

    def _pool(self, x: Tensor, stride: int) -> Tensor:
        (top, bottom), (left, right) = self._padding(x, 3, stride)
        # A ReLU comes before the pool: padding with 0 and padding with the lowest number give the
        # same result. With ceil_mode a window can reach one place beyond the last.
        if (bottom - top) == (right - left):
            return self._max_pool(x, stride, [top, left], reaches_beyond=bottom > top)
        x = F.pad(x, [left, right, top, bottom], data_format=self._layout)
        return self._max_pool(x, stride, [0, 0], reaches_beyond=False)

    def _max_pool(
        self, x: Tensor, stride: int, padding: list[int], *, reaches_beyond: bool
    ) -> Tensor:
        if self._on_gpu or not self._training:
            return F.max_pool2d(
                x, 3, stride, padding, ceil_mode=reaches_beyond, data_format=self._layout
            )
        # With indices, which the backward pass then uses: the gradient of oneDNN's own pool fails.
        return F.max_pool2d(x, 3, stride, padding, ceil_mode=reaches_beyond, return_mask=True)[0]

    def _average(self, x: Tensor) -> Tensor:
        """Return the means over height and width, [N, C]."""
        if not self._on_gpu and not self._training:
            return F.adaptive_avg_pool2d(x, 1).flatten(1)
        # A sum: with a mean, Paddle prints a line when it chooses a kernel, and the gradient of
        # oneDNN's pool fails.
        return x.sum(self._plane) / (x.shape[self._plane[0]] * x.shape[self._plane[1]])

    def _batch_norm(self, x: Tensor, name: str) -> Tensor:
        scale, bias, mean, variance = (
            self._values[f"{name}.{suffix}"]
            for suffix in ("weight", "bias", "running_mean", "running_var")
        )
        epsilon = self._recipe.bn_epsilon
        is_frozen = name in self._frozen_norms
        shape = [1, 1, 1, -1] if self._on_gpu else [1, -1, 1, 1]
        if not self._training or (is_frozen and x.stop_gradient):
            # Paddle Inference folds this operation of a program into convolutions. It does not fold
            # `_C_ops.batch_norm`.
            return F.batch_norm(
                x, mean, variance, scale, bias, epsilon=epsilon, data_format=self._layout
            )
        if is_frozen:
            # By plain operations: oneDNN's gradient of a batch norm fails without those of scale
            # and bias.
            factor = (scale * paddle.rsqrt(variance + epsilon)).reshape(shape)
            y = (x.cast("float32") - mean.reshape(shape)) * factor + bias.reshape(shape)
            return y.cast(x.dtype)
        if self._moments is not None:
            mean, variance, count = self._moments(x)
            y = (x.cast("float32") - mean.reshape(shape)) * paddle.rsqrt(
                variance + epsilon
            ).reshape(shape)
            y = (y * scale.reshape(shape) + bias.reshape(shape)).cast(x.dtype)
        else:
            count = x.size // x.shape[self._layout.index("C")]
            for half, value in (("weight", scale), ("bias", bias)):
                if f"{name}.{half}" not in self._trained:
                    self._require(value)
            if x.stop_gradient:
                self._require(x)
            y, mean, variance = self._normalise_by_batch(x, scale, bias)
        self.statistics[f"{name}.running_mean"] = mean.detach()
        self.statistics[f"{name}.running_var"] = variance.detach() * (count / (count - 1))
        return y

    def _require(self, value: Tensor) -> None:
        value.stop_gradient = False
        self.required.append(value)

    def _normalise_by_batch(
        self, x: Tensor, scale: Tensor, bias: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the batch after batch norm, and the batch's mean and biased variance."""
        # At momentum 0 the running statistics become those of this batch. They are averaged
        # elsewhere, because Paddle would average a biased variance. This is the operation behind
        # `F.batch_norm`, which hides these outputs.
        y, running_mean, running_variance, saved_mean, saved_variance, _ = paddle._C_ops.batch_norm(
            x,
            paddle.zeros(scale.shape),
            paddle.zeros(scale.shape),
            scale,
            bias,
            False,
            0.0,
            self._recipe.bn_epsilon,
            self._layout,
            False,
            False,
        )
        # oneDNN's kernel reads running statistics from its output, which does not exist yet in a
        # program. For the backward pass it saves mean and variance. Other kernels save 1 / standard
        # deviation instead of the variance.
        return (
            (y, saved_mean, saved_variance) if self._onednn else (y, running_mean, running_variance)
        )


def _blur_axis(x: Tensor, axis: int, stride: int) -> Tensor:
    """Return x blurred along an axis with (1, 2, 1) / 4."""
    # By slices: in a program with oneDNN, the gradient of a padding fails.
    length = x.shape[axis]

    def cut(begin: int, end: int, step: int = 1) -> Tensor:
        return paddle.strided_slice(x, [axis], [begin], [end], [step])

    first = cut(1, 2)
    last = cut(length - 2, length - 1)
    if stride == 1:
        first = paddle.zeros_like(first)
        last = paddle.zeros_like(last)
    before = paddle.concat([first, cut(0, length - 1)], axis)
    after = paddle.concat([cut(1, length), last], axis)
    y = 0.25 * before + 0.5 * x + 0.25 * after
    return paddle.strided_slice(y, [axis], [0], [length], [stride])


class Model(paddle.nn.Layer):  # type: ignore[misc]
    """The model in evaluation mode: normalised images [N, 3, H, W] to logits [N, logits].
    `state_dict` is canonical."""

    def __init__(self, recipe: Recipe, values: Mapping[str, np.ndarray]) -> None:
        super().__init__()
        self._recipe = recipe
        table = {tensor.name: tensor for tensor in recipe.list_tensors()}
        check_fit({name: tensor.shape for name, tensor in table.items()}, values, "weights")
        for name, tensor in table.items():
            layer: paddle.nn.Layer = self
            *path, own = name.split(".")
            for part in path:
                if part not in layer._sub_layers:
                    layer.add_sublayer(part, paddle.nn.Layer())
                layer = layer._sub_layers[part]
            value = paddle.to_tensor(np.asarray(values[name], np.float32))
            if tensor.is_trained:
                initial = paddle.nn.initializer.Assign(value)
                layer.add_parameter(
                    own, layer.create_parameter(list(tensor.shape), default_initializer=initial)
                )
            else:
                layer.register_buffer(own, value)
        self.eval()

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits, float32."""
        on_gpu = paddle.get_device() != "cpu"
        x = images.transpose([0, 2, 3, 1]) if on_gpu else images
        return Pass(self._recipe, self.state_dict(), training=False, on_gpu=on_gpu).logits(x)
