"""Temperature scaling against closed forms, a grid of temperatures, and drawn labels. A temperature
stays with its checkpoint, and goes where weights go."""

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest

from lockstep.models.accuracy_interval import wilson
from lockstep.models.state import State
from lockstep.recipes import Recipe
from lockstep.system.errors import CheckpointError, DataError
from lockstep.weights import checkpoint, open_weights
from lockstep.weights.calibration import (
    FILE,
    UNCALIBRATED,
    Calibration,
    Threshold,
    bin_confidences,
    choose_threshold,
    compute_calibration_error,
    compute_probabilities,
    fit_temperature,
    write_calibration,
)
from lockstep.weights.conversion import convert
from lockstep.weights.pruning import prune
from lockstep.weights.weights_choice import WeightsChoice
from tests.inference.cases import CLASSES, FIT, random_tensors


def draw_overconfident(factor: float, images: int = 4000) -> tuple[np.ndarray, np.ndarray]:
    """Return logits that are `factor` times those that the labels were drawn from."""
    random = np.random.default_rng(3)
    logits = random.normal(0, 1.5, (images, 6))
    chances = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    labels = (chances.cumsum(axis=1) > random.random((images, 1))).argmax(axis=1)
    return factor * logits, labels


def test_with_two_logits_the_temperature_has_a_closed_form() -> None:
    """Of 100 images with the logits (0, 2), 75 have label 1: the loss is least where the
    probability is 3/4, which is where 2 / temperature = log 3."""
    logits = np.tile([0.0, 2.0], (100, 1))
    labels = (np.arange(100) < 75).astype(np.int64)
    fit, _ = fit_temperature(logits, labels)
    assert fit is not None
    assert fit["temperature"] == pytest.approx(2 / math.log(3), rel=1e-8)
    assert fit["loss_after"] == pytest.approx(-0.75 * math.log(0.75) - 0.25 * math.log(0.25))
    assert fit["error_percent_after"] == pytest.approx(0, abs=1e-6)
    assert fit["error_percent_before"] == pytest.approx(100 / (1 + math.exp(-2)) - 75)


@pytest.mark.parametrize("factor", [0.4, 1.0, 3.0])
def test_the_temperature_that_labels_were_drawn_with_is_found_again(factor: float) -> None:
    logits, labels = draw_overconfident(factor)
    fit, _ = fit_temperature(logits, labels)
    assert fit is not None
    assert fit["temperature"] == pytest.approx(factor, rel=0.06)
    assert fit == fit_temperature(logits, labels)[0]


def test_no_temperature_of_a_grid_has_a_smaller_loss() -> None:
    logits, labels = draw_overconfident(3.0, images=200)
    fit, _ = fit_temperature(logits.astype(np.float32), labels)
    assert fit is not None
    losses = []
    for temperature in np.geomspace(0.05, 20, 2001):
        probabilities = compute_probabilities(logits, temperature)
        losses.append(-np.log(probabilities[np.arange(200), labels]).mean())
    assert fit["loss_after"] <= min(losses) + 1e-7
    assert fit["loss_after"] < fit["loss_before"]


def test_the_calibration_error_of_overconfident_logits_falls() -> None:
    fit, _ = fit_temperature(*draw_overconfident(3.0))
    assert fit is not None
    assert fit["error_percent_before"] > 15
    assert fit["error_percent_after"] < 3


def test_the_calibration_error_is_the_weighted_distance_of_the_bins() -> None:
    confidences = np.array([0.95, 0.95, 0.95, 0.95, 0.5, 0.5, 1.0])
    hits = np.array([True, True, True, False, False, False, True])
    # The last of 15 bins begins at 14/15 and holds the first four and the 1.0.
    expected = (abs(4 * 0.95 + 1.0 - 4) + 2 * 0.5) / 7
    assert compute_calibration_error(bin_confidences(confidences, hits)) == pytest.approx(expected)


CONFIDENCES = np.array([0.1, 0.5, 0.5, 0.6, 0.9, 1.0], np.float32)
RIGHT = np.array([True, False, True, False, True, True])


def test_bins_hold_their_upper_borders() -> None:
    low, high = bin_confidences(CONFIDENCES, RIGHT, bins=2)
    assert (low.images, low.right, high.images, high.right) == (3, 2, 3, 2)
    assert low.confidence == pytest.approx(1.1 / 3)
    assert high.confidence == pytest.approx(2.5 / 3)


def test_the_calibration_error_is_the_one_computed_by_hand() -> None:
    # |2/3 - 1.1/3| and |2/3 - 2.5/3|, half of the images each
    error = compute_calibration_error(bin_confidences(CONFIDENCES, RIGHT, bins=2))
    assert error == pytest.approx((0.9 / 3 + 0.5 / 3) / 2)


def test_a_model_as_sure_as_it_is_right_has_no_calibration_error() -> None:
    confidences = np.full(100, 0.75, np.float32)
    bins = bin_confidences(confidences, np.arange(100) < 75)
    assert compute_calibration_error(bins) == pytest.approx(0)


def test_confidences_that_are_no_numbers_are_in_no_bin() -> None:
    bins = bin_confidences(np.array([np.nan, 0.3]), np.array([True, True]), bins=4)
    assert [group.images for group in bins] == [0, 1, 0, 0]
    assert compute_calibration_error(bin_confidences(np.array([np.nan]), np.array([True]))) is None


REASONS = {
    "all right": "all 200 validation images are right",
    "few": "19 validation images, fewer than 20",
    "logits say nothing": "the loss has no minimum from 0.05 to 20",
    "one near miss": "the loss has no minimum from 0.05 to 20",
    # 150 images of 0.62 are right in 60 %, 50 of 0.9975 in 94 %: (3.4 + 2.9) / 200 = 3.1 %
    "worse": "changes the calibration error on the 200 images from 3.1 to 3.2 %",
}


@pytest.mark.parametrize("case", REASONS)
def test_where_no_temperature_fits_there_is_none_for_a_reason(case: str) -> None:
    logits, labels = draw_overconfident(1.0, images=200)
    if case == "all right":
        labels = logits.argmax(axis=1)
    elif case == "few":
        logits, labels = logits[:19], labels[:19]
    elif case == "one near miss":
        labels = logits.argmax(axis=1)
        logits[0] = 0.0
        logits[0, labels[0] - 1] = 1e-3
    elif case == "worse":
        logits = np.zeros((200, 2))
        logits[:, 0] = np.where(np.arange(200) < 150, 0.5, 6.0)
        labels = np.zeros(200, np.int64)
        labels[:60] = labels[197:] = 1
    else:
        labels = logits.argmin(axis=1)
    fit, reason = fit_temperature(logits, labels)
    assert fit is None
    assert REASONS[case] in reason


@pytest.mark.parametrize("wanted", [0.5, 0.8, 0.9, 0.95, 1.0])
def test_the_threshold_with_the_precision_and_most_answers_is_chosen(wanted: float) -> None:
    random = np.random.default_rng(5)
    confidences = random.integers(20, 100, 300) / 100  # many are equal
    hits = random.random(300) < confidences**0.5
    hits[confidences > 0.97] = True
    threshold = choose_threshold(confidences, hits, wanted)
    answered = confidences >= threshold["unknown_below"]
    assert threshold["answered"] == answered.sum()
    assert threshold["precision_percent"] == pytest.approx(100 * hits[answered].mean())
    assert threshold["answered_percent"] == pytest.approx(answered.sum() / 3)
    assert hits[answered].mean() >= wanted
    for least in np.unique(confidences):
        if (confidences >= least).sum() > answered.sum():
            assert hits[confidences >= least].mean() < wanted
    interval = [100 * bound for bound in wilson(int(hits[answered].sum()), int(answered.sum()))]
    assert threshold["precision_interval_percent"] == pytest.approx(interval)


def test_a_precision_that_no_threshold_reaches_is_an_error() -> None:
    expected = r"reaches a precision of 99 %.*highest possible is 66\.66 %: ask for 0\.6666"
    with pytest.raises(DataError, match=expected):
        choose_threshold(np.array([0.9, 0.8, 0.7]), np.array([False, True, True]), 0.99)


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


def test_others_have_no_temperature(saved: Path, tiny_recipe: Recipe, tmp_path: Path) -> None:
    about = {"recipe": tiny_recipe.fields(), "classes": CLASSES}
    state = State(4, random_tensors(tiny_recipe, 3), {})
    other = checkpoint.save(tmp_path / "others", state, data_digest="", about=about)
    shutil.copy(saved / FILE, other)
    weights = open_weights(other)
    assert weights.calibration == UNCALIBRATED
    assert [remark for remark in weights.remarks if "belongs to other weights" in remark]


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
