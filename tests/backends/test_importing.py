"""Tests for every engine with a framework: what a process prints that imports it."""

import os
from functools import cache
from pathlib import Path

import pytest

from lockstep.backends import FRAMEWORKS, LoadedBackend
from tests.backends.conftest import for_frameworks
from tests.processes import python

pytestmark = [for_frameworks, pytest.mark.usefixtures("alone")]

LOAD = """
import os, sys
from lockstep import backends
print("before", file=sys.stderr)
backends.load({name!r}).devices()
print("after", file=sys.stderr)
os.write(2, b"below")
"""


def load(name: str, **environment: str) -> tuple[int, str, str]:
    """Load a backend in a separate process; return its exit code, output and errors."""
    levels = {"TF_CPP_MIN_LOG_LEVEL", "GLOG_minloglevel"}
    kept = {variable: value for variable, value in os.environ.items() if variable not in levels}
    return python(LOAD.format(name=name), env=kept | environment)


@cache
def load_once(name: str) -> tuple[int, str, str]:
    """Return what `load` does, with a warning as an error; once for several tests."""
    return load(name, PYTHONWARNINGS="error::FutureWarning,error::UserWarning")


@pytest.mark.slow
def test_a_framework_is_imported_without_a_word(backend: LoadedBackend) -> None:
    code, output, errors = load_once(backend.name)
    assert (code, output) == (0, "")
    assert errors.startswith("before\nafter\n")


@pytest.mark.slow
def test_after_the_import_errors_are_heard_again(backend: LoadedBackend) -> None:
    assert load_once(backend.name)[2].endswith("after\nbelow")


def test_a_framework_that_cannot_be_imported_tells_why(
    backend: LoadedBackend, tmp_path: Path
) -> None:
    # Output of its libraries, and output of Python.
    broken = (
        "import os\nos.write(2, b'libcudart.so: undefined symbol\\n')\nraise ImportError('it cannot"
        " be loaded')"
    )
    (tmp_path / f"{FRAMEWORKS[backend.name].module}.py").write_text(broken)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    code, output, errors = load(backend.name, PYTHONPATH=path)
    assert (code, output) == (1, "")
    assert errors.startswith("before\nlibcudart.so: undefined symbol\n")
    assert errors.endswith("ImportError: it cannot be loaded\n")
