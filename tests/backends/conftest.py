"""The engines to test."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
import torch

from lockstep import backends
from lockstep.backends import Backend, Engine, State, World
from lockstep.recipes import Execution, Recipe
from tests.backends.cases import RATES, random_state

BACKENDS = ("torch",)

Start = Callable[..., Engine]


@pytest.fixture(scope="package", autouse=True)
def one_thread() -> Iterator[None]:
    """Models this small lose time to threads, and much more where other work needs the cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session", params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Backend:
    return backends.load(request.param)


@pytest.fixture(scope="session")
def world(backend: Backend) -> Iterator[World]:
    world = backend.world(Execution())
    yield world
    world.close()


@pytest.fixture
def start(backend: Backend, world: World) -> Iterator[Start]:
    """Build an engine that holds a state (by default `random_state`) and steps at `RATES`; uncompiled, unless asked."""
    with ExitStack() as stack:

        def start(recipe: Recipe, state: State | None = None, rates: Any = RATES, **execution: Any) -> Engine:
            how = Execution.of({"compile": "off"} | execution)
            engine = stack.enter_context(backend.engine(recipe, np.asarray(rates, np.float64), world, how))
            engine.write(random_state(recipe) if state is None else state)
            return engine

        yield start
