"""Tests for Paddle alone: modules, programs, oneDNN's kernels, the loss scale, and how the process behaves.

The other tests of engines run uncompiled. Here the same is tested with programs.
"""

import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep import backends
from lockstep.backends import Backend, Interval

# First, because it suppresses Paddle's greetings.
from lockstep.backends import paddle as paddle_backend
from lockstep.models.state import State

# isort: split
import paddle

from lockstep.backends.paddle import loading
from lockstep.backends.paddle.launching import trainers
from lockstep.backends.paddle.loss_scale import LossScale
from lockstep.backends.paddle.model import Pass
from lockstep.backends.paddle.program import Compiled
from lockstep.backends.paddle.world import PaddleWorld
from lockstep.recipes import Execution, Recipe
from lockstep.system.errors import BackendError, LockstepError
from lockstep.verification.bounds import BOUNDS, angle, distance
from tests.backends import oracle
from tests.backends.cases import (
    FP16,
    NARROWED,
    RATES,
    Step,
    all_bits,
    bits,
    moved,
    parameters,
    random_batch,
    random_batches,
    random_images,
    random_state,
    state_with_logits,
    statistics,
    steady_state,
)
from tests.backends.conftest import Start
from tests.backends.inputs import KINDS, check_arrays, check_refilled

OF_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "PADDLE_TRAINER_ID", "PADDLE_TRAINER_ENDPOINTS")


@pytest.fixture(scope="session")
def backend() -> Backend:
    return backends.load("paddle")


@pytest.fixture
def compiled(start: Start) -> Start:
    """Return a function like `start` for new engines that compute in programs."""
    return partial(start, compile="on", new=True)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Unset the variables of all launchers."""
    for name in OF_LAUNCHERS:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[Compiled]:
    """Return the functions from which programs are built, one entry for each program."""
    built: list[Compiled] = []
    build = Compiled._built

    def noted(self: Compiled, inputs: Any) -> Any:
        built.append(self)
        return build(self, inputs)

    monkeypatch.setattr(Compiled, "_built", noted)
    return built


# The module


def normalised(images: np.ndarray, recipe: Recipe) -> Any:
    """Return images as a module takes them: float32 [N, 3, H, W]."""
    x = ((images - np.array(recipe.mean)) / np.array(recipe.std)).astype(np.float32)
    return paddle.to_tensor(x.transpose(0, 3, 1, 2))


@pytest.fixture
def module(tiny_recipe: Recipe) -> Any:
    return paddle_backend.load_module(tiny_recipe, random_state(tiny_recipe).tensors)


@pytest.mark.parametrize("padding", ["symmetric", "same"])
@pytest.mark.parametrize("size", [32, 37])
def test_a_loaded_module_has_the_logits_of_float64(tiny_recipe: Recipe, padding: str, size: int) -> None:
    recipe = tiny_recipe.replace(padding=padding)
    values, images = random_state(recipe).tensors, random_images(5, size)
    logits = paddle_backend.load_module(recipe, values)(normalised(images, recipe))
    assert (logits.dtype, logits.shape) == (paddle.float32, [5, recipe.logits])
    assert distance(logits.numpy(), oracle.logits(recipe, values, images)) < BOUNDS["logits"].value


@pytest.mark.parametrize("compile", ["off", "on"])
def test_a_loaded_module_computes_what_the_engine_does(start: Start, module: Any, tiny_recipe: Recipe, compile: str) -> None:
    images = random_images(4)
    logits = module(normalised(images, tiny_recipe)).numpy()
    assert distance(logits, start(tiny_recipe, compile=compile).predict(images)) < BOUNDS["logits"].value


@pytest.mark.parametrize("padding", ["symmetric", "same"])
@pytest.mark.parametrize("shape", [(33, 32), (32, 33), (45, 64), (7, 80)])
def test_a_loaded_module_takes_images_that_are_not_square(tiny_recipe: Recipe, padding: str, shape: tuple[int, int]) -> None:
    recipe = tiny_recipe.replace(padding=padding)
    values, images = random_state(recipe).tensors, random_images(2, 80)[:, : shape[0], : shape[1]]
    logits = paddle_backend.load_module(recipe, values)(normalised(images, recipe))
    assert distance(logits.numpy(), oracle.logits(recipe, values, images)) < BOUNDS["logits"].value


def test_a_loaded_module_has_a_canonical_state_dict(tiny_recipe: Recipe) -> None:
    values = random_state(tiny_recipe).tensors
    state = paddle_backend.load_module(tiny_recipe.replace(precision="bf16"), values).state_dict()
    assert {tensor.dtype for tensor in state.values()} == {paddle.float32}
    assert list(state) == list(values)
    assert bits({name: tensor.numpy() for name, tensor in state.items()}) == bits(values)


def test_a_loaded_module_takes_a_state_dict(module: Any, tiny_recipe: Recipe) -> None:
    images, other = normalised(random_images(4), tiny_recipe), random_state(tiny_recipe, seed=3).tensors
    missing, unexpected = module.set_state_dict({name: paddle.to_tensor(value) for name, value in other.items()})
    assert (missing, unexpected) == ([], [])
    assert module(images).numpy().tobytes() == paddle_backend.load_module(tiny_recipe, other)(images).numpy().tobytes()


def test_a_loaded_module_is_ready_for_inference(module: Any) -> None:
    assert not any(layer.training for layer in module.sublayers(include_self=True))


def test_running_statistics_of_a_loaded_module_are_not_for_training(module: Any, tiny_recipe: Recipe) -> None:
    assert {name for name, _ in module.named_parameters()} == parameters(random_state(tiny_recipe)).keys()


def test_gradients_reach_every_weight_of_a_loaded_module(module: Any, tiny_recipe: Recipe) -> None:
    module(normalised(random_images(4), tiny_recipe)).square().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.numpy().any() for parameter in module.parameters())


def test_a_loaded_module_has_memory_of_its_own(tiny_recipe: Recipe) -> None:
    values = random_state(tiny_recipe).tensors
    module = paddle_backend.load_module(tiny_recipe, values)
    images = normalised(random_images(4), tiny_recipe)
    before = module(images).numpy()
    for value in values.values():
        value[:] = 0
    assert module(images).numpy().tobytes() == before.tobytes()


# The step, compiled

COMPILED = {
    "tiny with mixup": Step(mixup="sample"),
    "tiny in two parts with SAME padding": Step({"padding": "same", "batch_norm": "synchronised"}, "sample", parts=2),
    "tiny with 1001 logits": Step({"logits": 1001, "label_smoothing": 0.0}),
} | {f"{name} in two parts": Step(changes, "sample", parts=2, is_steady=True) for name, changes in NARROWED.items()}
"""Steps to compile. Batch norm over all ranks is local here, since there is a single rank."""

SIZES = {
    f"{size} pixels, {padding} padding": Step({"padding": padding}, "sample", size=size)
    for size, padding in itertools.product((31, 33, 38, 45), ("symmetric", "same"))
}
"""Steps with sizes that a stride of 2 turns into odd and even ones, for SAME padding."""

OfPrograms = tuple[list[Interval], list[State], oracle.Trained]


def stepped(start: Start, tiny_recipe: Recipe, step: Step) -> OfPrograms:
    """Return the results of one step, not compiled and compiled, and the expected results."""
    recipe, state, batch = step.begin(tiny_recipe)
    intervals, states = [], []
    for compile in ("off", "on"):
        engine = start(recipe, state, accumulation_steps=step.parts, compile=compile)
        intervals.append(engine.fetch(engine.train([batch], 0)))
        states.append(engine.read())
    return intervals, states, oracle.train(recipe, state, [batch], RATES, step.parts)


@pytest.mark.parametrize("step", (COMPILED | SIZES).values(), ids=COMPILED | SIZES)
def test_a_compiled_step_does_what_one_does_that_is_not(start: Start, tiny_recipe: Recipe, step: Step) -> None:
    (off, on), (plain, end), expected = stepped(start, tiny_recipe, step)
    assert on.losses == pytest.approx(off.losses, rel=BOUNDS["loss"].value)
    assert on.losses == pytest.approx(expected.losses, rel=BOUNDS["loss"].value)
    assert (on.counts.top1, on.counts.top5) == (off.counts.top1, off.counts.top5) == (expected.top1, expected.top5)
    assert distance(end.momentum, plain.momentum) < BOUNDS["compiled"].value
    assert distance(end.momentum, expected.state.momentum) < BOUNDS["gradient"].value
    assert distance(statistics(end), statistics(expected.state)) < BOUNDS["statistics"].value
    assert bits(end.momentum) != bits(plain.momentum), "nothing was compiled"


def test_a_compiled_step_may_compute_its_images_one_by_one(compiled: Start, tiny_recipe: Recipe) -> None:
    state, batch = steady_state(tiny_recipe), random_batch(tiny_recipe, 2, size=64)
    engine = compiled(tiny_recipe, state, accumulation_steps=2)
    engine.train([batch], 0)
    expected = oracle.train(tiny_recipe, state, [batch], RATES, parts=2).state
    assert distance(engine.read().momentum, expected.momentum) < BOUNDS["gradient"].value
    assert distance(statistics(engine.read()), statistics(expected)) < BOUNDS["statistics"].value


COMPILED_TRAJECTORIES = {
    "mixup": ({}, 1),
    "two parts, much decay": ({"weight_decay": 0.05, "weight_decay_roles": ("bn_scale", "fc_weight", "fc_bias")}, 2),
    "moving average": ({"ema_decay": 0.9}, 1),
}


@pytest.mark.parametrize(("changes", "parts"), COMPILED_TRAJECTORIES.values(), ids=COMPILED_TRAJECTORIES)
def test_compiled_steps_lead_where_float64_goes(
    compiled: Start, tiny_recipe: Recipe, changes: dict[str, Any], parts: int
) -> None:
    recipe = tiny_recipe.replace(**changes)
    state, batches = random_state(recipe, step=2), random_batches(recipe, 8, mixup="sample")
    engine = compiled(recipe, state, accumulation_steps=parts)
    engine.train(batches[:3], 2)
    engine.train(batches[3:], 5)
    end, expected = engine.read(), oracle.train(recipe, state, batches, RATES, parts).state
    assert distance(moved(end, state), moved(expected, state)) < BOUNDS["trajectory"].value
    assert distance(statistics(end), statistics(expected)) < BOUNDS["trajectory"].value
    if recipe.ema_decay:
        assert distance(end.ema, expected.ema) < BOUNDS["update"].value


def test_compiled_steps_keep_masked_weights_at_0(compiled: Start, tiny_recipe: Recipe) -> None:
    recipe = tiny_recipe.replace(ema_decay=0.9)
    state, batches, rng = random_state(recipe), random_batches(recipe, 2), np.random.default_rng(5)
    masks = {name: rng.random(state.tensors[name].shape) < 0.5 for name in ("layer2.0.conv2.weight", "fc.weight")}
    engine = compiled(recipe, state)
    engine.mask(masks)
    engine.train(batches, 0)
    end, expected = engine.read(), oracle.train(recipe, state, batches, RATES, masks=masks).state
    for name, mask in masks.items():
        assert not any(held[name][~mask].any() for held in (end.tensors, end.momentum, end.ema))
        assert end.tensors[name][mask].all()
    assert distance(end.momentum, expected.momentum) < BOUNDS["gradient"].value


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_compiled_step_in_low_precision_is_near(compiled: Start, tiny_recipe: Recipe, precision: str) -> None:
    recipe = tiny_recipe.replace(precision=precision)
    state, batch = random_state(recipe), random_batch(recipe, mixup="sample")
    engine = compiled(recipe, state)
    off = distance(engine.predict(batch.images), oracle.logits(recipe, state.tensors, batch.images))
    interval = engine.fetch(engine.train([batch], 0))
    end, expected = engine.read(), oracle.train(recipe, state, [batch], RATES)
    assert BOUNDS["logits"].value < off < BOUNDS[f"{precision} logits"].value
    assert interval.losses == pytest.approx(expected.losses, rel=BOUNDS[f"{precision} loss"].value)
    assert angle(end.momentum, expected.state.momentum) < BOUNDS[f"{precision} direction"].value
    off = distance(statistics(end), statistics(expected.state))
    assert BOUNDS["statistics"].value < off < BOUNDS[f"{precision} statistics"].value


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("name", NARROWED)
def test_a_compiled_step_of_a_narrow_model_in_low_precision_is_near(
    compiled: Start, tiny_recipe: Recipe, precision: str, name: str
) -> None:
    recipe = tiny_recipe.replace(precision=precision, padding="same", **NARROWED[name])
    state, batch = steady_state(recipe), random_batch(recipe, mixup="sample", size=33)
    engine = compiled(recipe, state, accumulation_steps=2)
    engine.train([batch], 0)
    end, expected = engine.read(), oracle.train(recipe, state, [batch], RATES, parts=2).state
    assert angle(end.momentum, expected.momentum) < BOUNDS[f"{precision} direction"].value
    assert distance(statistics(end), statistics(expected)) < BOUNDS[f"{precision} statistics"].value


OVERFLOWING = 2.0**60


def test_a_compiled_step_backs_off_after_an_overflow(compiled: Start, tiny_recipe: Recipe) -> None:
    recipe = tiny_recipe.replace(**FP16, loss_scaling="dynamic", loss_scale=OVERFLOWING)
    state = random_state(recipe)
    velocity = {name: np.full_like(value, 0.5) for name, value in state.momentum.items()}
    engine = compiled(recipe, State(0, state.tensors, velocity))
    interval = engine.fetch(engine.train([random_batch(recipe)], 0))
    end = engine.read()
    assert bits(parameters(end)) == bits(parameters(state))
    assert bits(end.momentum) == bits(velocity)
    assert end.scaler == {"scale": OVERFLOWING / 2, "good_steps": 0, "bad_steps": 0}
    assert interval.loss_scale == OVERFLOWING / 2
    assert np.isfinite(interval.losses).all()


def test_a_static_loss_scale_reaches_the_gradients_of_a_compiled_step(compiled: Start, tiny_recipe: Recipe) -> None:
    engine = compiled(tiny_recipe.replace(**FP16, loss_scaling="static", loss_scale=OVERFLOWING))
    engine.train([random_batch(tiny_recipe)], 0)
    assert not np.isfinite(engine.read().momentum["conv1.weight"]).all()


@pytest.mark.parametrize("loss_scaling", ["static", "dynamic"])
def test_a_loss_scale_leaves_a_compiled_step_as_it_is(compiled: Start, tiny_recipe: Recipe, loss_scaling: str) -> None:
    states = []
    for changes in ({}, {"loss_scaling": loss_scaling, "loss_scale": 8.0}):
        engine = compiled(tiny_recipe.replace(**FP16, **changes))
        engine.train([random_batch(tiny_recipe)], 0)
        states.append(engine.read())
    assert distance(states[1].momentum, states[0].momentum) < BOUNDS["scaled gradient"].value


# The same bits


def dirty_memory() -> None:
    """Leave NaN in the memory that is allocated next."""
    held = [paddle.full([length], float("nan")) for length in (8, 16, 32, 64, 128, 256, 1024) for _ in range(8)]
    del held


@pytest.mark.parametrize("name", [None, pytest.param("narrow resnet50", marks=pytest.mark.slow)])
def test_the_first_run_of_a_program_has_the_statistics_of_every_other(
    compiled: Start, tiny_recipe: Recipe, name: str | None
) -> None:
    # oneDNN's batch norm has outputs that a Paddle program reads before they are written.
    recipe = tiny_recipe.replace(**NARROWED.get(name or "", {}))
    state, batch = steady_state(recipe), random_batch(recipe)
    expected, ends = oracle.train(recipe, state, [batch], RATES).state, set()
    for _ in range(5):
        dirty_memory()
        engine = compiled(recipe, state)
        for _ in range(2):
            engine.write(state)
            engine.train([batch], 0)
            end = engine.read()
            assert distance(statistics(end), statistics(expected)) < BOUNDS["statistics"].value
            ends.add(bits(end.tensors))
    assert len(ends) == 1


def test_compiled_steps_repeat_to_the_last_bit(compiled: Start, tiny_recipe: Recipe) -> None:
    recipe = tiny_recipe.replace(ema_decay=0.9)
    batches, ends = random_batches(recipe, 4, mixup="sample"), []
    one, other = compiled(recipe), compiled(recipe)
    one.train(batches, 0)
    other.train(batches[:2], 0)
    other.evaluate(batches[:1])
    other.write(other.read())
    other.train(batches[2:], 2)
    resumed = compiled(recipe, other.read())
    for engine in (one, other, resumed):
        engine.train(batches[:1], 4)
        ends.append(all_bits(engine.read()))
    assert ends[0] == ends[1] == ends[2]


def test_a_compiled_engine_goes_on_from_what_another_has_trained(start: Start, tiny_recipe: Recipe) -> None:
    state, batches = random_state(tiny_recipe), random_batches(tiny_recipe, 6, mixup="sample")
    first = start(tiny_recipe, state)
    first.train(batches[:3], 0)
    second = start(tiny_recipe, random_state(tiny_recipe, seed=8), compile="on")
    second.train(batches[:2], 0)
    second.write(first.read())
    second.train(batches[3:], 3)
    expected = oracle.train(tiny_recipe, state, batches, RATES).state
    assert distance(moved(second.read(), state), moved(expected, state)) < BOUNDS["trajectory"].value
    assert second.read().step == 6


# Losses


@pytest.mark.parametrize("compile", ["off", "on"])
@pytest.mark.parametrize("mixup", ["none", "sample"])
def test_losses_of_logits_hundreds_apart_are_those_of_float64(
    start: Start, tiny_recipe: Recipe, compile: str, mixup: str
) -> None:
    # Paddle's `log_softmax` on a CPU returns -64 for every logit that is more than 64 below the largest.
    recipe = tiny_recipe.replace(label_smoothing=0.1 if mixup == "none" else 0.0)
    state = state_with_logits(recipe, [400.0, -300.0, 0.0, 5.0, -500.0, 200.0, 399.0, -70.0, 70.0, 64.0])
    batch = random_batch(recipe, mixup=mixup)
    engine = start(recipe, state, compile=compile)
    scores = engine.evaluate([batch])
    interval = engine.fetch(engine.train([batch], 0))
    expected = oracle.train(recipe, state, [batch], RATES)
    assert interval.losses == pytest.approx(expected.losses, rel=BOUNDS["loss"].value)
    assert scores.losses == pytest.approx(400.0 - state.tensors["fc.bias"][batch.labels], rel=BOUNDS["loss"].value, abs=0.4)
    assert distance(engine.read().momentum, expected.state.momentum) < BOUNDS["gradient"].value


# Inference, compiled


@pytest.mark.parametrize("padding", ["symmetric", "same"])
def test_compiled_predictions_of_any_number_and_size_are_those_of_float64(
    compiled: Start, tiny_recipe: Recipe, padding: str
) -> None:
    recipe = tiny_recipe.replace(padding=padding)
    engine, values = compiled(recipe), random_state(recipe).tensors
    for count, size in ((1, 32), (2, 32), (7, 45), (3, 31), (3, 33), (1, 64), (2, 9)):
        images = random_images(count, size)
        logits = engine.predict(images)
        assert (logits.dtype, logits.shape) == (np.float32, (count, recipe.logits))
        assert distance(logits, oracle.logits(recipe, values, images)) < BOUNDS["logits"].value


@pytest.mark.parametrize("kind", KINDS)
def test_arrays_for_programs_may_lie_in_memory_as_they_like(start: Start, tiny_recipe: Recipe, kind: Any) -> None:
    check_arrays(partial(start, compile="on"), tiny_recipe, kind)


def test_a_batch_for_programs_may_be_filled_again(start: Start, tiny_recipe: Recipe) -> None:
    check_refilled(partial(start, compile="on"), tiny_recipe)


def test_predictions_stay_when_others_are_made(compiled: Start, tiny_recipe: Recipe) -> None:
    # A program overwrites its previous result.
    engine = compiled(tiny_recipe)
    logits = engine.predict(random_images(3))
    before = logits.copy()
    engine.predict(random_images(3, seed=1))
    assert logits.tobytes() == before.tobytes()


@pytest.mark.parametrize("ema", [False, True])
def test_a_compiled_evaluation_scores_every_image_that_is_not_padding(
    compiled: Start, tiny_recipe: Recipe, ema: bool
) -> None:
    recipe = tiny_recipe.replace(ema_decay=0.9)
    state, batches = random_state(recipe), [random_batch(recipe, count, seed=count) for count in (8, 8, 3)]
    batches[1].labels[5:] = -1
    images, labels = (np.concatenate([getattr(batch, name) for batch in batches]) for name in ("images", "labels"))
    images, labels = images[labels >= 0], labels[labels >= 0]
    scores = compiled(recipe, state).evaluate(batches, ema=ema)
    logits = oracle.logits(recipe, state.ema if ema else state.tensors, images)
    losses = -oracle.log_softmax(logits)[np.arange(len(labels)), labels]
    assert scores.labels.tolist() == labels.tolist()
    assert scores.losses == pytest.approx(losses, rel=BOUNDS["loss"].value)
    assert scores.ranks.tolist() == oracle.places(logits, labels).tolist()
    assert scores.predictions.tolist() == logits.argmax(axis=1).tolist()


def test_a_compiled_evaluation_leaves_the_state_as_it_is(compiled: Start, tiny_recipe: Recipe) -> None:
    engine = compiled(tiny_recipe.replace(ema_decay=0.9))
    engine.train([random_batch(tiny_recipe)], 0)
    before = all_bits(engine.read())
    engine.evaluate([random_batch(tiny_recipe)], ema=True)
    engine.predict(random_images(3))
    assert all_bits(engine.read()) == before


# Batches


@pytest.mark.parametrize("said", ["ResourceExhaustedError: Out of memory.\n[Hint: 2 GB are free.]", ""])
@pytest.mark.parametrize("compile", ["off", "on"])
def test_too_little_memory_is_told_with_what_to_do(start: Start, tiny_recipe: Recipe, compile: str, said: str) -> None:
    def exhausted(*_: Any) -> None:
        raise MemoryError(said)

    engine: Any = start(tiny_recipe, accumulation_steps=2, compile=compile)
    of_part = engine._gradients_of_part
    engine._gradients_of_part = exhausted
    with pytest.raises(BackendError) as refused:
        engine.train([random_batch(tiny_recipe)], 0)
    message = str(refused.value)
    assert "16 images in 2 parts" in message
    assert ("2 GB are free" if said else "none is left") in message
    assert "--set accumulation_steps=4" in message
    engine._gradients_of_part = of_part
    assert engine.train([random_batch(tiny_recipe)], 0).steps == 1


# Programs


def test_steps_on_batches_of_one_shape_are_one_program(compiled: Start, tiny_recipe: Recipe, built: list[Compiled]) -> None:
    engine: Any = compiled(tiny_recipe.replace(ema_decay=0.9), accumulation_steps=2)
    engine.train(random_batches(tiny_recipe, 3, mixup="sample"), 0)
    engine.write(random_state(tiny_recipe.replace(ema_decay=0.9), seed=2))
    engine.train(random_batches(tiny_recipe, 2, mixup="batch"), 3)
    engine.train(random_batches(tiny_recipe, 2), 5)
    assert built == [engine._gradients_of_part]
    engine.train([random_batch(tiny_recipe, 12)], 7)
    assert built == [engine._gradients_of_part] * 2


def test_inference_has_a_program_for_every_shape(compiled: Start, tiny_recipe: Recipe, built: list[Compiled]) -> None:
    engine: Any = compiled(tiny_recipe.replace(ema_decay=0.9))
    for _ in range(2):
        for ema in (False, True):
            engine.evaluate([random_batch(tiny_recipe, count) for count in (8, 8, 3)], ema=ema)
        engine.predict(random_images(3))
        engine.predict(random_images(3, 45))
    assert built == [engine._logits] * 3


@pytest.mark.slow
def test_programs_stay_what_they_are_beside_many_others(compiled: Start, tiny_recipe: Recipe) -> None:
    # A Paddle executor keeps eight programs and would build others again, without oneDNN, with other outputs.
    state, engine = steady_state(tiny_recipe), compiled(tiny_recipe)
    batches, ends = [random_batch(tiny_recipe, count) for count in range(4, 13)], []
    for batch in [*batches, *batches[:2]]:
        engine.write(state)
        engine.train([batch], 0)
        ends.append(all_bits(engine.read()))
    assert ends[9:] == ends[:2]


def test_a_program_whose_first_run_failed_is_built_anew(
    compiled: Start, tiny_recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: Any, **__: Any) -> None:
        raise MemoryError("none left")

    state, batch = steady_state(tiny_recipe), random_batch(tiny_recipe)
    engine = compiled(tiny_recipe, state)
    with monkeypatch.context() as patched:
        patched.setattr(paddle.static.Executor, "run", failing)
        with pytest.raises(BackendError, match="none left"):
            engine.train([batch], 0)
    engine.train([batch], 0)
    expected = oracle.train(tiny_recipe, state, [batch], RATES).state
    assert distance(statistics(engine.read()), statistics(expected)) < BOUNDS["statistics"].value


def values(*shape: int, seed: int = 0) -> Any:
    return paddle.to_tensor(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


LYING: dict[str, Callable[[Any], Any]] = {
    "whole": lambda x: x,
    "transposed": lambda x: x.transpose([0, 2, 3, 1]),
    "with its axes reversed": lambda x: x.transpose([3, 2, 1, 0]),
    "every second": lambda x: x[:, ::2],
    "a part": lambda x: x[1:, 2:],
}


@pytest.mark.parametrize("onednn", [False, True])
@pytest.mark.parametrize("laid", LYING.values(), ids=LYING)
def test_inputs_of_a_program_may_lie_in_memory_as_they_like(laid: Callable[[Any], Any], onednn: bool) -> None:
    run = Compiled(lambda inputs: [inputs["x"] * 2 + 1, inputs["x"].max([1])], onednn=onednn)
    for seed in range(2):
        x = laid(values(3, 8, 4, 6, seed=seed))
        doubled, largest = run({"x": x})
        assert distance(doubled.numpy(), x.numpy() * 2 + 1) < BOUNDS["operation"].value
        assert distance(largest.numpy(), x.numpy().max(axis=1)) == BOUNDS["exact"].value


def test_a_program_passes_no_gradient_on() -> None:
    x = values(4, 5)
    x.stop_gradient = False
    (y,) = Compiled(lambda inputs: [inputs["x"] * 2], onednn=True)({"x": x})
    assert y.stop_gradient


@pytest.fixture(params=[False, True], ids=["oneDNN off", "oneDNN on"])
def flag(request: pytest.FixtureRequest) -> Iterator[dict[str, bool]]:
    """Flags for oneDNN that a user has set."""
    before, said = paddle.get_flags("FLAGS_use_mkldnn"), {"FLAGS_use_mkldnn": request.param}
    paddle.set_flags(said)
    yield said
    paddle.set_flags(before)


def test_a_program_leaves_the_process_as_it_was(flag: dict[str, bool]) -> None:
    def function(inputs: Any) -> list[Any]:
        assert not paddle.in_dynamic_mode()
        return [inputs["x"] * 2]

    Compiled(function, onednn=True)({"x": values(4, 5)})
    assert paddle.in_dynamic_mode()
    assert paddle.get_flags("FLAGS_use_mkldnn") == flag


@pytest.mark.parametrize("when", ["built", "run"])
def test_a_program_that_fails_leaves_the_process_as_it_was(
    when: str, flag: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: Any, **__: Any) -> list[Any]:
        raise ValueError("it fails")

    run = Compiled(failing if when == "built" else lambda inputs: [inputs["x"] * 2], onednn=True)
    if when == "run":
        monkeypatch.setattr(paddle.static.Executor, "run", failing)
    with pytest.raises(ValueError, match="it fails"):
        run({"x": values(4, 5)})
    assert paddle.in_dynamic_mode()
    assert paddle.get_flags("FLAGS_use_mkldnn") == flag


class _OfTwo(PaddleWorld):
    """Rank 0 of two. The other rank never starts, so this world is only for building an engine."""

    def __init__(self) -> None:
        self.rank, self.ranks, self.on_gpu, self.device = 0, 2, False, "made up"


def made(recipe: Recipe, compile: Any) -> Any:
    """Return the engine of one of two ranks."""
    execution = Execution(backend="paddle", device="cpu", compile=compile)
    return paddle_backend.engine(recipe, np.zeros(1), _OfTwo(), execution)


@pytest.mark.parametrize(("compile", "programs"), [("on", True), ("auto", True), ("off", False)])
def test_programs_are_used_unless_refused(tiny_recipe: Recipe, compile: str, programs: bool) -> None:
    engine = made(tiny_recipe, compile)
    assert isinstance(engine._gradients_of_part, Compiled) == isinstance(engine._logits, Compiled) == programs


@pytest.mark.parametrize("compile", ["auto", "off"])
def test_batch_norm_over_several_ranks_is_not_compiled(tiny_recipe: Recipe, compile: str) -> None:
    assert not isinstance(made(tiny_recipe.replace(batch_norm="synchronised"), compile)._gradients_of_part, Compiled)


def test_programs_are_refused_to_batch_norm_over_several_ranks(tiny_recipe: Recipe) -> None:
    with pytest.raises(BackendError, match="has no batch norm over all ranks; leave compile at auto"):
        made(tiny_recipe.replace(batch_norm="synchronised"), "on")


# Max pool


def padded(x: np.ndarray, padding: str) -> tuple[np.ndarray, tuple[slice, ...]]:
    """Pad images [N, C, H, W], none below 0, for windows of 3 at a stride of 2; return them and the place of the images."""
    places = [(0, 0), (0, 0)]
    for length in x.shape[2:]:
        missing = 2 if padding == "symmetric" else max((-(-length // 2) - 1) * 2 + 3 - length, 0)
        places.append((missing // 2, missing - missing // 2))
    inside = tuple(slice(before, before + length) for (before, _), length in zip(places, x.shape, strict=True))
    return np.pad(x, places), inside


def pooled(x: np.ndarray, padding: str, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the largest value of every window, a gradient of these, and the gradient of x if all values of x differ."""
    wide, inside = padded(x, padding)
    height, width = ((length - 3) // 2 + 1 for length in wide.shape[2:])
    y, back = np.zeros((*x.shape[:2], height, width), np.float32), np.zeros_like(wide)
    gradient = np.random.default_rng(seed).normal(size=y.shape).astype(np.float32)
    for i, j in itertools.product(range(height), range(width)):
        window = (..., slice(2 * i, 2 * i + 3), slice(2 * j, 2 * j + 3))
        y[..., i, j] = wide[window].max(axis=(2, 3))
        back[window] += (wide[window] == y[..., i, j, None, None]) * gradient[..., i, j, None, None]
    return y, gradient, back[inside]


def pool_and_back(recipe: Recipe, onednn: bool) -> Callable[[Any], Any]:
    """Return a function of x and the gradient of its pool to the pool and the gradient of x."""
    differentiate = paddle.static.gradients if onednn else paddle.grad

    def function(inputs: Any) -> list[Any]:
        y = Pass(recipe, {}, training=True, onednn=onednn)._pooled(inputs["x"])
        return [y.detach(), *differentiate([y], [inputs["x"]], [inputs["g"]])]

    return Compiled(function, onednn=True) if onednn else function


SQUARE = [(size, size) for size in (2, 3, 4, 5, 6, 7, 8, 13, 16, 17, 18, 28)]
OBLONG = [(3, 4), (4, 3), (7, 16), (16, 7), (8, 14), (15, 9), (1, 6)]
"""Shapes that are not tested with programs, since the images of a run are square."""


@pytest.mark.parametrize("padding", ["symmetric", "same"])
@pytest.mark.parametrize(("onednn", "shapes"), [(False, SQUARE + OBLONG), (True, SQUARE)], ids=["plain", "compiled"])
def test_a_max_pool_and_its_gradient_are_right_at_every_size(
    tiny_recipe: Recipe, padding: str, onednn: bool, shapes: list[tuple[int, int]]
) -> None:
    run = pool_and_back(tiny_recipe.replace(padding=padding), onednn)
    for seed, shape in enumerate(shapes):
        order = np.random.default_rng(seed).permutation(6 * shape[0] * shape[1]).reshape(2, 3, *shape)
        x = np.maximum(order - 5, 0).astype(np.float32)
        expected, gradient, expected_back = pooled(x, padding, seed)
        y, back = run({"x": paddle.to_tensor(x, stop_gradient=False), "g": paddle.to_tensor(gradient)})
        assert y.numpy().tobytes() == expected.tobytes(), shape
        # The gradient of a 0 does not matter, since a ReLU comes before the pool.
        assert distance(back.numpy() * (x > 0), expected_back * (x > 0)) < BOUNDS["operation"].value, shape


# The loss scale


def scaled(recipe: Recipe, **changes: Any) -> LossScale:
    return LossScale(recipe.replace(**FP16, **changes))


def used(scale: LossScale, gradient: list[float]) -> bool:
    """Return whether a gradient is to be used. If it is not, assert that it is replaced by zeros."""
    unscaled, is_used = scale.step(paddle.to_tensor(gradient))
    assert is_used or not unscaled.numpy().any()
    return bool(is_used)


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_a_gradient_that_is_not_finite_skips_the_update(tiny_recipe: Recipe, bad: float) -> None:
    scale = scaled(tiny_recipe, loss_scaling="dynamic", loss_scale=128.0)
    assert not used(scale, [1.0, 2.0, bad, 4.0])
    assert scale.read() == {"scale": 64.0, "good_steps": 0, "bad_steps": 0}


def test_large_finite_gradients_are_no_overflow(tiny_recipe: Recipe) -> None:
    # Their squares exceed float32.
    scale = scaled(tiny_recipe, loss_scaling="dynamic", loss_scale=128.0)
    assert used(scale, [3e38, -3e38])
    assert scale.read() == {"scale": 128.0, "good_steps": 1, "bad_steps": 0}


@pytest.mark.parametrize("loss_scaling", ["static", "none"])
def test_a_scale_that_does_not_adapt_updates_whatever_comes(tiny_recipe: Recipe, loss_scaling: str) -> None:
    scale = scaled(tiny_recipe, loss_scaling=loss_scaling, loss_scale=128.0)
    assert used(scale, [float("inf")])
    assert scale.value.item() == (128.0 if loss_scaling == "static" else 1.0)
    assert scale.read() == {}


# The world


@pytest.fixture
def without_gpu(alone: pytest.MonkeyPatch) -> None:
    alone.setattr(paddle, "is_compiled_with_cuda", lambda: False)


@pytest.mark.usefixtures("without_gpu")
def test_a_gpu_that_is_not_there_is_an_error() -> None:
    with pytest.raises(BackendError, match=r"finds no GPU.*device=cpu.*paddlepaddle-gpu"):
        paddle_backend.world(Execution(backend="paddle", device="cuda"))


@pytest.mark.usefixtures("without_gpu")
@pytest.mark.parametrize("device", ["auto", "cpu"])
def test_without_a_gpu_the_cpu_is_used(device: Any) -> None:
    world = paddle_backend.world(Execution(backend="paddle", device=device))
    assert (world.rank, world.ranks, world.on_gpu) == (0, 1, False)
    assert world.device == f"CPU, {loading.threads} threads"
    assert paddle_backend.devices() == [world.device]


def test_a_local_rank_without_a_gpu_of_its_own_is_refused(alone: pytest.MonkeyPatch) -> None:
    alone.setattr(paddle, "is_compiled_with_cuda", lambda: True)
    alone.setattr(paddle.device.cuda, "device_count", lambda: 2)
    alone.setenv("LOCAL_RANK", "2")
    with pytest.raises(BackendError, match="local rank 2 has no GPU: there are 2; launch fewer processes"):
        paddle_backend.world(Execution(backend="paddle"))


def test_several_ranks_that_do_not_know_each_other_are_refused(alone: pytest.MonkeyPatch) -> None:
    alone.setenv("RANK", "0")
    alone.setenv("WORLD_SIZE", "2")
    with pytest.raises(BackendError, match=r"no PADDLE_TRAINER_ENDPOINTS .*start them with `lockstep launch`"):
        paddle_backend.world(Execution(backend="paddle", device="cpu"))


def test_horovod_is_refused(alone: pytest.MonkeyPatch) -> None:
    with pytest.raises(BackendError, match="Horovod works only with TensorFlow's and MXNet's engines"):
        paddle_backend.world(Execution(backend="paddle", distributed="horovod"))
    with pytest.raises(BackendError, match="Horovod works only with TensorFlow's and MXNet's engines"):
        paddle_backend.launch(2, ["doctor"], "horovod")


@pytest.mark.parametrize("said", ["", "Connection reset by peer", "where\nConnection reset by peer\n"])
@pytest.mark.parametrize("kind", [RuntimeError, ValueError, ConnectionResetError])
def test_an_exchange_that_fails_among_several_ranks_is_laid_to_a_peer(kind: type[Exception], said: str) -> None:
    reason = "Connection reset by peer" if said else kind.__name__
    with pytest.raises(LockstepError, match=rf"^another rank has ended; .* \({reason}\)$"), _OfTwo().watched():
        raise kind(said)


def test_an_exchange_that_fails_alone_is_told_as_it_is(alone: pytest.MonkeyPatch) -> None:
    world = paddle_backend.world(Execution(backend="paddle", device="cpu"))
    with pytest.raises(RuntimeError, match=r"^it fails$"), world.watched():
        raise RuntimeError("it fails")


def test_memory_that_is_short_is_not_laid_to_a_peer() -> None:
    with pytest.raises(MemoryError), _OfTwo().watched():
        raise MemoryError


@pytest.mark.parametrize(
    ("length", "megabytes", "sizes"),
    [
        (700_000, 1, [262_144, 262_144, 175_712]),
        (700_000, 2, [524_288, 175_712]),
        (524_288, 1, [262_144, 262_144]),
        (700_000, 3, [700_000]),
        (700_000, 0, [700_000]),
    ],
)
def test_a_sum_over_ranks_is_taken_so_many_megabytes_at_a_time(
    monkeypatch: pytest.MonkeyPatch, length: int, megabytes: int, sizes: list[int]
) -> None:
    exchanged: list[int] = []

    def doubled(tensor: Any) -> None:
        exchanged.append(len(tensor))
        tensor.scale_(2.0)

    monkeypatch.setattr(paddle.distributed, "all_reduce", doubled)
    found = _OfTwo().sum(paddle.ones([length]), megabytes)
    assert exchanged == sizes
    assert (found.numpy() == 2).all()


def test_gradients_are_added_up_so_many_megabytes_at_a_time(start: Start, tiny_recipe: Recipe) -> None:
    engine: Any = start(tiny_recipe, all_reduce_mb=7)
    asked: list[tuple[int, ...]] = []

    class Noting(_OfTwo):
        def sum(self, tensor: Any, *megabytes: int) -> Any:
            asked.append((len(tensor), *megabytes))
            return tensor

    engine._world = Noting()
    engine.train([random_batch(tiny_recipe)], 0)
    assert asked[0] == (sum(value.size for value in engine.read().momentum.values()), 7)


def test_trainers_of_one_machine_know_each_other() -> None:
    environment = trainers(3)
    told = [environment(rank) for rank in range(3)]
    addresses = told[0]["PADDLE_TRAINER_ENDPOINTS"].split(",")
    assert len({*addresses, told[0]["PADDLE_MASTER"]}) == 4
    assert [each["PADDLE_CURRENT_ENDPOINT"] for each in told] == addresses
    assert [each["PADDLE_TRAINER_ID"] for each in told] == ["0", "1", "2"]
    for name in ("PADDLE_TRAINER_ENDPOINTS", "PADDLE_MASTER", "PADDLE_TRAINERS_NUM"):
        assert len({each[name] for each in told}) == 1
    assert told[0]["PADDLE_TRAINERS_NUM"] == "3"


@pytest.mark.parametrize(("count", "threads"), [(1, "6"), (2, "3"), (4, "1"), (8, "1")])
def test_trainers_divide_the_cores_among_them(count: int, threads: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(6)))
    assert {trainers(count)(rank)["OMP_NUM_THREADS"] for rank in range(count)} == {threads}


def test_the_paddle_backend_is_found_by_name() -> None:
    assert backends.load("paddle") is paddle_backend


# Processes


def python(program: str, **more: Any) -> tuple[int, str, str]:
    """Run a program; return its exit code, output and errors."""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=200, **more)
    return done.returncode, done.stdout, done.stderr


SHARE = """
import os
from lockstep.backends.paddle.launching import trainers
print(trainers(int(os.environ["RANKS"]))(0)["OMP_NUM_THREADS"])
"""


@pytest.mark.slow
@pytest.mark.parametrize(("given", "expected"), [(None, "1"), ("5", "5")])
def test_trainers_have_their_share_of_cores_though_the_launcher_has_all(
    given: str | None, expected: str, alone: pytest.MonkeyPatch
) -> None:
    alone.setenv("RANKS", str(len(os.sched_getaffinity(0))))
    alone.delenv("OMP_NUM_THREADS", raising=False)
    if given is not None:
        alone.setenv("OMP_NUM_THREADS", given)
    assert python(SHARE) == (0, f"{expected}\n", "")


STEP = """
import os
import numpy as np
from lockstep import backends
from lockstep.recipes import Execution
from tests.backends.cases import NARROWED, random_batch, random_state
from tests.conftest import TINY

recipe = TINY.replace(precision=os.environ["PRECISION"], **NARROWED["narrow resnet50"])
backend, execution = backends.load("paddle"), Execution(backend="paddle", device="cpu", compile=os.environ["COMPILE"])
with backend.engine(recipe, np.zeros(1), backend.world(execution), execution) as engine:
    engine.write(random_state(recipe))
    batch = random_batch(recipe, mixup="sample")
    engine.fetch(engine.train([batch], 0))
    engine.evaluate([batch])
    engine.predict(batch.images)
"""

StepAlone = Callable[[str, str], tuple[int, str, str]]


@pytest.fixture
def step_alone(alone: pytest.MonkeyPatch, pytestconfig: pytest.Config) -> StepAlone:
    """Return a function that trains, evaluates and predicts in a separate process, where a warning is an error."""

    def run(compile: str, precision: str) -> tuple[int, str, str]:
        own = {"COMPILE": compile, "PRECISION": precision, "OMP_NUM_THREADS": "1"}
        environment = os.environ | own | {"PYTHONWARNINGS": "error::FutureWarning,error::UserWarning"}
        return python(STEP, cwd=pytestconfig.rootpath, env=environment)

    return run


@pytest.mark.slow
@pytest.mark.parametrize("compile", ["off", "on"])
def test_a_process_trains_without_a_word(step_alone: StepAlone, compile: str, alone: pytest.MonkeyPatch) -> None:
    alone.delenv("GLOG_minloglevel", raising=False)
    assert step_alone(compile, "fp32") == (0, "", "")


SLOW_IF_NOT_FAST = {"batch_normalization", "binary", "convolution", "eltwise", "matmul"}


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_programs_are_computed_by_fast_kernels_of_onednn(
    step_alone: StepAlone, precision: str, alone: pytest.MonkeyPatch
) -> None:
    # If batch norm or ReLU get two orders of channels in memory, they use reference kernels.
    alone.setenv("DNNL_VERBOSE", "1")
    code, output, errors = step_alone("on", precision)
    assert code == 0, errors
    executed = [line.split(",") for line in output.splitlines() if line.startswith("onednn_verbose") and ",exec," in line]
    kernels = {tuple(fields[fields.index("exec") + 2 :][:2]) for fields in executed}
    assert {operation for operation, _ in kernels} >= SLOW_IF_NOT_FAST
    assert {(of, name) for of, name in kernels if of in SLOW_IF_NOT_FAST and name.startswith("ref:")} == set()


@pytest.mark.slow
def test_without_programs_nothing_is_computed_by_onednn(step_alone: StepAlone, alone: pytest.MonkeyPatch) -> None:
    alone.setenv("DNNL_VERBOSE", "1")
    assert step_alone("off", "fp32") == (0, "", "")


AFTER_TENSORFLOW = """
import tensorflow
from lockstep import backends
from lockstep.system.errors import BackendError
try:
    backends.load("paddle")
except BackendError as error:
    print(error)
"""


@pytest.mark.slow
@pytest.mark.skipif(find_spec("tensorflow") is None, reason="TensorFlow is not installed")
def test_paddle_is_not_imported_after_tensorflow() -> None:
    code, output, _ = python(AFTER_TENSORFLOW)
    assert code == 0
    assert "import paddle first, or use a process for each" in output


LOAD = "import sys\nfrom lockstep import backends\nbackends.load('paddle')\n"


@pytest.mark.slow
def test_after_the_import_errors_are_heard_again() -> None:
    program = f"print('before', file=sys.stderr)\n{LOAD}import os\nprint('after', file=sys.stderr)\nos.write(2, b'below')"
    assert python(f"import sys\n{program}") == (0, "", "before\nafter\nbelow")


def test_a_paddle_that_cannot_be_imported_tells_why(tmp_path: Path, alone: pytest.MonkeyPatch) -> None:
    # Output of its libraries, and output of Python.
    broken = "import os\nos.write(2, b'libcudart.so: undefined symbol\\n')\nraise ImportError('it cannot be loaded')"
    (tmp_path / "paddle.py").write_text(broken)
    alone.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    code, output, errors = python(LOAD)
    assert (code, output) == (1, "")
    assert errors.startswith("libcudart.so: undefined symbol\n")
    assert errors.endswith("ImportError: it cannot be loaded\n")


SUMS = """
import sys
from lockstep.backends.paddle.launching import launch

program = '''
import numpy as np
from lockstep import backends
from lockstep.recipes import Execution

backend = backends.load("paddle")
import paddle

world = backend.world(Execution(backend="paddle", device="cpu"))
own, other = (np.random.default_rng(rank).normal(size=700_001).astype(np.float32) for rank in (world.rank, 1 - world.rank))
for megabytes in (0, 1, 2, 100):
    found = world.sum(paddle.to_tensor(own), megabytes)
    assert found.numpy().tobytes() == (own + other).tobytes(), megabytes
world.close()
'''
sys.exit(launch(2, ["-c", program], "native"))
"""


@pytest.mark.slow
def test_sums_of_two_ranks_are_the_same_in_several_exchanges(alone: pytest.MonkeyPatch) -> None:
    alone.setenv("OMP_NUM_THREADS", "1")
    code, _, errors = python(SUMS)
    assert code == 0, errors
