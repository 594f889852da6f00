"""Tests for TensorFlow alone: modules, tracing, XLA and grouped convolutions."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

# First, because it suppresses TensorFlow's greetings.
from lockstep.backends import tensorflow as tensorflow_backend

# isort: split
import tensorflow as tf
from tensorflow.python.framework.config import is_op_determinism_enabled

from lockstep.backends.tensorflow import model as tensorflow_model
from lockstep.backends.tensorflow.world import TensorflowWorld
from lockstep.recipes import Execution, Recipe
from lockstep.system.errors import BackendError
from lockstep.verification.bounds import BOUNDS, distance
from tests.backends import oracle
from tests.backends.cases import (
    NARROWED,
    RATES,
    WEIGHTED,
    Step,
    compare_changes,
    normalise,
    statistics,
)
from tests.backends.compiled_steps import check_compiled_step
from tests.backends.conftest import Start, make_backend_fixture
from tests.backends.drawing import draw_batch, draw_batches, draw_images, draw_state
from tests.backends.native.tensorflow import OfTwo
from tests.processes import python
from tests.soak import in_a_soak

backend = make_backend_fixture("tensorflow")


# The module


@pytest.fixture
def module(tiny_recipe: Recipe) -> Any:
    return tensorflow_backend.load_module(tiny_recipe, draw_state(tiny_recipe).tensors)


def test_a_loaded_module_computes_the_same_in_a_graph(module: Any, tiny_recipe: Recipe) -> None:
    images = normalise(draw_images(4), tiny_recipe)
    traced = tf.function(module, autograph=False)(tf.constant(images))
    assert distance(traced.numpy(), module(images).numpy()) < BOUNDS["logits"].value


def test_a_loaded_module_has_a_variable_of_float32_for_every_tensor(tiny_recipe: Recipe) -> None:
    module = tensorflow_backend.load_module(
        tiny_recipe.replace(precision="bf16"), draw_state(tiny_recipe).tensors
    )
    assert isinstance(module, tf.Module)
    layouts = {4: (2, 3, 1, 0), 2: (1, 0), 1: (0,)}
    expected = {
        tensor.name: tuple(tensor.shape[axis] for axis in layouts[len(tensor.shape)])
        for tensor in tiny_recipe.list_tensors()
    }
    assert {
        variable.name.removesuffix(":0"): tuple(variable.shape) for variable in module.variables
    } == expected
    assert {variable.dtype for variable in module.variables} == {tf.float32}


def test_a_module_is_saved_and_restored(module: Any, tiny_recipe: Recipe, tmp_path: Path) -> None:
    other = tensorflow_backend.load_module(tiny_recipe, draw_state(tiny_recipe, seed=3).tensors)
    images = normalise(draw_images(4), tiny_recipe)
    path = tf.train.Checkpoint(model=module).write(str(tmp_path / "module"))
    tf.train.Checkpoint(model=other).read(path).assert_consumed()
    assert other(images).numpy().tobytes() == module(images).numpy().tobytes()


# The step: XLA

XLA = Step(
    {"padding": "same", "batch_norm": "synchronised", "dropout": 0.4, "stochastic_depth": 0.6}
    | WEIGHTED,
    "cut",
    parts=2,
)
"""A step of a model with groups, class weights, CutMix, dropout and stochastic depth, in two parts.
Batch norm over all ranks is local here, since there is a single rank."""


@in_a_soak
def test_a_step_compiled_by_xla_is_a_plain_one(start: Start, tiny_recipe: Recipe) -> None:
    check_compiled_step(start, tiny_recipe, XLA)


@in_a_soak
def test_compiled_steps_take_the_rates_of_their_numbers(start: Start, tiny_recipe: Recipe) -> None:
    recipe, state, first = XLA.begin(tiny_recipe)
    batches = [first, draw_batch(recipe, seed=1, mixup="sample")]
    engine = start(recipe, state, accumulation_steps=2, compile="on")  # the same engine as above
    engine.train(batches, 0)
    expected = oracle.train(recipe, state, batches, RATES, 2).state
    assert compare_changes(engine.read(), expected, state) < BOUNDS["trajectory"].value


COMPILED_STEPS = """
import os
from dataclasses import replace
from pathlib import Path
import numpy as np
from lockstep import backends
from lockstep.recipes import Execution
from tests.backends.cases import BASIC
from tests.backends.drawing import draw_batches, draw_state
from tests.conftest import TINY

# XLA takes long for every convolution.
recipe = TINY.replace(model=replace(BASIC, layers=(1, 1, 1, 1)))
backend = backends.load("tensorflow")
execution = Execution(backend="tensorflow", device="cpu", compile="on")
rates = np.linspace(0.1, 0.2, 8)
with backend.engine(recipe, rates, backend.world(execution), execution) as engine:
    engine.write(draw_state(recipe))
    for step, batch in enumerate(draw_batches(recipe, 3)):
        engine.fetch(engine.train([batch], step))
        print(len(list(Path(os.environ["WRITTEN"]).glob("*before_optimizations.txt"))))
"""


@pytest.mark.slow
@in_a_soak  # XLA needs 20 seconds
def test_three_steps_are_compiled_once(
    pytestconfig: pytest.Config, alone: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # XLA compiles again for every value of an argument that it takes for a constant. It writes
    # files for what it compiles.
    alone.setenv("WRITTEN", str(tmp_path))
    alone.setenv("XLA_FLAGS", f"--xla_dump_to={tmp_path} --xla_dump_hlo_as_text")
    code, output, errors = python(COMPILED_STEPS, cwd=pytestconfig.rootpath)
    assert code == 0, errors
    first, second, third = map(int, output.split())
    assert first > 0
    assert (second, third) == (first, first)


def built(recipe: Recipe, world: TensorflowWorld, compile: Any) -> Any:
    execution = Execution(backend="tensorflow", device="cpu", compile=compile, deterministic=False)
    return tensorflow_backend.engine(recipe, np.zeros(1), world, execution)


def test_xla_is_refused_to_batch_norm_over_several_ranks(tiny_recipe: Recipe) -> None:
    message = "XLA cannot compile batch norm over all ranks; leave compile at auto"
    with pytest.raises(BackendError, match=message):
        built(tiny_recipe.replace(batch_norm="synchronised"), OfTwo(on_gpu=False), "on")


@pytest.mark.parametrize("compile", ["auto", "off"])
@pytest.mark.parametrize("on_gpu", [True, False])
def test_batch_norm_over_ranks_without_xla(tiny_recipe: Recipe, compile: str, on_gpu: bool) -> None:
    assert built(tiny_recipe.replace(batch_norm="synchronised"), OfTwo(on_gpu), compile) is not None


def test_xla_on_a_gpu_needs_leave_to_be_not_deterministic(tiny_recipe: Recipe) -> None:
    execution = Execution(backend="tensorflow", compile="on")
    with pytest.raises(BackendError, match="--set deterministic=false"):
        tensorflow_backend.engine(tiny_recipe, np.zeros(1), OfTwo(on_gpu=True), execution)
    assert not is_op_determinism_enabled(), "a refused engine has changed the process"


def test_xla_is_taken_by_ranks_that_normalise_by_themselves(tiny_recipe: Recipe) -> None:
    assert built(tiny_recipe, OfTwo(on_gpu=False), "on") is not None


# The step: grouped convolutions

GROUPED = {
    "tiny": Step(mixup="sample"),
    "tiny in two parts": Step(mixup="sample", parts=2),
    "tiny with SAME padding": Step({"padding": "same"}),
    "narrow resnext101-32x4d": Step(NARROWED["narrow resnext101-32x4d"], "sample", is_steady=True),
}


@pytest.mark.parametrize("step", GROUPED.values(), ids=GROUPED)
def test_a_step_is_the_same_group_by_group(
    start: Start, tiny_recipe: Recipe, monkeypatch: pytest.MonkeyPatch, step: Step
) -> None:
    dtypes: list[Any] = []
    monkeypatch.setattr(tensorflow_model, "computes_groups", dtypes.append)  # which returns None
    recipe, state, batch = step.begin(tiny_recipe)
    engine = start(recipe, state, accumulation_steps=step.parts, new=True)
    interval = engine.fetch(engine.train([batch], 0))
    end = engine.read()
    expected = oracle.train(recipe, state, [batch], RATES, step.parts)
    assert set(dtypes) == {tf.float32}
    assert interval.losses == pytest.approx(expected.losses, rel=BOUNDS["loss"].value)
    assert distance(end.momentum, expected.state.momentum) < BOUNDS["gradient"].value
    assert distance(statistics(end), statistics(expected.state)) < BOUNDS["statistics"].value


STEP_WITHOUT_ONEDNN = """
import sys
import numpy as np
from lockstep import backends
from lockstep.recipes import Execution
from tests.backends.drawing import draw_batch, draw_state
from tests.conftest import TINY

backend = backends.load("tensorflow")
execution = Execution(backend="tensorflow", device="cpu", compile="off")
with backend.engine(TINY, np.zeros(1), backend.world(execution), execution) as engine:
    engine.write(draw_state(TINY))
    print(engine.fetch(engine.train([draw_batch(TINY)], 0)).losses.item())
"""


@in_a_soak
def test_a_tensorflow_without_onednn_computes_the_same(
    tiny_recipe: Recipe, pytestconfig: pytest.Config, alone: pytest.MonkeyPatch
) -> None:
    # TensorFlow's own CPU kernels have no gradient of a grouped convolution.
    alone.setenv("TF_ENABLE_ONEDNN_OPTS", "0")
    code, output, errors = python(STEP_WITHOUT_ONEDNN, cwd=pytestconfig.rootpath)
    assert code == 0, errors
    expected = oracle.train(
        tiny_recipe, draw_state(tiny_recipe), [draw_batch(tiny_recipe)], RATES
    ).losses
    assert float(output) == pytest.approx(expected.item(), rel=BOUNDS["loss"].value)


# Tracing


def test_predictions_of_any_size_trace_once(start: Start, tiny_recipe: Recipe) -> None:
    engine: Any = start(tiny_recipe)
    for count, size in ((1, 32), (5, 32), (3, 37), (1, 64)):
        images = draw_images(count, size)
        logits = engine.predict(images)
        assert (logits.dtype, logits.shape) == (np.float32, (count, tiny_recipe.logits))
    assert engine._logits.experimental_get_tracing_count() == 1


def test_evaluating_batches_of_any_size_traces_once(start: Start, tiny_recipe: Recipe) -> None:
    engine: Any = start(tiny_recipe.replace(ema_decay=0.9))
    for ema in (False, True):
        engine.evaluate([draw_batch(tiny_recipe, count) for count in (8, 8, 3)], ema=ema)
    assert engine._logits.experimental_get_tracing_count() == 1
    assert engine._evaluated_ema.experimental_get_tracing_count() == 1


def test_steps_on_batches_of_one_shape_trace_once(start: Start, tiny_recipe: Recipe) -> None:
    engine: Any = start(tiny_recipe, new=True)
    engine.train(draw_batches(tiny_recipe, 3, mixup="sample"), 0)
    engine.write(draw_state(tiny_recipe, seed=2))
    engine.train(draw_batches(tiny_recipe, 2, mixup="sample"), 3)
    assert engine._train_step.experimental_get_tracing_count() == 1
