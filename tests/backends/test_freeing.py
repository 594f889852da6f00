"""An engine that is closed holds nothing, without waiting for Python's collector: on a GPU, nothing
would make the collector run before memory is short."""

import gc
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import numpy as np
import pytest

from lockstep.backends import Engine, LoadedBackend, World
from lockstep.recipes import Recipe
from tests.backends.cases import BASIC
from tests.backends.conftest import starter

RECIPE = Recipe(
    model=BASIC, logits=10, global_batch_images=4, epochs=1, image_size=32, precision="fp32"
)


@pytest.fixture
def without_collector() -> Iterator[None]:
    """Free only what nothing refers to, as long as a test runs."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def refer_to_parts(engine: Engine) -> dict[str, weakref.ref[object]]:
    """Return weak references to an engine and to what it made, by their names."""
    parts = {"engine": weakref.ref(engine)}
    for name, part in vars(engine).items():
        own = type(part).__module__.startswith("lockstep.backends") and name != "_world"
        if own or name == "model":
            with suppress(TypeError):  # a type without weak references
                parts[name] = weakref.ref(part)
    return parts


@pytest.mark.usefixtures("without_collector")
def test_a_closed_engine_is_free_at_once(backend: LoadedBackend, world: World) -> None:
    with ExitStack() as stack:
        engine = starter(backend, world, stack)(RECIPE)
        engine.predict(np.zeros((2, 32, 32, 3), np.uint8))
        parts = refer_to_parts(engine)
        del engine

    assert [name for name, part in parts.items() if part() is not None] == []
