"""Tests for every engine: low precision, loss scaling and moving averages, against float64
(`oracle`)."""

from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from lockstep.models.state import State
from lockstep.recipes import Recipe
from lockstep.verification.bounds import BOUNDS, angle, distance
from tests.backends import oracle
from tests.backends.cases import BASIC, FP16, RATES, bits, parameters
from tests.backends.compiled_steps import check_scaled_step
from tests.backends.conftest import Start
from tests.backends.drawing import draw_batch, draw_batches, draw_images, draw_state
from tests.soak import SOAK

OVERFLOWING = 2.0**60
"""A loss scale with which every gradient exceeds fp16's largest number, 65,504."""


FEW = 4
"""Images of a batch in tests where more are not needed. In fp16 a full model takes a CPU a second
for four images."""


# Precision


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_low_precision_logits_are_near(start: Start, tiny_recipe: Recipe, precision: str) -> None:
    recipe = tiny_recipe.replace(precision=precision)
    state = draw_state(recipe)
    images = draw_images(16)
    logits = start(recipe, state).predict(images)
    assert logits.dtype == np.float32
    off = distance(logits, oracle.logits(recipe, state.tensors, images))
    assert BOUNDS["logits"].value < off < BOUNDS[f"{precision} logits"].value


@pytest.mark.parametrize(("precision", "parts"), [("bf16", 1), ("bf16", 2), ("fp16", 2)])
def test_a_step_in_low_precision_is_near(
    start: Start, tiny_recipe: Recipe, precision: str, parts: int
) -> None:
    recipe = tiny_recipe.replace(precision=precision)
    state = draw_state(recipe)
    batch = draw_batch(recipe)
    engine = start(recipe, state, accumulation_steps=parts)
    interval = engine.fetch(engine.train([batch], 0))
    expected = oracle.train(recipe, state, [batch], RATES, parts)
    assert interval.losses == pytest.approx(expected.losses, rel=BOUNDS[f"{precision} loss"].value)
    result = angle(engine.read().momentum, expected.state.momentum)
    assert result < BOUNDS[f"{precision} direction"].value


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_small_updates_are_not_lost(start: Start, tiny_recipe: Recipe, precision: str) -> None:
    state = draw_state(tiny_recipe)
    engine = start(tiny_recipe.replace(precision=precision), state, rates=[1e-4])
    engine.train([draw_batch(tiny_recipe)], 0)
    end = engine.read()
    expected = {
        name: state.tensors[name] - np.float64(1e-4) * v for name, v in end.momentum.items()
    }
    assert distance(parameters(end), expected) < BOUNDS["operation"].value


def test_an_evaluation_in_fp16_holds_what_exceeds_fp16(start: Start, tiny_recipe: Recipe) -> None:
    # Running statistics that have not settled: after the first batch norm, activations exceed
    # 65,504.
    recipe = tiny_recipe.replace(**FP16, ema_decay=0.5)
    batch = draw_batch(tiny_recipe, FEW)
    state = draw_state(recipe)
    far = state.tensors | {
        "bn1.running_mean": np.full_like(state.tensors["bn1.running_mean"], -1e6)
    }
    state = State(0, far, state.momentum, {name: value.copy() for name, value in far.items()})
    logits = oracle.logits(recipe, far, batch.pixels)
    expected = -np.take_along_axis(oracle.log_softmax(logits), batch.labels[:, None], axis=1)[:, 0]
    assert expected.max() > 65_504
    engine = start(recipe, state)
    for ema in (False, True):
        losses = engine.evaluate([batch], ema=ema).losses
        assert np.abs(losses - expected).max() < BOUNDS["logits"].value * np.abs(logits).max()


@pytest.mark.parametrize("loss_scaling", ["static", "dynamic"])
def test_loss_scales_change_no_update(start: Start, tiny_recipe: Recipe, loss_scaling: str) -> None:
    check_scaled_step(start, tiny_recipe, loss_scaling, FEW)


def test_a_static_loss_scale_reaches_the_gradients(start: Start, tiny_recipe: Recipe) -> None:
    engine = start(tiny_recipe.replace(**FP16, loss_scaling="static", loss_scale=OVERFLOWING))
    engine.train([draw_batch(tiny_recipe, FEW)], 0)
    assert not np.isfinite(engine.read().momentum["conv1.weight"]).all()


def dynamic(recipe: Recipe, **changes: Any) -> Recipe:
    return recipe.replace(**FP16, loss_scaling="dynamic", **changes)


def make_scaled_state(
    recipe: Recipe, scale: float, good_steps: int = 0, bad_steps: int = 0
) -> State:
    """Return a state with a velocity, so that a step that only decays it is noticed."""
    state = draw_state(recipe)
    velocity = {name: np.full_like(value, 0.5) for name, value in state.momentum.items()}
    scaler = {"scale": scale, "good_steps": good_steps, "bad_steps": bad_steps}
    return replace(state, momentum=velocity, scaler=scaler)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "rmsprop_tf"])
def test_an_overflow_skips_the_update(start: Start, tiny_recipe: Recipe, optimizer: str) -> None:
    # With Nesterov's momentum, whose update has the gradient itself, besides the velocity.
    changes = {"optimizer": optimizer, "nesterov": optimizer == "sgd", "clip_norm": 1.0}
    recipe = dynamic(tiny_recipe, weight_decay=0.1, **changes)
    state = make_scaled_state(recipe, OVERFLOWING)
    engine = start(recipe, state)
    engine.train([draw_batch(tiny_recipe, FEW)], 0)
    end = engine.read()
    assert end.scaler["scale"] == OVERFLOWING / 2
    assert bits(parameters(end)) == bits(parameters(state))
    assert bits(end.momentum) == bits(state.momentum)
    assert bits(end.second_moments) == bits(state.second_moments)
    assert end.step == 1


@pytest.mark.slow
def test_compiled_steps_back_off_too(start: Start, native: ModuleType, tiny_recipe: Recipe) -> None:
    if not (SOAK or native.FACTS.compiles_quickly):
        pytest.skip("compiling takes up to a minute, even for tiny models")
    # With basic blocks, which have two convolutions: XLA takes long for every convolution.
    recipe = dynamic(tiny_recipe, model=replace(BASIC, layers=(1, 1, 1, 1)))
    state = make_scaled_state(recipe, OVERFLOWING)
    engine = start(recipe, state, compile="on")
    interval = engine.fetch(engine.train([draw_batch(recipe, FEW)], 0))
    end = engine.read()
    assert bits(parameters(end)) == bits(parameters(state))
    assert bits(end.momentum) == bits(state.momentum)
    assert end.scaler == {"scale": OVERFLOWING / 2, "good_steps": 0, "bad_steps": 0}
    assert interval.loss_scale == OVERFLOWING / 2
    assert np.isfinite(interval.losses).all()


THREE = {"loss_scale_backoff_steps": 3}
FOUR = {"loss_scale_growth_steps": 4}
AT_ONCE = {"loss_scale_growth_steps": 1, "loss_scale_growth": 4.0}
FULL = (OVERFLOWING, 5, 0)
SCALERS: dict[str, tuple[Any, ...]] = {
    "an overflow halves the scale": ({}, FULL, 1, (OVERFLOWING / 2, 0, 0)),
    "every overflow halves it again": ({}, FULL, 3, (OVERFLOWING / 8, 0, 0)),
    "backing off has its factor": ({"loss_scale_backoff": 0.25}, FULL, 1, (OVERFLOWING / 4, 0, 0)),
    "a second overflow may be forgiven": (THREE, FULL, 2, (OVERFLOWING, 0, 2)),
    "the third in a row is not": (THREE, FULL, 3, (OVERFLOWING / 2, 0, 0)),
    "a good step breaks the row": (THREE, (8.0, 0, 2), 1, (8.0, 1, 0)),
    "good steps are counted": (FOUR, (8.0, 0, 0), 3, (8.0, 3, 0)),
    "enough of them double the scale": (FOUR, (8.0, 0, 0), 4, (16.0, 0, 0)),
    "growth has its own factor": (AT_ONCE, (8.0, 0, 0), 1, (32.0, 0, 0)),
    "a row of good steps goes on where it was left": (FOUR, (8.0, 3, 0), 1, (16.0, 0, 0)),
}


@pytest.mark.parametrize(("changes", "first", "steps", "last"), SCALERS.values(), ids=SCALERS)
def test_a_dynamic_loss_scale_adapts(
    start: Start,
    tiny_recipe: Recipe,
    changes: dict[str, Any],
    first: tuple[float, int, int],
    steps: int,
    last: tuple[float, int, int],
) -> None:
    engine = start(dynamic(tiny_recipe, **changes), make_scaled_state(tiny_recipe, *first))
    interval = engine.fetch(engine.train(draw_batches(tiny_recipe, steps), 0))
    scaler = engine.read().scaler
    assert (scaler["scale"], scaler["good_steps"], scaler["bad_steps"]) == last
    assert interval.loss_scale == last[0]


def test_training_recovers_after_an_overflow(start: Start, tiny_recipe: Recipe) -> None:
    state = make_scaled_state(tiny_recipe, OVERFLOWING)
    batches = draw_batches(tiny_recipe, 2)
    engine = start(dynamic(tiny_recipe, loss_scale_backoff=2.0**-50), state)
    engine.train(batches, 0)
    unscaled = start(tiny_recipe.replace(**FP16), State(1, state.tensors, state.momentum))
    unscaled.train(batches[1:], 1)
    result = distance(engine.read().momentum, unscaled.read().momentum)
    assert result < BOUNDS["scaled gradient"].value


def test_a_new_scaler_has_the_recipes_first_scale(start: Start, tiny_recipe: Recipe) -> None:
    engine = start(
        dynamic(tiny_recipe, loss_scale=64.0), make_scaled_state(tiny_recipe, 8.0, good_steps=5)
    )
    engine.write(draw_state(tiny_recipe))
    assert engine.read().scaler == {"scale": 64.0, "good_steps": 0, "bad_steps": 0}


@pytest.mark.parametrize("changes", [{}, FP16 | {"loss_scaling": "static"}], ids=["fp32", "static"])
def test_a_state_has_no_scaler_without_dynamic_scaling(
    start: Start, tiny_recipe: Recipe, changes: dict[str, Any]
) -> None:
    assert start(tiny_recipe.replace(**changes)).read().scaler == {}


# Moving average


@pytest.mark.parametrize(("step", "keep"), [(0, 1 / 10), (1, 2 / 11), (7, 8 / 17), (11, 0.5)])
def test_the_moving_average_follows_the_formula(
    start: Start, tiny_recipe: Recipe, step: int, keep: float
) -> None:
    recipe = tiny_recipe.replace(ema_decay=0.5)
    state = draw_state(recipe, step=step)
    engine = start(recipe, state)
    engine.train([draw_batch(recipe)], step)
    end = engine.read()
    expected = {
        name: keep * state.ema[name] + (1 - keep) * value.astype(np.float64)
        for name, value in end.tensors.items()
    }
    assert distance(end.ema, expected) < BOUNDS["operation"].value


def test_training_is_the_same_with_a_moving_average(start: Start, tiny_recipe: Recipe) -> None:
    ends = []
    for decay in (0.0, 0.9):
        engine = start(tiny_recipe.replace(ema_decay=decay))
        engine.train(draw_batches(tiny_recipe, 3), 0)
        ends.append(bits(engine.read().tensors))
    assert ends[0] == ends[1]


def test_evaluating_the_average_uses_all_of_it(start: Start, tiny_recipe: Recipe) -> None:
    recipe = tiny_recipe.replace(ema_decay=0.9)
    batch = draw_batch(tiny_recipe)
    other = draw_state(recipe, seed=9).tensors
    state = draw_state(recipe)
    averaged = start(recipe, State(0, state.tensors, state.momentum, other)).evaluate(
        [batch], ema=True
    )
    trained = start(recipe, State(0, other, state.momentum, state.ema)).evaluate([batch])
    assert averaged.losses.tobytes() == trained.losses.tobytes()
