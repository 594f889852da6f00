"""A temperature stays with its checkpoint, and goes where weights go."""

import json
import shutil
from pathlib import Path

import pytest

from lockstep.models.state import State
from lockstep.recipes import Recipe
from lockstep.system.errors import CheckpointError
from lockstep.weights import checkpoint, open_weights
from lockstep.weights.calibration import (
    FILE,
    UNCALIBRATED,
    Calibration,
    Threshold,
    write_calibration,
)
from lockstep.weights.conversion import convert
from lockstep.weights.pruning import prune
from lockstep.weights.weights_choice import WeightsChoice
from tests.inference.cases import CLASSES, FIT, random_tensors


@pytest.fixture
def saved(tiny_recipe: Recipe, tmp_path: Path) -> Path:
    """A checkpoint with a moving average; the trained weights have a temperature."""
    recipe = tiny_recipe.replace(ema_decay=0.9)
    state = State(3, random_tensors(recipe, 1), {}, random_tensors(recipe, 2))
    about = {"recipe": recipe.fields(), "classes": CLASSES}
    path = checkpoint.save(tmp_path / "checkpoints", state, data_digest="", about=about)
    write_calibration(path / "model.safetensors", FIT)
    return path


def test_the_trained_weights_and_their_average_have_an_entry_each(saved: Path) -> None:
    assert open_weights(saved).calibration == Calibration(3.0)
    assert open_weights(saved, ema=True).calibration == UNCALIBRATED
    write_calibration(saved / "ema.safetensors", FIT | {"temperature": 0.5})
    assert open_weights(saved).calibration == Calibration(3.0)
    assert open_weights(saved, ema=True).calibration == Calibration(0.5)


def test_a_threshold_stays_until_the_temperature_changes(saved: Path) -> None:
    file = saved / "model.safetensors"
    threshold: Threshold = {
        **{"wanted_percent": 95.0, "unknown_below": 0.75, "precision_percent": 96.0},
        **{"precision_interval_percent": [90.0, 99.0], "answered": 60, "answered_percent": 60.0},
    }
    write_calibration(file, FIT, threshold)
    write_calibration(file, FIT)
    assert open_weights(saved).calibration == Calibration(3.0, 0.75)
    write_calibration(file, FIT | {"temperature": 0.5})
    assert open_weights(saved).calibration == Calibration(0.5)
    write_calibration(file, None, threshold)
    assert open_weights(saved).calibration == Calibration(0.5, 0.75)


def test_a_copied_checkpoint_keeps_its_temperature(saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved, tmp_path / "step-00000003")
    assert open_weights(tmp_path / "step-00000003").calibration == Calibration(3.0)


def test_other_weights_have_no_temperature(
    saved: Path, tiny_recipe: Recipe, tmp_path: Path
) -> None:
    about = {"recipe": tiny_recipe.fields(), "classes": CLASSES}
    state = State(4, random_tensors(tiny_recipe, 3), {})
    other = checkpoint.save(tmp_path / "others", state, data_digest="", about=about)
    shutil.copy(saved / FILE, other)
    weights = open_weights(other)
    assert weights.calibration == UNCALIBRATED
    assert [remark for remark in weights.remarks if "is of other weights" in remark]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "calibration.json cannot be read"),
        ("[]", "expected an object"),
        ("temperature", "expected a temperature above 0"),
    ],
)
def test_a_damaged_file_is_named(content: str, message: str, saved: Path) -> None:
    if content == "temperature":
        entries = json.loads((saved / FILE).read_text())
        entries["model.safetensors"]["temperature"] = 0
        content = json.dumps(entries)
    (saved / FILE).write_text(content)
    with pytest.raises(CheckpointError, match=message):
        open_weights(saved)


def test_converted_metadata_holds_the_temperature(saved: Path, tmp_path: Path) -> None:
    convert(WeightsChoice(str(saved)), tmp_path / "weights.safetensors", certificate=False)
    assert open_weights(tmp_path / "weights.safetensors").calibration == Calibration(3.0)
    result = convert(
        WeightsChoice(str(saved)), tmp_path / "weights.pth", to="torchvision", certificate=False
    )
    assert [remark for remark in result["remarks"] if "holds no temperature" in remark]


def test_pruned_weights_have_no_temperature(saved: Path, tmp_path: Path) -> None:
    prune(saved, tmp_path / "pruned.safetensors")
    assert open_weights(tmp_path / "pruned.safetensors").calibration == UNCALIBRATED
