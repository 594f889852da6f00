"""The engines to test: LOCKSTEP_BACKENDS names them, comma-separated. If one cannot be loaded, its
tests fail.

LOCKSTEP_TEST_DEVICE is the device that they compute on: "cpu", "cuda" or "auto", a GPU if there is
one.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from lockstep import backends
from lockstep.backends import Backend, Engine, World
from lockstep.models.architectures import ModelSpec
from lockstep.models.state import State
from lockstep.recipes import Execution, Recipe
from tests.backends import native as natives
from tests.backends.cases import RATES, lacks, random_state

DEFAULT = "paddle,reference,tensorflow,torch"
BACKENDS = tuple(os.environ.get("LOCKSTEP_BACKENDS", DEFAULT).split(","))
DEVICE = os.environ.get("LOCKSTEP_TEST_DEVICE", "auto")
"""The device of the engines, unless a test is for one device."""
COMPILE = "on" if BACKENDS == ("mxnet",) else "off"
"""Whether engines are compiled if a test does not choose. Only MXNet builds a graph very quickly.
"""

of_frameworks = pytest.mark.parametrize(
    "backend", [name for name in BACKENDS if name != "reference"], indirect=True
)
"""Runs a test for every engine except the reference, which has no framework."""
of_quantising = pytest.mark.parametrize(
    "backend",
    [name for name, each in backends.FRAMEWORKS.items() if name in BACKENDS and each.quantises],
    indirect=True,
)
"""Runs a test for every engine that supports quantisation."""

collect_ignore_glob = [
    f"test_{name}*.py"
    for name in ("mxnet", "paddle", "tensorflow", "torch")
    if name not in BACKENDS
]
if "torch" not in BACKENDS:  # its autograd is the oracle there
    collect_ignore_glob += ["test_reference.py"]
if BACKENDS == ("mxnet",):  # the other environment has run them, and they are alike for all engines
    collect_ignore_glob += ["test_host_memory.py", "test_interpreter.py"]

Start = Callable[..., Engine]
OF_LAUNCHERS = (
    *(
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "HOROVOD_RANK",
        "TF_CONFIG",
        "DMLC_PS_ROOT_URI",
    ),
    *("LOCKSTEP_TORCH_STORE", "MASTER_ADDR", "MASTER_PORT"),
    *("PADDLE_TRAINER_ID", "PADDLE_TRAINER_ENDPOINTS", "TF_NUM_INTRAOP_THREADS"),
)
"""Variables that launchers set for their ranks."""


@pytest.fixture(scope="package", autouse=True)
def one_thread() -> Iterator[None]:
    """Use one thread: threads make models this small slower, and much slower if other work needs
    the cores."""
    os.environ["TF_NUM_INTRAOP_THREADS"] = "1"  # read when TensorFlow first computes
    if "paddle" in BACKENDS:
        backends.load("paddle")
        import paddle

        paddle.base.core.set_num_threads(1)
    if "torch" not in BACKENDS:
        yield
        return
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session", params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Backend:
    return backends.load(request.param)


@pytest.fixture
def native(backend: Backend) -> ModuleType:
    """What the tests need of the framework itself: a module of the folder `native`."""
    return natives.of(backend)


class Kept:
    """Engines of finished tests, for tests that need the same ones: tracing a graph takes much
    longer than using it.

    Once a state is written, a used engine must behave like a new one. Full models are not kept,
    because they are large.
    """

    def __init__(self) -> None:
        self._free: dict[str, list[Engine]] = {}
        self._stack = ExitStack()

    @contextmanager
    def lent(
        self, backend: Backend, recipe: Recipe, rates: np.ndarray, world: World, how: Execution
    ) -> Iterator[Engine]:
        """Yield an engine that no other test uses, and keep it afterwards."""
        key = repr((id(backend), recipe, rates.tobytes(), how))
        free = self._free.setdefault(key, [])
        engine = (
            free.pop()
            if free
            else self._stack.enter_context(backend.engine(recipe, rates, world, how))
        )
        yield engine
        if isinstance(recipe.model, ModelSpec):
            engine.mask({})
            free.append(engine)

    def close(self) -> None:
        self._free.clear()
        self._stack.close()


def starter(backend: Backend, world: World, stack: ExitStack, kept: Kept | None = None) -> Start:
    """Return a function that returns an engine with a state (by default `random_state`) and the
    rates `RATES`.

    The engines are closed with the stack. An engine may come from `kept`, unless `new` is true. The
    reference computes in float32 here. It is compared with itself in float64, and in
    `test_reference` with autograd.
    """

    def start(
        recipe: Recipe,
        state: State | None = None,
        rates: Any = RATES,
        *,
        new: bool = False,
        **execution: Any,
    ) -> Engine:
        if why := lacks(natives.name_of(backend), recipe.precision):
            pytest.skip(why)
        how = Execution.of(
            {"compile": COMPILE, "device": DEVICE, "reference_dtype": "float32"} | execution
        )
        table = np.asarray(rates, np.float64)
        if new or kept is None:
            engine = stack.enter_context(backend.engine(recipe, table, world, how))
        else:
            engine = stack.enter_context(kept.lent(backend, recipe, table, world, how))
        engine.write(random_state(recipe) if state is None else state)
        return engine

    return start


Grounds = Callable[[Backend], tuple[World, Kept]]


@pytest.fixture(scope="session")
def grounds() -> Iterator[Grounds]:
    """Return a function that returns a backend's world and its kept engines. All modules of tests
    share them."""
    found: dict[int, tuple[World, Kept]] = {}

    def ground(backend: Backend) -> tuple[World, Kept]:
        if id(backend) not in found:
            found[id(backend)] = backend.world(Execution.of({"device": DEVICE})), Kept()
        return found[id(backend)]

    yield ground
    for world, kept in found.values():
        kept.close()
        world.close()


@pytest.fixture(scope="module")  # not the session's: the tests of single engines replace `backend`
def world(backend: Backend, grounds: Grounds) -> World:
    return grounds(backend)[0]


@pytest.fixture(scope="module")
def kept(backend: Backend, grounds: Grounds) -> Kept:
    return grounds(backend)[1]


@pytest.fixture
def start(backend: Backend, world: World, kept: Kept) -> Iterator[Start]:
    with ExitStack() as stack:
        yield starter(backend, world, stack, kept)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Unset the variables of all launchers."""
    for name in OF_LAUNCHERS:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch
