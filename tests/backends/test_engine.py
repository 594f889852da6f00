"""Tests for every engine: states, logits, evaluation, prediction and resuming, against float64
(`oracle`)."""

from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import pytest

from lockstep.data import Batch
from lockstep.models.architectures import ModelSpec
from lockstep.models.metrics import Scores
from lockstep.models.state import State
from lockstep.recipes import Recipe
from lockstep.recipes.initial_weights import initial_tensors
from lockstep.system.errors import CheckpointError
from lockstep.verification.bounds import BOUNDS, distance
from tests.backends import oracle
from tests.backends.cases import (
    BASIC,
    BLURRED,
    FP16,
    MODERN,
    NARROWED,
    OTHER_COLOURS,
    V1,
    WEIGHTED,
    all_bits,
)
from tests.backends.conftest import Start
from tests.backends.drawing import (
    draw_batch,
    draw_batches,
    draw_images,
    draw_state,
    state_with_logits,
)
from tests.backends.steps import FROZEN_AND_RATES

# State


NARROW_MODELS = {"basic": BASIC, "v1": V1, "modern": MODERN} | {
    name: changes["model"] for name, changes in NARROWED.items()
}


@pytest.mark.parametrize("model", NARROW_MODELS.values(), ids=NARROW_MODELS)
def test_a_narrow_model_is_its_table(start: Start, tiny_recipe: Recipe, model: ModelSpec) -> None:
    state = start(tiny_recipe.replace(model=model, logits=7)).read()
    result = {name: value.shape for name, value in state.tensors.items()}
    assert result == {t.name: t.shape for t in model.list_tensors(7)}
    assert state.momentum.keys() == {t.name for t in model.list_tensors(7) if t.is_trained}


def test_what_was_written_is_read_to_the_last_bit(start: Start, tiny_recipe: Recipe) -> None:
    recipe = tiny_recipe.replace(**FP16, loss_scaling="dynamic", ema_decay=0.9, optimizer="adamw")
    plain = draw_state(recipe, seed=5)
    odd = plain.tensors["bn1.bias"].copy()
    odd[:8] = [-0.0, np.inf, np.nan, 1e-42, 3e38, 1 / 3, -1e-20, 7]
    state = State(
        step=11,
        tensors=plain.tensors | {"bn1.bias": odd},
        momentum={name: value + np.float32(0.25) for name, value in plain.momentum.items()},
        ema=plain.ema,
        scaler={"scale": 4096.0, "good_steps": 17, "bad_steps": 0},
        second_moments={name: value / 3 for name, value in plain.second_moments.items()},
    )
    assert all_bits(start(recipe, state).read()) == all_bits(state)


def test_arrays_of_a_state_may_be_read_only(start: Start, tiny_recipe: Recipe) -> None:
    state = draw_state(tiny_recipe)
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
    engine.train([draw_batch(recipe)], 0)
    assert all_bits(read) == before


def test_training_does_not_change_the_written_state(start: Start, tiny_recipe: Recipe) -> None:
    recipe = tiny_recipe.replace(ema_decay=0.9)
    state = draw_state(recipe)
    before = all_bits(state)
    start(recipe, state).train([draw_batch(recipe)], 0)
    assert all_bits(state) == before


@pytest.mark.parametrize("part", ["tensors", "momentum", "ema", "second_moments"])
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
    recipe = tiny_recipe.replace(ema_decay=0.9, optimizer="adamw")
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


def test_an_average_is_refused_where_the_recipe_has_none(start: Start, tiny_recipe: Recipe) -> None:
    with pytest.raises(CheckpointError, match="unknown"):
        start(tiny_recipe, draw_state(tiny_recipe.replace(ema_decay=0.9)))


# Logits

NARROW_RESNET50, NARROW_RESNEXT101 = NARROWED.values()
AS_TENSORFLOW = {"padding": "same", "logits": 1001}
MODERN_MODEL = {"model": MODERN}


@pytest.mark.parametrize(
    ("changes", "size"),
    [
        ({}, 32),
        ({}, 37),
        ({"model": BASIC}, 32),
        ({"model": V1}, 32),
        (MODERN_MODEL, 37),
        ({"model": BLURRED}, 37),
        (NARROW_RESNET50, 32),
        (NARROW_RESNET50, 64),
        (NARROW_RESNEXT101, 32),
        (NARROW_RESNEXT101, 64),
        (AS_TENSORFLOW | NARROW_RESNET50, 37),
        (AS_TENSORFLOW | NARROW_RESNEXT101, 64),
        ({"padding": "flax"}, 32),
        ({"padding": "same"}, 37),
        ({"padding": "same", "model": BASIC}, 41),
        ({"padding": "same", "model": V1}, 40),
        ({"padding": "same", "model": MODERN}, 40),
        ({"logits": 1001}, 32),
        ({"bn_epsilon": 0.1}, 32),
        (OTHER_COLOURS, 32),
    ],
    ids=lambda value: value if isinstance(value, int) else ",".join(value) or "tiny",
)
def test_logits_are_those_of_float64(
    start: Start, tiny_recipe: Recipe, changes: dict[str, Any], size: int
) -> None:
    recipe = tiny_recipe.replace(**changes)
    state = draw_state(recipe)
    images = draw_images(5, size)
    logits = start(recipe, state).predict(images)
    assert (logits.dtype, logits.shape) == (np.float32, (5, recipe.logits))
    assert distance(logits, oracle.logits(recipe, state.tensors, images)) < BOUNDS["logits"].value


def test_any_number_of_images_of_any_size_is_predicted(start: Start, tiny_recipe: Recipe) -> None:
    engine = start(tiny_recipe)
    values = draw_state(tiny_recipe).tensors
    for count, size in ((2, 32), (7, 45), (1, 64)):
        images = draw_images(count, size)
        result = distance(engine.predict(images), oracle.logits(tiny_recipe, values, images))
        assert result < BOUNDS["logits"].value


# Evaluation and prediction


def compute_scores(
    logits: np.ndarray, labels: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return losses without label smoothing, the ranks of the labels, and the predictions."""
    losses = -oracle.log_softmax(logits)[np.arange(len(labels)), labels]
    return losses, oracle.places(logits, labels), logits.argmax(axis=1)


def test_scores_are_those_of_the_logits_predicted(start: Start, tiny_recipe: Recipe) -> None:
    # Which are for training alone.
    recipe = tiny_recipe.replace(**WEIGHTED, dropout=0.4, stochastic_depth=0.6)
    engine = start(recipe)
    batch = draw_batch(recipe)
    scores = engine.evaluate([batch])
    losses, ranks, predictions = compute_scores(engine.predict(batch.images), batch.labels)
    assert distance(scores.losses, losses) < BOUNDS["loss"].value
    assert scores.ranks.tolist() == ranks.tolist()
    assert scores.predictions.tolist() == predictions.tolist()
    assert scores.labels.tolist() == batch.labels.tolist()
    assert scores.logits is None
    assert {name: value.dtype.name for name, value in list(vars(scores).items())[:5]} == {
        "losses": "float32",
        "ranks": "int32",
        "predictions": "int32",
        "labels": "int32",
        "confidences": "float32",
    }


def test_scores_with_flips_are_those_of_mean_logits(start: Start, tiny_recipe: Recipe) -> None:
    recipe = tiny_recipe.replace(eval_flips=True)
    engine = start(recipe)
    batch = draw_batch(recipe)
    scores = engine.evaluate([pad(batch, 20)], with_logits=True)
    mirrored = engine.predict(np.ascontiguousarray(batch.images[:, :, ::-1]))
    logits = (engine.predict(batch.images).astype(np.float64) + mirrored) / 2
    losses, ranks, predictions = compute_scores(logits, batch.labels)
    assert distance(scores.losses, losses) < BOUNDS["loss"].value
    assert scores.ranks.tolist() == ranks.tolist()
    assert scores.predictions.tolist() == predictions.tolist()
    assert scores.logits is not None
    assert scores.logits.dtype == np.float32
    assert distance(scores.logits, logits) < BOUNDS["loss"].value
    nothing = Batch(batch.images[:2], np.array([-1, -1]))
    assert np.shape(engine.evaluate([nothing], with_logits=True).logits) == (0, recipe.logits)


@pytest.mark.parametrize(
    ("logits", "confidence"),
    [([0.0] * 10, 0.1), ([*[0.0] * 9, np.log(27.0)], 0.75), ([500.0, *[-500.0] * 9], 1.0)],
)
def test_a_confidence_is_the_share_of_the_exponentials(
    start: Start, tiny_recipe: Recipe, logits: list[float], confidence: float
) -> None:
    engine = start(tiny_recipe, state_with_logits(tiny_recipe, logits))
    confidences = engine.evaluate([Batch(draw_images(2), np.array([0, 3]))]).confidences
    assert confidences == pytest.approx([confidence, confidence], rel=BOUNDS["loss"].value)


def pad(batch: Batch, size: int) -> Batch:
    """Return a batch filled up to `size` with images that are not counted."""
    missing = size - len(batch.labels)
    images = np.concatenate([batch.images, draw_images(missing, batch.images.shape[1], seed=99)])
    return Batch(images, np.concatenate([batch.labels, np.full(missing, -1)]))


def list_scores(scores: Scores) -> list[tuple[float, ...]]:
    rows = zip(
        scores.labels.tolist(), scores.ranks.tolist(), scores.predictions.tolist(), strict=True
    )
    # Relative to the largest loss: a loss near 0 is a difference of logits of that size.
    rounding = BOUNDS["loss"].value * float(scores.losses.max(initial=0))
    return [
        (*row, pytest.approx(loss, rel=0, abs=rounding))
        for row, loss in zip(rows, scores.losses.tolist(), strict=True)
    ]


def test_a_batch_of_padding_alone_counts_nothing(start: Start, tiny_recipe: Recipe) -> None:
    engine = start(tiny_recipe)
    batch = draw_batch(tiny_recipe, count=8)
    nothing = pad(draw_batch(tiny_recipe, count=0), 8)
    assert list_scores(engine.evaluate([batch, nothing])) == list_scores(engine.evaluate([batch]))


def test_evaluating_nothing_counts_nothing(start: Start, tiny_recipe: Recipe) -> None:
    assert len(start(tiny_recipe).evaluate([]).labels) == 0


@pytest.mark.parametrize("size", [1, 4, 8, 19, 32])
def test_every_image_counts_once(start: Start, tiny_recipe: Recipe, size: int) -> None:
    engine = start(tiny_recipe)
    whole = draw_batch(tiny_recipe, count=19)
    parts = [
        Batch(whole.images[i : i + size], whole.labels[i : i + size]) for i in range(0, 19, size)
    ]
    scores = engine.evaluate(pad(part, size) for part in parts)
    assert list_scores(scores) == list_scores(engine.evaluate([whole]))
    assert len(scores.labels) == 19


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
    scores = engine.evaluate([Batch(draw_images(2), np.array([label, label]))])
    assert scores.ranks.tolist() == [rank, rank]
    assert scores.predictions.tolist() == [prediction, prediction]


@pytest.mark.parametrize("label", [0, 1, 9])
def test_logits_of_nan_are_wrong_everywhere(start: Start, tiny_recipe: Recipe, label: int) -> None:
    engine = start(tiny_recipe, state_with_logits(tiny_recipe, [NAN] * 10))
    scores = engine.evaluate([Batch(draw_images(2), np.array([label, label]))])
    assert (scores.ranks >= 5).all()
    assert np.isnan(scores.losses).all()
    assert np.isnan(scores.confidences).all()


@pytest.mark.parametrize(("label", "top1"), [(3, 0), (0, 0)])
def test_one_nan_comes_first(start: Start, tiny_recipe: Recipe, label: int, top1: int) -> None:
    engine = start(tiny_recipe, state_with_logits(tiny_recipe, [9, 8, 7, NAN, 5, 4, 3, 2, 1, 0]))
    scores = engine.evaluate([Batch(draw_images(2), np.array([label, label]))])
    assert (scores.ranks == 0).sum() == top1


@pytest.mark.parametrize("ema", [False, True])
def test_evaluation_leaves_no_trace(start: Start, tiny_recipe: Recipe, ema: bool) -> None:
    recipe = tiny_recipe.replace(ema_decay=0.9)
    disturbed = start(recipe)
    undisturbed = start(recipe)
    batches = draw_batches(recipe, 3)
    for step, batch in enumerate(batches):
        disturbed.train([batch], step)
        disturbed.evaluate([batches[0]], ema=ema)
        disturbed.predict(batches[0].images)
    undisturbed.train(batches, 0)
    assert all_bits(disturbed.read()) == all_bits(undisturbed.read())


def test_held_images_train_and_score_as_any_others(start: Start, tiny_recipe: Recipe) -> None:
    held, other = draw_batches(tiny_recipe, 2)
    batches = [held, replace(held, labels=other.labels), other, held]
    with_held = start(tiny_recipe)
    without = start(tiny_recipe)
    with_held.train([replace(batch, is_held=True) for batch in batches], 0)
    without.train(batches, 0)
    scores = [with_held.evaluate([replace(other, is_held=True)]), without.evaluate([other])]
    assert scores[0].losses.tobytes() == scores[1].losses.tobytes()
    assert all_bits(with_held.read()) == all_bits(without.read())


# Resuming

LIMITED_LAMB = {"optimizer": "lamb", "clip_norm": 0.1, "loss_scaling": "dynamic"}
RESUMED: dict[str, tuple[dict[str, Any], int]] = {
    "frozen tensors": (FROZEN_AND_RATES, 2),
    "bf16, groups, synchronised": (
        NARROWED["narrow resnext101-32x4d"] | {"precision": "bf16", "batch_norm": "synchronised"},
        1,
    ),
    "dynamic fp16": (FP16 | LIMITED_LAMB | {"loss_scale_growth_steps": 2}, 1),
    "static fp16": (FP16 | {"loss_scaling": "static"}, 2),
}


@pytest.mark.parametrize(("changes", "parts"), RESUMED.values(), ids=RESUMED)
def test_a_new_engine_goes_on_to_the_same_bits(
    start: Start, tiny_recipe: Recipe, changes: dict[str, Any], parts: int
) -> None:
    recipe = tiny_recipe.replace(**changes)
    batches = draw_batches(recipe, 3, mixup="sample")
    first = start(recipe, accumulation_steps=parts)
    first.train(batches[:1], 0)
    second = start(recipe, first.read(), accumulation_steps=parts, new=True)
    losses = second.fetch(second.train(batches[1:], 1)).losses
    first.write(draw_state(recipe))
    expected = first.fetch(first.train(batches, 0)).losses[1:]
    assert all_bits(second.read()) == all_bits(first.read())
    assert losses.tobytes() == expected.tobytes()


def test_the_division_into_calls_changes_nothing(start: Start, tiny_recipe: Recipe) -> None:
    batches = draw_batches(tiny_recipe, 4)
    engine = start(tiny_recipe)
    engine.train(batches, 0)
    at_once = engine.read()
    engine.write(draw_state(tiny_recipe))
    stream = iter(batches)
    for first in (0, 1, 3):
        engine.train(islice(stream, 2 if first == 1 else 1), first)
    assert all_bits(engine.read()) == all_bits(at_once)


def test_initial_weights_train(start: Start, tiny_recipe: Recipe) -> None:
    recipe = tiny_recipe.replace(zero_init_last_bn=True)
    names = [tensor.name for tensor in recipe.list_tensors() if tensor.is_trained]
    values = initial_tensors(recipe)
    state = State(0, values, {name: np.zeros_like(values[name]) for name in names})
    engine = start(recipe, state, rates=[0.05] * 12)
    losses = engine.fetch(engine.train([draw_batch(recipe)] * 12, 0)).losses
    assert losses[-1] < losses[0] - 0.5
