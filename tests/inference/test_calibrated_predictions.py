"""What a stored temperature changes: probabilities everywhere, logits nowhere."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import lockstep
from lockstep.cli.predict_forms import choose_form
from lockstep.inference.prediction import Prediction
from lockstep.system.errors import UserError
from lockstep.weights.calibration import write_calibration
from tests.inference.cases import FIT, image_file

SaveWeights = Callable[..., Path]


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    return image_file(tmp_path, 50, 60)


@pytest.fixture
def calibrated(save_weights: SaveWeights, photo: Path) -> tuple[Path, np.ndarray]:
    """A checkpoint with a temperature, and its logits of the photo without one."""
    source = save_weights()
    with lockstep.load(source) as predictor:
        logits = predictor.logits(photo)
    write_calibration(source / "model.safetensors", FIT)
    return source, logits


def compute_expected(logits: np.ndarray) -> np.ndarray:
    """Return the softmax of the logits over the temperature, the largest first."""
    powers = np.exp(logits.astype(np.float64) / 3)
    return -np.sort(-powers / powers.sum())


def test_logits_are_divided(calibrated: tuple[Path, np.ndarray], photo: Path) -> None:
    source, logits = calibrated
    events: list[Any] = []
    with lockstep.load(source).on(listener=events.append) as predictor:
        prediction = predictor.predict(photo, top=10)
        again = predictor.logits(photo)
    np.testing.assert_allclose(prediction.probabilities, compute_expected(logits), rtol=1e-9)
    np.testing.assert_array_equal(again, logits)
    assert "probabilities are calibrated: logits are divided by 3" in [
        event.get("message") for event in events
    ]


@pytest.mark.parametrize("to", ["onnx", "torchscript"])
def test_an_export_computes_calibrated_probabilities(
    to: str, calibrated: tuple[Path, np.ndarray], photo: Path, tmp_path: Path
) -> None:
    source, logits = calibrated
    folder = tmp_path / "exported"
    result = lockstep.load(source).export(folder, to=to)  # compares with an engine
    assert "probabilities are calibrated: the classifier is divided by 3" in result["remarks"]
    assert json.loads((folder / "export.json").read_text())["temperature"] == 3
    if to == "torchscript":
        answers = torch.jit.load(folder / "model.pt")(
            torch.tensor(np.array(Image.open(photo))[None])
        )
        probabilities = -np.sort(-answers["probabilities"][0].numpy())
    else:
        with lockstep.load(folder) as predictor:
            prediction = predictor.predict(photo, top=10)
        probabilities = np.array(prediction.probabilities)
    np.testing.assert_allclose(probabilities, compute_expected(logits), rtol=1e-3)


def test_a_bare_export_has_logits(calibrated: tuple[Path, np.ndarray], tmp_path: Path) -> None:
    source, _ = calibrated
    result = lockstep.load(source).export(tmp_path / "bare", to="onnx", bare=True, compare=False)
    remark = "for calibrated probabilities, divide the logits by 3 before softmax"
    assert remark in result["remarks"]
    written = lockstep.load(tmp_path / "bare").module().fc.weight.detach().numpy()
    np.testing.assert_array_equal(
        written, lockstep.load(source).module().fc.weight.detach().numpy()
    )


@pytest.fixture
def uncertain(calibrated: tuple[Path, np.ndarray]) -> tuple[Path, float]:
    """The checkpoint with a threshold just above the photo's probability, and that threshold."""
    source, logits = calibrated
    threshold = float(compute_expected(logits)[0]) + 1e-4
    entry: Any = {**FIT, "unknown_below": threshold}
    write_calibration(source / "model.safetensors", entry)
    return source, threshold


def test_images_below_it_are_unknown(uncertain: tuple[Path, float], photo: Path) -> None:
    source, threshold = uncertain
    for unknown_below, expected in ((None, True), (threshold - 2e-4, False), (0, False)):
        prediction = lockstep.load(source, unknown_below=unknown_below).predict(photo)
        assert prediction.is_unknown is expected
        assert len(prediction.classes) == 5
    with pytest.raises(UserError, match="expected 0 to 1"):
        list(lockstep.load(source, unknown_below=70).predict(photo))


def test_an_exported_model_keeps_the_threshold(
    uncertain: tuple[Path, float], photo: Path, tmp_path: Path
) -> None:
    source, threshold = uncertain
    lockstep.load(source).export(tmp_path / "exported", to="onnx", compare=False)
    for runtime in (None, "native"):
        with lockstep.load(tmp_path / "exported").on(runtime) as predictor:
            prediction = predictor.predict(photo)
            assert predictor.unknown_below == threshold
        assert prediction.is_unknown


def test_a_bare_model_keeps_the_temperature_and_the_threshold(
    uncertain: tuple[Path, float], calibrated: tuple[Path, np.ndarray], photo: Path, tmp_path: Path
) -> None:
    source, threshold = uncertain
    lockstep.load(source).export(tmp_path / "bare", to="onnx", bare=True, compare=False)
    with lockstep.load(tmp_path / "bare") as predictor:
        prediction = predictor.predict(photo, top=10)
        logits = predictor.logits(photo)
        assert predictor.unknown_below == threshold
    assert logits == pytest.approx(calibrated[1], abs=1e-4)
    assert prediction.probabilities == pytest.approx(compute_expected(logits), rel=1e-6)
    assert prediction.is_unknown


FORMS = {
    "table": "p.png\n  unknown: no class has 75.00 % or more\n   60.00 %  dots\n",
    "csv": "path,rank,class,probability,unknown\np.png,1,dots,0.600000,true\n",
    "jsonl": '{"path": "p.png", "classes": ["dots"], "probabilities": [0.6], "unknown": true}\n',
}


@pytest.mark.parametrize("name", FORMS)
def test_outputs_say_unknown_only_where_there_is_a_threshold(name: str) -> None:
    form = choose_form(name, None)
    plain = form.begin() + form.row(Prediction(Path("p.png"), ("dots",), (0.6,)))
    assert "unknown" not in plain
    form.unknown_below = 0.75
    prediction = Prediction(Path("p.png"), ("dots",), (0.6,), is_unknown=True)
    assert form.begin() + form.row(prediction) + form.end() == FORMS[name]
