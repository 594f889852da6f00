"""A run that starts on one engine and resumes on another ends as a run without a break."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from lockstep import backends
from lockstep.models.state import State
from lockstep.recipes import Recipe
from lockstep.verification.bounds import BOUNDS, angle, distance
from tests.backends import oracle
from tests.backends.cases import (
    FP16,
    NARROWED,
    PUBLISHED,
    RATES,
    bits,
    compare_changes,
    statistics,
    subtract_states,
)
from tests.backends.conftest import Grounds, Start, starter
from tests.backends.drawing import draw_batches, draw_steady_state
from tests.backends.launchers import PAIRS, RING
from tests.soak import SOAK

STEPS = 8


@dataclass(frozen=True)
class Pair:
    """Functions that start the first and the second engine of a run."""

    first: Start
    second: Start


@pytest.fixture(params=RING, ids=" to ".join)
def pair(request: pytest.FixtureRequest, grounds: Grounds) -> Iterator[Pair]:
    with ExitStack() as stack:
        starts = []
        for name in request.param:
            backend = backends.load(name)
            starts.append(starter(backend, grounds(backend)[0], stack, grounds(backend)[1]))
        yield Pair(*starts)


def hand_over(
    pair: Pair, recipe: Recipe, begin: State, *, mixup: str = "sample", parts: int = 1
) -> State:
    """Return the final state of a run in which each engine does half of the steps."""
    batches = draw_batches(recipe, STEPS, mixup=mixup)
    half = STEPS // 2
    first = pair.first(recipe, begin, accumulation_steps=parts)
    first.train(batches[:half], 0)
    second = pair.second(recipe, first.read(), accumulation_steps=parts)
    second.train(batches[half:], half)
    return second.read()


RUNS: dict[str, tuple[dict[str, Any], str, int]] = {
    "LAMB, an average, SAME padding and two parts": (
        {
            "optimizer": "lamb",
            "optimizer_epsilon": 1e-3,
            "clip_norm": 1.0,
            "ema_decay": 0.9,
            "padding": "same",
        },
        "sample",
        2,
    ),
    "much momentum and decay": ({"momentum": 0.99, "weight_decay": 0.05}, "none", 1),
} | (
    {name: (changes | {"ema_decay": 0.9}, "sample", 1) for name, changes in NARROWED.items()}
    if SOAK
    else {}
)


@dataclass(frozen=True)
class Run:
    """A run from a steady state, and its expected end."""

    recipe: Recipe
    mixup: str
    parts: int
    begin: State
    expected: State

    @classmethod
    def make(cls, recipe: Recipe, mixup: str, parts: int) -> "Run":
        begin = draw_steady_state(recipe)
        batches = draw_batches(recipe, STEPS, mixup=mixup)
        return cls(
            recipe, mixup, parts, begin, oracle.train(recipe, begin, batches, RATES, parts).state
        )

    def check(self, end: State) -> None:
        begin = self.begin
        expected = self.expected
        of_statistics = BOUNDS[
            "full statistics" if self.recipe.model in PUBLISHED else "statistics"
        ].value
        assert end.step == expected.step == STEPS
        assert compare_changes(end, expected, begin) < BOUNDS["trajectory"].value
        assert distance(end.momentum, expected.momentum) < BOUNDS["trajectory"].value
        assert distance(statistics(end), statistics(expected)) < of_statistics
        if self.recipe.ema_decay:
            assert distance(end.ema, expected.ema) < of_statistics


@pytest.fixture(scope="module", params=RUNS.values(), ids=RUNS)
def run(request: pytest.FixtureRequest, tiny_recipe: Recipe) -> Run:
    changes, mixup, parts = request.param
    return Run.make(tiny_recipe.replace(**changes), mixup, parts)


@pytest.fixture(scope="module")
def full_run(tiny_recipe: Recipe) -> Run:
    return Run.make(tiny_recipe.replace(model="resnet50", logits=1000, ema_decay=0.9), "sample", 1)


def test_a_run_handed_over_ends_where_float64_goes(pair: Pair, run: Run) -> None:
    run.check(hand_over(pair, run.recipe, run.begin, mixup=run.mixup, parts=run.parts))


FULL = RING if SOAK else ()
"""Engines that pass on a full model, in a soak: the narrow models above show what depends on the
engines."""


@pytest.mark.slow
@pytest.mark.parametrize("pair", FULL, ids=" to ".join, indirect=True)
def test_a_full_model_handed_over_ends_where_float64_goes(pair: Pair, full_run: Run) -> None:
    full_run.check(hand_over(pair, full_run.recipe, full_run.begin))


def test_losing_the_velocities_would_show(tiny_recipe: Recipe) -> None:
    # Otherwise the test above could not detect that velocities are lost.
    begin = draw_steady_state(tiny_recipe)
    batches = draw_batches(tiny_recipe, STEPS)
    half = STEPS // 2
    middle = oracle.train(tiny_recipe, begin, batches[:half], RATES).state
    without = replace(
        middle, momentum={name: np.zeros_like(value) for name, value in middle.momentum.items()}
    )
    ends = [
        oracle.train(tiny_recipe, state, batches[half:], RATES).state for state in (middle, without)
    ]
    assert compare_changes(ends[1], ends[0], begin) > 5 * BOUNDS["trajectory"].value


@pytest.mark.parametrize("pair", PAIRS, ids=" to ".join, indirect=True)
def test_what_one_engine_reads_another_takes_over_exactly(pair: Pair, tiny_recipe: Recipe) -> None:
    recipe = tiny_recipe.replace(**FP16, loss_scaling="dynamic", ema_decay=0.9, optimizer="adamw")
    first = pair.first(recipe)
    first.train(draw_batches(recipe, 3), 0)
    state = first.read()
    end = pair.second(recipe, state).read()
    assert (end.step, end.scaler) == (state.step, state.scaler)
    for name in ("tensors", "momentum", "ema", "second_moments"):
        assert bits(getattr(end, name)) == bits(getattr(state, name))


def test_a_dynamic_loss_scale_goes_on_across_engines(pair: Pair, tiny_recipe: Recipe) -> None:
    # Step 0 overflows. The first engine does three of the five good steps until the scale grows.
    recipe = tiny_recipe.replace(
        **FP16,
        loss_scaling="dynamic",
        loss_scale=2.0**60,
        loss_scale_backoff=2.0**-50,
        loss_scale_growth_steps=5,
    )
    begin = draw_steady_state(recipe)
    batches = draw_batches(recipe, STEPS, mixup="sample")
    end = hand_over(pair, recipe, begin)
    assert end.scaler == {"scale": 2048.0, "good_steps": 2, "bad_steps": 0}
    expected = oracle.train(
        recipe, State(1, begin.tensors, begin.momentum), batches[1:], RATES
    ).state
    result = angle(subtract_states(end, begin), subtract_states(expected, begin))
    assert result < BOUNDS["fp16 direction"].value


# fp16 is in the test above.
def test_a_run_handed_over_in_bf16_goes_the_same_way(pair: Pair, tiny_recipe: Recipe) -> None:
    recipe = tiny_recipe.replace(precision="bf16", ema_decay=0.9)
    begin = draw_steady_state(recipe)
    batches = draw_batches(recipe, STEPS, mixup="sample")
    end = hand_over(pair, recipe, begin)
    expected = oracle.train(recipe, begin, batches, RATES).state
    result = angle(subtract_states(end, begin), subtract_states(expected, begin))
    assert result < BOUNDS["bf16 direction"].value
