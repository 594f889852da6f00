"""Tests for every engine: frozen tensors, and learning rates by tensor."""

from types import ModuleType
from typing import Any

import numpy as np
import pytest

from lockstep.models.state import State
from lockstep.recipes import Recipe
from lockstep.verification.bounds import BOUNDS, distance
from tests.backends import oracle
from tests.backends.cases import Step, bits, parameters
from tests.backends.conftest import Start
from tests.backends.drawing import draw_batch, draw_batches, draw_state
from tests.backends.steps import FROZEN, FROZEN_AND_RATES, STEPS


def is_changing(recipe: Recipe, name: str) -> bool:
    """Return whether training changes a tensor."""
    names = [name]
    if oracle.is_statistic(name):
        norm = name.rpartition(".")[0]
        names = [f"{norm}.weight", f"{norm}.bias"]
    return any(oracle.rate_factor(recipe, other) for other in names)


def test_frozen_tensors_keep_their_bits_and_no_others(start: Start, tiny_recipe: Recipe) -> None:
    recipe = tiny_recipe.replace(**FROZEN_AND_RATES)
    drawn = draw_state(recipe, seed=1)
    state = State(0, drawn.tensors, parameters(draw_state(recipe, seed=2)), drawn.ema)
    engine = start(recipe, state, accumulation_steps=2)
    engine.train(draw_batches(recipe, 2), 0)
    end = engine.read()
    for kind in ("tensors", "momentum", "ema"):
        before = getattr(state, kind)
        for name, value in getattr(end, kind).items():
            has_changed = bits({name: value}) != bits({name: before[name]})
            assert has_changed == is_changing(recipe, name), (kind, name)


def test_a_frozen_backbone_computes_as_in_evaluation(start: Start, tiny_recipe: Recipe) -> None:
    recipe, state, batch = STEPS["frozen backbone"].begin(tiny_recipe)
    engine = start(recipe, state)
    log_p = oracle.log_softmax(engine.predict(batch.pixels))
    smoothing = recipe.label_smoothing
    own = log_p[np.arange(len(log_p)), batch.labels]
    expected = -((1 - smoothing) * own + smoothing * log_p.mean(axis=1)).mean()
    result = engine.fetch(engine.train([batch], 0)).losses
    assert result == pytest.approx([expected], rel=BOUNDS["loss"].value)


def test_rates_are_those_of_the_frameworks_own_optimizer_with_groups(
    start: Start, tiny_recipe: Recipe, native: ModuleType
) -> None:
    # After the first step the velocity is the gradient, with its decay.
    recipe = tiny_recipe.replace(**FROZEN_AND_RATES)
    state = draw_state(recipe)
    rate = 0.5
    engine = start(recipe, state, rates=[rate])
    engine.train([draw_batch(recipe)], 0)
    end = engine.read()
    factors = {name: oracle.rate_factor(recipe, name) for name in state.momentum}
    trained = [name for name, factor in factors.items() if factor]
    groups = [(state.tensors[name], end.momentum[name], rate * factors[name]) for name in trained]
    expected = native.step_in_groups(groups, recipe.momentum)
    moved = {name: end.tensors[name] for name in trained}
    assert distance(moved, dict(zip(trained, expected, strict=True))) < BOUNDS["operation"].value


@pytest.mark.parametrize(
    ("frozen", "convolutions"),
    # In a block: three convolutions and that of the shortcut.
    [((), 1 + 4 * 4), (FROZEN, 3 * 4), ("backbone", 0)],
    ids=["nothing", "up to the first stage", "backbone"],
)
def test_nothing_is_computed_backwards_below_the_lowest_trained_tensor(
    start: Start, tiny_recipe: Recipe, native: ModuleType, frozen: Any, convolutions: int
) -> None:
    recipe, state, batch = Step({"frozen": frozen}).begin(tiny_recipe)
    engine = start(recipe, state, compile=native.FACTS.counted)
    assert native.count_differentiated_convolutions(engine, batch) == convolutions
