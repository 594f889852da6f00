"""The rooms (subpackages) of the package: their number, their order in floors, and that imports
have no cycles.

Test modules import no test modules: what several of them need is in `cases.py` and similar modules.
"""

import ast
import re
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import lockstep

SOURCE = Path(lockstep.__file__).parent
ARCHITECTURE = Path(__file__).parent.parent / "docs" / "architecture.md"
FLOORS = (
    ("system",),
    ("launch",),
    ("models",),
    ("recipes",),
    ("data",),
    ("backends",),
    ("weights",),
    ("runs",),
    ("inference",),
    ("verification", "benchmark", "reporting"),
    ("cli",),
)
"""The lowest floor comes first. A room imports only from rooms on lower floors."""
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
NO_ROOMS = {"__init__.py", "__main__.py", "py.typed", "__pycache__"}
"""Files that Python and type checkers need."""


def name_of(path: Path) -> str:
    parts = ("lockstep", *path.relative_to(SOURCE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in SOURCE.rglob("*.py")}


def imported(tree: ast.Module) -> set[str]:
    """Return the modules of the package that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            whole = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in MODULES else node.module for name in whole}
    return {name for name in found if name in MODULES and name != "lockstep"}


@cache
def imports() -> dict[str, set[str]]:
    return {
        name: imported(ast.parse(path.read_text(encoding="utf-8")))
        for name, path in MODULES.items()
    }


def room(module: str) -> str:
    return module.split(".")[1]


def test_there_are_at_most_thirteen_rooms() -> None:
    entries = {path.name for path in SOURCE.iterdir()} - NO_ROOMS
    assert entries == set(FLOOR)
    assert len(entries) <= 13


def test_every_room_is_described() -> None:
    described = re.findall(
        r"^\| `(\w+)/` \| \S", ARCHITECTURE.read_text(encoding="utf-8"), re.MULTILINE
    )
    assert set(described) == set(FLOOR)


def test_imports_point_down() -> None:
    upward = [
        f"{name} imports {other}"
        for name, others in imports().items()
        for other in others
        if name not in ("lockstep", "lockstep.__main__")
        and room(name) != room(other)
        and FLOOR[room(other)] >= FLOOR[room(name)]
    ]
    assert upward == []


def test_no_imports_go_in_circles() -> None:
    try:
        TopologicalSorter(imports()).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_a_file_about_runs_imports_at_most_15_modules() -> None:
    counts = {
        name: len(others) for name, others in imports().items() if name.startswith("lockstep.runs.")
    }
    assert counts["lockstep.runs.train"] > 1
    assert {name: count for name, count in counts.items() if count > 15} == {}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("from lockstep.runs import folder", {"lockstep.runs.folder"}),
        ("from lockstep.recipes import Recipe", {"lockstep.recipes"}),
        ("def later():\n    import lockstep.cli.train", {"lockstep.cli.train"}),
        ("import os\nfrom lockstep import train", set()),
    ],
)
def test_an_import_is_seen_wherever_it_stands(text: str, expected: set[str]) -> None:
    assert imported(ast.parse(text)) == expected


TESTS = Path(__file__).parent
RUNS_OTHER_TESTS = {"backends/test_faults.py", "backends/test_handover_faults.py"}
"""Test modules that run tests of other modules, on wrong engines."""


def imported_tests(text: str) -> set[str]:
    """Return the names of the test modules that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = getattr(node, "module", None) or ""
            names = [part for alias in node.names for part in alias.name.split(".")]
            is_of_tests = (
                f"{module}.".startswith("tests.") or "tests" in names or getattr(node, "level", 0)
            )
            found |= {
                name
                for name in (*module.split("."), *names)
                if is_of_tests and name.startswith("test_")
            }
    return found


def test_no_test_module_is_imported() -> None:
    files = {
        str(path.relative_to(TESTS)): imported_tests(path.read_text(encoding="utf-8"))
        for path in TESTS.rglob("*.py")
    }
    assert {
        name: found for name, found in files.items() if found and name not in RUNS_OTHER_TESTS
    } == {}
    assert all(files[name] for name in RUNS_OTHER_TESTS)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("from tests.backends.test_steps import STEPS", {"test_steps"}),
        ("from tests.backends import cases, test_steps", {"test_steps"}),
        ("def later():\n    import tests.backends.test_steps as steps", {"test_steps"}),
        ("from .test_steps import STEPS", {"test_steps"}),
        ("from tests.backends.steps import test_of", {"test_of"}),
        ("from numpy.testing import test_suite\nimport tests.processes", set()),
    ],
)
def test_an_imported_test_is_seen_however_it_is_imported(text: str, expected: set[str]) -> None:
    assert imported_tests(text) == expected


MOST_LINES = {"file": 500, "function": 60}


def test_no_file_is_long() -> None:
    root = ARCHITECTURE.parent.parent
    paths = [
        path for folder in ("src", "tests", "benchmarks") for path in (root / folder).rglob("*.py")
    ]
    lines = {
        str(path.relative_to(root)): path.read_text(encoding="utf-8").count("\n") for path in paths
    }
    assert {name: count for name, count in lines.items() if count > MOST_LINES["file"]} == {}


def test_no_function_is_long() -> None:
    """Without signature and docstring: those of a command list all of its options."""
    found = {}
    for name, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef):
                body = node.body[1:] if ast.get_docstring(node) is not None else node.body
                length = (node.end_lineno or 0) - body[0].lineno + 1 if body else 0
                if length > MOST_LINES["function"]:
                    found[f"{name}.{node.name}"] = length
    assert found == {}
