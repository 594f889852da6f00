"""Finding a backend. Nothing is loaded before a backend is requested."""

import importlib.util
import inspect
import os
from dataclasses import fields

import numpy as np
import pytest

from lockstep import backends
from lockstep.backends import FRAMEWORKS, Backend, Framework, LoadedBackend, Options
from lockstep.launch.nodes import one_machine
from lockstep.recipes import Execution, Recipe
from lockstep.system.errors import BackendError
from tests.backends.conftest import BACKENDS, Start, parametrize_backends
from tests.backends.drawing import draw_images


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_every_framework_has_a_module(name: str) -> None:
    assert importlib.util.find_spec(f"lockstep.backends.{name}") is not None


def test_a_backend_has_the_functions_of_the_protocol(backend: LoadedBackend) -> None:
    assert backend.name in BACKENDS
    for name, function in inspect.getmembers(Backend, inspect.isfunction):
        if not name.startswith("_"):
            signature = inspect.signature(function)
            expected = [parameter for parameter in signature.parameters if parameter != "self"]
            assert list(inspect.signature(getattr(backend, name)).parameters) == expected


def test_threads_of_a_framework_give_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    backends.load("reference")
    assert os.environ["GOMP_SPINCOUNT"] == "2000"


def test_a_user_may_choose_how_threads_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    backends.load("reference")
    assert os.environ["GOMP_SPINCOUNT"] == "7"


VALUES = {
    "distributed": ("horovod",),
    "layout": ("nhwc", "nchw"),
    "fused": ("on",),
    "cuda_graph": ("on",),
    "recompute": ("blocks",),
    "all_reduce_precision": ("bf16", "fp16"),
    "quantisation": ("int8",),
}
"""Values of options that not every backend supports."""


def test_the_values_of_all_options_are_tested() -> None:
    assert VALUES.keys() == {option.name for option in fields(Options)}


def _list_refused() -> list[tuple[str, str, str]]:
    refused = []
    for name in BACKENDS:
        for option, values in VALUES.items():
            supported = getattr(FRAMEWORKS[name].on_cpu, option) if name in FRAMEWORKS else ()
            refused += [(name, option, value) for value in values if value not in supported]
    return refused


@pytest.mark.parametrize(("backend", "option", "value"), _list_refused(), indirect=["backend"])
def test_an_option_that_a_backend_does_not_support_is_refused_with_those_that_do(
    backend: LoadedBackend, tiny_recipe: Recipe, option: str, value: str
) -> None:
    able = [name for name, row in FRAMEWORKS.items() if value in getattr(row.on_cpu, option)]
    execution = Execution(device="cpu")
    recipe = tiny_recipe
    if option == "quantisation":
        recipe = tiny_recipe.replace(quantisation=value)
    else:
        execution = execution.replace(**{option: value})
    message = f"{option} is {value}, but the {backend.name} backend supports only"
    if able:
        message += f".*, or --backend {' or '.join(able)}"
    with pytest.raises(BackendError, match=message):
        backend.engine(recipe, np.zeros(1), backend.world(execution), execution)


@parametrize_backends(lambda row: "auto" in row.on_cpu.layout and len(row.on_cpu.layout) > 2)
def test_a_backend_with_several_layouts_computes_in_each(
    backend: LoadedBackend, start: Start, tiny_recipe: Recipe
) -> None:
    for layout in FRAMEWORKS[backend.name].on_cpu.layout:
        assert start(tiny_recipe, layout=layout).predict(draw_images(1)).shape == (1, 10)


@parametrize_backends(lambda row: row.on_gpu is None)
def test_a_backend_without_gpus_refuses_one(backend: LoadedBackend) -> None:
    with pytest.raises(BackendError, match=r"device is cuda, but .*--set device=auto.*--backend"):
        backend.world(Execution(device="cuda"))


@parametrize_backends(lambda row: row.addresses is None)
def test_one_process_refuses_ranks(backend: LoadedBackend, alone: pytest.MonkeyPatch) -> None:
    with pytest.raises(BackendError, match="trains in one process"):
        backend.prepare_ranks(one_machine(2), "native")
    alone.setenv("WORLD_SIZE", "2")
    with pytest.raises(BackendError, match="trains in one process"):
        backend.world(Execution())


@pytest.mark.parametrize(
    ("name", "hint"),
    [("tortch", "Did you mean torch"), ("caffe", f"Known: {', '.join(FRAMEWORKS)}"), ("", "Known")],
)
def test_an_unknown_backend_is_refused_with_what_there_is(name: str, hint: str) -> None:
    with pytest.raises(BackendError, match=hint):
        backends.load(name)


def test_a_missing_framework_is_named_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = Framework(("no-such-distribution", "nor-this-one"), "pip install it")
    monkeypatch.setitem(FRAMEWORKS, "other", missing)
    with pytest.raises(BackendError, match="'other' needs no-such-distribution: pip install it"):
        backends.load("other")


@pytest.mark.parametrize(
    ("distributions", "is_installed"),
    [
        (("numpy",), True),
        (("no-such-distribution", "numpy"), True),
        (("no-such-distribution",), False),
        ((), False),
    ],
)
def test_one_distribution_is_enough(distributions: tuple[str, ...], is_installed: bool) -> None:
    assert (Framework(distributions, "").version() is not None) == is_installed
