"""What every engine must do: the published models at full size, against mathematics in float64 (`oracle`).

Depth and width multiply rounding, and a stride or a group that is wrong in one stage alone shows here. The steps begin
from `steady_state`; the logits, which no ReLU makes jump, from `random_state`.
"""

from typing import Any

import numpy as np
import pytest

from lockstep.backends import Interval, State
from lockstep.data import Batch
from lockstep.recipes import Recipe
from lockstep.verification.bounds import BOUNDS, distance
from tests.backends import oracle
from tests.backends.cases import (
    RATES,
    Step,
    all_bits,
    moved,
    random_batch,
    random_batches,
    random_images,
    random_state,
    statistics,
    steady_state,
)
from tests.backends.conftest import Start

pytestmark = pytest.mark.slow

Stepped = tuple[Interval, State, oracle.Trained]
MASKED = ("conv1.weight", "layer2.0.conv2.weight", "layer4.0.downsample.0.weight", "fc.weight")
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


@every_model
@pytest.mark.parametrize(
    "changes",
    [
        {"ema_decay": 0.9, "weight_decay": 0.01},
        {"padding": "same", "logits": 1001, "precision": "fp16", "loss_scaling": "dynamic", "loss_scale": 64.0},
    ],
    ids=["averaged", "as TensorFlow's"],
)
def test_a_full_model_goes_on_where_it_was_read_to_the_same_bits(
    start: Start, tiny_recipe: Recipe, model: str, changes: dict[str, Any]
) -> None:
    recipe = tiny_recipe.replace(**{"model": model, "logits": 1000} | changes)
    state, batches = steady_state(recipe), random_batches(recipe, 3, count=4, size=64, mixup="sample")
    first = start(recipe, state, accumulation_steps=2)
    first.train(batches[:1], 0)
    second = start(recipe, first.read(), accumulation_steps=2)
    for engine, left in ((first, batches[1:]), (second, batches[1:])):
        engine.train(left, 1)
    assert all_bits(first.read()) == all_bits(second.read())


@every_model
def test_a_full_model_goes_where_float64_goes_masked_averaged_and_in_parts(
    start: Start, tiny_recipe: Recipe, model: str
) -> None:
    recipe = tiny_recipe.replace(model=model, logits=1000, ema_decay=0.9, weight_decay=0.01)
    state, batches = steady_state(recipe), random_batches(recipe, 4, count=4, size=64, mixup="batch")
    masks = {name: np.arange(state.tensors[name].size).reshape(state.tensors[name].shape) % 4 < 2 for name in MASKED}
    engine = start(recipe, state, accumulation_steps=2)
    engine.mask(masks)
    losses = engine.fetch(engine.train(batches, 0)).losses
    end, expected = engine.read(), oracle.train(recipe, state, batches, RATES, 2, masks)
    assert losses == pytest.approx(expected.losses, rel=BOUNDS["full loss"].value)
    assert distance(moved(end, state), moved(expected.state, state)) < BOUNDS["trajectory"].value
    assert distance(end.momentum, expected.state.momentum) < BOUNDS["trajectory"].value
    assert distance(end.ema, expected.state.ema) < BOUNDS["full statistics"].value
    assert not any(end.tensors[name][~mask].any() for name, mask in masks.items())


@every_model
def test_a_full_model_scores_every_image_of_a_ragged_evaluation(start: Start, tiny_recipe: Recipe, model: str) -> None:
    recipe = tiny_recipe.replace(model=model, logits=1000)
    state, batch = random_state(recipe), random_batch(recipe, count=4, size=64)
    scores = start(recipe, state).evaluate([batch, Batch(batch.images, np.where(np.arange(4) < 3, batch.labels, -1))])
    logits = oracle.logits(recipe, state.tensors, batch.images)
    losses = -oracle.log_softmax(logits)[np.arange(4), batch.labels]
    assert scores.losses == pytest.approx(np.concatenate([losses, losses[:3]]), rel=BOUNDS["full loss"].value)
    assert scores.predictions.tolist() == [*logits.argmax(axis=1), *logits.argmax(axis=1)[:3]]
