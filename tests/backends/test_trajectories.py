"""Tests for every engine: twenty steps over a whole schedule, against mathematics in float64
(`oracle`)."""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest

from lockstep.data import Batch
from lockstep.models.state import State
from lockstep.recipes import Recipe
from lockstep.recipes.schedule import learning_rates
from lockstep.verification.bounds import BOUNDS, distance
from tests.backends import oracle
from tests.backends.cases import NARROWED, compare_changes, statistics
from tests.backends.conftest import Start
from tests.backends.drawing import draw_batches, draw_steady_state
from tests.soak import SOAK

STEPS_PER_EPOCH = 5

# The peak is low: at ordinary learning rates rounding leads to another trajectory. One schedule is
# smooth and one has jumps. An engine gets a rate for every step and does not know the schedule.
SCHEDULES = {
    "warm-up and cosine": {"warmup_epochs": 1.0},
    "step": {"warmup_epochs": 0.0, "lr_decay": "step", "lr_step_epochs": (1, 3)},
    "a narrow resnext101-32x4d": {"warmup_epochs": 1.0, "lr": 5e-5}
    | NARROWED["narrow resnext101-32x4d"],
}
OF_ENGINES = ("warm-up and cosine", "a narrow resnext101-32x4d")
"""Schedules that engines follow outside of a soak. `test_steps` has rates that jump, and
`test_faults` needs all schedules."""


@cache
def whole_run(recipe: Recipe) -> tuple[np.ndarray, State, list[Batch], oracle.Trained]:
    """Return rates, first state and batches of a run, and the expected results; computed once for
    all engines."""
    rates = learning_rates(recipe, STEPS_PER_EPOCH)
    begin = draw_steady_state(recipe)
    batches = draw_batches(recipe, len(rates), mixup="sample")
    return rates, begin, batches, oracle.train(recipe, begin, batches, list(rates))


def twenty_steps(start: Start, recipe: Recipe, changes: dict[str, Any]) -> "Trajectory":
    """Return the final state, the losses, the first state, and the expected values of the first
    two."""
    recipe = recipe.replace(**{"epochs": 4, "lr": 9e-4, "ema_decay": 0.9} | changes)
    rates, begin, batches, expected = whole_run(recipe)
    engine = start(recipe, begin, rates)
    losses = engine.fetch(engine.train(batches, 0)).losses
    return engine.read(), losses, begin, expected


Trajectory = tuple[State, np.ndarray, State, oracle.Trained]


def check_weights(end: State, _: np.ndarray, begin: State, expected: oracle.Trained) -> None:
    assert compare_changes(end, expected.state, begin) < BOUNDS["trajectory"].value


def check_curve(_: State, losses: np.ndarray, _begin: State, expected: oracle.Trained) -> None:
    """Compare the losses with the bound for one step: rounding does not grow here."""
    assert len(losses) == 20
    assert losses == pytest.approx(expected.losses, rel=BOUNDS["loss"].value)


def check_rest(end: State, _: np.ndarray, _begin: State, expected: oracle.Trained) -> None:
    """Compare velocities, statistics and moving averages."""
    assert distance(end.momentum, expected.state.momentum) < BOUNDS["trajectory"].value
    assert distance(statistics(end), statistics(expected.state)) < BOUNDS["statistics"].value
    assert distance(end.ema, expected.state.ema) < BOUNDS["statistics"].value


CHECKS = (check_weights, check_curve, check_rest)
"""The checks of a trajectory. One engine is used for all of them. `test_faults` uses each check
alone."""


@pytest.mark.parametrize("schedule", SCHEDULES if SOAK else OF_ENGINES)
def test_twenty_steps_follow_float64(start: Start, tiny_recipe: Recipe, schedule: str) -> None:
    hold_trajectory(start, tiny_recipe, SCHEDULES[schedule], *CHECKS)


def hold_trajectory(
    start: Start, tiny_recipe: Recipe, changes: dict[str, Any], *checks: Callable[..., None]
) -> None:
    trajectory = twenty_steps(start, tiny_recipe, changes)
    for check in checks:
        check(*trajectory)


def test_the_rates_of_a_cosine_differ_from_step_to_step(tiny_recipe: Recipe) -> None:
    # Otherwise the trajectories could not distinguish the rate of one step from that of another.
    rates = learning_rates(
        tiny_recipe.replace(epochs=4, lr=9e-4, **SCHEDULES["warm-up and cosine"]), STEPS_PER_EPOCH
    )
    assert len(set(rates)) == len(rates) == 20
    assert rates.max() == 9e-4
