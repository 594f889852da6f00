"""Planted label errors are found by a run that did not train on the images."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import lockstep
from lockstep.inference.label_errors import check_labels, draw_suspects
from lockstep.recipes import Recipe
from lockstep.recipes.initial_weights import initial_state
from lockstep.system.errors import CheckpointError, DataError
from lockstep.weights import checkpoint

COLOURS = {"red": (200, 40, 40), "green": (40, 180, 40), "blue": (40, 40, 200)}
PLANTED = {"val/green/red-6.png": "red", "val/red/blue-2.png": "blue"}
"""They are the most certain suspects. On other kernels there may be more of them."""
CHANGES = {"frozen": "backbone", "precision": "fp32"}
Run = Callable[..., tuple[int, str, str]]


def draw(path: Path, number: int, seed: int) -> None:
    """Write a noisy square of a colour. Three of four are partly of the next colour, so that the
    run is less sure of their classes than of the planted ones."""
    colour, other = (np.array(list(COLOURS.values())[i % 3]) for i in (number, number + 1))
    colour = colour + 0.4 * (seed % 4 > 0) * (other - colour)
    noise = np.random.default_rng(100 * number + seed).normal(0, 10, (32, 32, 3))
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray((colour + noise).clip(0, 255).astype(np.uint8)).save(path)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Squares of three colours; two validation images are in the folder of another colour."""
    root = tmp_path_factory.mktemp("colours")
    for number, name in enumerate(COLOURS):
        for seed in range(16):
            draw(root / "train" / name / f"{name}-{seed}.png", number, seed)
        for seed in range(7):
            draw(root / "val" / name / f"{name}-{seed}.png", number, 50 + seed)
    for place, name in PLANTED.items():
        file = Path(place).name
        (root / "val" / name / file).rename(root / place)
    return root


@pytest.fixture(scope="module")
def run(data: Path, tiny_recipe: Recipe, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A linear probe of random features: its only minimum is the same on all kernels, and it is
    the surer of a colour the purer that is."""
    root = tmp_path_factory.mktemp("colour-runs")
    weights = root / "random.safetensors"
    about = {"recipe": tiny_recipe.fields(), "classes": ["other"]}
    checkpoint.write_weights(weights, initial_state(tiny_recipe).tensors, about)
    lockstep.train(data=data, out=root / "runs" / "run", weights=weights, changes=CHANGES)
    return root / "runs" / "run"


def test_planted_errors_are_found_with_their_true_class(run: Path, data: Path) -> None:
    check = check_labels(data, [run])
    assert (check.judged, check.images) == (21, 69)
    assert {suspect.place: suspect.suggestion for suspect in check.suspects[:2]} == PLANTED
    sheet = draw_suspects(check, 2)
    assert sheet.size == (2 * 168 + 8, 168 + 3 * 16 + 8)


def test_a_folder_of_runs_stands_for_them(run: Path, data: Path) -> None:
    check = check_labels(data, [run.parent, run])
    assert {suspect.place: suspect.suggestion for suspect in check.suspects[:2]} == PLANTED


def test_errors_are_listed_and_drawn(run: Path, data: Path, tmp_path: Path, answer: Run) -> None:
    out = tmp_path / "doubtful.png"
    arguments = ("data", "check", data, "--labels", run, "--out", out)
    code, output, _ = answer(*arguments)
    assert code == 1
    assert "21 of 69 images were judged" in output
    assert "; doubtful: " in output
    assert "note: these runs have a top-1" not in output
    assert "val/green/red-6.png: green" in output
    assert out.read_bytes().startswith(b"\x89PNG")
    content = json.loads(answer(*arguments, "--json")[1])
    assert {row["image"]: row["suggestion"] for row in content["suspects"][:2]} == PLANTED


def test_wrong_runs_are_refused(run: Path, textures: Path, data: Path) -> None:
    with pytest.raises(DataError, match="was trained on images other"):
        check_labels(textures, [run])
    with pytest.raises(CheckpointError, match="is not a run and contains none"):
        check_labels(data, [data])
