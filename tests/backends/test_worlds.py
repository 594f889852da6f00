"""Tests for every engine: its device, its ranks, and what it leaves when it is closed."""

import os
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from lockstep.backends import LoadedBackend, World
from lockstep.recipes import Execution, Recipe
from lockstep.system.errors import BackendError
from tests.backends.cases import RATES, all_bits
from tests.backends.conftest import Start, for_gpus, parametrize_backends
from tests.backends.drawing import draw_batch, draw_batches, draw_state

# The device


@for_gpus
def test_a_gpu_that_is_not_there_is_an_error(
    backend: LoadedBackend, native: ModuleType, alone: pytest.MonkeyPatch
) -> None:
    native.set_gpus(alone, 0)
    message = rf"finds no GPU here; use --set device=cpu.*{native.FACTS.advice}"
    with pytest.raises(BackendError, match=message):
        backend.world(Execution(device="cuda"))


@for_gpus
@pytest.mark.parametrize("device", ["auto", "cpu"])
def test_without_a_gpu_the_cpu_is_used(
    backend: LoadedBackend, native: ModuleType, device: Any, alone: pytest.MonkeyPatch
) -> None:
    native.set_gpus(alone, 0)
    world = backend.world(Execution(device=device))
    assert (world.rank, world.ranks, world.on_gpu) == (0, 1, False)
    threads = backend.libraries()["threads"]
    assert world.device == f"CPU, {threads} thread{'s' * (int(threads) != 1)}"
    assert backend.devices() == [world.device]
    world.close()


@for_gpus
def test_a_local_rank_without_a_gpu_of_its_own_is_refused(
    backend: LoadedBackend, native: ModuleType, alone: pytest.MonkeyPatch
) -> None:
    native.set_gpus(alone, 2)
    alone.setenv("LOCAL_RANK", "2")
    message = "local rank 2 has no GPU: there are only 2; launch fewer processes"
    with pytest.raises(BackendError, match=message):
        backend.world(Execution())


@pytest.fixture
def switch(native: ModuleType) -> Iterator[ModuleType]:
    """What has the switches for TensorFloat-32. They and the environment variables are restored
    afterwards."""
    if not hasattr(native, "tensorfloat"):
        pytest.skip("without a GPU there are no switches for TensorFloat-32")
    with patch.dict(os.environ):
        before = native.tensorfloat()
        yield native
        native.set_tensorfloat(before)


@for_gpus
@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp16"])
@pytest.mark.parametrize("before", [False, True])
def test_tensorfloat_products_are_used_in_tf32_alone(
    backend: LoadedBackend,
    switch: ModuleType,
    world: World,
    tiny_recipe: Recipe,
    precision: str,
    before: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    switch.set_tensorfloat([before] * len(switch.tensorfloat()))
    monkeypatch.setattr(world, "on_gpu", True)
    execution = Execution(compile="off", deterministic=False)
    with backend.engine(tiny_recipe.replace(precision=precision), np.zeros(1), world, execution):
        assert set(switch.tensorfloat()) == {precision == "tf32"}


# Ranks


@pytest.mark.parametrize(
    "variables", [{"RANK": "0", "WORLD_SIZE": "2"}, {"WORLD_SIZE": "2"}], ids=",".join
)
def test_several_ranks_that_do_not_know_each_other_are_refused(
    backend: LoadedBackend, variables: dict[str, str], alone: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        alone.setenv(name, value)
    with pytest.raises(BackendError, match="`lockstep launch`"):
        backend.world(Execution(device="cpu"))


@parametrize_backends(lambda row: "horovod" in row.on_cpu.distributed)
def test_missing_horovod_is_refused(backend: LoadedBackend, alone: pytest.MonkeyPatch) -> None:
    alone.setitem(sys.modules, "horovod", None)
    alone.delitem(sys.modules, f"lockstep.backends.{backend.name}.horovod_world", raising=False)
    with pytest.raises(BackendError, match=f"`make {backend.name}-horovod`"):
        backend.world(Execution(distributed="horovod"))


# Memory


@pytest.mark.parametrize("ranks", [1, 2])
def test_too_little_memory_is_told_with_what_to_do_and_not_laid_to_a_peer(
    start: Start,
    native: ModuleType,
    world: World,
    tiny_recipe: Recipe,
    monkeypatch: pytest.MonkeyPatch,
    ranks: int,
) -> None:
    engine: Any = start(tiny_recipe, accumulation_steps=2)
    with monkeypatch.context() as patched:
        patched.setattr(engine, native.FACTS.step, native.exhaust_host)
        patched.setattr(world, "ranks", ranks)
        with pytest.raises(BackendError) as refused:
            engine.train([draw_batch(tiny_recipe)], 0)
    first, advice = str(refused.value).splitlines()
    assert first.startswith(
        f"the device has too little memory for {native.FACTS.batch} in 2 parts: "
    )
    assert native.FACTS.reason in first
    assert "--set accumulation_steps=4; else use smaller batches: --batch" in advice


@for_gpus
def test_too_little_memory_of_a_gpu_is_told_with_what_to_do(
    start: Start, native: ModuleType, tiny_recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine: Any = start(tiny_recipe, accumulation_steps=2)
    with monkeypatch.context() as patched:
        patched.setattr(engine, native.FACTS.step, native.exhaust_gpu)
        with pytest.raises(BackendError) as refused:
            engine.train([draw_batch(tiny_recipe)], 0)
    first, advice = str(refused.value).splitlines()
    assert native.FACTS.full in first
    assert "--set accumulation_steps=4; else" in advice


def test_training_goes_on_after_a_batch_that_was_too_large(
    start: Start, native: ModuleType, tiny_recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine: Any = start(tiny_recipe)
    with monkeypatch.context() as patched:
        patched.setattr(engine, native.FACTS.step, native.exhaust_host)
        with pytest.raises(BackendError, match="too little memory"):
            engine.train([draw_batch(tiny_recipe)], 0)
    engine.train([draw_batch(tiny_recipe)], 0)
    state = engine.read()
    engine.write(draw_state(tiny_recipe))
    engine.train([draw_batch(tiny_recipe)], 0)
    assert all_bits(state) == all_bits(engine.read())


# Closing


def test_closing_an_engine_changes_no_other(
    backend: LoadedBackend, native: ModuleType, start: Start, world: World, tiny_recipe: Recipe
) -> None:
    batches = draw_batches(tiny_recipe, 2)
    disturbed = start(tiny_recipe)
    undisturbed = start(tiny_recipe)
    disturbed.train(batches[:1], 0)
    with backend.engine(
        tiny_recipe, np.asarray(RATES), world, Execution.of({"compile": native.FACTS.compile})
    ) as other:
        other.write(draw_state(tiny_recipe, seed=1))
    disturbed.train(batches[1:], 1)
    undisturbed.train(batches, 0)
    assert all_bits(disturbed.read()) == all_bits(undisturbed.read())


def test_an_error_within_an_engine_gets_out_of_it(
    backend: LoadedBackend, native: ModuleType, world: World, tiny_recipe: Recipe
) -> None:
    with (
        pytest.raises(ZeroDivisionError),
        backend.engine(
            tiny_recipe, np.zeros(1), world, Execution.of({"compile": native.FACTS.compile})
        ),
    ):
        raise ZeroDivisionError


def test_worlds_open_one_after_another(backend: LoadedBackend, alone: pytest.MonkeyPatch) -> None:
    for _ in range(2):
        world = backend.world(Execution(device="cpu"))
        assert world.any(True)
        world.close()
