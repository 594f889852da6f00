"""The engines to test: LOCKSTEP_BACKENDS names them, comma-separated. If one cannot be loaded, its
tests fail.

LOCKSTEP_TEST_DEVICE is the device that they compute on: "cpu", "cuda" or "auto", a GPU if there is
one.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from lockstep import backends
from lockstep.backends import FRAMEWORKS, Engine, Framework, LoadedBackend, World
from lockstep.models.architectures import ModelSpec
from lockstep.models.state import State
from lockstep.recipes import Execution, Recipe
from tests.backends import native as natives
from tests.backends.cases import RATES
from tests.backends.drawing import draw_state
from tests.soak import in_a_soak

DEFAULT = ",".join(sorted(name for name, row in FRAMEWORKS.items() if not row.is_separate))
BACKENDS = tuple(os.environ.get("LOCKSTEP_BACKENDS", DEFAULT).split(","))
DEVICE = os.environ.get("LOCKSTEP_TEST_DEVICE", "auto")
"""The device of the engines, unless a test is for one device."""


def parametrize_backends(supports: Callable[[Framework], object]) -> pytest.MarkDecorator:
    """Return a mark that runs a test for every backend whose row fulfils a condition."""
    names = [name for name in BACKENDS if name in FRAMEWORKS and supports(FRAMEWORKS[name])]
    return pytest.mark.parametrize("backend", names, indirect=True)


for_frameworks = parametrize_backends(lambda row: row.module)
for_gpus = parametrize_backends(lambda row: row.on_gpu)
for_ranks = parametrize_backends(lambda row: row.addresses)
for_quantising = parametrize_backends(lambda row: row.quantises)

collect_ignore_glob = [f"test_{name}*.py" for name in FRAMEWORKS if name not in BACKENDS]
if all(FRAMEWORKS[name].is_separate for name in BACKENDS if name in FRAMEWORKS):
    # The other environment has run them, and they are the same for all engines.
    collect_ignore_glob += ["test_host_memory.py", "test_interpreter.py", "test_loading.py"]
    collect_ignore_glob += ["test_*faults.py"]

Start = Callable[..., Engine]
RANK_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "HOROVOD_RANK",
    "TF_CONFIG",
    "DMLC_PS_ROOT_URI",
    "LOCKSTEP_TORCH_STORE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "PADDLE_TRAINER_ID",
    "PADDLE_TRAINER_ENDPOINTS",
    "TF_NUM_INTRAOP_THREADS",
)
"""Variables that launchers set for their ranks."""


@pytest.fixture(scope="session", params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> LoadedBackend:
    return backends.load(request.param)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what is left to `make soak`."""
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            name = item.callspec.params.get("backend")
            if Path(item.path).stem in natives.LEFT_TO_SOAK.get(name, ()):
                item.add_marker(in_a_soak)


def make_backend_fixture(name: str) -> Any:
    """Return the fixture `backend` for a file with tests of one backend."""

    @pytest.fixture(scope="session")
    def backend() -> LoadedBackend:
        return backends.load(name)

    return backend


@pytest.fixture
def native(backend: LoadedBackend) -> ModuleType:
    """What the tests need of the framework itself: a module of the folder `native`."""
    return natives.find(backend.name)


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
        self,
        backend: LoadedBackend,
        recipe: Recipe,
        rates: np.ndarray,
        world: World,
        how: Execution,
    ) -> Iterator[Engine]:
        """Yield an engine that no other test uses, and keep it afterwards."""
        key = repr((backend.name, recipe, rates.tobytes(), how))
        free = self._free.setdefault(key, [])
        if free:
            engine = free.pop()
        else:
            engine = self._stack.enter_context(backend.engine(recipe, rates, world, how))
        yield engine
        if isinstance(recipe.model, ModelSpec):
            engine.mask({})
            free.append(engine)

    def close(self) -> None:
        self._free.clear()
        self._stack.close()


def _device(backend: LoadedBackend) -> str:
    return DEVICE if FRAMEWORKS[backend.name].on_gpu is not None else "cpu"


def starter(
    backend: LoadedBackend, world: World, stack: ExitStack, kept: Kept | None = None
) -> Start:
    """Return a function that returns an engine with a state (by default `draw_state`) and the
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
        native = natives.find(backend.name)
        if obstacle := native.find_obstacle(recipe.precision):
            pytest.skip(obstacle)
        how = Execution.of(
            {"compile": native.FACTS.compile, "device": _device(backend)}
            | {"reference_dtype": "float32"}
            | execution
        )
        table = np.asarray(rates, np.float64)
        if new or kept is None:
            engine = stack.enter_context(backend.engine(recipe, table, world, how))
        else:
            engine = stack.enter_context(kept.lent(backend, recipe, table, world, how))
        engine.write(draw_state(recipe) if state is None else state)
        return engine

    return start


Grounds = Callable[[LoadedBackend], tuple[World, Kept]]


@pytest.fixture(scope="session")
def grounds() -> Iterator[Grounds]:
    """Return a function that returns a backend's world and its kept engines. All modules of tests
    share them."""
    grounds: dict[str, tuple[World, Kept]] = {}

    def find_ground(backend: LoadedBackend) -> tuple[World, Kept]:
        if backend.name not in grounds:
            grounds[backend.name] = backend.world(Execution(device=_device(backend))), Kept()
        return grounds[backend.name]

    yield find_ground
    for world, kept in grounds.values():
        kept.close()
        world.close()


@pytest.fixture(scope="module")  # not the session's: the tests of single engines replace `backend`
def world(backend: LoadedBackend, grounds: Grounds) -> World:
    return grounds(backend)[0]


@pytest.fixture(scope="module")
def kept(backend: LoadedBackend, grounds: Grounds) -> Kept:
    return grounds(backend)[1]


@pytest.fixture
def start(backend: LoadedBackend, world: World, kept: Kept) -> Iterator[Start]:
    with ExitStack() as stack:
        yield starter(backend, world, stack, kept)


@pytest.fixture
def start_compiled(start: Start) -> Start:
    """Return a function like `start` for new engines that are compiled."""
    return partial(start, compile="on", new=True)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Unset the variables of all launchers."""
    for name in RANK_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch
