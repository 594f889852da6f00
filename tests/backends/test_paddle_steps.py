"""Tests for Paddle's programs: steps, losses and predictions that are compiled."""

import gc
import itertools
from functools import partial
from typing import Any

import numpy as np
import pytest

# First, because it suppresses Paddle's greetings.

# isort: split
import paddle

from lockstep.recipes import Recipe
from lockstep.verification.bounds import BOUNDS, angle, distance
from tests.backends import oracle
from tests.backends.cases import (
    BINARY,
    BLURRED,
    FP16,
    MODERN,
    NARROWED,
    RATES,
    WEIGHTED,
    Step,
    all_bits,
    bits,
    compare_changes,
    statistics,
)
from tests.backends.compiled_steps import check_compiled_step, check_scaled_step
from tests.backends.conftest import Start, make_backend_fixture
from tests.backends.drawing import (
    draw_batch,
    draw_batches,
    draw_images,
    draw_state,
    draw_steady_state,
)
from tests.backends.inputs import KINDS, check_arrays, check_far_logits, check_refilled
from tests.backends.steps import FROZEN_AND_RATES
from tests.soak import SOAK, in_a_soak

backend = make_backend_fixture("paddle")


# The step, compiled

COMPILED = {
    "tiny with mixup": Step(mixup="sample"),
    "tiny in two parts with SAME padding, class weights and dropout": Step(
        {"padding": "same", "batch_norm": "synchronised", "dropout": 0.4, "stochastic_depth": 0.6}
        | WEIGHTED,
        "sample",
        parts=2,
    ),
    "tiny with 1001 logits and binary cross-entropy": Step(
        BINARY | {"logits": 1001, "label_smoothing": 0.0}, "cut"
    ),
    "modern parts in two parts": Step({"model": MODERN}, "sample", parts=2, size=37),
    "a blur before convolutions": Step({"model": BLURRED, "padding": "same"}),
} | {
    f"{name} in two parts": Step(changes, "sample", parts=2, is_steady=True)
    for name, changes in NARROWED.items()
}
"""Steps to compile. Batch norm over all ranks is local here, since there is a single rank."""

SIZES = {
    f"{size} pixels, {padding} padding": Step({"padding": padding}, "sample", size=size)
    for size, padding in itertools.product((31, 33, 38, 45), ("symmetric", "same"))
}
"""Steps with sizes that a stride of 2 turns into odd and even ones, for SAME padding."""


@pytest.mark.parametrize("step", (COMPILED | SIZES).values(), ids=COMPILED | SIZES)
def test_a_compiled_step_is_a_plain_one(start: Start, tiny_recipe: Recipe, step: Step) -> None:
    check_compiled_step(start, tiny_recipe, step)


def test_compiled_images_may_be_computed_apart(start_compiled: Start, tiny_recipe: Recipe) -> None:
    state = draw_steady_state(tiny_recipe)
    batch = draw_batch(tiny_recipe, 2, size=64)
    engine = start_compiled(tiny_recipe, state, accumulation_steps=2)
    engine.train([batch], 0)
    expected = oracle.train(tiny_recipe, state, [batch], RATES, parts=2).state
    assert distance(engine.read().momentum, expected.momentum) < BOUNDS["gradient"].value
    assert distance(statistics(engine.read()), statistics(expected)) < BOUNDS["statistics"].value


def test_the_program_of_an_older_size_is_gone(start_compiled: Start, tiny_recipe: Recipe) -> None:
    engine: Any = start_compiled(tiny_recipe)
    ends = []
    for size in (32, 64, 32):
        engine.write(draw_state(tiny_recipe))
        engine.train([draw_batch(tiny_recipe, 2, size=size)], 0)
        ends.append(all_bits(engine.read()))
        assert len(engine._gradients_of_part._programs) == 1
    assert ends[0] == ends[2]


@in_a_soak
def test_a_compiled_step_leaves_no_objects_behind_but_of_its_inputs(
    start_compiled: Start, tiny_recipe: Recipe
) -> None:
    # Paddle never frees a list for each tensor that Python makes. A step has hundreds of results,
    # and a run many steps.
    engine = start_compiled(tiny_recipe)
    batch = draw_batch(tiny_recipe, 2)
    counts = []
    for _ in range(3):
        for _ in range(5):
            engine.fetch(engine.train([batch], 0))
        gc.collect()
        counts.append(sum(type(item) is list for item in gc.get_objects()))
    assert counts[2] - counts[1] <= 5 * 4


COMPILED_TRAJECTORIES = {
    "mixup": ({}, 1),
    "two parts, much decay": (
        {"weight_decay": 0.05, "weight_decay_roles": ("bn_scale", "fc_weight", "fc_bias")},
        2,
    ),
    "moving average": ({"ema_decay": 0.9}, 1),
    "frozen tensors and rates by tensor": (FROZEN_AND_RATES, 1),
}


@pytest.mark.parametrize(
    ("changes", "parts"), COMPILED_TRAJECTORIES.values(), ids=COMPILED_TRAJECTORIES
)
def test_compiled_steps_lead_where_float64_goes(
    start_compiled: Start, tiny_recipe: Recipe, changes: dict[str, Any], parts: int
) -> None:
    recipe = tiny_recipe.replace(**changes)
    state = draw_state(recipe, step=2)
    batches = draw_batches(recipe, 8, mixup="sample")
    engine = start_compiled(recipe, state, accumulation_steps=parts)
    engine.train(batches[:3], 2)
    engine.train(batches[3:], 5)
    end = engine.read()
    expected = oracle.train(recipe, state, batches, RATES, parts).state
    assert compare_changes(end, expected, state) < BOUNDS["trajectory"].value
    assert distance(statistics(end), statistics(expected)) < BOUNDS["trajectory"].value
    if recipe.ema_decay:
        assert distance(end.ema, expected.ema) < BOUNDS["update"].value


def test_compiled_steps_keep_masks(start_compiled: Start, tiny_recipe: Recipe) -> None:
    recipe = tiny_recipe.replace(ema_decay=0.9)
    state = draw_state(recipe)
    batches = draw_batches(recipe, 2)
    rng = np.random.default_rng(5)
    masks = {
        name: rng.random(state.tensors[name].shape) < 0.5
        for name in ("layer2.0.conv2.weight", "fc.weight")
    }
    engine = start_compiled(recipe, state)
    engine.mask(masks)
    engine.train(batches, 0)
    end = engine.read()
    expected = oracle.train(recipe, state, batches, RATES, masks=masks).state
    for name, mask in masks.items():
        assert not any(held[name][~mask].any() for held in (end.tensors, end.momentum, end.ema))
        assert end.tensors[name][mask].all()
    assert distance(end.momentum, expected.momentum) < BOUNDS["gradient"].value


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_compiled_step_in_low_precision_is_near(
    start_compiled: Start, tiny_recipe: Recipe, precision: str
) -> None:
    recipe = tiny_recipe.replace(precision=precision)
    state = draw_state(recipe)
    batch = draw_batch(recipe, mixup="sample")
    engine = start_compiled(recipe, state)
    off = distance(engine.predict(batch.images), oracle.logits(recipe, state.tensors, batch.images))
    interval = engine.fetch(engine.train([batch], 0))
    end = engine.read()
    expected = oracle.train(recipe, state, [batch], RATES)
    assert BOUNDS["logits"].value < off < BOUNDS[f"{precision} logits"].value
    assert interval.losses == pytest.approx(expected.losses, rel=BOUNDS[f"{precision} loss"].value)
    assert angle(end.momentum, expected.state.momentum) < BOUNDS[f"{precision} direction"].value
    off = distance(statistics(end), statistics(expected.state))
    assert BOUNDS["statistics"].value < off < BOUNDS[f"{precision} statistics"].value


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("name", NARROWED if SOAK else list(NARROWED)[-1:])
def test_a_compiled_step_of_a_narrow_model_in_low_precision_is_near(
    start_compiled: Start, tiny_recipe: Recipe, precision: str, name: str
) -> None:
    recipe = tiny_recipe.replace(precision=precision, padding="same", **NARROWED[name])
    state = draw_steady_state(recipe)
    batch = draw_batch(recipe, mixup="sample", size=33)
    engine = start_compiled(recipe, state, accumulation_steps=2)
    engine.train([batch], 0)
    end = engine.read()
    expected = oracle.train(recipe, state, [batch], RATES, parts=2).state
    assert angle(end.momentum, expected.momentum) < BOUNDS[f"{precision} direction"].value
    assert distance(statistics(end), statistics(expected)) < BOUNDS[f"{precision} statistics"].value


OVERFLOWING = 2.0**60


def test_a_loss_scale_reaches_gradients(start_compiled: Start, tiny_recipe: Recipe) -> None:
    engine = start_compiled(
        tiny_recipe.replace(**FP16, loss_scaling="static", loss_scale=OVERFLOWING)
    )
    engine.train([draw_batch(tiny_recipe)], 0)
    assert not np.isfinite(engine.read().momentum["conv1.weight"]).all()


@pytest.mark.parametrize("loss_scaling", ["static", "dynamic"])
def test_a_loss_scale_leaves_a_compiled_step_as_it_is(
    start_compiled: Start, tiny_recipe: Recipe, loss_scaling: str
) -> None:
    check_scaled_step(start_compiled, tiny_recipe, loss_scaling)


# The same bits


def dirty_memory() -> None:
    """Leave NaN in the memory that is allocated next."""
    held = [
        paddle.full([length], float("nan"))
        for length in (8, 16, 32, 64, 128, 256, 1024)
        for _ in range(8)
    ]
    del held


@pytest.mark.parametrize("name", [None, *(["narrow resnet50"] if SOAK else [])])
def test_the_first_run_of_a_program_has_the_statistics_of_every_other(
    start_compiled: Start, tiny_recipe: Recipe, name: str | None
) -> None:
    # oneDNN's batch norm has outputs that a Paddle program reads before they are written.
    recipe = tiny_recipe.replace(**NARROWED.get(name or "", {}))
    state = draw_steady_state(recipe)
    batch = draw_batch(recipe)
    expected = oracle.train(recipe, state, [batch], RATES).state
    ends = set()
    for _ in range(5):
        dirty_memory()
        engine = start_compiled(recipe, state)
        for _ in range(2):
            engine.write(state)
            engine.train([batch], 0)
            end = engine.read()
            assert distance(statistics(end), statistics(expected)) < BOUNDS["statistics"].value
            ends.add(bits(end.tensors))
    assert len(ends) == 1


def test_compiled_steps_repeat_to_the_last_bit(start_compiled: Start, tiny_recipe: Recipe) -> None:
    recipe = tiny_recipe.replace(ema_decay=0.9)
    batches = draw_batches(recipe, 4, mixup="sample")
    ends = []
    one = start_compiled(recipe)
    other = start_compiled(recipe)
    one.train(batches, 0)
    other.train(batches[:2], 0)
    other.evaluate(batches[:1])
    other.write(other.read())
    other.train(batches[2:], 2)
    resumed = start_compiled(recipe, other.read())
    for engine in (one, other, resumed):
        engine.train(batches[:1], 4)
        ends.append(all_bits(engine.read()))
    assert ends[0] == ends[1] == ends[2]


def test_a_compiled_engine_continues_anothers_training(start: Start, tiny_recipe: Recipe) -> None:
    state = draw_state(tiny_recipe)
    batches = draw_batches(tiny_recipe, 6, mixup="sample")
    first = start(tiny_recipe, state)
    first.train(batches[:3], 0)
    second = start(tiny_recipe, draw_state(tiny_recipe, seed=8), compile="on")
    second.train(batches[:2], 0)
    second.write(first.read())
    second.train(batches[3:], 3)
    expected = oracle.train(tiny_recipe, state, batches, RATES).state
    assert compare_changes(second.read(), expected, state) < BOUNDS["trajectory"].value
    assert second.read().step == 6


# Losses


@pytest.mark.parametrize("mixup", ["none", "sample"])
def test_far_logits_compiled_are_right(start: Start, tiny_recipe: Recipe, mixup: str) -> None:
    check_far_logits(partial(start, compile="on"), tiny_recipe, mixup)


# Inference, compiled


@pytest.mark.parametrize("padding", ["symmetric", "same"])
def test_compiled_predictions_of_any_number_and_size_are_those_of_float64(
    start_compiled: Start, tiny_recipe: Recipe, padding: str
) -> None:
    recipe = tiny_recipe.replace(padding=padding)
    engine = start_compiled(recipe)
    values = draw_state(recipe).tensors
    for count, size in ((1, 32), (2, 32), (7, 45), (3, 31), (3, 33), (1, 64), (2, 9)):
        images = draw_images(count, size)
        logits = engine.predict(images)
        assert (logits.dtype, logits.shape) == (np.float32, (count, recipe.logits))
        assert distance(logits, oracle.logits(recipe, values, images)) < BOUNDS["logits"].value


@pytest.mark.parametrize("kind", KINDS)
def test_arrays_may_lie_as_they_like(start: Start, tiny_recipe: Recipe, kind: Any) -> None:
    check_arrays(partial(start, compile="on"), tiny_recipe, kind)


def test_a_batch_for_programs_may_be_filled_again(start: Start, tiny_recipe: Recipe) -> None:
    check_refilled(partial(start, compile="on"), tiny_recipe)


def test_predictions_stay_when_others_are_made(start_compiled: Start, tiny_recipe: Recipe) -> None:
    # A program overwrites its previous result.
    engine = start_compiled(tiny_recipe)
    logits = engine.predict(draw_images(3))
    before = logits.copy()
    engine.predict(draw_images(3, seed=1))
    assert logits.tobytes() == before.tobytes()


@pytest.mark.parametrize("ema", [False, True])
def test_a_compiled_evaluation_scores_every_image_that_is_not_padding(
    start_compiled: Start, tiny_recipe: Recipe, ema: bool
) -> None:
    recipe = tiny_recipe.replace(ema_decay=0.9)
    state = draw_state(recipe)
    batches = [draw_batch(recipe, count, seed=count) for count in (8, 8, 3)]
    batches[1].labels[5:] = -1
    images, labels = (
        np.concatenate([getattr(batch, name) for batch in batches]) for name in ("images", "labels")
    )
    images = images[labels >= 0]
    labels = labels[labels >= 0]
    scores = start_compiled(recipe, state).evaluate(batches, ema=ema)
    logits = oracle.logits(recipe, state.ema if ema else state.tensors, images)
    losses = -oracle.log_softmax(logits)[np.arange(len(labels)), labels]
    assert scores.labels.tolist() == labels.tolist()
    assert scores.losses == pytest.approx(losses, rel=BOUNDS["loss"].value)
    assert scores.ranks.tolist() == oracle.places(logits, labels).tolist()
    assert scores.predictions.tolist() == logits.argmax(axis=1).tolist()


def test_compiled_evaluation_changes_nothing(start_compiled: Start, tiny_recipe: Recipe) -> None:
    engine = start_compiled(tiny_recipe.replace(ema_decay=0.9))
    engine.train([draw_batch(tiny_recipe)], 0)
    before = all_bits(engine.read())
    engine.evaluate([draw_batch(tiny_recipe)], ema=True)
    engine.predict(draw_images(3))
    assert all_bits(engine.read()) == before
