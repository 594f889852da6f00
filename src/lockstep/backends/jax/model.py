"""A `ModelSpec` as plain JAX operations, NHWC.

Tensors have canonical names and JAX's usual layouts: kernels [height, width, in / groups, out],
classifier [in, out].
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from lockstep.backends.jax.batch_norm import ALONE, OverRanks, count_values, normalise_batch
from lockstep.backends.jax.convolutions import convolve
from lockstep.backends.shared.channels_last import convert_all, new_arrays
from lockstep.models.architectures import Block, Conv, Squeeze
from lockstep.models.quantisation import LARGEST, LOWEST, SMALLEST_SCALE
from lockstep.recipes import Recipe
from lockstep.recipes.stochastic_depth import drop_rates
from lockstep.recipes.trained_tensors import frozen_norms

Array = Any
"""A `jax.Array`, or what stands for one while a function is traced."""
Arrays = dict[str, Array]

COMPUTED_IN = {"bf16": jnp.bfloat16, "fp16": jnp.float16}


class Pass:
    """One pass of a batch through a model, in the recipe's precision."""

    def __init__(
        self,
        recipe: Recipe,
        values: Mapping[str, Array],
        *,
        training: bool,
        on_gpu: bool = False,
        over: OverRanks = ALONE,
        recompute: bool = False,
        scales: Mapping[str, Array] | None = None,
    ) -> None:
        """Prepare a pass. In training, batch norm computes with the images of the ranks `over`
        which it goes. With `scales` of inputs, float32 [] by the layer's name, convolutions and the
        classifier compute with weights and inputs in int8."""
        self._recipe = recipe
        self._values = values
        self._training = training
        self._on_gpu = on_gpu
        self._over = over
        self._recomputes = recompute
        self._scales = scales
        self._dtype = COMPUTED_IN.get(recipe.precision, jnp.float32)
        # XLA would widen the operands of convolutions on CPUs itself, but only of some.
        self._multiplied_in = self._dtype if on_gpu else jnp.float32
        # The default on GPUs is TensorFloat-32, on TPUs bf16.
        is_exact = self._multiplied_in == jnp.float32 and recipe.precision != "tf32"
        self._precision = lax.Precision.HIGHEST if is_exact else lax.Precision.DEFAULT
        self._frozen_norms = frozen_norms(recipe)
        self._drop_rates = drop_rates(recipe)
        self.statistics: Arrays = {}
        """In training, the running statistics after this batch of batch norms that are not
        frozen."""
        self.largest_inputs: Arrays = {}
        """In inference, the largest magnitude of the input of each convolution and the classifier:
        float32 [], by the layer's name."""

    def logits(
        self,
        images: Array,
        kept_features: Array | None = None,
        kept_blocks: Array | None = None,
    ) -> Array:
        """Return float32 logits [N, logits] of normalised images, float32 [N, H, W, 3]. Dropout
        leaves the `kept_features`, bool [N, features], and stochastic depth the `kept_blocks`, bool
        [N, blocks]."""
        spec = self._recipe.spec
        x = images.astype(self._dtype)
        for conv in spec.list_stem():
            x = _relu(self._convolution(x, conv))
        x = self._max_pool(x, 1 if spec.pool_blurs else 2)
        if spec.pool_blurs:
            x = _blur(x, 2)
        for i, block in enumerate(spec.list_blocks()):
            kept = None if kept_blocks is None else kept_blocks[:, i, None, None, None]
            x = self._recompute(x, block, kept) if self._recomputes else self._block(x, block, kept)
        x = _average(x).astype(self._dtype)
        if kept_features is not None:
            x = self._drop(x, kept_features, self._recipe.dropout)
        x, weight = self._quantise(x, "fc")
        return self._linear(x, "fc", weight).astype(jnp.float32)

    def _quantise(self, x: Array, layer: str) -> tuple[Array, Array]:
        """Return the input and the weight with which a layer computes."""
        weight = self._values[f"{layer}.weight"]
        if not self._training:
            self.largest_inputs[layer] = jnp.max(jnp.abs(x.astype(jnp.float32)))
        if self._scales is None:
            return x, weight
        return _fake_quantise(x.astype(jnp.float32), self._scales[layer]), _quantise_weight(weight)

    def _drop(self, x: Array, kept: Array, rate: float) -> Array:
        """Return the `kept` values divided by 1 - `rate`, and 0 elsewhere."""
        factors = kept.astype(jnp.float32) / (1 - rate)
        return (x.astype(jnp.float32) * factors).astype(self._dtype)

    def _widen(self, x: Array) -> Array:
        """Return values rounded to the recipe's precision, in the dtype of multiplications."""
        return x.astype(self._dtype).astype(self._multiplied_in)

    def _recompute(self, x: Array, block: Block, kept: Array | None) -> Array:
        """Return a block's output. Until the backward pass, only its input is kept."""

        def compute(x: Array, values: Mapping[str, Array]) -> tuple[Array, Arrays]:
            run = Pass(
                self._recipe,
                values,
                training=True,
                on_gpu=self._on_gpu,
                over=self._over,
                scales=self._scales,
            )
            y = run._block(x, block, kept)
            return y, run.statistics

        prefix = f"{block.name}."
        own = {name: value for name, value in self._values.items() if name.startswith(prefix)}
        y, statistics = jax.checkpoint(compute)(x, own)
        self.statistics |= statistics
        return y

    def _block(self, x: Array, block: Block, kept: Array | None) -> Array:
        """Return a block's output. Stochastic depth leaves the convolutions of the `kept` images,
        bool [N, 1, 1, 1]."""
        shortcut = x if block.shortcut is None else self._convolution(x, block.shortcut)
        for conv in block.convs[:-1]:
            x = _relu(self._convolution(x, conv))
            if conv.blurs_after:
                x = _blur(x, 2)
        x = self._convolution(x, block.convs[-1])
        if block.squeeze is not None:
            x = self._squeeze(x, block.squeeze)
        if kept is not None:
            x = self._drop(x, kept, self._drop_rates[block.name])
        return _relu(x + shortcut)

    def _squeeze(self, x: Array, squeeze: Squeeze) -> Array:
        """Return x with every channel times its factor."""
        factors = _average(x).astype(self._dtype)
        factors = _relu(self._dense(factors, squeeze.first))
        factors = lax.logistic(self._dense(factors, squeeze.second))
        return x * factors[:, None, None]

    def _dense(self, x: Array, name: str) -> Array:
        """Return a 1x1 convolution with bias of one pixel [N, C]."""
        return self._linear(x, name, self._values[f"{name}.weight"][0, 0])

    def _linear(self, x: Array, name: str, weight: Array) -> Array:
        """Return x times a weight [in, out], plus the bias of that name."""
        product = lax.dot(self._widen(x), self._widen(weight), precision=self._precision)
        return (product + self._widen(self._values[f"{name}.bias"])).astype(self._dtype)

    def _convolution(self, x: Array, conv: Conv) -> Array:
        """Return the result of a convolution, after what comes before it, and the batch norm that
        follows it."""
        if conv.before == "average":
            x = _average_pool_2x2(x)
        elif conv.before == "blur":
            x = _blur(x, 1)
        x, weight = self._quantise(x, conv.name)
        y = convolve(
            self._widen(x),
            self._widen(weight),
            (conv.stride, conv.stride),
            self._find_padding(x, conv.kernel, conv.stride),
            conv.groups,
            self._precision,
            on_gpu=self._on_gpu,
        )
        return self._batch_norm(y.astype(self._dtype), conv.bn_name)

    def _find_padding(self, x: Array, kernel: int, stride: int) -> list[tuple[int, int]]:
        """Return the numbers of pixels before and after both axes of images."""
        if self._recipe.choose_padding(kernel) == "symmetric":
            return [(kernel // 2, kernel // 2)] * 2
        return lax.padtype_to_pads(x.shape[1:3], (kernel, kernel), (stride, stride), "SAME")

    def _max_pool(self, x: Array, stride: int) -> Array:
        pads = self._find_padding(x, 3, stride)
        if self._training and not self._on_gpu:
            return pool_largest(x, stride, pads)
        padding = [(0, 0), *pads, (0, 0)]
        lowest = np.array(-np.inf, x.dtype)
        return lax.reduce_window(x, lowest, lax.max, (1, 3, 3, 1), (1, stride, stride, 1), padding)

    def _batch_norm(self, x: Array, name: str) -> Array:
        scale, bias, mean, variance = (
            self._values[f"{name}.{suffix}"]
            for suffix in ("weight", "bias", "running_mean", "running_var")
        )
        epsilon = self._recipe.bn_epsilon
        if not self._training or name in self._frozen_norms:
            factor = scale / lax.sqrt(variance + epsilon)
            return ((x.astype(jnp.float32) - mean) * factor + bias).astype(x.dtype)
        y, batch_mean, batch_variance = normalise_batch(x, scale, bias, epsilon, self._over)
        count = count_values(x, self._over)
        momentum = self._recipe.bn_momentum
        unbiased = batch_variance * (count / (count - 1))
        self.statistics |= {
            f"{name}.running_mean": mean + momentum * (batch_mean - mean),
            f"{name}.running_var": variance + momentum * (unbiased - variance),
        }
        return y


def _relu(x: Array) -> Array:
    """Return max(x, 0), with NaN for NaN. Its gradient at 0 is 0."""
    return lax.select(x <= 0, lax.full_like(x, 0), x)


def _average(x: Array) -> Array:
    """Return the mean over all pixels, float32 [N, C]."""
    return jnp.sum(x.astype(jnp.float32), axis=(1, 2)) / (x.shape[1] * x.shape[2])


def _average_pool_2x2(x: Array) -> Array:
    """Return the mean of every 2 x 2 pixels, 2 apart. At an odd edge it is the mean of the pixels
    that exist."""
    height, width = x.shape[1:3]
    padding = [(0, 0), (0, height % 2), (0, width % 2), (0, 0)]
    total = lax.reduce_window(
        x.astype(jnp.float32), np.float32(0), lax.add, (1, 2, 2, 1), (1, 2, 2, 1), padding
    )
    rows, columns = (_count_pairs(length) for length in (height, width))
    return (total / (rows[:, None, None] * columns[:, None])).astype(x.dtype)


def _count_pairs(length: int) -> np.ndarray:
    """Return how many of an axis' pixels are in every pair: 2, and 1 for the last one alone."""
    counts = np.full(-(-length // 2), 2, np.float32)
    counts[-1] -= length % 2
    return counts


def _blur(x: Array, stride: int) -> Array:
    """Return x blurred: with stride 2 padded with mirrored pixels, with stride 1 with zeros.

    As sums of slices, because XLA's convolutions of single channels are slow on CPUs.
    """
    y = x.astype(jnp.float32)
    for axis in (1, 2):
        before, after = (
            (lax.slice_in_dim(y, place, place + 1, axis=axis) for place in (1, y.shape[axis] - 2))
            if stride == 2
            else (lax.full_like(lax.slice_in_dim(y, 0, 1, axis=axis), 0),) * 2
        )
        y = lax.concatenate([before, y, after], axis)
        ends = [y.shape[axis] - 2 + place for place in range(3)]
        first, middle, last = (
            lax.slice_in_dim(y, place, end, stride, axis) for place, end in enumerate(ends)
        )
        y = 0.25 * first + 0.5 * middle + 0.25 * last
    return y.astype(x.dtype)


@dataclass(frozen=True)
class Module:
    """The model in evaluation mode.

    `module.apply(module.params, images)`, or `module(images)`, are the logits [N, logits] of
    normalised images [N, H, W, 3].
    """

    apply: Callable[[Arrays, Array], Array]
    """Parameters and images to logits. It can be differentiated, compiled and vectorised."""
    params: Arrays
    """Trained tensors by canonical name: kernels [height, width, in / groups, out], classifier [in,
    out]. The statistics of batch norm are in `apply`."""

    def __call__(self, images: Array) -> Array:
        """Return the logits."""
        return self.apply(self.params, images)


def load_module(recipe: Recipe, tensors: dict[str, np.ndarray]) -> Module:
    """Return the model in evaluation mode: normalised NHWC images to logits."""
    arrays = convert_all(new_arrays(recipe), tensors, "weights")
    values = {name: jnp.asarray(array) for name, array in arrays.items()}
    params = {name: values.pop(name) for name in _list_parameters(recipe)}
    on_gpu = jax.default_backend() != "cpu"
    return Module(jax.jit(partial(_compute_logits, recipe, values, on_gpu)), params)


def _list_parameters(recipe: Recipe) -> list[str]:
    table = recipe.list_tensors()
    return [tensor.name for tensor in table if tensor.is_trained]


def _compute_logits(
    recipe: Recipe, statistics: Arrays, on_gpu: bool, params: Arrays, images: Array
) -> Array:
    values = statistics | params
    return Pass(recipe, values, training=False, on_gpu=on_gpu).logits(images)


_WINDOW = 3


def pool_largest(x: Array, stride: int, padding: Sequence[tuple[int, int]]) -> Array:
    """Return the largest value of every window of 3 x 3 pixels of images [N, H, W, C], which are
    padded before and after both axes. NaN is the largest.

    The gradient goes to the first of equal values, in the order of rows. Rows and columns are
    pooled one after the other, as slices: the gradient of XLA's own operation is one long loop on a
    CPU (benchmarks/notes/engines.md).
    """
    for axis in (2, 1):
        pads = [(0, 0, 0)] * x.ndim
        pads[axis] = (*padding[axis - 1], 0)
        x = lax.pad(x, np.array(-np.inf, x.dtype), pads)
        last = (x.shape[axis] - _WINDOW) // stride * stride
        largest, *others = (
            lax.slice_in_dim(x, place, place + last + 1, stride, axis) for place in range(_WINDOW)
        )
        for other in others:
            is_larger = (other > largest) | (other != other)
            largest = jnp.where(is_larger, other, largest)
        x = largest
    return x


# Quantisation, by the rules of `lockstep.models.quantisation`


def _round_input(x: Array, scale: Array) -> tuple[Array, Array]:
    """Return the multiples, and where x is within the limits."""
    q = jnp.round(x / scale)
    limited = jnp.clip(q, LOWEST, LARGEST)
    return limited * scale, q == limited


def _round_weight(weight: Array) -> Array:
    largest = jnp.max(jnp.abs(weight), axis=range(weight.ndim - 1))
    scale = jnp.maximum(largest / LARGEST, SMALLEST_SCALE)
    return jnp.round(weight / scale) * scale


_fake_quantise = jax.custom_vjp(lambda x, scale: _round_input(x, scale)[0])
"""Float32 x rounded to int8 multiples of the scale, float32 []. The gradient passes where x is
within the limits of the integers."""
_fake_quantise.defvjp(
    _round_input, lambda is_within, gradient: (jnp.where(is_within, gradient, 0), None)
)
_quantise_weight = jax.custom_vjp(_round_weight)
"""A float32 weight [..., out] rounded to int8 multiples of a scale for each output channel. All of
its gradient passes: none is limited."""
_quantise_weight.defvjp(
    lambda weight: (_round_weight(weight), None), lambda _, gradient: (gradient,)
)
