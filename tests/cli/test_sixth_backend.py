"""A backend is a folder and a row of `FRAMEWORKS`: a copy of the reference works with every
command and passes the conformance suite."""

import ast
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import lockstep
from lockstep.backends import FRAMEWORKS
from tests.soak import SOAK, in_a_soak

SOURCE = Path(lockstep.__file__).parent
TESTS = Path(__file__).parent.parent
MAY_NAME_THEM = {
    "backends/frameworks.py",
    "system/defaults.py",
    "runs/loggers/tensorboard.py",
    "benchmark/iteration_times.py",
    "proof/runtimes.py",
}
"""The table; the default; tensorboardX, which imports PyTorch; how NVIDIA's examples define a mean;
what `check.py` imports where a model is deployed."""
NAME_THEM_BY_NATURE = (("weights", "formats"), ("recipes", "nvidia"))
"""Files of other programs hold their names, such as PyTorch's types; NVIDIA's examples are named
after them."""


def test_no_frameworks_name_stands_outside_its_folder() -> None:
    names = "|".join(name for name in FRAMEWORKS if name != "reference")
    places = {}
    for path in SOURCE.rglob("*.py"):
        place = path.relative_to(SOURCE)
        code = re.sub(
            r"^ *(>>>|\.\.\.) .*$", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE
        )
        own = {*NAME_THEM_BY_NATURE, *(("backends", name) for name in FRAMEWORKS)}
        if str(place) not in MAY_NAME_THEM and place.parts[:2] not in own:
            places[str(place)] = re.findall(rf"""["']({names})["']""", code)
    assert {place: names for place, names in places.items() if names} == {}


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package and its tests with a sixth backend, `sixth`: a copy of the reference, with a copy
    of its row and of what its tests need."""
    root = tmp_path_factory.mktemp("tree")
    no_caches = shutil.ignore_patterns("__pycache__")
    shutil.copytree(SOURCE, root / "lockstep", ignore=no_caches)
    shutil.copytree(TESTS, root / "tests", ignore=no_caches)
    shutil.copy(TESTS.parent / "pyproject.toml", root)
    folder = root / "lockstep" / "backends"
    shutil.copytree(folder / "reference", folder / "sixth")
    for path in (folder / "sixth").glob("*.py"):
        path.write_text(
            path.read_text().replace("lockstep.backends.reference", "lockstep.backends.sixth")
        )
    natives = root / "tests" / "backends" / "native"
    shutil.copy(natives / "reference.py", natives / "sixth.py")
    table = folder / "frameworks.py"
    table.write_text(copy_row(table.read_text(), "reference", "sixth"))
    return root


def copy_row(text: str, name: str, copy: str) -> str:
    """Return the source of `FRAMEWORKS` with a copy of a row."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Dict):
            for key, row in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant) and key.value == name:
                    source = f'"{name}": {ast.get_source_segment(text, row)},\n'
                    return text.replace(source, source + source.replace(name, copy, 1))
    raise AssertionError(f"there is no row {name}")


COMMANDS = """
import contextlib, io, json, sys
from lockstep import cli
outputs = []
for arguments in json.load(sys.stdin):
    sys.argv, output = ["lockstep", *arguments], io.StringIO()
    with contextlib.redirect_stdout(output):
        try:
            cli.run()
        except SystemExit as end:
            assert end.code == 0, (arguments, end.code)
    outputs.append(output.getvalue())
print(json.dumps(outputs))
"""


def run(tree: Path, *commands: tuple[object, ...]) -> list[str]:
    """Return the outputs of commands of this tree, carried out one after another in a process."""
    environment = os.environ | {"PYTHONPATH": str(tree)}
    lines = json.dumps([[str(argument) for argument in command] for command in commands])
    done = subprocess.run(
        [sys.executable, "-P", "-c", COMMANDS],
        input=lines,
        capture_output=True,
        text=True,
        env=environment,
        cwd=tree,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@in_a_soak  # the conformance suite below runs all that the commands call
def test_a_copied_backend_runs_all_commands(tree: Path, recipe_file: Path, textures: Path) -> None:
    with_it = ("--backend", "sixth")
    quick = ("--set", "epochs=1", "--set", "reference_dtype=float32")
    trained = tree / "run"
    report = tree / "report.json"
    small = shlex.split("--set image_size=32 -b 2 -i 2 -e 1 -w 1 --dtype fp32 --model resnet18")
    doctor, _, evaluated, verified, *_ = run(
        tree,
        ("doctor",),
        ("train", "--recipe", recipe_file, "--data", textures, "--out", trained, *with_it, *quick),
        ("evaluate", trained, "--data", textures, "--json", *with_it),
        ("verify", "--backends", "sixth", "--steps", 3),
        ("benchmark", "train", *with_it, *small, "-o", report),
        ("benchmark", "convert", report, "--form", "dlll", "-o", tree / "measured.txt"),
        ("benchmark", "convert", trained, "--form", "dlll", "-o", tree / "trained.txt"),
        ("report", trained, "-o", tree / "page.html"),
    )
    assert re.search(r"^sixth +\S+: CPU", doctor, re.MULTILINE)
    assert json.loads(evaluated)["images"] == 20
    assert "sixth" in verified
    assert json.loads(report.read_text())["cells"][0]["backend"] == "sixth"
    for name in ("measured.txt", "trained.txt"):
        lines = (tree / name).read_text().splitlines()
        assert all(line.startswith("DLLL {") for line in lines)
        assert lines
    assert "sixth" in (tree / "page.html").read_text()


SAMPLE = ("engine", "inputs", "modules", "protocol", "quantisation", "worlds")
"""Files of the suite that use all functions of a backend. A soak runs the others, too."""


def test_a_copied_backend_passes_the_conformance_suite(tree: Path) -> None:
    chosen = ["tests/backends"]
    if not SOAK:
        chosen = ["-k", "sixth", "-m", "not slow", *(f"tests/backends/test_{x}.py" for x in SAMPLE)]
    environment = os.environ | {"PYTHONPATH": str(tree), "LOCKSTEP_BACKENDS": "sixth"}
    environment.pop("LOCKSTEP_SOAK", None)
    pytest_command = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*pytest_command, *chosen],
        capture_output=True,
        text=True,
        env=environment,
        cwd=tree,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) > (200 if SOAK else 100)
