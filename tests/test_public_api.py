"""What users can rely on: the names, the cost of an import, and the examples in the docstrings."""

import doctest
import importlib.metadata
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec

import lockstep
from lockstep.models.state import State
from lockstep.recipes import Recipe
from lockstep.recipes.initial_weights import initial_tensors
from lockstep.weights import checkpoint
from tests.weights.signers import write_key

SOURCE = Path(lockstep.__file__).parent
FRAMEWORKS = {"torch", "tensorflow", "paddle", "mxnet"}


def test_exactly_these_names_are_public() -> None:
    assert lockstep.__all__ == [
        "Augmentation",
        "Evaluation",
        "Event",
        "Execution",
        "Int8",
        "LockstepError",
        "Model",
        "Prediction",
        "Recipe",
        "Run",
        "UserError",
        "draw_data_set",
        "learning_rates",
        "load",
        "load_recipe",
        "pack",
        "read_run",
        "report",
        "sign",
        "train",
        "verify",
        "verify_signature",
    ]
    assert dir(lockstep) == lockstep.__all__


def test_the_version_is_that_of_the_package_or_of_a_source_tree(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert lockstep.__version__ == importlib.metadata.version("lockstep-vision")

    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    assert lockstep.__version__ == "0+source"


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'lockstep' has no attribute 'trian'"):
        lockstep.trian  # noqa: B018


def modules_after(code: str) -> set[str]:
    """Return the top-level modules that a new process has imported after some code."""
    code += (
        "\nimport json, sys; print('\\n' + json.dumps(sorted({name.split('.')[0] for name in"
        " sys.modules})))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_importing_lockstep_loads_no_framework_and_nothing_heavy() -> None:
    loaded = modules_after("import lockstep")
    assert "lockstep" in loaded
    assert not loaded & (FRAMEWORKS | {"numpy", "cv2", "pydantic", "PIL", "rich", "tensorboardX"})


def test_the_core_loads_no_framework() -> None:
    engines = {SOURCE / "backends" / name for name in FRAMEWORKS}
    paths = [
        path
        for path in SOURCE.rglob("*.py")
        if engines.isdisjoint(path.parents) and path.stem != "__main__"
    ]
    names = [
        ".".join(("lockstep", *path.relative_to(SOURCE).with_suffix("").parts)) for path in paths
    ]
    loaded = modules_after(f"import {', '.join(name.removesuffix('.__init__') for name in names)}")
    assert "numpy" in loaded
    assert not loaded & FRAMEWORKS


def test_writing_events_loads_no_framework(tmp_path: Path) -> None:
    loaded = modules_after(
        "import sys, pathlib, numpy\nfrom lockstep.runs.recorder import Recorder\nwith"
        f" Recorder(None) as recorder: recorder.open(pathlib.Path({str(tmp_path)!r}), 0,"
        " numpy.ones(3))\n"
    )
    assert "tensorboardX" in loaded
    assert not loaded & FRAMEWORKS


def test_help_loads_nothing_heavy() -> None:
    loaded = modules_after(
        "import sys; sys.argv = ['lockstep', '--help']\n"
        "from lockstep.cli import run\n"
        "try: run()\n"
        "except SystemExit as stop: assert stop.code == 0"
    )
    assert "typer" in loaded
    assert not loaded & (FRAMEWORKS | {"numpy", "cv2", "pydantic", "tensorboardX"})


def test_help_names_every_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "lockstep", "--help"], capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    names = (
        "demo train evaluate predict convert export serve verify report recipes data benchmark"
        " launch doctor"
    )
    for command in names.split():
        assert f"\n  {command} " in done.stdout


@pytest.fixture
def workplace(
    textures: Path, tiny_recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files that the examples use, in the current folder: `data` with images, a trained `run`,
    `tiny.yaml`, and a key."""
    (tmp_path / "data").symlink_to(textures)
    (tmp_path / "tiny.yaml").write_text(tiny_recipe.format_yaml())
    about = {
        "recipe": tiny_recipe.fields(),
        "classes": sorted(path.name for path in (textures / "val").glob("[!.]*")),
    }
    state = State(7, initial_tensors(tiny_recipe), {})
    checkpoint.save(tmp_path / "run" / "checkpoints", state, data_digest="", about=about)
    (tmp_path / "run" / "recipe.yaml").write_text(tiny_recipe.format_yaml())
    figures = {
        "loss": 2.0,
        "top1_percent": 10.0,
        "top5_percent": 50.0,
        "images": 20,
        "images_per_sec": 9.0,
    }
    entry = {"kind": "evaluate", "step": 7, "weights": "trained"} | figures
    (tmp_path / "run" / "log.jsonl").write_text(json.dumps(entry) + "\n")
    write_key(tmp_path / "key.pem", ec.generate_private_key(ec.SECP256R1()))
    monkeypatch.chdir(tmp_path)


def documented() -> list[str]:
    """Return the modules with examples in their docstrings."""
    files = sorted(path for path in SOURCE.rglob("*.py") if ">>> " in path.read_text())
    return [
        ".".join(("lockstep", *path.relative_to(SOURCE).with_suffix("").parts)) for path in files
    ]


def test_there_are_examples_to_run() -> None:
    assert {
        "lockstep.system.errors",
        "lockstep.inference.model",
        "lockstep.recipes.order",
        "lockstep.runs.train",
    } <= set(documented())


@pytest.mark.usefixtures("workplace")
@pytest.mark.parametrize("name", documented())
def test_examples_in_docstrings_do_what_they_say(name: str) -> None:
    result = doctest.testmod(importlib.import_module(name.removesuffix(".__init__")))
    assert result.attempted > 0
    assert result.failed == 0


PUBLIC: Any = lockstep  # wrong arguments are meant here


class Layer:
    """What a module of a framework looks like."""

    state_dict = parameters = None


@pytest.mark.parametrize(
    ("call", "advice"),
    [
        (lambda path: PUBLIC.load(Layer()), r"weights is a .*Layer; expected .*torch.save\("),
        (lambda path: PUBLIC.load({"best_checkpoint": "run"}), r'report\["best_checkpoint"\]'),
        (lambda path: PUBLIC.load(None), "weights is None; expected a path or a name"),
        (lambda path: PUBLIC.train("demo", [1, 2], path), r"data is a list; .*lockstep.pack\("),
        (lambda path: PUBLIC.train({"epochs": 3}, "data", path), r"recipe is a dict; .*changes="),
        (lambda path: PUBLIC.train("demo", path, 3), "out is an int; expected the path"),
        (lambda path: PUBLIC.train("demo", path, path, weights=Layer()), "torch.save"),
        (lambda path: PUBLIC.report(Layer()), "runs is a .*Layer; expected the folder of a run"),
    ],
)
def test_what_is_given_where_a_path_is_wanted_is_named_with_the_way(
    call: Callable[[Path], object], advice: str, tmp_path: Path
) -> None:
    with pytest.raises(lockstep.UserError, match=advice):
        call(tmp_path)
