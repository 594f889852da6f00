"""A `ModelSpec` as plain TensorFlow operations, NHWC.

Tensors have canonical names and TensorFlow's layouts: kernels [height, width, in / groups, out],
classifier [in, out].
"""

from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

import numpy as np
import tensorflow as tf

from lockstep.backends.shared.channels_last import convert_all, new_arrays
from lockstep.models.architectures import Block, Conv, Squeeze
from lockstep.recipes import Recipe
from lockstep.recipes.stochastic_depth import drop_rates
from lockstep.recipes.trained_tensors import frozen_norms

Tensor = Any
"""A `tf.Tensor` or `tf.Variable`: TensorFlow has no annotations."""

COMPUTED_IN = {"bf16": tf.bfloat16, "fp16": tf.float16}

graph = partial(tf.function, autograph=False)
"""`tf.function` that traces a function without changing it: its branches are Python's."""

Moments = Callable[[Tensor], tuple[Tensor, Tensor, int]]
"""A function of values [N, H, W, C] to mean and biased variance [C] in float32, and the number of
values of a channel."""


class Pass:
    """One pass of a batch through a model, in the recipe's precision."""

    def __init__(
        self,
        recipe: Recipe,
        values: Mapping[str, Tensor],
        *,
        training: bool,
        moments: Moments | None = None,
        recompute: bool = False,
    ) -> None:
        self._recipe = recipe
        self._values = values
        self._training = training
        self._moments = moments
        self._recomputes = recompute
        self._dtype = COMPUTED_IN.get(recipe.precision, tf.float32)
        # TensorFlow's fp16 products on CPUs add up in fp16, which is also slow. A GPU adds up in
        # float32.
        self._summed_in = (
            tf.float32
            if self._dtype == tf.float16 and not tf.config.list_logical_devices("GPU")
            else self._dtype
        )
        self._frozen_norms = frozen_norms(recipe)
        self._drop_rates = drop_rates(recipe)
        self.statistics: dict[str, Tensor] = {}
        """In training, the running statistics after this batch of batch norms that are not
        frozen."""

    def logits(
        self,
        images: Tensor,
        kept_features: Tensor | None = None,
        kept_blocks: Tensor | None = None,
    ) -> Tensor:
        """Return float32 logits [N, logits] of normalised images, float32 [N, H, W, 3]. Dropout
        leaves the `kept_features`, bool [N, features], and stochastic depth the `kept_blocks`, bool
        [N, blocks]."""
        spec = self._recipe.spec
        x = tf.cast(images, self._dtype)
        for conv in spec.list_stem():
            x = tf.nn.relu(self._convolution(x, conv))
        stride = 1 if spec.pool_blurs else 2
        x, padding = self._pad(x, 3, stride)
        x = tf.nn.max_pool2d(x, 3, stride, padding)
        if spec.pool_blurs:
            x = self._blur(x, 2)
        for i, block in enumerate(spec.list_blocks()):
            kept = None if kept_blocks is None else kept_blocks[:, i, None, None, None]
            x = self._recompute(x, block, kept) if self._recomputes else self._block(x, block, kept)
        x = tf.cast(tf.reduce_mean(tf.cast(x, tf.float32), axis=[1, 2]), self._dtype)
        if kept_features is not None:
            x = self._drop(x, kept_features, self._recipe.dropout)
        weight, bias = (self._round(self._values[name]) for name in ("fc.weight", "fc.bias"))
        y = tf.nn.bias_add(tf.matmul(self._widen(x), weight), bias)
        return tf.cast(tf.cast(y, self._dtype), tf.float32)

    def _drop(self, x: Tensor, kept: Tensor, rate: float) -> Tensor:
        """Return the `kept` values divided by 1 - `rate`, and 0 elsewhere."""
        factors = tf.cast(kept, tf.float32) / (1 - rate)
        return tf.cast(tf.cast(x, tf.float32) * factors, self._dtype)

    def _round(self, value: Tensor) -> Tensor:
        """Return a weight rounded to the recipe's precision, for a multiplication."""
        return self._widen(tf.cast(value, self._dtype))

    def _widen(self, x: Tensor) -> Tensor:
        return tf.cast(x, self._summed_in)

    def _recompute(self, x: Tensor, block: Block, kept: Tensor | None) -> Tensor:
        """Return a block's output. Until the backward pass, only its input is kept. The first pass
        counts for statistics."""
        names: list[str] = []

        def compute(x: Tensor) -> tuple[Tensor, ...]:
            run = Pass(self._recipe, self._values, training=True, moments=self._moments)
            y = run._block(x, block, kept)
            names[:] = run.statistics
            return y, *run.statistics.values()

        y, *statistics = tf.recompute_grad(compute)(x)
        self.statistics |= zip(names, statistics, strict=True)
        return y

    def _block(self, x: Tensor, block: Block, kept: Tensor | None) -> Tensor:
        """Return a block's output. Stochastic depth leaves the convolutions of the `kept` images,
        bool [N, 1, 1, 1]."""
        shortcut = x if block.shortcut is None else self._convolution(x, block.shortcut)
        for conv in block.convs[:-1]:
            x = tf.nn.relu(self._convolution(x, conv))
            if conv.blurs_after:
                x = self._blur(x, 2)
        x = self._convolution(x, block.convs[-1])
        if block.squeeze is not None:
            x = self._squeeze(x, block.squeeze)
        if kept is not None:
            x = self._drop(x, kept, self._drop_rates[block.name])
        return tf.nn.relu(x + shortcut)

    def _squeeze(self, x: Tensor, squeeze: Squeeze) -> Tensor:
        """Return x with every channel times its factor."""
        mean = tf.reduce_mean(tf.cast(x, tf.float32), axis=[1, 2], keepdims=True)
        hidden = tf.nn.relu(self._dense(tf.cast(mean, self._dtype), squeeze.first))
        return x * tf.sigmoid(self._dense(hidden, squeeze.second))

    def _dense(self, x: Tensor, name: str) -> Tensor:
        """Return a 1x1 convolution with bias of values [N, 1, 1, C]."""
        weight, bias = (self._round(self._values[f"{name}.{half}"]) for half in ("weight", "bias"))
        y = tf.nn.conv2d(self._widen(x), weight, 1, "VALID")
        return tf.cast(tf.nn.bias_add(y, bias), self._dtype)

    def _blur(self, x: Tensor, stride: int) -> Tensor:
        """Return x blurred: with stride 2 padded with mirrored pixels, with stride 1 with zeros."""
        line = tf.constant([0.25, 0.5, 0.25])
        kernel = tf.tile((line[:, None] * line)[..., None, None], [1, 1, x.shape[3], 1])
        mode = "REFLECT" if stride == 2 else "CONSTANT"
        wide = tf.pad(tf.cast(x, tf.float32), [[0, 0], [1, 1], [1, 1], [0, 0]], mode)
        y = tf.nn.depthwise_conv2d(wide, kernel, [1, stride, stride, 1], "VALID")
        return tf.cast(y, x.dtype)

    def _convolution(self, x: Tensor, conv: Conv) -> Tensor:
        """Return the result of a convolution, after what comes before it, and the batch norm that
        follows it."""
        if conv.before == "average":
            # TensorFlow's mean leaves out its padding, which is after the pixels.
            x = tf.nn.avg_pool2d(x, 2, 2, "SAME")
        elif conv.before == "blur":
            x = self._blur(x, 1)
        kernel = self._round(self._values[f"{conv.name}.weight"])
        x, padding = self._pad(self._widen(x), conv.kernel, conv.stride)
        if conv.groups == 1 or computes_groups(self._summed_in):
            x = tf.nn.conv2d(x, kernel, conv.stride, padding)
        else:
            parts = zip(
                tf.split(x, conv.groups, axis=3), tf.split(kernel, conv.groups, axis=3), strict=True
            )
            x = tf.concat(
                [tf.nn.conv2d(part, own, conv.stride, padding) for part, own in parts], axis=3
            )
        x = tf.cast(x, self._dtype)
        return self._batch_norm(x, conv.bn_name)

    def _pad(self, x: Tensor, kernel: int, stride: int) -> tuple[Tensor, str]:
        """Return the images to slide a window over, and TensorFlow's name for their padding."""
        if stride == 1 or self._recipe.choose_padding(kernel) == "same":
            return x, "SAME"  # both paddings are the same at stride 1
        # As a separate operation: a convolution in bf16 with explicit padding uses oneDNN's slow
        # path on a CPU. Zeros for the pool, too: a ReLU comes before it, whose gradient at 0 is 0,
        # whether padding or a pixel is the largest.
        pad = kernel // 2
        return (tf.pad(x, [[0, 0], [pad, pad], [pad, pad], [0, 0]]) if pad else x), "VALID"

    def _batch_norm(self, x: Tensor, name: str) -> Tensor:
        scale, bias, mean, variance = (
            self._values[f"{name}.{suffix}"]
            for suffix in ("weight", "bias", "running_mean", "running_var")
        )
        epsilon = self._recipe.bn_epsilon
        momentum = self._recipe.bn_momentum
        by_batch = self._training and name not in self._frozen_norms
        if by_batch and self._moments is not None:
            batch_mean, batch_variance, count = self._moments(x)
            y = tf.nn.batch_normalization(
                tf.cast(x, tf.float32), batch_mean, batch_variance, bias, scale, epsilon
            )
            y = tf.cast(y, x.dtype)
            unbiased = tf.stop_gradient(batch_variance) * (count / (count - 1))
            mean = mean + momentum * (tf.stop_gradient(batch_mean) - mean)
            variance = variance + momentum * (unbiased - variance)
        else:
            # With weight 1 for the new average, the operation expects no old values.
            old = (mean, variance) if not by_batch or momentum < 1 else ([], [])
            y, mean, variance, *_ = tf.raw_ops.FusedBatchNormV3(
                x=x,
                scale=scale,
                offset=bias,
                mean=old[0],
                variance=old[1],
                epsilon=epsilon,
                exponential_avg_factor=momentum if by_batch else 1.0,
                is_training=by_batch,
            )
        if by_batch:
            self.statistics[f"{name}.running_mean"], self.statistics[f"{name}.running_var"] = (
                mean,
                variance,
            )
        return y


@cache
def computes_groups(dtype: tf.DType) -> bool:
    """Return whether TensorFlow has kernels for grouped convolutions and their gradients on this
    device.

    GPUs have them, and so has oneDNN for float32 and bf16. TensorFlow's own CPU kernels do not
    support them.
    """

    @graph
    def gradient(x: Tensor, d_y: Tensor) -> Tensor:
        return tf.raw_ops.Conv2DBackpropFilter(
            input=x,
            filter_sizes=[3, 3, 4, 8],
            out_backprop=d_y,
            strides=[1, 1, 1, 1],
            padding="SAME",
        )

    try:
        with tf.init_scope():  # this function may be called while a step is traced
            gradient(tf.ones([1, 4, 4, 8], dtype), tf.ones([1, 4, 4, 8], dtype))
    except (tf.errors.InvalidArgumentError, tf.errors.UnimplementedError):
        return False
    return True


class Model(tf.Module):  # type: ignore[misc]
    """The model in evaluation mode: normalised images [N, H, W, 3] to logits [N, logits]."""

    def __init__(self, recipe: Recipe, values: Mapping[str, np.ndarray]) -> None:
        super().__init__()
        self._recipe = recipe
        self._values = new_variables(recipe)
        copy_into(self._values, values, "weights")

    def __call__(self, images: Tensor) -> Tensor:
        """Return the logits."""
        return Pass(self._recipe, self._values, training=False).logits(images)


def new_variables(recipe: Recipe) -> dict[str, Tensor]:
    """Return a variable of zeros for every tensor of the recipe's model, by canonical name."""
    arrays = new_arrays(recipe)
    variables = {}
    for tensor in recipe.list_tensors():
        variables[tensor.name] = tf.Variable(
            arrays[tensor.name], name=tensor.name, trainable=tensor.is_trained
        )
    return variables


def copy_into(into: Mapping[str, Tensor], values: Mapping[str, np.ndarray], what: str) -> None:
    """Assign canonical arrays to variables of the same names. Raises `CheckpointError` if names or
    shapes differ."""
    for name, array in convert_all(into, values, what).items():
        into[name].assign(array)
