"""The rooms (subpackages) of the package: their number, their order in floors, and that imports
have no cycles.

Test modules import no test modules: what several of them need is in `cases.py` and similar modules.
"""

import ast
import re
from functools import cache
from graphlib import CycleError, TopologicalSorter
from itertools import chain
from pathlib import Path

import pytest

import lockstep

ROOT = Path(__file__).parent.parent
SOURCE = Path(lockstep.__file__).parent
ARCHITECTURE = ROOT / "docs/explanation/architecture.md"
FLOORS = (
    ("system",),
    ("launch",),
    ("models",),
    ("recipes",),
    ("data",),
    ("backends",),
    ("proof",),
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
Nodes = list[ast.AST]
"""All nodes of a file's syntax tree."""


def parse(text: str) -> Nodes:
    return list(ast.walk(ast.parse(text)))


@cache
def parse_folder(folder: Path) -> dict[str, Nodes]:
    """Return the nodes of all files in a folder, by their paths."""
    nodes = {}
    for path in folder.rglob("*.py"):
        nodes[str(path.relative_to(folder))] = parse(path.read_text(encoding="utf-8"))
    return nodes


def imported(nodes: Nodes) -> set[str]:
    """Return the modules of the package that a file imports, anywhere in it."""
    names = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            whole = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= {name if name in MODULES else node.module for name in whole}
    return {name for name in names if name in MODULES and name != "lockstep"}


@cache
def imports() -> dict[str, set[str]]:
    files = parse_folder(SOURCE)
    return {name: imported(files[str(path.relative_to(SOURCE))]) for name, path in MODULES.items()}


def room(module: str) -> str:
    return module.split(".")[1]


def test_there_are_at_most_fourteen_rooms() -> None:
    entries = {path.name for path in SOURCE.iterdir()} - NO_ROOMS
    assert entries == set(FLOOR)
    assert len(entries) <= 14


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
    assert imported(parse(text)) == expected


TESTS = Path(__file__).parent
RUNS_OTHER_TESTS = {
    "backends/fault_finders.py",
    "backends/frozen_faults.py",
    "backends/optimizer_faults.py",
    "backends/test_faults.py",
    "backends/test_handover_faults.py",
}
"""Files that run tests of other modules, on wrong engines."""


def imported_tests(nodes: Nodes) -> set[str]:
    """Return the names of the test modules that a file imports, anywhere in it."""
    modules = set()
    for node in nodes:
        if not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        module = getattr(node, "module", None) or ""
        names = [part for alias in node.names for part in alias.name.split(".")]
        is_of_tests = f"{module}.".startswith("tests.") or "tests" in names
        if is_of_tests or getattr(node, "level", 0):
            parts = (*module.split("."), *names)
            modules |= {name for name in parts if name.startswith("test_")}
    return modules


def test_no_test_module_is_imported() -> None:
    files = {path: imported_tests(nodes) for path, nodes in parse_folder(TESTS).items()}
    assert {
        name: names for name, names in files.items() if names and name not in RUNS_OTHER_TESTS
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
    assert imported_tests(parse(text)) == expected


FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
MOST_LINES = {"file": 500, "function": 60}
MOST_PER_100_LINES = {"comprehensions": 2.1, "conditional expressions": 1.45, "tuples": 0.02}
"""How dense the source may be, on average: what it was when this was written. Code that reads well
has fewer of each; a sentence may still be one."""
MOST_PARTICIPLES = 0.01
"""The share of functions that may be named by a participle or a preposition."""
PARTICIPLE = re.compile(
    r"_*([a-z]+ed|told|said|found|taken|given|seen|kept|heard|meant|made|held|drawn|read_by"
    r"|(of|on|in|with|to|as|from|for|by)_.*)(_.*)?"
)
NAMELESS = {"found", "each", "told", "said", "given", "taken", "asked"}
"""Names that say nothing of what they name."""


OWN = (SOURCE, TESTS, ROOT / "benchmarks")


def count_lines(path: Path) -> int:
    return path.read_text(encoding="utf-8").count("\n")


def test_no_file_is_long() -> None:
    lines = {path: count_lines(path) for folder in OWN for path in folder.rglob("*.py")}
    assert {path: count for path, count in lines.items() if count > MOST_LINES["file"]} == {}


def test_no_function_is_long() -> None:
    """With signature and docstring. Commands of `cli/` list all of their options."""
    lengths = {}
    for path, nodes in parse_folder(SOURCE).items():
        for node in nodes:
            if isinstance(node, FUNCTIONS) and not path.startswith("cli/"):
                lengths[f"{path}: {node.name}"] = (node.end_lineno or 0) - node.lineno + 1
    assert {name: lines for name, lines in lengths.items() if lines > MOST_LINES["function"]} == {}


def test_code_is_not_dense() -> None:
    counts = dict.fromkeys(MOST_PER_100_LINES, 0)
    for node in chain.from_iterable(parse_folder(SOURCE).values()):
        if isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
            counts["comprehensions"] += 1
        elif isinstance(node, ast.IfExp):
            counts["conditional expressions"] += 1
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
            counts["tuples"] += isinstance(node.targets[0], ast.Tuple)
    hundreds = sum(map(count_lines, MODULES.values())) / 100
    rates = {name: round(count / hundreds, 2) for name, count in counts.items()}
    assert {name: rate for name, rate in rates.items() if rate > MOST_PER_100_LINES[name]} == {}


def test_functions_are_verbs() -> None:
    nodes = chain.from_iterable(parse_folder(SOURCE).values())
    names = [node.name for node in nodes if isinstance(node, FUNCTIONS)]
    participles = [name for name in names if PARTICIPLE.fullmatch(name)]
    assert len(participles) <= MOST_PARTICIPLES * len(names), participles


def test_values_are_nouns() -> None:
    nameless = []
    files = [item for folder in OWN for item in parse_folder(folder).items()]
    for path, nodes in files:
        for node in nodes:
            is_stored = isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
            name = node.id if is_stored else getattr(node, "arg", None)
            if name in NAMELESS:
                nameless.append(f"{path}:{node.lineno}: {name}")
    assert nameless == []


@pytest.mark.parametrize(
    ("name", "is_participle"),
    [
        ("_checked", True),
        ("found_names", True),
        ("of_run", True),
        ("in_usable_precision", True),
        ("check_names", False),
        ("is_finished", False),
        ("feed", False),
        ("format_loss", False),
        ("to_json", True),
    ],
)
def test_participles_and_prepositions_are_told_from_verbs(name: str, is_participle: bool) -> None:
    # "feed" looks like a participle, too: the share allows a few.
    assert bool(PARTICIPLE.fullmatch(name)) == (is_participle or name == "feed")
