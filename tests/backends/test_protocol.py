"""Finding a backend. Nothing is loaded before a backend is requested."""

import importlib
import importlib.util
import inspect
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep import backends
from lockstep.backends import FRAMEWORKS, Backend, Framework
from lockstep.recipes import Execution, Recipe
from lockstep.system.errors import BackendError
from tests.backends.conftest import BACKENDS, DEFAULT

FOREIGN = ("torch", "tensorflow", "paddle", "mxnet", "jax")
"""Frameworks that the core never imports."""

REPORT = f"""
loaded = [name for name in {FOREIGN} if name in sys.modules]
assert not loaded, loaded
"""

IMPORT_THE_CORE = (
    f"""
import importlib, importlib.util, sys
from pathlib import Path
import lockstep
serves = all(map(importlib.util.find_spec, ("fastapi", "uvicorn", "prometheus_client", "python_multipart")))
root = Path(lockstep.__file__).parent
for file in root.rglob("*.py"):
    parts = file.relative_to(root.parent).with_suffix("").parts
    if parts[1:3] in {{("inference", "serving"), ("inference", "decoding")}} and not serves:
        continue  # without the packages of the extra
    if parts[-1] != "__main__" and parts[1:3] not in {[("backends", name) for name in FRAMEWORKS]}:
        importlib.import_module(".".join(part for part in parts if part != "__init__"))
assert "lockstep.runs.train" in sys.modules and "lockstep.backends.shared.host_memory" in sys.modules
"""
    + REPORT
)


def test_every_framework_is_tested_unless_others_are_named() -> None:
    # MXNet is tested in a separate environment, where LOCKSTEP_BACKENDS names it (Makefile).
    assert {*DEFAULT.split(","), "mxnet"} == set(FRAMEWORKS)


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_every_framework_has_a_module(name: str) -> None:
    assert importlib.util.find_spec(f"lockstep.backends.{name}") is not None


@pytest.mark.parametrize("name", ["no_such_engine", "torch"])
def test_a_named_engine_that_cannot_be_imported_fails(
    name: str, pytestconfig: pytest.Config, tmp_path: Path
) -> None:
    # A module with the framework's name that cannot be loaded is found before the real one.
    (tmp_path / "torch.py").write_text("raise ImportError('broken')")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-k",
        "functions_of_the_protocol",
        __file__,
    ]
    environment = os.environ | {"LOCKSTEP_BACKENDS": name, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        command,
        cwd=pytestconfig.rootpath,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert "1 error" in done.stdout


def test_a_backend_has_the_functions_of_the_protocol(backend: Backend) -> None:
    for name, function in inspect.getmembers(Backend, inspect.isfunction):
        if not name.startswith("_"):
            expected = [
                parameter
                for parameter in inspect.signature(function).parameters
                if parameter != "self"
            ]
            assert list(inspect.signature(getattr(backend, name)).parameters) == expected


@pytest.mark.parametrize("name", BACKENDS)
def test_a_backend_is_found_by_its_name(name: str) -> None:
    assert backends.load(name) is importlib.import_module(f"lockstep.backends.{name}")


@pytest.mark.parametrize(("given", "taken"), [(None, "2000"), ("7", "7")])
def test_threads_of_a_framework_give_way_unless_told_otherwise(
    given: str | None, taken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    if given is not None:
        monkeypatch.setenv("GOMP_SPINCOUNT", given)
    backends.load("reference")
    assert os.environ["GOMP_SPINCOUNT"] == taken


LAYOUTS_ON_A_CPU = {"torch": ["nhwc", "nchw"], "reference": ["nhwc"], "tensorflow": ["nhwc"]}
LAYOUTS_ON_A_CPU |= {"paddle": ["nchw"], "mxnet": ["nchw"]}


def test_a_cuda_graph_is_refused_on_a_cpu(backend: Backend, tiny_recipe: Recipe) -> None:
    execution = Execution(device="cpu", cuda_graph="on")
    with pytest.raises(BackendError, match=r"cuda_graph is on, but .*; leave out cuda_graph"):
        backend.engine(tiny_recipe, np.zeros(1), backend.world(execution), execution)


def test_a_layout_that_an_engine_does_not_have_is_refused(backend: Any) -> None:
    found = []
    for layout in ("nhwc", "nchw"):
        try:
            backend.world(Execution(device="cpu", layout=layout)).close()
            found.append(layout)
        except BackendError as error:
            assert f"layout is {layout}, but this engine computes in" in str(error)  # noqa: PT017 - some have both
    assert found == LAYOUTS_ON_A_CPU[backend.__name__.rpartition(".")[2]]


def test_fused_kernels_are_refused_by_engines_that_have_none(backend: Any) -> None:
    found = ""
    try:
        backend.world(Execution(device="cpu", fused="on")).close()
    except BackendError as error:
        found = str(error)
    has_kernels = backend.__name__.endswith(".torch")
    assert found == (
        ""
        if has_kernels
        else "fused is on, but this engine has no fused kernels; use --backend torch"
    )


def test_recomputation_that_an_engine_does_not_have_is_refused(backend: Any) -> None:
    name = backend.__name__.rpartition(".")[2]
    execution = Execution(device="cpu", recompute="blocks")
    if name in ("tensorflow", "torch"):
        backend.world(execution).close()
        return
    with pytest.raises(
        BackendError, match=r"keeps all activations.* --backend tensorflow or torch"
    ):
        backend.world(execution)


@pytest.mark.parametrize(
    ("name", "hint"),
    [("tortch", "Did you mean torch"), ("caffe", f"Known: {', '.join(FRAMEWORKS)}"), ("", "Known")],
)
def test_an_unknown_backend_is_refused_with_what_there_is(name: str, hint: str) -> None:
    with pytest.raises(BackendError, match=hint):
        backends.load(name)


def test_a_missing_framework_is_refused_with_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    missing = Framework(("no-such-distribution", "nor-this-one"), "pip install it")
    monkeypatch.setitem(FRAMEWORKS, "other", missing)
    with pytest.raises(BackendError, match="'other' needs no-such-distribution: pip install it"):
        backends.load("other")


@pytest.mark.parametrize(
    ("distributions", "found"),
    [
        (("numpy",), True),
        (("no-such-distribution", "numpy"), True),
        (("no-such-distribution",), False),
        ((), False),
    ],
)
def test_one_distribution_of_several_is_enough(distributions: tuple[str, ...], found: bool) -> None:
    assert (Framework(distributions, "").version() is not None) == found


@pytest.mark.parametrize(
    "code",
    [
        "import sys, lockstep" + REPORT,
        "import sys, lockstep.runs.train" + REPORT,
        "import sys; from lockstep.backends import FRAMEWORKS; FRAMEWORKS['torch'].version()"
        + REPORT,
        IMPORT_THE_CORE,
    ],
    ids=["lockstep", "training", "version", "every module of the core"],
)
def test_no_framework_is_loaded_before_it_is_used(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
