"""What every engine must do: the protocol of `lockstep.backends`, against mathematics in float64 (`oracle`)."""

from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest

from lockstep.backends import Interval, State
from lockstep.data import Batch
from lockstep.errors import CheckpointError
from lockstep.initial import initial_tensors
from lockstep.metrics import Counts, Scores
from lockstep.models import MODELS, ModelSpec, model_spec, tensors
from lockstep.recipes import Recipe
from tests.backends import oracle
from tests.backends.cases import (
    RATES,
    TOLERANCE,
    all_bits,
    angle,
    bits,
    distance,
    moved,
    parameters,
    random_batch,
    random_batches,
    random_images,
    random_state,
    state_with_logits,
    statistics,
)
from tests.backends.conftest import Start

NARROW: dict[str, Any] = {"layers": (2, 1, 1, 1), "stem_width": 8, "widths": (8, 8, 16, 16)}
BASIC = ModelSpec(block="basic", expansion=1, **NARROW)
V1 = ModelSpec(block="bottleneck", expansion=2, stride_in="1x1", **NARROW)
OTHER_COLOURS = {"mean": (10.0, 100.0, 200.0), "std": (30.0, 60.0, 120.0)}
"""Far apart, so that a mixed-up channel or a swapped mean and deviation shows."""

FP16: dict[str, Any] = {"precision": "fp16"}
OVERFLOWING = 2.0**60
"""A loss scale that takes every gradient beyond fp16's largest number, 65,504."""


# State


@pytest.mark.slow
@pytest.mark.parametrize("model", ["resnet18", "resnet50", "resnext101-32x4d"])
def test_the_tensors_of_a_full_model_are_those_of_the_table(start: Start, tiny_recipe: Recipe, model: str) -> None:
    recipe = tiny_recipe.replace(model=model, logits=1000)
    found = start(recipe).read()
    table = {tensor.name: tensor.shape for tensor in tensors(MODELS[model], 1000)}
    trained = {tensor.name: tensor.shape for tensor in tensors(MODELS[model], 1000) if tensor.is_trained}
    assert {name: value.shape for name, value in found.tensors.items()} == table
    assert {name: value.shape for name, value in found.momentum.items()} == trained


@pytest.mark.parametrize("model", [BASIC, V1], ids=["basic", "v1"])
def test_the_tensors_of_a_narrow_model_are_those_of_the_table(start: Start, tiny_recipe: Recipe, model: ModelSpec) -> None:
    found = start(tiny_recipe.replace(model=model, logits=7)).read()
    assert {name: value.shape for name, value in found.tensors.items()} == {t.name: t.shape for t in tensors(model, 7)}


def test_what_was_written_is_read_to_the_last_bit(start: Start, tiny_recipe: Recipe) -> None:
    recipe = tiny_recipe.replace(**FP16, loss_scaling="dynamic", ema_decay=0.9)
    plain = random_state(recipe, seed=5)
    odd = np.array([-0.0, np.inf, np.nan, 1e-42, 3e38, 1 / 3, -1e-20, 7], np.float32)
    state = State(
        step=11,
        tensors=plain.tensors | {"bn1.bias": odd},
        momentum={name: value + np.float32(0.25) for name, value in plain.momentum.items()},
        ema=plain.ema,
        scaler={"scale": 4096.0, "good_steps": 17, "bad_steps": 0},
    )
    assert all_bits(start(recipe, state).read()) == all_bits(state)


def test_arrays_of_a_state_may_be_read_only(start: Start, tiny_recipe: Recipe) -> None:
    state = random_state(tiny_recipe)
    for value in (*state.tensors.values(), *state.momentum.values()):
        value.setflags(write=False)
    assert all_bits(start(tiny_recipe, state).read()) == all_bits(state)


def test_tensors_read_are_float32_in_rows(start: Start, tiny_recipe: Recipe) -> None:
    read = start(tiny_recipe.replace(precision="bf16")).read()
    for value in (*read.tensors.values(), *read.momentum.values()):
        assert value.dtype == np.float32
        assert value.flags.c_contiguous


def test_training_does_not_change_a_state_read_before(start: Start, tiny_recipe: Recipe) -> None:
    recipe = tiny_recipe.replace(ema_decay=0.9)
    engine = start(recipe)
    read = engine.read()
    before = all_bits(read)
    engine.train([random_batch(recipe)], 0)
    assert all_bits(read) == before


def test_training_does_not_change_the_state_that_was_written(start: Start, tiny_recipe: Recipe) -> None:
    recipe = tiny_recipe.replace(ema_decay=0.9)
    state = random_state(recipe)
    before = all_bits(state)
    start(recipe, state).train([random_batch(recipe)], 0)
    assert all_bits(state) == before


@pytest.mark.parametrize("part", ["tensors", "momentum", "ema"])
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("missing", r"missing \['layer1\.0\.bn1\.weight'\]"),
        ("unknown", "fc.weights.*mean fc.weight"),
        ("shape", "fc.weight"),
    ],
)
def test_a_state_that_does_not_fit_is_refused(
    start: Start, tiny_recipe: Recipe, part: str, fault: str, message: str
) -> None:
    recipe = tiny_recipe.replace(ema_decay=0.9)
    engine = start(recipe)
    state = engine.read()
    values = getattr(state, part)
    if fault == "missing":
        del values["layer1.0.bn1.weight"]
    elif fault == "unknown":
        values["fc.weights"] = values["fc.weight"]
    else:
        values["fc.weight"] = values["fc.weight"].T
    with pytest.raises(CheckpointError, match=message):
        engine.write(state)


def test_a_moving_average_is_refused_where_the_recipe_has_none(start: Start, tiny_recipe: Recipe) -> None:
    with pytest.raises(CheckpointError, match="unknown"):
        start(tiny_recipe, random_state(tiny_recipe.replace(ema_decay=0.9)))


# Logits


@pytest.mark.parametrize(
    ("changes", "size"),
    [
        ({}, 32),
        ({}, 37),
        ({"model": BASIC}, 32),
        ({"model": V1}, 32),
        ({"padding": "same"}, 32),
        ({"padding": "same"}, 37),
        ({"padding": "same", "model": BASIC}, 41),
        ({"padding": "same", "model": V1}, 40),
        ({"logits": 1001}, 32),
        ({"bn_epsilon": 0.1}, 32),
        (OTHER_COLOURS, 32),
    ],
    ids=lambda value: value if isinstance(value, int) else ",".join(value) or "tiny",
)
def test_logits_are_those_of_float64(start: Start, tiny_recipe: Recipe, changes: dict[str, Any], size: int) -> None:
    recipe = tiny_recipe.replace(**changes)
    state, images = random_state(recipe), random_images(5, size)
    logits = start(recipe, state).predict(images)
    assert (logits.dtype, logits.shape) == (np.float32, (5, recipe.logits))
    assert distance(logits, oracle.logits(recipe, state.tensors, images)) < TOLERANCE["logits"]


@pytest.mark.slow
@pytest.mark.parametrize("model", ["resnet34", "resnet50", "resnet50-v1", "resnext101-32x4d"])
def test_logits_of_a_full_model_are_those_of_float64(start: Start, tiny_recipe: Recipe, model: str) -> None:
    recipe = tiny_recipe.replace(model=model, logits=1000)
    state, images = random_state(recipe), random_images(2, 96)
    logits = start(recipe, state).predict(images)
    assert distance(logits, oracle.logits(recipe, state.tensors, images)) < TOLERANCE["full logits"]


# One step

STEPS = {
    "smoothed": ({}, "none", 1),
    "not smoothed": ({"label_smoothing": 0.0}, "none", 1),
    "one mixup coefficient": ({}, "batch", 1),
    "a mixup coefficient each": ({}, "sample", 1),
    "1001 logits": ({"logits": 1001}, "sample", 1),
    "SAME padding": ({"padding": "same"}, "none", 1),
    "basic blocks": ({"model": BASIC}, "none", 1),
    "v1 strides": ({"model": V1}, "none", 1),
    "other batch norm": ({"bn_momentum": 0.4, "bn_epsilon": 0.01}, "none", 1),
    "other colours": (OTHER_COLOURS, "sample", 1),
    "two parts": ({}, "none", 2),
    "two parts with mixup": ({}, "sample", 2),
}
every_step = pytest.mark.parametrize(("changes", "mixup", "parts"), STEPS.values(), ids=STEPS)


def one_step(
    start: Start, recipe: Recipe, changes: dict[str, Any], mixup: str, parts: int
) -> tuple[Interval, State, oracle.Trained]:
    """Return what one step brought, the state after it, and what both should be."""
    recipe = recipe.replace(weight_decay=0.0, **changes)
    state, batch = random_state(recipe), random_batch(recipe, mixup=mixup)
    engine = start(recipe, state, accumulation_steps=parts)
    interval = engine.fetch(engine.train([batch], 0))
    return interval, engine.read(), oracle.train(recipe, state, [batch], RATES, parts)


@every_step
def test_the_loss_is_that_of_float64(
    start: Start, tiny_recipe: Recipe, changes: dict[str, Any], mixup: str, parts: int
) -> None:
    interval, _, expected = one_step(start, tiny_recipe, changes, mixup, parts)
    assert interval.losses == pytest.approx(expected.losses, rel=TOLERANCE["loss"])


@every_step
def test_the_first_velocity_is_the_gradient_of_float64(
    start: Start, tiny_recipe: Recipe, changes: dict[str, Any], mixup: str, parts: int
) -> None:
    _, state, expected = one_step(start, tiny_recipe, changes, mixup, parts)
    assert distance(state.momentum, expected.state.momentum) < TOLERANCE["gradient"]


@every_step
def test_running_statistics_are_those_of_float64(
    start: Start, tiny_recipe: Recipe, changes: dict[str, Any], mixup: str, parts: int
) -> None:
    _, state, expected = one_step(start, tiny_recipe, changes, mixup, parts)
    assert distance(statistics(state), statistics(expected.state)) < TOLERANCE["statistics"]


def test_running_statistics_take_the_unbiased_variance(start: Start, tiny_recipe: Recipe) -> None:
    # The last stage of 32 pixels has one: the variance of a channel there is over the images alone.
    recipe = tiny_recipe.replace(bn_momentum=1.0)
    state, batch = random_state(recipe), random_batch(recipe, count=2)
    engine = start(recipe, state)
    engine.train([batch], 0)
    biased = oracle.train(recipe, state, [batch], RATES).state.tensors["layer4.0.bn3.running_var"] / 2
    assert np.all(engine.read().tensors["layer4.0.bn3.running_var"] > 1.9 * biased)


def test_weights_move_by_the_rate_times_the_velocity(start: Start, tiny_recipe: Recipe) -> None:
    state = random_state(tiny_recipe)
    engine = start(tiny_recipe, state, rates=[0.3])
    engine.train([random_batch(tiny_recipe)], 0)
    end = engine.read()
    expected = {name: state.tensors[name] - np.float64(0.3) * v for name, v in end.momentum.items()}
    assert distance(parameters(end), expected) < TOLERANCE["update"]


def test_a_step_takes_the_rate_of_its_number(start: Start, tiny_recipe: Recipe) -> None:
    state, batch, rates = random_state(tiny_recipe, step=3), random_batch(tiny_recipe), [0.1, 0.2, 0.4, 0.3, 0.5]
    engine = start(tiny_recipe, state, rates=rates)
    engine.train([batch], 3)
    expected = oracle.train(tiny_recipe, state, [batch], rates).state
    assert distance(moved(engine.read(), state), moved(expected, state)) < TOLERANCE["gradient"]


# Decay, momentum and accumulation over steps

DEFAULT_ROLES = Recipe().weight_decay_roles


@pytest.mark.parametrize(
    "roles",
    [
        DEFAULT_ROLES,
        (),
        ("conv_weight",),
        ("bn_scale",),
        ("bn_bias",),
        ("fc_weight",),
        ("fc_bias",),
        ("bn_scale", "fc_bias"),
    ],
    ids=lambda roles: ",".join(roles) or "none",
)
def test_weight_decay_reaches_the_listed_roles_alone(start: Start, tiny_recipe: Recipe, roles: tuple[str, ...]) -> None:
    decay, state, batch = 0.5, random_state(tiny_recipe), random_batch(tiny_recipe)
    velocities = []
    for each in (0.0, decay):
        engine = start(tiny_recipe.replace(weight_decay=each, weight_decay_roles=roles), state)
        engine.train([batch], 0)
        velocities.append(engine.read().momentum)
    for name in parameters(state):
        expected = decay * state.tensors[name] if oracle.role(name) in roles else 0
        np.testing.assert_allclose(velocities[1][name] - velocities[0][name], expected, atol=1e-6, err_msg=name)


def test_the_batch_norm_of_a_shortcut_is_not_decayed_in_the_published_recipes(start: Start, tiny_recipe: Recipe) -> None:
    state, batch, name = random_state(tiny_recipe), random_batch(tiny_recipe), "layer1.0.downsample.1.weight"
    velocities = []
    for decay in (0.0, 0.5):
        engine = start(tiny_recipe.replace(weight_decay=decay), state)
        engine.train([batch], 0)
        velocities.append(engine.read().momentum[name])
    assert velocities[0].tobytes() == velocities[1].tobytes()


TRAJECTORIES = {
    "plain": ({}, "none", 1),
    "no momentum": ({"momentum": 0.0}, "none", 1),
    "much decay": ({"weight_decay": 0.05, "weight_decay_roles": ("bn_scale", "fc_weight", "fc_bias")}, "none", 1),
    "mixup": ({}, "sample", 1),
    "two parts": ({}, "none", 2),
    "moving average": ({"ema_decay": 0.9}, "none", 1),
}


@pytest.mark.parametrize(("changes", "mixup", "parts"), TRAJECTORIES.values(), ids=TRAJECTORIES)
def test_eight_steps_at_changing_rates_lead_where_float64_goes(
    start: Start, tiny_recipe: Recipe, changes: dict[str, Any], mixup: str, parts: int
) -> None:
    recipe = tiny_recipe.replace(**changes)
    state, batches = random_state(recipe), random_batches(recipe, 8, mixup=mixup)
    engine = start(recipe, state, accumulation_steps=parts)
    engine.train(batches, 0)
    expected = oracle.train(recipe, state, batches, RATES, parts).state
    assert distance(moved(engine.read(), state), moved(expected, state)) < TOLERANCE["trajectory"]


def test_momentum_keeps_the_rate_outside_the_velocity(start: Start, tiny_recipe: Recipe) -> None:
    # Without a rate nothing moves, so that both steps have one gradient g: v = m * g + g, whatever the rates.
    state, batch = random_state(tiny_recipe), random_batch(tiny_recipe)
    engine = start(tiny_recipe.replace(weight_decay=0.0, momentum=0.75), state, rates=[0, 0, 0.5])
    engine.train([batch], 0)
    gradient = engine.read().momentum
    engine.train([batch], 1)
    velocity = engine.read().momentum
    assert distance(velocity, {name: 1.75 * g for name, g in gradient.items()}) < TOLERANCE["update"]


def test_two_equal_parts_have_the_gradient_of_one(start: Start, tiny_recipe: Recipe) -> None:
    # Batch norm is out of play: a part, its twin and both together have the same mean and variance.
    part = random_batch(tiny_recipe, count=8)
    twice = Batch(np.concatenate([part.images] * 2), np.concatenate([part.labels] * 2))
    velocities = []
    for batch, parts in ((part, 1), (twice, 1), (twice, 2)):
        engine = start(tiny_recipe, accumulation_steps=parts)
        engine.train([batch], 0)
        velocities.append(engine.read().momentum)
    assert distance(velocities[1], velocities[0]) < TOLERANCE["gradient"]
    assert distance(velocities[2], velocities[0]) < TOLERANCE["gradient"]


def test_partners_are_counted_within_a_part(start: Start, tiny_recipe: Recipe) -> None:
    # Weight 0 on the image itself: a batch of which each image is its partner alone.
    batch = random_batch(tiny_recipe)
    partners = np.tile(np.arange(8)[::-1], 2)
    reversed_parts = Batch(batch.images, batch.labels, np.zeros(16, np.float32), partners)
    rows = np.concatenate([partners[:8], partners[8:] + 8])
    losses = []
    for each in (reversed_parts, Batch(batch.images[rows], batch.labels[rows])):
        engine = start(tiny_recipe, accumulation_steps=2)
        losses.append(engine.fetch(engine.train([each], 0)).losses)
    assert losses[0] == pytest.approx(losses[1], rel=TOLERANCE["loss"])


# What an interval reports


@pytest.mark.parametrize("parts", [1, 2])
def test_hits_are_counted_against_the_images_own_labels(start: Start, tiny_recipe: Recipe, parts: int) -> None:
    # The logits fall from class 0 to 9, so that labels below 5 are among the first five.
    recipe = tiny_recipe.replace(weight_decay=0.0)
    batch = random_batch(recipe, mixup="sample")
    labels = np.array([0, 0, 0, 1, 2, 4, 5, 9, 9, 9, 9, 9, 9, 9, 9, 9])
    engine = start(recipe, state_with_logits(recipe, [9, 8, 7, 6, 5, 4, 3, 2, 1, 0]), accumulation_steps=parts)
    interval = engine.fetch(engine.train([Batch(batch.images, labels, batch.coefficients, batch.partners)], 0))
    assert (interval.counts.top1, interval.counts.top5, interval.counts.images) == (3, 6, 16)


def test_an_interval_has_the_mean_loss_of_every_step(start: Start, tiny_recipe: Recipe) -> None:
    state, batches = random_state(tiny_recipe, step=2), random_batches(tiny_recipe, 3)
    engine = start(tiny_recipe, state)
    interval = engine.fetch(engine.train(batches, 2))
    expected = oracle.train(tiny_recipe, state, batches, RATES)
    assert interval.first == 2
    assert interval.losses.dtype == np.float64
    assert interval.losses == pytest.approx(expected.losses, rel=TOLERANCE["loss"])


def test_an_interval_sums_the_losses_of_its_images(start: Start, tiny_recipe: Recipe) -> None:
    engine = start(tiny_recipe)
    interval = engine.fetch(engine.train(random_batches(tiny_recipe, 3), 0))
    assert interval.counts.loss_sum == pytest.approx(16 * interval.losses.sum())
    assert interval.counts.images == 48


def test_a_loss_that_is_no_number_is_reported(start: Start, tiny_recipe: Recipe) -> None:
    engine = start(tiny_recipe, state_with_logits(tiny_recipe, [0.0] * 9 + [np.nan]))
    interval = engine.fetch(engine.train([random_batch(tiny_recipe)], 0))
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
    assert engine.fetch(engine.train([random_batch(tiny_recipe)], 0)).loss_scale == scale


def test_training_takes_batches_one_by_one_and_ends_with_them(start: Start, tiny_recipe: Recipe) -> None:
    engine, taken = start(tiny_recipe), []

    def until_stopped() -> Iterator[Batch]:
        for step, batch in enumerate(random_batches(tiny_recipe, 5)):
            if step == 2:
                return
            taken.append(step)
            yield batch

    handle = engine.train(until_stopped(), 4)
    assert (handle.first, handle.steps, taken, engine.read().step) == (4, 2, [0, 1], 6)


def test_training_on_nothing_changes_nothing(start: Start, tiny_recipe: Recipe) -> None:
    engine = start(tiny_recipe)
    before = all_bits(engine.read())
    assert engine.train([], 0).steps == 0
    assert all_bits(engine.read()) == before


def test_an_interval_can_be_fetched_after_the_next_was_enqueued(start: Start, tiny_recipe: Recipe) -> None:
    batches, engine, other = random_batches(tiny_recipe, 4), start(tiny_recipe), start(tiny_recipe)
    handles = [engine.train(batches[:2], 0), engine.train(batches[2:], 2)]
    late = [engine.fetch(handle) for handle in handles]
    at_once = [other.fetch(other.train(batches[first : first + 2], first)) for first in (0, 2)]
    for a, b in zip(late, at_once, strict=True):
        assert a.losses.tobytes() == b.losses.tobytes()
        assert a.counts == b.counts


# Precision


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_logits_in_low_precision_are_near(start: Start, tiny_recipe: Recipe, precision: str) -> None:
    recipe = tiny_recipe.replace(precision=precision)
    state, images = random_state(recipe), random_images(16)
    logits = start(recipe, state).predict(images)
    assert logits.dtype == np.float32
    off = distance(logits, oracle.logits(recipe, state.tensors, images))
    assert TOLERANCE["logits"] < off < TOLERANCE[f"{precision} logits"]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_step_in_low_precision_is_near(start: Start, tiny_recipe: Recipe, precision: str) -> None:
    recipe = tiny_recipe.replace(precision=precision)
    state, batch = random_state(recipe), random_batch(recipe)
    engine = start(recipe, state)
    interval = engine.fetch(engine.train([batch], 0))
    expected = oracle.train(recipe, state, [batch], RATES)
    assert interval.losses == pytest.approx(expected.losses, rel=TOLERANCE[f"{precision} loss"])
    assert angle(engine.read().momentum, expected.state.momentum) < TOLERANCE[f"{precision} angle"]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_updates_below_low_precision_are_not_lost(start: Start, tiny_recipe: Recipe, precision: str) -> None:
    state = random_state(tiny_recipe)
    engine = start(tiny_recipe.replace(precision=precision), state, rates=[1e-4])
    engine.train([random_batch(tiny_recipe)], 0)
    end = engine.read()
    expected = {name: state.tensors[name] - np.float64(1e-4) * v for name, v in end.momentum.items()}
    assert distance(parameters(end), expected) < TOLERANCE["update"]


@pytest.mark.parametrize("loss_scaling", ["static", "dynamic"])
def test_a_loss_scale_leaves_the_update_as_it_is(start: Start, tiny_recipe: Recipe, loss_scaling: str) -> None:
    states = []
    for changes in ({}, {"loss_scaling": loss_scaling, "loss_scale": 1024.0}):
        engine = start(tiny_recipe.replace(**FP16, **changes))
        engine.train([random_batch(tiny_recipe)], 0)
        states.append(engine.read())
    assert distance(states[1].momentum, states[0].momentum) < TOLERANCE["scaled gradient"]


def test_a_static_loss_scale_reaches_the_gradients(start: Start, tiny_recipe: Recipe) -> None:
    engine = start(tiny_recipe.replace(**FP16, loss_scaling="static", loss_scale=OVERFLOWING))
    engine.train([random_batch(tiny_recipe)], 0)
    assert not np.isfinite(engine.read().momentum["conv1.weight"]).all()


def dynamic(recipe: Recipe, **changes: Any) -> Recipe:
    return recipe.replace(**FP16, loss_scaling="dynamic", **changes)


def with_scaler(recipe: Recipe, scale: float, good_steps: int = 0, bad_steps: int = 0) -> State:
    """Return a state with a velocity, so that a step that only decays it would show."""
    state = random_state(recipe)
    velocity = {name: np.full_like(value, 0.5) for name, value in state.momentum.items()}
    scaler = {"scale": scale, "good_steps": good_steps, "bad_steps": bad_steps}
    return State(0, state.tensors, velocity, state.ema, scaler)


def test_an_overflow_skips_the_update(start: Start, tiny_recipe: Recipe) -> None:
    state = with_scaler(tiny_recipe, OVERFLOWING)
    engine = start(dynamic(tiny_recipe, weight_decay=0.1), state)
    engine.train([random_batch(tiny_recipe)], 0)
    end = engine.read()
    assert bits(parameters(end)) == bits(parameters(state))
    assert bits(end.momentum) == bits(state.momentum)
    assert end.step == 1


SCALERS = {
    "an overflow halves the scale": ({}, (OVERFLOWING, 5, 0), 1, (OVERFLOWING / 2, 0, 0)),
    "every overflow halves it again": ({}, (OVERFLOWING, 5, 0), 3, (OVERFLOWING / 8, 0, 0)),
    "backing off has its own factor": ({"loss_scale_backoff": 0.25}, (OVERFLOWING, 5, 0), 1, (OVERFLOWING / 4, 0, 0)),
    "a first overflow may be forgiven": ({"loss_scale_backoff_steps": 3}, (OVERFLOWING, 5, 0), 1, (OVERFLOWING, 0, 1)),
    "a second too": ({"loss_scale_backoff_steps": 3}, (OVERFLOWING, 5, 0), 2, (OVERFLOWING, 0, 2)),
    "the third in a row is not": ({"loss_scale_backoff_steps": 3}, (OVERFLOWING, 5, 0), 3, (OVERFLOWING / 2, 0, 0)),
    "a good step breaks the row": ({"loss_scale_backoff_steps": 3}, (8.0, 0, 2), 1, (8.0, 1, 0)),
    "good steps are counted": ({"loss_scale_growth_steps": 4}, (8.0, 0, 0), 3, (8.0, 3, 0)),
    "enough of them double the scale": ({"loss_scale_growth_steps": 4}, (8.0, 0, 0), 4, (16.0, 0, 0)),
    "growth has its own factor": ({"loss_scale_growth_steps": 1, "loss_scale_growth": 4.0}, (8.0, 0, 0), 1, (32.0, 0, 0)),
    "a row of good steps goes on where it was left": ({"loss_scale_growth_steps": 100}, (8.0, 99, 0), 1, (16.0, 0, 0)),
}


@pytest.mark.parametrize(("changes", "first", "steps", "last"), SCALERS.values(), ids=SCALERS)
def test_a_dynamic_loss_scale_adapts(
    start: Start,
    tiny_recipe: Recipe,
    changes: dict[str, Any],
    first: tuple[float, int, int],
    steps: int,
    last: tuple[float, int, int],
) -> None:
    engine = start(dynamic(tiny_recipe, **changes), with_scaler(tiny_recipe, *first))
    interval = engine.fetch(engine.train(random_batches(tiny_recipe, steps), 0))
    scaler = engine.read().scaler
    assert (scaler["scale"], scaler["good_steps"], scaler["bad_steps"]) == last
    assert interval.loss_scale == last[0]


def test_training_recovers_after_an_overflow(start: Start, tiny_recipe: Recipe) -> None:
    recipe = dynamic(tiny_recipe, loss_scale_backoff=2.0**-50)
    state, batches = with_scaler(tiny_recipe, OVERFLOWING), random_batches(tiny_recipe, 2)
    engine = start(recipe, state)
    engine.train(batches, 0)
    unscaled = start(tiny_recipe.replace(**FP16), State(1, state.tensors, state.momentum))
    unscaled.train(batches[1:], 1)
    assert distance(engine.read().momentum, unscaled.read().momentum) < TOLERANCE["scaled gradient"]


def test_a_state_without_a_scaler_brings_the_recipes_first_scale(start: Start, tiny_recipe: Recipe) -> None:
    engine = start(dynamic(tiny_recipe, loss_scale=64.0), with_scaler(tiny_recipe, 8.0, good_steps=5))
    engine.write(random_state(tiny_recipe))
    assert engine.read().scaler == {"scale": 64.0, "good_steps": 0, "bad_steps": 0}


@pytest.mark.parametrize("changes", [{}, FP16 | {"loss_scaling": "static"}], ids=["fp32", "static"])
def test_a_state_has_no_scaler_without_dynamic_scaling(start: Start, tiny_recipe: Recipe, changes: dict[str, Any]) -> None:
    assert start(tiny_recipe.replace(**changes)).read().scaler == {}


# Moving average


@pytest.mark.parametrize(("step", "keep"), [(0, 1 / 10), (1, 2 / 11), (7, 8 / 17), (11, 0.5)])
def test_the_moving_average_follows_the_formula(start: Start, tiny_recipe: Recipe, step: int, keep: float) -> None:
    recipe = tiny_recipe.replace(ema_decay=0.5)
    state = random_state(recipe, step=step)
    engine = start(recipe, state)
    engine.train([random_batch(recipe)], step)
    end = engine.read()
    expected = {name: keep * state.ema[name] + (1 - keep) * value.astype(np.float64) for name, value in end.tensors.items()}
    assert distance(end.ema, expected) < TOLERANCE["update"]


def test_training_is_the_same_with_a_moving_average(start: Start, tiny_recipe: Recipe) -> None:
    ends = []
    for decay in (0.0, 0.9):
        engine = start(tiny_recipe.replace(ema_decay=decay))
        engine.train(random_batches(tiny_recipe, 3), 0)
        ends.append(bits(engine.read().tensors))
    assert ends[0] == ends[1]


def test_evaluating_the_moving_average_uses_its_weights_and_statistics(start: Start, tiny_recipe: Recipe) -> None:
    recipe, batch = tiny_recipe.replace(ema_decay=0.9), random_batch(tiny_recipe)
    other = random_state(recipe, seed=9).tensors
    state = random_state(recipe)
    averaged = start(recipe, State(0, state.tensors, state.momentum, other)).evaluate([batch], ema=True)
    trained = start(recipe, State(0, other, state.momentum, state.ema)).evaluate([batch])
    assert averaged.losses.tobytes() == trained.losses.tobytes()


# Evaluation and prediction


def scores_of(logits: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return losses without smoothing, the labels' places and the predictions."""
    losses = -oracle.log_softmax(logits)[np.arange(len(labels)), labels]
    return losses, oracle.places(logits, labels), logits.argmax(axis=1)


def test_scores_are_those_of_the_logits_predicted(start: Start, tiny_recipe: Recipe) -> None:
    engine, batch = start(tiny_recipe), random_batch(tiny_recipe)
    scores = engine.evaluate([batch])
    losses, ranks, predictions = scores_of(engine.predict(batch.images), batch.labels)
    assert scores.losses == pytest.approx(losses, rel=TOLERANCE["loss"])
    assert scores.ranks.tolist() == ranks.tolist()
    assert scores.predictions.tolist() == predictions.tolist()
    assert scores.labels.tolist() == batch.labels.tolist()
    assert [getattr(scores, name).dtype.name for name in ("losses", "ranks", "predictions", "labels")] == [
        "float32",
        "int32",
        "int32",
        "int32",
    ]


def padded(batch: Batch, size: int) -> Batch:
    """Return a batch filled up to `size` with images that do not count."""
    missing = size - len(batch.labels)
    images = np.concatenate([batch.images, random_images(missing, batch.images.shape[1], seed=99)])
    return Batch(images, np.concatenate([batch.labels, np.full(missing, -1)]))


def in_order(scores: Scores) -> list[tuple[float, ...]]:
    rows = zip(scores.labels.tolist(), scores.ranks.tolist(), scores.predictions.tolist(), strict=True)
    return [(*row, pytest.approx(loss, rel=1e-5)) for row, loss in zip(rows, scores.losses.tolist(), strict=True)]


def test_padding_does_not_count(start: Start, tiny_recipe: Recipe) -> None:
    engine, batch = start(tiny_recipe), random_batch(tiny_recipe, count=5)
    assert in_order(engine.evaluate([padded(batch, 8)])) == in_order(engine.evaluate([batch]))


def test_a_batch_of_padding_alone_counts_nothing(start: Start, tiny_recipe: Recipe) -> None:
    engine, batch = start(tiny_recipe), random_batch(tiny_recipe, count=8)
    nothing = padded(random_batch(tiny_recipe, count=0), 8)
    assert engine.evaluate([batch, nothing]).counts() == engine.evaluate([batch]).counts()


def test_evaluating_nothing_counts_nothing(start: Start, tiny_recipe: Recipe) -> None:
    assert start(tiny_recipe).evaluate([]).counts() == Counts()


@pytest.mark.parametrize("size", [1, 4, 8, 19, 32])
def test_every_image_counts_once_in_batches_of_any_size(start: Start, tiny_recipe: Recipe, size: int) -> None:
    engine, whole = start(tiny_recipe), random_batch(tiny_recipe, count=19)
    parts = [Batch(whole.images[i : i + size], whole.labels[i : i + size]) for i in range(0, 19, size)]
    scores = engine.evaluate(padded(part, size) for part in parts)
    assert in_order(scores) == in_order(engine.evaluate([whole]))
    assert scores.counts().images == 19


NAN = float("nan")
RANKED: dict[str, tuple[list[float], int, int, int]] = {
    "the best is first": ([0, 1, 9, 3, 4, 5, 6, 7, 8, 2], 2, 0, 2),
    "the worst is last": ([0, 1, 9, 3, 4, 5, 6, 7, 8, 2], 0, 9, 2),
    "the fifth counts as top 5": ([0, 1, 9, 3, 4, 5, 6, 7, 8, 2], 5, 4, 2),
    "the sixth does not": ([0, 1, 9, 3, 4, 5, 6, 7, 8, 2], 4, 5, 2),
    "of equals the lowest class is first": ([1.0] * 10, 0, 0, 0),
    "of equals the highest class is last": ([1.0] * 10, 9, 9, 0),
    "equals behind better ones": ([5, 3, 5, 3, 0, 0, 0, 0, 0, 0], 3, 3, 0),
}


@pytest.mark.parametrize(("logits", "label", "rank", "prediction"), RANKED.values(), ids=RANKED)
def test_ranks_count_the_classes_in_front(
    start: Start, tiny_recipe: Recipe, logits: list[float], label: int, rank: int, prediction: int
) -> None:
    engine = start(tiny_recipe, state_with_logits(tiny_recipe, logits))
    scores = engine.evaluate([Batch(random_images(2), np.array([label, label]))])
    assert scores.ranks.tolist() == [rank, rank]
    assert scores.predictions.tolist() == [prediction, prediction]


@pytest.mark.parametrize("label", [0, 1, 9])
def test_logits_that_are_no_numbers_are_wrong_for_every_label(start: Start, tiny_recipe: Recipe, label: int) -> None:
    engine = start(tiny_recipe, state_with_logits(tiny_recipe, [NAN] * 10))
    scores = engine.evaluate([Batch(random_images(2), np.array([label, label]))])
    assert scores.counts().top5 == 0
    assert np.isnan(scores.losses).all()


@pytest.mark.parametrize(("label", "top1"), [(3, 0), (0, 0)])
def test_one_logit_that_is_no_number_comes_first_and_is_wrong(
    start: Start, tiny_recipe: Recipe, label: int, top1: int
) -> None:
    engine = start(tiny_recipe, state_with_logits(tiny_recipe, [9, 8, 7, NAN, 5, 4, 3, 2, 1, 0]))
    assert engine.evaluate([Batch(random_images(2), np.array([label, label]))]).counts().top1 == top1


@pytest.mark.parametrize("ema", [False, True])
def test_evaluation_and_prediction_leave_no_trace(start: Start, tiny_recipe: Recipe, ema: bool) -> None:
    recipe = tiny_recipe.replace(ema_decay=0.9)
    disturbed, undisturbed, batches = start(recipe), start(recipe), random_batches(recipe, 3)
    for step, batch in enumerate(batches):
        disturbed.train([batch], step)
        disturbed.evaluate([batches[0]], ema=ema)
        disturbed.predict(batches[0].images)
    undisturbed.train(batches, 0)
    assert all_bits(disturbed.read()) == all_bits(undisturbed.read())


# Going on

RESUMED = {
    "fp32": {"ema_decay": 0.99},
    "bf16": {"precision": "bf16", "ema_decay": 0.99},
    "dynamic fp16": FP16 | {"loss_scaling": "dynamic", "loss_scale_growth_steps": 3},
    "static fp16": FP16 | {"loss_scaling": "static"},
    "synchronised": {"batch_norm": "synchronised"},
}


@pytest.mark.parametrize("changes", RESUMED.values(), ids=RESUMED)
@pytest.mark.parametrize("parts", [1, 2])
def test_a_new_engine_goes_on_to_the_same_bits(
    start: Start, tiny_recipe: Recipe, changes: dict[str, Any], parts: int
) -> None:
    recipe = tiny_recipe.replace(**changes)
    batches = random_batches(recipe, 5, mixup="sample")
    first = start(recipe, accumulation_steps=parts)
    first.train(batches[:2], 0)
    second = start(recipe, first.read(), accumulation_steps=parts)
    losses = second.fetch(second.train(batches[2:], 2)).losses
    whole = start(recipe, accumulation_steps=parts)
    expected = whole.fetch(whole.train(batches, 0)).losses[2:]
    assert all_bits(second.read()) == all_bits(whole.read())
    assert losses.tobytes() == expected.tobytes()


def test_the_division_into_calls_changes_nothing(start: Start, tiny_recipe: Recipe) -> None:
    batches, at_once, one_by_one = random_batches(tiny_recipe, 4), start(tiny_recipe), start(tiny_recipe)
    at_once.train(batches, 0)
    stream = iter(batches)
    for first in (0, 1, 3):
        one_by_one.train(islice(stream, 2 if first == 1 else 1), first)
    assert all_bits(one_by_one.read()) == all_bits(at_once.read())


def test_initial_weights_train(start: Start, tiny_recipe: Recipe) -> None:
    recipe = tiny_recipe.replace(zero_init_last_bn=True)
    names = [tensor.name for tensor in tensors(model_spec(recipe.model), recipe.logits) if tensor.is_trained]
    values = initial_tensors(recipe)
    state = State(0, values, {name: np.zeros_like(values[name]) for name in names})
    engine = start(recipe, state, rates=[0.05] * 12)
    losses = engine.fetch(engine.train([random_batch(recipe)] * 12, 0)).losses
    assert losses[-1] < losses[0] - 0.5
