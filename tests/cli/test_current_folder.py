"""Nothing is imported from the current folder of a command: modules there can have the names of
Python's own modules."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import lockstep
from lockstep.system.workers import carry_out

SOURCE = Path(lockstep.__file__).parent
NAMES = ("numbers", "random", "typing", "re", "enum", "json", "numpy", "torch", "typer")


@pytest.fixture
def full_of_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the current folder. It has modules that end every process that imports them."""
    for name in NAMES:
        (tmp_path / f"{name}.py").write_text(
            f"raise SystemExit('imported from the current folder: {name}')"
        )
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    return tmp_path


@pytest.mark.usefixtures("full_of_modules")
def test_a_command_imports_nothing_from_the_current_folder() -> None:
    here = subprocess.run(
        [sys.executable, "-c", "import numbers"], capture_output=True, text=True, check=False
    )
    assert "imported from the current folder" in here.stderr, (
        "without this the command below could not fail"
    )
    command = [sys.executable, "-m", "lockstep", "recipes", "show", "demo"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "epochs: " in done.stdout


def test_a_worker_imports_nothing_from_the_current_folder(full_of_modules: Path) -> None:
    code = (
        "import numbers, random, subprocess, sys\nsubprocess.run([sys.executable, '-c', 'import"
        " numbers'], check=True)"
    )
    ended = carry_out([sys.executable, "-P", "-c", code], full_of_modules, lambda done, total: None)
    assert (ended.code, ended.errors) == (0, "")


def test_every_python_that_is_started_is_told_to_leave_the_current_folder_out() -> None:
    places = [place for path in SOURCE.rglob("*.py") for place in starts(path)]
    assert len(places) >= 8
    assert [place for place, is_safe in places if not is_safe] == []


def starts(path: Path) -> list[tuple[str, bool]]:
    """Return the lines of a file where a command has -m or -c, and whether -P comes before it."""
    text = path.read_text(encoding="utf-8")
    if not any(option in text for option in ('"-m"', '"-c"')):
        return []
    commands = []
    for node in ast.walk(ast.parse(text)):
        words = (
            node.elts
            if isinstance(node, ast.List | ast.Tuple)
            else node.args
            if isinstance(node, ast.Call)
            else []
        )
        values = [word.value if isinstance(word, ast.Constant) else None for word in words]
        places = [values.index(option) for option in ("-m", "-c") if option in values]
        if values and values[0] in ("bash", "sh"):
            continue
        commands += [
            (f"{path.name}:{node.lineno}", place > 0 and values[place - 1] == "-P")
            for place in places
        ]  # type: ignore[attr-defined]
    return commands
