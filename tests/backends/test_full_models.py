"""What every engine must do: the published models at full size, against mathematics in float64 (`oracle`).

Depth and width multiply rounding, and a stride or a group that is wrong in one stage alone shows here. The steps begin
from `steady_state`; the logits, which no ReLU makes jump, from `random_state`.
"""

import pytest

from lockstep.backends import Interval, State
from lockstep.recipes import Recipe
from lockstep.verification.bounds import BOUNDS, distance
from tests.backends import oracle
from tests.backends.cases import RATES, Step, random_images, random_state, statistics
from tests.backends.conftest import Start

pytestmark = pytest.mark.slow

Stepped = tuple[Interval, State, oracle.Trained]
every_model = pytest.mark.parametrize("model", ["resnet50", "resnext101-32x4d"])


def one_step(start: Start, recipe: Recipe, model: str) -> Stepped:
    """Return what a step of four images of 64 pixels brought, the state after it, and what both should be."""
    step = Step({"model": model, "logits": 1000}, "sample", size=64, is_steady=True)
    recipe, state, batch = step.begin(recipe, count=4)
    engine = start(recipe, state)
    interval = engine.fetch(engine.train([batch], 0))
    return interval, engine.read(), oracle.train(recipe, state, [batch], RATES)


@every_model
def test_a_step_of_a_full_model_is_that_of_float64(start: Start, tiny_recipe: Recipe, model: str) -> None:
    interval, state, expected = one_step(start, tiny_recipe, model)
    assert interval.losses == pytest.approx(expected.losses, rel=BOUNDS["loss"].value)
    assert distance(state.momentum, expected.state.momentum) < BOUNDS["gradient"].value
    assert distance(statistics(state), statistics(expected.state)) < BOUNDS["full statistics"].value


@pytest.mark.parametrize(
    ("model", "size"), [("resnet34", 96), ("resnet50", 224), ("resnet50-v1", 96), ("resnext101-32x4d", 224)]
)
def test_logits_of_a_full_model_are_those_of_float64(start: Start, tiny_recipe: Recipe, model: str, size: int) -> None:
    recipe = tiny_recipe.replace(model=model, logits=1000)
    state, images = random_state(recipe), random_images(2, size)
    logits = start(recipe, state).predict(images)
    assert distance(logits, oracle.logits(recipe, state.tensors, images)) < BOUNDS["full logits"].value
