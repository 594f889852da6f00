"""A fine-tuning that is killed with SIGKILL in any of its parts is the same run, bit for bit."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lockstep.data.textures import draw_data_set
from lockstep.recipes import Recipe
from lockstep.recipes.initial_weights import initial_tensors
from lockstep.weights import checkpoint
from tests.runs.cases import find_same_parts, read_entries, read_losses
from tests.runs.killing import FITTING, FOLDS, WRITING, train

ROOT = Path(__file__).parents[2]
CHANGES = {"precision": "fp32", "epochs": 2, "seed": 5}
MOMENTS: dict[str, dict[str, Any]] = {
    "first checkpoint": {"kind": WRITING},
    "features": {"kind": "progress", "what": "computing features"},
    "probe": {"kind": FITTING},
    "evaluation of the probe": {"kind": "progress", "what": "evaluating trained weights"},
    "answer of the probe": {"kind": "linear_probe"},
    "training": {"kind": "train", "first_step": 3},
    "last evaluation": {"kind": "evaluate", "step": 6},
    "calibration": {"kind": "progress", "what": "calibrating ema"},
    "second fold": {"run": 2, "kind": "train", "first_step": 1},
}


@pytest.fixture(scope="module")
def killed(tiny_recipe: Recipe, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The arguments of every killed training, by its moment."""
    root = tmp_path_factory.mktemp("killed")
    recipe = tiny_recipe.replace(logits=4, precision="fp32")
    about = {"recipe": recipe.fields(), "classes": list("abcd")}
    checkpoint.write_weights(root / "weights.safetensors", initial_tensors(recipe), about)
    draw_data_set(root / "data", train_images=24, val_images=24, kinds=("dots", "grid", "rays"))
    cases = {}
    for number, name in enumerate(MOMENTS):
        place = root / str(number)
        shutil.copytree(root / "data", place / "data")
        cases[name] = {
            "out": str(place / "run"),
            "data": str(place / "data"),
            "weights": str(root / "weights.safetensors"),
            "changes": CHANGES,
            "folds": "fold" in name,
            "moment": MOMENTS[name],
        }
    command = [sys.executable, "-m", "tests.runs.killing", json.dumps(list(cases.values()))]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(["src", "."])}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, stdout=subprocess.DEVNULL)
    return cases


def finish(case: dict[str, Any], out: Path) -> None:
    places = {name: Path(case[name]) for name in ("data", "weights")}
    train(out, **places, changes=CHANGES, folds=case["folds"], listener=lambda event: None)


@pytest.fixture(scope="module")
def whole(killed: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """The same run and cross-validation without a kill, by whether it has folds."""
    root = tmp_path_factory.mktemp("whole")
    runs = {}
    for case in (killed["probe"], killed["second fold"]):
        folds = case["folds"]
        data = root / f"data-{folds}"
        shutil.copytree(Path(case["data"]), data, ignore=shutil.ignore_patterns(".lockstep*"))
        runs[folds] = root / f"run-{folds}"
        finish(case | {"data": data}, runs[folds])
    return runs


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_killed_fine_tuning_resumes_bit_for_bit(
    moment: str, killed: dict[str, Any], whole: dict[bool, Path]
) -> None:
    case = killed[moment]
    run = Path(case["out"])
    finish(case, run)
    other = whole[case["folds"]]
    parts = [Path(f"fold-{number}") for number in range(1, FOLDS + 1)]
    for part in parts if case["folds"] else [Path()]:
        assert find_same_parts(run / part, other / part) == ["tensors", "momentum", "ema"]
        assert read_losses(run / part) == read_losses(other / part)
        assert read_outcome(run / part) == read_outcome(other / part)


def read_outcome(run: Path) -> dict[str, Any]:
    """Return the evaluations, and the temperatures of all checkpoints."""
    figures = ("step", "weights", "loss", "top1_percent", "images")
    files = sorted(run.glob("checkpoints/*/calibration.json"))
    return {
        "evaluations": [[row[name] for name in figures] for row in read_entries(run, "evaluate")],
        "temperatures": {file.parent.name: file.read_text() for file in files},
    }
