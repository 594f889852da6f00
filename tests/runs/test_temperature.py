"""A run fits a temperature to the validation images at its end; what uses weights then uses it."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import lockstep
from lockstep.recipes import Recipe
from lockstep.reporting.summary import list_results
from lockstep.reporting.views import View, build_views
from lockstep.runs.report import Report
from lockstep.weights.calibration import FILE
from tests.runs.cases import Event, stop_when, train_until


@pytest.fixture(scope="module")
def learnt(textures: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The training images, which a tiny model soon tells apart a little, also as validation."""
    data = tmp_path_factory.mktemp("learnt")
    for part in ("train", "val"):
        (data / part).symlink_to(textures / "train")
    return data


@pytest.fixture(scope="module")
def calibrated(
    tiny_recipe: Recipe, learnt: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Report]:
    """A finished run, which was stopped while it calibrated, and its report."""

    def is_calibrating(event: Event) -> bool:
        return bool(event["kind"] == "progress" and event["what"] == "calibrating ema")

    recipe = tiny_recipe.replace(epochs=6, ema_decay=0.5, temperature_scaling=True)
    run = tmp_path_factory.mktemp("calibrated") / "run"
    train_until(stop_when(is_calibrating), recipe, learnt, run)
    assert not (run / "report.json").exists()
    return run, lockstep.train(recipe, learnt, run)


def find_folder(report: Report) -> Path:
    """Return the folder of the best checkpoint."""
    path = Path(report["best_checkpoint"])
    return path if path.is_dir() else path.parent


def compute_losses(logits: np.ndarray, labels: np.ndarray, temperatures: np.ndarray) -> np.ndarray:
    """Return the mean cross-entropy at every temperature."""
    losses = []
    for temperature in temperatures:
        scaled = logits.astype(np.float64) / temperature
        totals = np.log(np.exp(scaled).sum(axis=1))
        losses.append(float((totals - scaled[np.arange(len(labels)), labels]).mean()))
    return np.array(losses)


@pytest.mark.parametrize("weights", ["model.safetensors", "ema.safetensors"])
def test_the_temperature_has_the_least_loss_on_the_validation_images(
    weights: str, calibrated: tuple[Path, Report], learnt: Path
) -> None:
    _, report = calibrated
    paths = sorted((learnt / "val").rglob("*.jpg"))
    labels = [report["classes"].index(path.parent.name) for path in paths]
    best = find_folder(report)
    entry = json.loads((best / FILE).read_text())[weights]
    with lockstep.load(best / weights) as predictor:
        logits = np.stack(list(predictor.logits(paths)))
        prediction = predictor.predict(paths[0], top=1)
    temperature = entry["temperature"]
    near = temperature * np.geomspace(0.5, 2, 401)
    losses = compute_losses(logits, np.array(labels), near)
    assert near[losses.argmin()] == pytest.approx(temperature, rel=0.01)
    assert entry["loss_after"] == pytest.approx(losses.min(), rel=1e-5)
    assert entry["images"] == len(paths)
    powers = np.exp((logits[0].astype(np.float64) - logits[0].max()) / temperature)
    assert prediction.probabilities[0] == pytest.approx(powers.max() / powers.sum(), rel=1e-5)


def test_an_evaluation_can_store_temperature(calibrated: tuple[Path, Report], learnt: Path) -> None:
    run, report = calibrated
    best = find_folder(report)
    before = json.loads((best / FILE).read_text())
    weights = f"{'ema' if report['best']['weights'] == 'ema' else 'model'}.safetensors"
    plain = lockstep.load(run).evaluate(learnt).to_json()
    assert "calibration" not in plain
    (best / FILE).unlink()
    model = lockstep.load(run)
    photo = np.zeros((40, 40, 3), np.uint8)
    uncalibrated = model.predict(photo)
    result = model.evaluate(learnt, calibrate=True).to_json()
    assert model.predict(photo) == lockstep.load(run).predict(photo) != uncalibrated
    assert result["loss"] == pytest.approx(plain["loss"], rel=1e-5)
    assert result["top1_percent"] == plain["top1_percent"]
    after = json.loads((best / FILE).read_text())
    assert after.keys() == {weights}
    assert after[weights]["temperature"] == pytest.approx(before[weights]["temperature"], rel=1e-5)
    (best / FILE).write_text(json.dumps(before))


def read_view(run: Path) -> View:
    """Return the first evaluation of the report, which is the best one."""
    return build_views([lockstep.read_run(run)])[0]


def measure_calibration_error(confidences: np.ndarray, right: np.ndarray) -> float:
    """Return the expected calibration error in 15 bins, as its paper defines it."""
    error = 0.0
    for low in np.arange(15) / 15:
        inside = (confidences > low) & (confidences <= low + 1 / 15)
        if inside.any():
            error += inside.mean() * abs(right[inside].mean() - confidences[inside].mean())
    return error


def test_a_report_shows_the_probabilities_that_predict_gives(
    calibrated: tuple[Path, Report], learnt: Path
) -> None:
    run, report = calibrated
    paths = sorted((learnt / "val").rglob("*.jpg"))
    predictions = list(lockstep.load(run).predict(paths, top=1))
    probabilities = np.array([prediction.probabilities[0] for prediction in predictions])
    names = [prediction.classes[0] for prediction in predictions]
    right = np.array([path.parent.name for path in paths]) == names
    view = read_view(run)
    assert view.mistakes
    for mistake in view.mistakes:
        assert mistake.confidence == pytest.approx(probabilities[mistake.sample], abs=1e-5)
    expected = measure_calibration_error(probabilities, right)
    assert view.calibration_error == pytest.approx(expected, abs=1e-5)
    [result, *_] = list_results([lockstep.read_run(run)])
    assert result.calibration_error == view.calibration_error
    entries = json.loads((find_folder(report) / FILE).read_text())
    assert view.basis in [f"temperature {entry['temperature']:.3g}" for entry in entries.values()]


def test_a_report_names_a_temperature_that_its_probabilities_lack(
    calibrated: tuple[Path, Report], learnt: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(calibrated[0], tmp_path / "run")
    before = read_view(run)
    for path in run.glob("*validation.npz"):
        with np.load(path) as file:
            arrays = {name: file[name] for name in file if "calibrated" not in name}
        np.savez(path, **arrays)
    view = read_view(run)
    assert view.basis == f"before {before.basis}"
    assert view.calibration_error != before.calibration_error
    assert "evaluate RUN --calibrate" in lockstep.report(run, tmp_path / "page.html").read_text()
    lockstep.load(run).evaluate(learnt, calibrate=True)
    after = read_view(run)
    assert after.basis == before.basis
    assert after.calibration_error == pytest.approx(before.calibration_error, abs=1e-5)


def test_a_run_of_another_recipe_has_no_temperature(uninterrupted: Path) -> None:
    assert not list(uninterrupted.rglob(FILE))
