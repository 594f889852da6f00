"""Tests for PyTorch's ranks and processes: devices, the process group, memory."""

import ctypes
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from lockstep import backends
from lockstep.backends import Backend
from lockstep.backends import torch as torch_backend
from lockstep.backends.shared import host_memory
from lockstep.recipes import Execution, Recipe
from lockstep.system.errors import BackendError
from tests.backends.cases import (
    random_batch,
)
from tests.backends.conftest import Start

CPU = torch.device("cpu")


FLAGS: tuple[tuple[Any, str], ...] = (
    (torch.backends.cudnn, "deterministic"),
    (torch.backends.cudnn, "benchmark"),
    (torch.backends.cudnn, "allow_tf32"),
    (torch.backends.cuda.matmul, "allow_tf32"),
)


@pytest.fixture(scope="session")
def backend() -> Backend:
    return backends.load("torch")


@pytest.fixture(autouse=True)
def flags() -> Iterator[None]:
    """Restore settings that an engine changes for the whole process."""
    before = [getattr(place, name) for place, name in FLAGS]
    yield
    for (place, name), value in zip(FLAGS, before, strict=True):
        setattr(place, name, value)


# The process


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp16"])
def test_tensorfloat_products_are_used_in_tf32_alone(tiny_recipe: Recipe, precision: str) -> None:
    for before in (False, True):
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = before
        execution = Execution(device="cpu", compile="off")
        torch_backend.engine(
            tiny_recipe.replace(precision=precision), np.zeros(1), torch_backend.world(execution), execution
        )
        assert torch.backends.cudnn.allow_tf32 == torch.backends.cuda.matmul.allow_tf32 == (precision == "tf32")


@pytest.mark.parametrize("deterministic", [True, False])
def test_kernels_are_chosen_for_speed_only_if_they_may_differ(tiny_recipe: Recipe, deterministic: bool) -> None:
    execution = Execution(device="cpu", compile="off", deterministic=deterministic)
    torch_backend.engine(tiny_recipe, np.zeros(1), torch_backend.world(execution), execution)
    assert torch.backends.cudnn.deterministic == deterministic
    assert torch.backends.cudnn.benchmark != deterministic


@pytest.fixture
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)


def test_a_local_rank_without_a_gpu_of_its_own_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(BackendError, match="local rank 2 has no GPU: there are 2; launch fewer processes"):
        torch_backend.world(Execution())


def test_too_little_memory_is_reported_with_what_to_do(
    start: Start, tiny_recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exhausted(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB.")

    engine: Any = start(tiny_recipe, accumulation_steps=2, new=True)
    monkeypatch.setattr(engine, "_loss", exhausted)
    with pytest.raises(BackendError, match=r"for 16 images in 2 parts: .* 20 GiB.\nCompute .* accumulation_steps=4"):
        engine.train([random_batch(tiny_recipe)], 0)


@pytest.mark.usefixtures("without_gpu")
def test_a_gpu_that_is_not_there_is_an_error() -> None:
    with pytest.raises(BackendError, match=r"finds no GPU.*device=cpu"):
        torch_backend.world(Execution(device="cuda"))


@pytest.mark.usefixtures("without_gpu")
@pytest.mark.parametrize("device", ["auto", "cpu"])
def test_without_a_gpu_the_cpu_is_used(device: Any) -> None:
    world = torch_backend.world(Execution(device=device))
    assert (world.rank, world.ranks, world.torch_device) == (0, 1, CPU)
    assert world.device == f"CPU, {torch.get_num_threads()} threads"
    assert torch_backend.devices() == [world.device]


def test_the_torch_backend_is_found_by_name() -> None:
    assert backends.load("torch") is torch_backend


# Memory of the process

RESIDENT_AFTER_FREEING = """
import resource
import numpy as np
from lockstep.backends.shared.host_memory import keep_freed_memory

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()

{call}
np.ones(1)
before = resident()
large = np.ones(8_000_000)
del large
print(resident() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no mallopt")
@pytest.mark.parametrize(("call", "kept"), [("keep_freed_memory()", True), ("", False)])
def test_freed_memory_stays_with_the_process_when_asked(call: str, kept: bool) -> None:
    command = [sys.executable, "-c", RESIDENT_AFTER_FREEING.format(call=call)]
    environment = os.environ | {"LD_PRELOAD": ""}  # another allocator
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60)
    assert (int(done.stdout) > 32_000_000) == kept


@pytest.mark.parametrize("missing", ["linux", "mallopt"])
def test_other_systems_are_left_alone(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    called: list[Callable[..., Any]] = []
    library = type("Library", (), {} if missing == "mallopt" else {"mallopt": lambda *_: called.append(print)})
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library())
    if missing == "linux":
        monkeypatch.setattr(sys, "platform", "darwin")
    host_memory.keep_freed_memory()
    assert not called


@pytest.mark.parametrize(("given", "taken"), [(None, "2000"), ("7", "7")])
def test_threads_of_a_framework_give_way_unless_told_otherwise(
    given: str | None, taken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    if given is not None:
        monkeypatch.setenv("GOMP_SPINCOUNT", given)
    backends.load("torch")
    assert os.environ["GOMP_SPINCOUNT"] == taken
