"""Checks of steps that are compiled, or that have a loss scale, against steps that do not."""

import pytest

from lockstep.recipes import Recipe
from lockstep.verification.bounds import BOUNDS, distance
from tests.backends import oracle
from tests.backends.cases import FP16, RATES, Step, bits, statistics
from tests.backends.conftest import Start
from tests.backends.drawing import draw_batch


def check_compiled_step(start: Start, tiny_recipe: Recipe, step: Step) -> None:
    recipe, state, batch = step.begin(tiny_recipe)
    intervals = []
    states = []
    for compile in ("off", "on"):
        engine = start(recipe, state, accumulation_steps=step.parts, compile=compile)
        intervals.append(engine.fetch(engine.train([batch], 0)))
        states.append(engine.read())
    expected = oracle.train(recipe, state, [batch], RATES, step.parts)
    for interval in intervals:
        assert interval.losses == pytest.approx(expected.losses, rel=BOUNDS["loss"].value)
        assert interval.counts.top1 == expected.top1
        assert interval.counts.top5 == expected.top5
    plain, end = states
    assert distance(end.momentum, plain.momentum) < BOUNDS["compiled"].value
    assert distance(end.momentum, expected.state.momentum) < BOUNDS["gradient"].value
    assert distance(statistics(end), statistics(expected.state)) < BOUNDS["statistics"].value
    assert bits(end.momentum) != bits(plain.momentum), "nothing was compiled"


def check_scaled_step(start: Start, recipe: Recipe, loss_scaling: str, images: int = 16) -> None:
    # The scale is at most 8: gradients of full models reach 7,000, and fp16 ends at 65,504.
    states = []
    for changes in ({}, {"loss_scaling": loss_scaling, "loss_scale": 8.0}):
        engine = start(recipe.replace(**FP16, **changes))
        engine.train([draw_batch(recipe, images)], 0)
        states.append(engine.read())
    assert distance(states[1].momentum, states[0].momentum) < BOUNDS["scaled gradient"].value
