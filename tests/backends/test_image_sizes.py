"""Tests for every engine: training steps on images of several sizes."""

import pytest

from lockstep.recipes import Recipe
from lockstep.verification.bounds import BOUNDS
from tests.backends import oracle
from tests.backends.cases import RATES, all_bits, compare_changes
from tests.backends.conftest import Start
from tests.backends.drawing import draw_batch, draw_state


def test_changing_sizes_go_where_float64_goes_and_resume(start: Start, tiny_recipe: Recipe) -> None:
    recipe = tiny_recipe.replace(stochastic_depth=0.6)
    batches = [
        draw_batch(recipe, seed=number, size=size, mixup="sample")
        for number, size in enumerate((32, 48, 32))
    ]
    begun = draw_state(recipe)
    engine = start(recipe, begun)
    losses = [*engine.fetch(engine.train(batches[:2], 0)).losses]
    middle = engine.read()
    losses += [*engine.fetch(engine.train(batches[2:], 2)).losses]
    end = engine.read()
    expected = oracle.train(recipe, begun, batches, RATES)
    assert losses[0] == pytest.approx(expected.losses[0], rel=BOUNDS["loss"].value)
    assert losses == pytest.approx(expected.losses, rel=BOUNDS["trajectory"].value)
    assert compare_changes(end, expected.state, begun) < BOUNDS["trajectory"].value
    resumed = start(recipe, middle, new=True)
    resumed.fetch(resumed.train(batches[2:], 2))
    assert all_bits(resumed.read()) == all_bits(end)
