"""Tests for every engine that supports it: steps and logits with weights and inputs in int8,
against float64 (`oracle`)."""

from typing import Any

import numpy as np
import pytest

from lockstep.models.quantisation import SMALLEST_SCALE, Scales, input_scales, layers
from lockstep.models.state import State
from lockstep.recipes import Recipe
from lockstep.system.errors import CheckpointError
from lockstep.verification.bounds import BOUNDS, angle, distance
from tests.backends import oracle
from tests.backends.cases import BASIC, RATES, all_bits
from tests.backends.conftest import Start, for_quantising
from tests.backends.drawing import draw_batch, draw_batches, draw_images, draw_state

MODELS: dict[str, dict[str, Any]] = {
    "grouped": {},
    "basic, SAME padding": {"model": BASIC, "padding": "same"},
}
COARSE = 16.0
LIMITING = 0.25
"""Factors of calibrated scales. With the first, forgetting to round is plain, and rounding in
float32 seldom decides a rounding to int8. With the second, many values are limited."""

every_model = pytest.mark.parametrize("model", MODELS)


def begin(
    recipe: Recipe, model: str = "grouped", factor: float = COARSE
) -> tuple[Recipe, State, Scales]:
    """Return a quantised recipe, a state, and scales that are calibrated on the reference and then
    multiplied."""
    recipe = recipe.replace(quantisation="int8", ema_decay=0.9, weight_decay=0.0, **MODELS[model])
    state = draw_state(recipe)
    with oracle.make_engine(recipe, RATES) as engine:
        engine.write(state)
        scales = input_scales(engine.calibrate(draw_batches(recipe, 2)))
    return (
        recipe,
        state,
        {name: float(np.float32(factor * scale)) for name, scale in scales.items()},
    )


@for_quantising
@every_model
@pytest.mark.parametrize("factor", [COARSE, LIMITING])
def test_quantised_logits_are_those_of_float64(
    start: Start, tiny_recipe: Recipe, model: str, factor: float
) -> None:
    (recipe, state, scales), images = begin(tiny_recipe, model, factor), draw_images(4)
    engine = start(recipe, state)
    engine.quantise(scales)
    expected = oracle.logits(recipe, state.tensors, images, scales)
    assert distance(engine.predict(images), expected) < BOUNDS["quantised"].value


@for_quantising
def test_quantised_logits_in_bf16_are_near(start: Start, tiny_recipe: Recipe) -> None:
    (recipe, state, scales), images = begin(tiny_recipe, factor=1.0), draw_images(4)
    engine = start(recipe.replace(precision="bf16"), state)
    engine.quantise(scales)
    off = distance(engine.predict(images), oracle.logits(recipe, state.tensors, images, scales))
    assert BOUNDS["quantised"].value < off < BOUNDS["bf16 quantised"].value


@for_quantising
@every_model
def test_a_quantised_step_is_that_of_float64(start: Start, tiny_recipe: Recipe, model: str) -> None:
    (recipe, state, scales), batch = begin(tiny_recipe, model), draw_batch(tiny_recipe, 8)
    engine = start(recipe, state)
    engine.quantise(scales)
    interval = engine.fetch(engine.train([batch], 0))
    end = engine.read()
    expected = oracle.train(recipe, state, [batch], RATES, scales=scales)
    assert interval.losses == pytest.approx(expected.losses, rel=BOUNDS["quantised"].value)
    assert angle(end.momentum, expected.state.momentum) < BOUNDS["quantised direction"].value


@for_quantising
def test_no_gradient_passes_where_an_input_is_limited(start: Start, tiny_recipe: Recipe) -> None:
    # No feature is negative. With the smallest scale, those above 0 are limited; a ReLU stops the
    # gradient of those of 0.
    recipe, state, scales = begin(tiny_recipe)
    engine = start(recipe, state)
    engine.quantise(scales | {"fc": SMALLEST_SCALE})
    engine.train([draw_batch(recipe, 8)], 0)
    velocity = engine.read().momentum
    assert velocity["fc.bias"].all()
    assert not any(value.any() for name, value in velocity.items() if not name.startswith("fc."))


@for_quantising
def test_calibration_takes_the_largest_inputs_of_all(start: Start, tiny_recipe: Recipe) -> None:
    recipe, state, scales = begin(tiny_recipe)
    batches = draw_batches(recipe, 3)
    engine = start(recipe, state)
    engine.quantise(scales)
    largest = engine.calibrate(batches)
    assert tuple(largest) == layers(recipe.model)
    with oracle.make_engine(recipe.replace(quantisation="none"), RATES) as plain:
        plain.write(state)
        expected = [plain.calibrate([batch]) for batch in batches]
    assert largest == pytest.approx(
        {name: max(image[name] for image in expected) for name in largest}, rel=1e-5
    )


@for_quantising
def test_calibration_and_evaluation_train_nothing(start: Start, tiny_recipe: Recipe) -> None:
    recipe, state, scales = begin(tiny_recipe)
    engine = start(recipe, state)
    batches = draw_batches(recipe, 1)
    engine.quantise(scales)
    engine.calibrate(batches)
    engine.evaluate(batches, ema=True)
    assert all_bits(engine.read()) == all_bits(state)


@for_quantising
def test_an_average_is_evaluated_with_quantisation(start: Start, tiny_recipe: Recipe) -> None:
    (recipe, state, scales), batch = begin(tiny_recipe), draw_batch(tiny_recipe)
    engine = start(recipe, state)
    engine.quantise(scales)
    logits = oracle.logits(recipe, state.ema, batch.images, scales)
    expected = -oracle.log_softmax(logits)[np.arange(len(batch.labels)), batch.labels]
    result = engine.evaluate([batch], ema=True).losses
    assert result == pytest.approx(expected, rel=BOUNDS["quantised"].value)


@for_quantising
def test_rounding_does_not_hide_what_is_no_number(start: Start, tiny_recipe: Recipe) -> None:
    recipe, state, scales = begin(tiny_recipe)
    state.tensors["conv1.weight"][0, 0, 0, 0] = np.nan
    engine = start(recipe, state)
    engine.quantise(scales)
    assert np.isnan(engine.predict(draw_images(2))).all()
    assert np.isnan(engine.fetch(engine.train([draw_batch(recipe)], 0)).losses).all()


@for_quantising
def test_scales_that_do_not_fit_are_refused(start: Start, tiny_recipe: Recipe) -> None:
    recipe, state, scales = begin(tiny_recipe)
    engine = start(recipe, state)
    message = r"missing \['fc'\], unknown \['fc2'\]. Did you mean fc"
    with pytest.raises(CheckpointError, match=message):
        engine.quantise({name.replace("fc", "fc2"): scale for name, scale in scales.items()})
