"""Tests for every engine: training steps, against mathematics in float64 (`oracle`)."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from lockstep.backends import Interval
from lockstep.data import Batch
from lockstep.models.state import State
from lockstep.recipes import Recipe
from lockstep.verification.bounds import BOUNDS, distance, largest
from tests.backends import oracle
from tests.backends.cases import (
    FP16,
    RATES,
    Step,
    all_bits,
    compare_changes,
    parameters,
    statistics,
)
from tests.backends.conftest import Start
from tests.backends.drawing import (
    draw_batch,
    draw_batches,
    draw_state,
    state_with_logits,
)
from tests.backends.steps import STEPS, TRAJECTORIES

# One step

every_step = pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)


Stepped = tuple[Interval, State, oracle.Trained]


def one_step(start: Start, recipe: Recipe, step: Step) -> Stepped:
    """Return the results of one step, the state after it, and the expected values of both."""
    recipe, state, batch = step.begin(recipe)
    engine = start(recipe, state, accumulation_steps=step.parts)
    interval = engine.fetch(engine.train([batch], 0))
    return interval, engine.read(), oracle.train(recipe, state, [batch], RATES, step.parts)


def check_loss(interval: Interval, _: State, expected: oracle.Trained) -> None:
    assert interval.losses == pytest.approx(expected.losses, rel=BOUNDS["loss"].value)


def check_gradient(_: Interval, state: State, expected: oracle.Trained) -> None:
    """Compare the first velocity, which is the gradient, with float64's."""
    assert distance(state.momentum, expected.state.momentum) < BOUNDS["gradient"].value


def check_statistics(_: Interval, state: State, expected: oracle.Trained) -> None:
    assert distance(statistics(state), statistics(expected.state)) < BOUNDS["statistics"].value


CHECKS = (check_loss, check_gradient, check_statistics)
"""The checks of a step. One engine is used for all of them. `test_faults` uses each check alone."""


@every_step
def test_a_step_is_that_of_float64(start: Start, tiny_recipe: Recipe, step: Step) -> None:
    hold_step(start, tiny_recipe, step, *CHECKS)


def hold_step(start: Start, tiny_recipe: Recipe, step: Step, *checks: Callable[..., None]) -> None:
    stepped = one_step(start, tiny_recipe, step)
    for check in checks:
        check(*stepped)


def test_weights_move_by_the_rate_times_the_velocity(start: Start, tiny_recipe: Recipe) -> None:
    rates = [0.3, 0.1]
    states = [draw_state(tiny_recipe)]
    engine = start(tiny_recipe, states[0], rates=rates)
    for step in (0, 1):
        engine.train([draw_batch(tiny_recipe, seed=step)], step)
        states.append(engine.read())
        before = parameters(states[step])
        after = states[step + 1]
        expected = {
            name: before[name] - np.float64(rates[step]) * v for name, v in after.momentum.items()
        }
        assert distance(parameters(after), expected) < BOUNDS["operation"].value


# Decay, momentum and accumulation over steps

DEFAULT_ROLES = Recipe().weight_decay_roles


@pytest.mark.parametrize(
    "roles",
    # Each role is listed and not.
    [DEFAULT_ROLES, ("bn_scale", "shortcut_bn_bias", "fc_bias"), ("bn_bias", "fc_weight")],
    ids=",".join,
)
def test_only_its_roles_decay(start: Start, tiny_recipe: Recipe, roles: tuple[str, ...]) -> None:
    decay = 0.5
    state = draw_state(tiny_recipe)
    batch = draw_batch(tiny_recipe)
    velocities = []
    for value in (0.0, decay):
        engine = start(tiny_recipe.replace(weight_decay=value, weight_decay_roles=roles), state)
        engine.train([batch], 0)
        velocities.append(engine.read().momentum)
    for name in parameters(state):
        listed = oracle.role(name) in roles or (
            "downsample.1.bias" in name and "shortcut_bn_bias" in roles
        )
        expected = decay * state.tensors[name] if listed else 0
        # Relative to the velocities, since a difference has the rounding of its operands.
        rounding = 2 * BOUNDS["operation"].value * largest(velocities[1][name])
        np.testing.assert_allclose(
            velocities[1][name] - velocities[0][name], expected, atol=rounding, err_msg=name
        )


@pytest.mark.parametrize(("changes", "mixup", "parts"), TRAJECTORIES.values(), ids=TRAJECTORIES)
def test_eight_steps_at_changing_rates_lead_where_float64_goes(
    start: Start, tiny_recipe: Recipe, changes: dict[str, Any], mixup: str, parts: int
) -> None:
    recipe = tiny_recipe.replace(**changes)
    state = draw_state(recipe)
    batches = draw_batches(recipe, 8, mixup=mixup)
    engine = start(recipe, state, accumulation_steps=parts)
    engine.train(batches, 0)
    expected = oracle.train(recipe, state, batches, RATES, parts).state
    assert compare_changes(engine.read(), expected, state) < BOUNDS["trajectory"].value


def test_no_momentum_keeps_the_last_gradient(start: Start, tiny_recipe: Recipe) -> None:
    recipe = tiny_recipe.replace(momentum=0.0)
    batches = draw_batches(tiny_recipe, 2)
    engine = start(recipe, rates=[0, 0])
    engine.train(batches, 0)
    expected = oracle.train(recipe, draw_state(recipe), batches[1:], RATES).state
    assert distance(engine.read().momentum, expected.momentum) < BOUNDS["gradient"].value


# What an interval reports


@pytest.mark.parametrize("parts", [1, 2])
def test_hits_are_counted_against_the_images_own_labels(
    start: Start, tiny_recipe: Recipe, parts: int
) -> None:
    # The logits decrease from class 0 to 9, so labels below 5 are among the first five.
    recipe = tiny_recipe.replace(weight_decay=0.0)
    batch = draw_batch(recipe, mixup="sample")
    labels = np.array([0, 0, 0, 1, 2, 4, 5, 9, 9, 9, 9, 9, 9, 9, 9, 9])
    engine = start(
        recipe, state_with_logits(recipe, [9, 8, 7, 6, 5, 4, 3, 2, 1, 0]), accumulation_steps=parts
    )
    interval = engine.fetch(
        engine.train([Batch(batch.images, labels, batch.coefficients, batch.partners)], 0)
    )
    assert (interval.counts.top1, interval.counts.top5, interval.counts.images) == (3, 6, 16)


def test_an_interval_sums_the_losses_of_its_images(start: Start, tiny_recipe: Recipe) -> None:
    engine = start(tiny_recipe)
    interval = engine.fetch(engine.train(draw_batches(tiny_recipe, 3), 0))
    assert interval.counts.loss_sum == pytest.approx(16 * interval.losses.sum())
    assert interval.counts.images == 48


def test_a_loss_that_is_no_number_is_reported(start: Start, tiny_recipe: Recipe) -> None:
    engine = start(tiny_recipe, state_with_logits(tiny_recipe, [0.0] * 9 + [np.nan]))
    interval = engine.fetch(engine.train([draw_batch(tiny_recipe)], 0))
    assert np.isnan(interval.losses).all()
    assert interval.counts.top1 == 0


@pytest.mark.parametrize(
    ("changes", "scale"),
    [
        ({}, 1.0),
        ({"loss_scaling": "static"}, 1.0),
        (FP16, 1.0),
        (FP16 | {"loss_scaling": "static", "loss_scale": 64.0}, 64.0),
        (FP16 | {"loss_scaling": "dynamic", "loss_scale": 32.0}, 32.0),
    ],
)
def test_an_interval_reports_the_loss_scale(
    start: Start, tiny_recipe: Recipe, changes: dict[str, Any], scale: float
) -> None:
    engine = start(tiny_recipe.replace(**changes))
    assert engine.fetch(engine.train([draw_batch(tiny_recipe)], 0)).loss_scale == scale


def test_batches_are_taken_one_by_one_until_they_end(start: Start, tiny_recipe: Recipe) -> None:
    engine = start(tiny_recipe)
    steps = []

    def until_stopped() -> Iterator[Batch]:
        for step, batch in enumerate(draw_batches(tiny_recipe, 5)):
            if step == 2:
                return
            steps.append(step)
            yield batch

    handle = engine.train(until_stopped(), 4)
    assert (handle.first, handle.steps, steps, engine.read().step) == (4, 2, [0, 1], 6)


def test_training_on_nothing_changes_nothing(start: Start, tiny_recipe: Recipe) -> None:
    engine = start(tiny_recipe)
    before = all_bits(engine.read())
    assert engine.train([], 0).steps == 0
    assert all_bits(engine.read()) == before


def test_an_interval_can_be_fetched_after_the_next(start: Start, tiny_recipe: Recipe) -> None:
    batches = draw_batches(tiny_recipe, 4)
    engine = start(tiny_recipe)
    other = start(tiny_recipe)
    handles = [engine.train(batches[:2], 0), engine.train(batches[2:], 2)]
    late = [engine.fetch(handle) for handle in handles]
    at_once = [other.fetch(other.train(batches[first : first + 2], first)) for first in (0, 2)]
    for a, b in zip(late, at_once, strict=True):
        assert a.losses.tobytes() == b.losses.tobytes()
        assert a.counts == b.counts
