"""Activation recomputation on TensorFlow: the same bits."""

from dataclasses import replace

from lockstep.recipes import Recipe
from tests.backends.cases import BASIC, all_bits
from tests.backends.conftest import Start, make_backend_fixture
from tests.backends.drawing import draw_batches

backend = make_backend_fixture("tensorflow")


def test_a_run_that_computes_activations_twice_has_the_same_bits(
    start: Start, tiny_recipe: Recipe
) -> None:
    # The state has the running statistics, which would be others if the second pass moved them,
    # too.
    recipe = tiny_recipe.replace(model=replace(BASIC, layers=(1, 1, 1, 1)), stochastic_depth=0.6)
    ends = []
    for recompute in ("off", "blocks"):
        engine = start(recipe, recompute=recompute)
        losses = engine.fetch(engine.train(draw_batches(recipe, 2, mixup="sample"), 0)).losses
        ends.append((losses.tobytes(), all_bits(engine.read())))
    assert ends[0] == ends[1]
