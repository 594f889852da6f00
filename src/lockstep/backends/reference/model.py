"""A `ModelSpec` computed with the functions in `functions`: logits, and the gradients of all
parameters."""

from collections.abc import Callable, Iterable, Mapping

import numpy as np

from lockstep.backends.reference import functions as f
from lockstep.models.architectures import Block, Conv, Squeeze
from lockstep.models.quantisation import weight_scales
from lockstep.models.sections import CLASSIFIER, STEM
from lockstep.recipes import Recipe
from lockstep.recipes.stochastic_depth import drop_rates
from lockstep.recipes.trained_tensors import frozen_norms, lowest_trained_section

Array = np.ndarray


class Network:
    """One pass of a batch through a model. `tensors` are canonical, in the dtype of the
    computation.

    In bf16 and fp16 the inputs and outputs of every convolution, batch norm, sum and pool are
    rounded, forward and backward. Computations inside of them are not rounded. Batch norm's
    parameters and statistics are not rounded.

    With `scales`, weights and inputs of convolutions and classifier are quantised
    (`lockstep.models.quantisation`).
    """

    def __init__(
        self,
        recipe: Recipe,
        tensors: Mapping[str, Array],
        *,
        training: bool,
        scales: Mapping[str, float] | None = None,
        largest: dict[str, float] | None = None,
    ) -> None:
        """Prepare a pass. In `largest`, it raises the magnitudes of layers' inputs, by name, to the
        largest that it sees."""
        self._recipe = recipe
        self._tensors = tensors
        self._training = training
        self._scales = scales
        self._largest = largest
        self._frozen_norms = frozen_norms(recipe)
        self._drop_rates = drop_rates(recipe)
        self.statistics: dict[str, Array] = {}
        """In training, the running statistics after this batch of batch norms that are not
        frozen."""
        self.gradients: dict[str, Array] = {}
        """Gradients of every parameter in the lowest trained section and above, once `back` has
        been called."""

    def logits(
        self, x: Array, kept_features: Array | None = None, kept_blocks: Array | None = None
    ) -> tuple[Array, Callable[[Array], None]]:
        """Return the logits [N, K] of normalised images [N, H, W, 3], and back: d_logits -> None.
        It fills `gradients`. Dropout leaves the `kept_features`, bool [N, features], and stochastic
        depth the `kept_blocks`, bool [N, blocks]."""
        spec = self._recipe.spec
        lowest = lowest_trained_section(self._recipe)
        backs: list[f.Back] = []

        def then(step: tuple[Array, f.Back], section: str | None = None) -> Array:
            if section == lowest:
                backs.clear()  # nothing below it is computed backwards
            backs.append(step[1])
            return step[0]

        x = self._round(x)
        for i, conv in enumerate(spec.list_stem()):
            x = then(self._convolution(x, conv), None if i else STEM)
            x = then(f.relu(x))
        stride = 1 if spec.pool_blurs else 2
        x = then(f.max_pool(x, kernel=3, stride=stride, padding=self._recipe.choose_padding(3)))
        if spec.pool_blurs:
            x = then(self._rounding(f.blur(x, stride=2, padding="reflect")))
        for i, block in enumerate(spec.list_blocks()):
            kept = None if kept_blocks is None else kept_blocks[:, i]
            x = then(self._block(x, block, kept), block.name)
        x = then(self._rounding(f.average_pool(x)))
        if kept_features is not None:
            x = then(self._rounding(f.drop(x, kept_features, self._recipe.dropout)))
        x = then(self._classifier(x), CLASSIFIER)

        def back(d_logits: Array) -> None:
            d_x = self._round(d_logits)
            for step in reversed(backs):
                d_x = step(d_x)

        return x, back

    def _block(self, x: Array, block: Block, kept: Array | None) -> tuple[Array, f.Back]:
        """Return y = relu(convolutions of x, with ReLU between them, + shortcut of x), and back.
        Stochastic depth leaves the convolutions of the `kept` images, bool [N]."""
        inside = []
        shortcut = x
        shortcut_back = None
        y = x
        for conv in block.convs:
            y, back = self._convolution(y, conv)
            inside.append(back)
            if conv is not block.convs[-1]:
                y, back = f.relu(y)
                inside.append(back)
            if conv.blurs_after:
                y, back = self._rounding(f.blur(y, stride=2, padding="reflect"))
                inside.append(back)
        if block.squeeze is not None:
            y, back = self._squeeze(y, block.squeeze)
            inside.append(back)
        if kept is not None:
            rate = self._drop_rates[block.name]
            y, back = self._rounding(f.drop(y, kept[:, None, None, None], rate))
            inside.append(back)
        if block.shortcut is not None:
            shortcut, shortcut_back = self._convolution(x, block.shortcut)
        y, relu_back = f.relu(self._round(y + shortcut))

        def back_of_block(d_y: Array) -> Array:
            d_sum = d_x = relu_back(d_y)
            for step in reversed(inside):
                d_x = step(d_x)
            return self._round(d_x + (d_sum if shortcut_back is None else shortcut_back(d_sum)))

        return y, back_of_block

    def _squeeze(self, x: Array, squeeze: Squeeze) -> tuple[Array, f.Back]:
        """Return x with every channel times its factor, and back."""
        steps = []

        def then(step: tuple[Array, f.Back]) -> Array:
            y, back = self._rounding(step)
            steps.append(back)
            return y

        factors = then(f.average_pool(x))
        factors = then(f.relu(then(self._dense(factors, squeeze.first))))
        factors = then(f.sigmoid(then(self._dense(factors, squeeze.second))))
        y, product_back = f.scale_channels(x, factors)

        def back(d_y: Array) -> Array:
            d_x, d_factors = map(self._round, product_back(d_y))
            for step in reversed(steps):
                d_factors = step(d_factors)
            return self._round(d_x + d_factors)

        return self._round(y), back

    def _dense(self, x: Array, name: str) -> tuple[Array, f.Back]:
        """Return the 1x1 convolution of one pixel [N, C], with its bias, and back."""
        weight = self._tensors[f"{name}.weight"]
        y, linear_back = f.linear(
            x, self._round(weight[:, :, 0, 0]), self._round(self._tensors[f"{name}.bias"])
        )

        def back(d_y: Array) -> Array:
            d_x, d_weight, d_bias = linear_back(d_y)
            self.gradients[f"{name}.weight"] = self._round(d_weight).reshape(weight.shape)
            self.gradients[f"{name}.bias"] = self._round(d_bias)
            return d_x

        return y, back

    def _convolution(self, x: Array, conv: Conv) -> tuple[Array, f.Back]:
        """Return the result of a convolution, after what comes before it, and the batch norm that
        follows it, and back."""
        name = f"{conv.name}.weight"
        x, before_back = self._prepare(x, conv)
        x, weight, of_quantisation = self._quantise(x, conv.name)
        y, conv_back = f.convolution(
            x,
            weight,
            stride=conv.stride,
            groups=conv.groups,
            padding=self._recipe.choose_padding(conv.kernel),
        )
        y, norm_back = self._batch_norm(self._round(y), conv.bn_name)

        def back(d_y: Array) -> Array:
            d_x, d_weight = of_quantisation(*conv_back(self._round(norm_back(d_y))))
            self.gradients[name] = self._round(d_weight)
            return before_back(self._round(d_x))

        return self._round(y), back

    def _prepare(self, x: Array, conv: Conv) -> tuple[Array, f.Back]:
        """Return the input of a convolution, and back."""
        if conv.before == "average":
            return self._rounding(f.average_pool_2x2(x))
        if conv.before == "blur":
            return self._rounding(f.blur(x, stride=1, padding="zero"))
        return x, lambda d_x: d_x

    def _batch_norm(self, x: Array, name: str) -> tuple[Array, f.Back]:
        names = [f"{name}.{suffix}" for suffix in ("weight", "bias", "running_mean", "running_var")]
        scale, bias, old_mean, old_variance = (self._tensors[key] for key in names)
        epsilon = self._recipe.bn_epsilon
        if not self._training or name in self._frozen_norms:
            return f.batch_norm_in_inference(
                x, scale, bias, old_mean, old_variance, epsilon=epsilon
            )
        y, mean, variance, norm_back = f.batch_norm(x, scale, bias, epsilon=epsilon)
        self.statistics[names[2]], self.statistics[names[3]] = f.running_statistics(
            old_mean,
            old_variance,
            mean,
            variance,
            values=x.size // x.shape[3],
            momentum=self._recipe.bn_momentum,
        )

        def back(d_y: Array) -> Array:
            d_x, self.gradients[names[0]], self.gradients[names[1]] = norm_back(d_y)
            return d_x

        return y, back

    def _classifier(self, x: Array) -> tuple[Array, f.Back]:
        x, weight, of_quantisation = self._quantise(x, "fc")
        y, linear_back = f.linear(x, weight, self._round(self._tensors["fc.bias"]))

        def back(d_y: Array) -> Array:
            d_x, d_weight, d_bias = linear_back(d_y)
            d_x, d_weight = of_quantisation(d_x, d_weight)
            self.gradients["fc.weight"], self.gradients["fc.bias"] = (
                self._round(d_weight),
                self._round(d_bias),
            )
            return self._round(d_x)

        return self._round(y), back

    def _quantise(
        self, x: Array, layer: str
    ) -> tuple[Array, Array, Callable[[Array, Array], tuple[Array, Array]]]:
        """Return what a layer computes with: its input and its weight, and back: (d_x, d_weight) ->
        (d_x, d_weight)."""
        weight = self._tensors[f"{layer}.weight"]
        if self._largest is not None:
            self._largest[layer] = float(np.abs(x).max(initial=self._largest[layer]))
        if self._scales is None:
            return x, self._round(weight), lambda d_x, d_weight: (d_x, d_weight)
        per_channel = (
            weight_scales(weight).reshape(-1, *[1] * (weight.ndim - 1)).astype(weight.dtype)
        )
        x, x_back = f.fake_quantise(x, x.dtype.type(self._scales[layer]))
        weight, weight_back = f.fake_quantise(weight, per_channel)
        return (
            self._round(x),
            self._round(weight),
            lambda d_x, d_weight: (x_back(d_x), weight_back(d_weight)),
        )

    def _rounding(self, step: tuple[Array, f.Back]) -> tuple[Array, f.Back]:
        y, back = step
        return self._round(y), lambda d_y: self._round(back(d_y))

    def _round(self, x: Array) -> Array:
        return f.round_to(x, self._recipe.precision)


Moments = tuple[Array, Array]
"""Mean and biased variance of every channel: float64 [C] each."""


def measure_norm_inputs(
    recipe: Recipe, tensors: Mapping[str, Array], batches: Iterable[Array]
) -> dict[str, Moments]:
    """Return the moments of the inputs of every batch norm over all images, by its name.

    `batches` are images, uint8 [N, H, W, 3], one or more. They pass through the weights as in an
    evaluation, in float32.
    """
    recipe = recipe.replace(precision="fp32", loss_scaling="none")
    sums: dict[str, Array] = {}
    mean, std = (np.array(values, np.float32) for values in (recipe.mean, recipe.std))
    for images in batches:
        network = _Measuring(recipe, tensors, sums)
        network.logits(f.normalise(images.astype(np.float32), mean, std))
    moments = {}
    for name, (count, total, squares) in sums.items():
        middle = total / count
        moments[name] = middle, np.maximum(squares / count - np.square(middle), 0)
    return moments


class _Measuring(Network):
    """A pass in inference that adds what batch norms get to `sums`: by name, the number of values
    of a channel, their sum and the sum of their squares, float64 [3, C]."""

    def __init__(
        self, recipe: Recipe, tensors: Mapping[str, Array], sums: dict[str, Array]
    ) -> None:
        super().__init__(recipe, tensors, training=False)
        self._sums = sums

    def _batch_norm(self, x: Array, name: str) -> tuple[Array, f.Back]:
        values = x.reshape(-1, x.shape[3]).astype(np.float64)
        sums = np.stack(
            [np.full(x.shape[3], len(values)), values.sum(axis=0), np.square(values).sum(axis=0)]
        )
        self._sums[name] = self._sums.get(name, 0) + sums
        return super()._batch_norm(x, name)
