"""Tests for the reference engine: functions against finite differences, whole steps against
autograd in float64."""

from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from lockstep import backends
from lockstep.backends import Engine
from lockstep.backends.reference import functions as f
from lockstep.models.architectures import MODELS, narrow_model
from lockstep.models.quantisation import weight_scales
from lockstep.models.state import State
from lockstep.recipes import Execution, Recipe
from lockstep.verification.bounds import BOUNDS, angle, distance
from tests.backends import autograd
from tests.backends.cases import RATES, Step, compare_changes, statistics
from tests.backends.drawing import draw_batch, draw_batches, draw_images, draw_state
from tests.backends.steps import STEPS, TRAJECTORIES

ROUNDING = 3e-6
"""Rounding of a state, which is float32 after every step: 6e-8 of a value, and more of a small
difference."""

random = np.random.default_rng(1)


# Functions


def numerical_gradient(
    function: Callable[[], np.ndarray], of: np.ndarray, weights: np.ndarray
) -> np.ndarray:
    """Return the gradient of sum(weights * function()) with respect to an array, by central
    differences."""
    gradient = np.empty_like(of)
    for place in np.ndindex(of.shape):
        kept = of[place]
        step = 1e-5
        of[place] = kept + step
        above = (weights * function()).sum()
        of[place] = kept - step
        below = (weights * function()).sum()
        of[place] = kept
        gradient[place] = (above - below) / (2 * step)
    return gradient


def check(function: Callable[[], tuple[Any, ...]], *inputs: np.ndarray) -> None:
    """Compare every gradient that the last result of `function` returns with differences."""
    y = function()[0]
    back = function()[-1]
    d_y = random.normal(size=y.shape)
    gradients = back(d_y)
    gradients = gradients if isinstance(gradients, tuple) else (gradients,)
    for gradient, array in zip(gradients, inputs, strict=True):
        assert gradient.shape == array.shape
        np.testing.assert_allclose(
            gradient, numerical_gradient(lambda: function()[0], array, d_y), rtol=1e-6, atol=1e-8
        )


def spread(*shape: int) -> np.ndarray:
    """Return values at least 1e-3 apart from each other and from 0, so that a small step does not
    switch any of them."""
    count = int(np.prod(shape))
    return random.permutation(np.arange(count) * 2e-3 - count * 1e-3 + 5e-4).reshape(shape)


@pytest.mark.parametrize("padding", ["symmetric", "same"])
@pytest.mark.parametrize(
    ("kernel", "stride", "groups", "size"),
    [(1, 1, 1, 3), (1, 2, 1, 5), (3, 1, 2, 4), (3, 2, 1, 5), (7, 2, 1, 6)],
)
def test_convolution_has_the_gradients_of_finite_differences(
    kernel: int, stride: int, groups: int, size: int, padding: str
) -> None:
    x = random.normal(size=(2, size, size + 1, 4))
    weight = random.normal(size=(6, 4 // groups, kernel, kernel))
    check(
        lambda: f.convolution(x, weight, stride=stride, groups=groups, padding=padding), x, weight
    )


def test_batch_norm_has_the_gradients_of_finite_differences() -> None:
    x = random.normal(2, 3, size=(3, 2, 3, 2))
    scale = random.normal(size=2)
    bias = random.normal(size=2)
    check(lambda: f.batch_norm(x, scale, bias, epsilon=0.1), x, scale, bias)


@pytest.mark.parametrize("padding", ["symmetric", "same"])
@pytest.mark.parametrize("size", [5, 6])
def test_max_pooling_has_the_gradients_of_finite_differences(size: int, padding: str) -> None:
    x = spread(2, size, size, 2)
    check(lambda: f.max_pool(x, kernel=3, stride=2, padding=padding), x)


def test_relu_has_the_gradients_of_finite_differences() -> None:
    x = spread(3, 4)
    check(lambda: f.relu(x), x)


def test_average_pooling_has_the_gradients_of_finite_differences() -> None:
    x = random.normal(size=(2, 3, 4, 2))
    check(lambda: f.average_pool(x), x)


def test_the_classifier_has_the_gradients_of_finite_differences() -> None:
    x = random.normal(size=(3, 4))
    weight = random.normal(size=(5, 4))
    bias = random.normal(size=5)
    check(lambda: f.linear(x, weight, bias), x, weight, bias)


def test_dropout_has_the_gradients_of_finite_differences() -> None:
    x = random.normal(size=(3, 4))
    kept = random.random((3, 4)) < 0.5
    check(lambda: f.drop(x, kept, 0.4), x)


@pytest.mark.parametrize("weights", [1.0, np.array([0, 0.5, 1, 2, 4])])
def test_the_loss_has_the_gradients_of_finite_differences(weights: Any) -> None:
    logits = random.normal(size=(3, 5))
    target = weights * random.dirichlet(np.ones(5), size=3)
    numerical = numerical_gradient(
        lambda: f.cross_entropy(logits, target)[0], logits, np.full(3, 1 / 3)
    )
    np.testing.assert_allclose(
        f.cross_entropy(logits, target)[1](), numerical, rtol=1e-6, atol=1e-9
    )


@pytest.mark.parametrize(("reduction", "above"), [("mean", None), ("sum", 0.2)])
def test_binary_cross_entropy_is_that_of_timm(reduction: str, above: float | None) -> None:
    logits = np.array([[2, -1, 0.5], [0, 3, -30]])
    target = f.targets(np.array([0, 2]), 3, smoothing=0.1, dtype=np.dtype(float))
    if above is not None:
        target = f.binarise(target, above)
    losses, back = f.binary_cross_entropy(logits, target, reduction)
    # `BinaryCrossEntropy(smoothing=0.1)` of timm 1.0.31, and with target_threshold=0.2 and
    # sum_classes=True
    expected = {"mean": 5.5343335358125145, "sum": 17.578000607437538}[reduction]
    assert losses.mean() == pytest.approx(expected, rel=1e-14)
    numerical = numerical_gradient(
        lambda: f.binary_cross_entropy(logits, target, reduction)[0], logits, np.full(2, 1 / 2)
    )
    np.testing.assert_allclose(back(), numerical, rtol=1e-6, atol=1e-9)


def test_a_convolution_by_hand() -> None:
    x = np.arange(9.0).reshape(1, 3, 3, 1)
    y, _ = f.convolution(x, np.ones((1, 1, 3, 3)), stride=2, groups=1, padding="symmetric")
    result = y[0, :, :, 0].tolist()
    assert result == [[0 + 1 + 3 + 4, 1 + 2 + 4 + 5], [3 + 4 + 6 + 7, 4 + 5 + 7 + 8]]


@pytest.mark.parametrize(
    ("length", "kernel", "stride", "kind", "expected"),
    [
        (224, 7, 2, "symmetric", (3, 3)),
        # https://www.tensorflow.org/api_docs/python/tf/nn#notes_on_padding_2
        (224, 7, 2, "same", (2, 3)),
        (112, 3, 2, "same", (0, 1)),
        (113, 3, 2, "same", (1, 1)),
        (56, 3, 1, "same", (1, 1)),
        (56, 1, 2, "same", (0, 0)),
        (56, 1, 2, "symmetric", (0, 0)),
    ],
)
def test_padding(
    length: int, kernel: int, stride: int, kind: str, expected: tuple[int, int]
) -> None:
    assert f.padding(length, kernel, stride, kind) == expected


def test_of_equal_pixels_the_first_is_the_largest() -> None:
    _, back = f.max_pool(np.zeros((1, 3, 3, 1)), kernel=3, stride=2, padding="same")
    assert back(np.ones((1, 2, 2, 1)))[0, :, :, 0].tolist() == [[1, 1, 0], [1, 1, 0], [0, 0, 0]]


def test_running_variance_is_unbiased() -> None:
    values = np.array([1.0, 2.0, 6.0])
    mean, variance = f.running_statistics(
        np.array(10.0), np.array(20.0), values.mean(), values.var(), values=3, momentum=0.25
    )
    assert mean == pytest.approx(0.75 * 10 + 0.25 * 3)
    assert variance == pytest.approx(0.75 * 20 + 0.25 * np.var(values, ddof=1))


@pytest.mark.parametrize(
    ("value", "precision", "expected"),
    [
        (1 + 2**-8, "bf16", 1.0),  # in the middle: to the even neighbour
        (1 + 3 * 2**-8, "bf16", 1 + 2**-6),
        (1 + 2**-8 + 2**-20, "bf16", 1 + 2**-7),
        (3.4e38, "bf16", np.inf),
        (-np.inf, "bf16", -np.inf),
        (1 + 2**-11, "fp16", 1.0),
        (65519.9, "fp16", 65504.0),
        (65520.0, "fp16", np.inf),
        (2.0**-25, "fp16", 0.0),
        (1 + 2**-30, "fp32", 1 + 2**-30),
        (1 + 2**-30, "tf32", 1 + 2**-30),
    ],
)
def test_rounding_to_few_bits(value: float, precision: str, expected: float) -> None:
    with np.errstate(over="ignore"):
        assert f.round_to(np.array([value]), precision)[0] == expected


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_rounding_keeps_what_is_no_number(precision: str) -> None:
    assert np.isnan(f.round_to(np.array([np.nan, -np.nan]), precision)).all()


# Whole steps

DIFFERENT = (
    "resnet18",
    "resnet50",
    "resnet50-v1",
    "resnext101-32x4d",
    "resnet18d",
    "seresnext26t-32x4d",
    "resnetblur50",
    "resnet50-ffcv",
)
"""Models that differ in more than numbers of channels and layers."""
KINDS = STEPS | {
    f"narrow {name}": Step({"model": narrow_model(MODELS[name])}, "sample") for name in DIFFERENT
}


def engine(recipe: Recipe, state: State, parts: int = 1) -> Engine:
    backend = backends.load("reference")
    execution = Execution(accumulation_steps=parts)
    built = backend.engine(recipe, np.asarray(RATES), backend.world(execution), execution)
    built.write(state)
    return built


@pytest.mark.parametrize("step", KINDS.values(), ids=KINDS)
def test_a_step_is_that_of_autograd(tiny_recipe: Recipe, step: Step) -> None:
    recipe, state, batch = step.begin(tiny_recipe)
    reference = engine(recipe, state, step.parts)
    interval = reference.fetch(reference.train([batch], 0))
    end = reference.read()
    expected = autograd.train(recipe, state, [batch], RATES, step.parts)
    # The second of two parts starts from statistics rounded to float32. Nothing else in a step is
    # rounded.
    assert interval.losses == pytest.approx(expected.losses, rel=1e-12)
    assert (interval.counts.top1, interval.counts.top5) == (expected.top1, expected.top5)
    assert distance(end.momentum, expected.state.momentum) < ROUNDING
    assert distance(statistics(end), statistics(expected.state)) < ROUNDING


@pytest.mark.parametrize(("changes", "mixup", "parts"), TRAJECTORIES.values(), ids=TRAJECTORIES)
def test_some_steps_are_those_of_autograd(
    tiny_recipe: Recipe, changes: dict[str, Any], mixup: str, parts: int
) -> None:
    recipe = tiny_recipe.replace(**changes)
    state = draw_state(recipe)
    batches = draw_batches(recipe, 5, mixup=mixup)
    reference = engine(recipe, state, parts)
    reference.train(batches, 0)
    end = reference.read()
    expected = autograd.train(recipe, state, batches, RATES, parts).state
    # The engine's weights are float32, and some are a thousand times as large as their change.
    assert compare_changes(end, expected, state) < 3e-3
    assert distance(statistics(end), statistics(expected)) < ROUNDING
    if recipe.ema_decay:
        assert distance(end.ema, expected.ema) < ROUNDING


@pytest.mark.parametrize("padding", ["symmetric", "same"])
@pytest.mark.parametrize("model", DIFFERENT)
def test_logits_are_those_of_autograd(tiny_recipe: Recipe, model: str, padding: str) -> None:
    recipe = tiny_recipe.replace(model=narrow_model(MODELS[model]), padding=padding)
    state = draw_state(recipe)
    images = draw_images(3, 45)
    expected = autograd.logits(recipe, state.tensors, images)
    assert distance(engine(recipe, state).predict(images), expected) < 1e-7
    module = backends.load("reference").load_module(recipe, state.tensors)
    assert distance(module(autograd.normalise(images, recipe).numpy()), expected) < 1e-12


@pytest.mark.parametrize(("fields", "bits"), [({}, 52), ({"reference_dtype": "float32"}, 23)])
def test_the_dtype_is_the_asked_one(tiny_recipe: Recipe, fields: dict[str, str], bits: int) -> None:
    backend = backends.load("reference")
    execution = Execution.of(fields)
    state = draw_state(tiny_recipe)
    batch = draw_batch(tiny_recipe)
    built = backend.engine(tiny_recipe, np.asarray(RATES), backend.world(execution), execution)
    built.write(state)
    loss = built.fetch(built.train([batch], 0)).losses
    exact = autograd.train(tiny_recipe, state, [batch], RATES).losses
    assert (np.abs(loss / exact - 1) < 1e-12) == (bits == 52)
    assert loss == pytest.approx(exact, rel=1e-5)


# Int8

INT8_SCALE = 0.25
INT8_VALUES = [
    0.0,
    0.125,
    0.375,
    -0.125,
    -0.375,
    0.3,
    -7.77,
    31.87,
    31.88,
    40.0,
    -32.1,
    -32.13,
    -40.0,
]
"""Halves of a scale, which go to the even integer, and values around the limits."""


def compute_with_torch(x: np.ndarray, *quantisation: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return what PyTorch's own functions round values to in int8, and the gradient of the sum of
    the results."""
    leaf = torch.tensor(x, dtype=torch.float32, requires_grad=True)
    per_channel = isinstance(quantisation[0], torch.Tensor)
    function = (
        torch.fake_quantize_per_channel_affine
        if per_channel
        else torch.fake_quantize_per_tensor_affine
    )
    y = function(leaf, *quantisation)
    y.sum().backward()
    assert leaf.grad is not None
    return y.detach().numpy(), leaf.grad.numpy()


def test_rounding_to_int8_is_that_of_pytorch() -> None:
    x = np.array(INT8_VALUES)
    y, back = f.fake_quantise(x, np.float64(INT8_SCALE))
    expected, gradient = compute_with_torch(x, INT8_SCALE, 0, -128, 127)
    assert y.tolist() == expected.tolist()
    assert back(np.ones_like(x)).tolist() == gradient.tolist()


@pytest.mark.parametrize("shape", [(4, 3, 2, 2), (4, 6)])
def test_weights_in_int8_are_those_of_pytorch(shape: tuple[int, ...]) -> None:
    weight = (
        random.normal(size=shape) * np.array([1, 1e-3, 0, 50]).reshape(-1, *[1] * (len(shape) - 1))
    ).astype(np.float32)
    scales = weight_scales(weight)
    y, back = f.fake_quantise(
        weight.astype(np.float64), scales.reshape(-1, *[1] * (len(shape) - 1)).astype(np.float64)
    )
    largest = torch.tensor(weight).abs().flatten(1).amax(dim=1)
    quantisation = (
        (largest / 127).clamp(min=2.0**-126),
        torch.zeros(4, dtype=torch.int32),
        0,
        -127,
        127,
    )
    expected, gradient = compute_with_torch(weight, *quantisation)
    np.testing.assert_allclose(y, expected, rtol=1e-6)
    assert not y[2].any()
    assert np.array_equal(back(np.ones(shape)), gradient)


class QuantisedNetwork(autograd.Network):
    """A pass with PyTorch's own rounding to int8."""

    scales: ClassVar[dict[str, float]] = {}
    largest: ClassVar[dict[str, float]] = {}

    def factors(self, x: torch.Tensor, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = super().factors(x, name)
        self.largest[name] = max(self.largest.get(name, 0.0), x.abs().max().item())
        if not self.scales:
            return x, weight
        scales = (weight.detach().abs().flatten(1).amax(dim=1) / 127).float()
        zeros = torch.zeros(len(weight), dtype=torch.int32)
        weight = torch.fake_quantize_per_channel_affine(weight, scales, zeros, 0, -128, 127)
        return torch.fake_quantize_per_tensor_affine(x, self.scales[name], 0, -128, 127), weight


def test_quantised_steps_are_right(tiny_recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = tiny_recipe.replace(weight_decay=0.0, quantisation="int8")
    batch = draw_batch(tiny_recipe, 8)
    state = draw_state(recipe)
    monkeypatch.setattr(QuantisedNetwork, "largest", {})
    autograd_network = QuantisedNetwork(autograd.float64(state.tensors), recipe, training=False)
    with torch.no_grad():
        autograd_network.logits(batch.images)
    reference: Any = engine(recipe, state)
    assert reference.calibrate([batch]) == pytest.approx(QuantisedNetwork.largest, rel=1e-12)
    scales = {
        name: float(np.float32(value / 8)) for name, value in QuantisedNetwork.largest.items()
    }
    monkeypatch.setattr(QuantisedNetwork, "scales", scales)
    monkeypatch.setattr(autograd, "Network", QuantisedNetwork)
    reference.quantise(scales)
    interval = reference.fetch(reference.train([batch], 0))
    end = reference.read()
    expected = autograd.train(recipe, state, [batch], RATES)
    # PyTorch's functions round to float32.
    assert interval.losses == pytest.approx(expected.losses, rel=1e-6)
    assert angle(end.momentum, expected.state.momentum) < BOUNDS["quantised direction"].value
