"""The Python that runs a backend."""

import sys
from pathlib import Path

import pytest

from lockstep.backends import FRAMEWORKS, Framework, find_interpreter
from lockstep.system.errors import BackendError

MISSING = Framework(("no-such-distribution",), "pip install it")


@pytest.fixture(autouse=True)
def unset_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCKSTEP_TORCH_PYTHON", raising=False)


def test_this_python_runs_what_is_installed_here() -> None:
    assert find_interpreter("reference") == Path(sys.executable)


def test_a_variable_names_another_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named = tmp_path / "python"
    named.touch(mode=0o700)
    monkeypatch.setenv("LOCKSTEP_TORCH_PYTHON", str(named))
    assert find_interpreter("torch") == named


@pytest.mark.parametrize("kind", ["missing", "a folder", "no program"])
def test_a_variable_that_names_nothing_to_run_is_refused(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = tmp_path if kind == "a folder" else tmp_path / "python"
    if kind == "no program":
        named.touch(mode=0o600)
    monkeypatch.setenv("LOCKSTEP_TORCH_PYTHON", str(named))
    message = r"LOCKSTEP_TORCH_PYTHON is .*expected a Python that has lockstep and torch"
    with pytest.raises(BackendError, match=message):
        find_interpreter("torch")


def test_an_environment_next_to_it_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FRAMEWORKS, "torch", MISSING)
    monkeypatch.setattr(sys, "prefix", str(tmp_path / ".venv"))
    assert find_interpreter("torch") is None
    python = tmp_path / ".venv-torch" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    assert find_interpreter("torch") == python
