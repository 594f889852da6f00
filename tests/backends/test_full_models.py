"""What every engine must do: the published models at full size, against mathematics in float64 (`oracle`).

Depth and width multiply rounding, and a stride or a group that is wrong in one stage alone shows here. The steps begin
from `steady_state`; the logits, which no ReLU makes jump, from `random_state`.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from lockstep.backends import Interval, State
from lockstep.data import Batch
from lockstep.recipes import Recipe
from lockstep.verification.bounds import BOUNDS, distance
from tests.backends import oracle, test_engine, test_masks, test_precision, test_steps
from tests.backends.cases import (
    PUBLISHED,
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
from tests.backends.test_trajectories import twenty_steps

pytestmark = pytest.mark.slow

Stepped = tuple[Interval, State, oracle.Trained]
MASKED = ("conv1.weight", "layer2.0.conv2.weight", "layer4.0.downsample.0.weight", "fc.weight")
every_model = pytest.mark.parametrize("model", PUBLISHED)

STEPS = {
    "a mixup coefficient each": Step(mixup="sample"),
    "one mixup coefficient": Step(mixup="batch"),
    "not smoothed": Step({"label_smoothing": 0.0}),
    "SAME padding and 1001 logits": Step({"padding": "same", "logits": 1001}),
}


def one_step(start: Start, recipe: Recipe, model: str, step: Step) -> Stepped:
    """Return what a step of four images of 64 pixels brought, the state after it, and what both should be."""
    step = replace(step, changes={"model": model, "logits": 1000} | step.changes, size=64, is_steady=True)
    recipe, state, batch = step.begin(recipe, count=4)
    engine = start(recipe, state)
    interval = engine.fetch(engine.train([batch], 0))
    return interval, engine.read(), oracle.train(recipe, state, [batch], RATES)


@every_model
@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_a_step_of_a_full_model_is_that_of_float64(start: Start, tiny_recipe: Recipe, model: str, step: Step) -> None:
    interval, state, expected = one_step(start, tiny_recipe, model, step)
    assert interval.losses == pytest.approx(expected.losses, rel=BOUNDS["loss"].value)
    assert distance(state.momentum, expected.state.momentum) < BOUNDS["gradient"].value
    assert distance(statistics(state), statistics(expected.state)) < BOUNDS["full statistics"].value


@pytest.mark.parametrize(
    ("model", "size", "changes"),
    [
        ("resnet34", 96, {}),
        ("resnet50", 224, {}),
        ("resnet50-v1", 96, {}),
        ("resnext101-32x4d", 224, {}),
        ("resnet50", 96, test_engine.AS_TENSORFLOW),
        ("resnext101-32x4d", 64, test_engine.AS_TENSORFLOW),
    ],
    ids=lambda value: ",".join(value) or "as published" if isinstance(value, dict) else value,
)
def test_logits_of_a_full_model_are_those_of_float64(
    start: Start, tiny_recipe: Recipe, model: str, size: int, changes: dict[str, Any]
) -> None:
    recipe = tiny_recipe.replace(**{"model": model, "logits": 1000} | changes)
    state, images = random_state(recipe), random_images(2, size)
    logits = start(recipe, state).predict(images)
    assert distance(logits, oracle.logits(recipe, state.tensors, images)) < BOUNDS["full logits"].value


@every_model
@pytest.mark.parametrize(
    "changes",
    [
        {"ema_decay": 0.9, "weight_decay": 0.01},
        {"padding": "same", "logits": 1001, "precision": "bf16"},
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


@every_model
def test_twenty_steps_of_a_full_model_go_where_float64_goes(start: Start, tiny_recipe: Recipe, model: str) -> None:
    # 16 images of 32 pixels: one pixel of each in the last stage, and a batch norm there of 16 values.
    changes = {"warmup_epochs": 1.0, "lr": 5e-5, "model": model, "logits": 1000}
    end, losses, begin, expected = twenty_steps(start, tiny_recipe, changes)
    assert len(losses) == 20
    assert losses == pytest.approx(expected.losses, rel=BOUNDS["full loss"].value)
    assert distance(moved(end, begin), moved(expected.state, begin)) < BOUNDS["trajectory"].value
    assert distance(end.momentum, expected.state.momentum) < BOUNDS["trajectory"].value
    assert distance(statistics(end), statistics(expected.state)) < BOUNDS["full statistics"].value
    assert distance(end.ema, expected.state.ema) < BOUNDS["full statistics"].value


# What is held against the engine's own gradient, or another step of its own, where rounding of a deep model plays no part;
# and the gradient by plain descent, which is held against float64.
RULES: dict[str, Callable[..., None]] = {
    "a state": test_engine.test_what_was_written_is_read_to_the_last_bit,
    "scores": test_engine.test_scores_are_those_of_the_logits_predicted,
    "plain descent": test_steps.test_a_step_of_plain_descent_goes_by_the_rate_times_the_gradient,
    "rate": test_steps.test_weights_move_by_the_rate_times_the_velocity,
    "momentum": test_steps.test_momentum_keeps_the_rate_outside_the_velocity,
    "decay": partial(test_steps.test_weight_decay_reaches_the_listed_roles_alone, roles=test_steps.DEFAULT_ROLES),
    "parts": test_steps.test_two_equal_parts_have_the_gradient_of_one,
    "static loss scale": partial(test_precision.test_a_loss_scale_leaves_the_update_as_it_is, loss_scaling="static"),
    "dynamic loss scale": partial(test_precision.test_a_loss_scale_leaves_the_update_as_it_is, loss_scaling="dynamic"),
    "a loss scale too large": test_precision.test_a_static_loss_scale_reaches_the_gradients,
    "overflow": test_precision.test_an_overflow_skips_the_update,
    "moving average": partial(test_precision.test_the_moving_average_follows_the_formula, step=7, keep=8 / 17),
    "evaluation of the moving average": test_precision.test_evaluating_the_moving_average_uses_its_weights_and_statistics,
    "masks": partial(test_masks.test_masked_weights_stay_at_0_through_training, pattern="two of four"),
}


IN_FP16 = ("static loss scale", "dynamic loss scale", "a loss scale too large", "overflow")
"""Of the larger model they take a CPU minutes each, and of its size they take no notice."""
RULED = [
    pytest.param(model, rule, id=f"{name}-{model}")
    for model in PUBLISHED
    for name, rule in RULES.items()
    if model == "resnet50" or name not in IN_FP16
]


@pytest.mark.parametrize(("model", "rule"), RULED)
def test_what_holds_of_narrow_models_holds_of_a_full_one(
    start: Start, tiny_recipe: Recipe, model: str, rule: Callable[..., None]
) -> None:
    rule(start=start, recipe=tiny_recipe.replace(model=model, logits=1000))
