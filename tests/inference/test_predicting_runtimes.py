"""Predictions of other runtimes, and of exported models, compared with the reference."""

from pathlib import Path

import numpy as np
import pytest

import lockstep
from lockstep.inference.session import list_export_runtimes
from lockstep.recipes import Execution, Recipe
from lockstep.system.errors import BackendError
from tests.inference.cases import MEAN, STD, image_file, save_random

REFERENCE = Execution(backend="reference", reference_dtype="float32")


@pytest.fixture
def weights(tiny_recipe: Recipe, tmp_path: Path) -> Path:
    return save_random(
        tiny_recipe.replace(mean=MEAN, std=STD, eval_resize=40, antialias=True), tmp_path
    )


@pytest.mark.parametrize("name", list_export_runtimes())
def test_runtimes_have_the_references_logits(name: str, weights: Path, tmp_path: Path) -> None:
    path = image_file(tmp_path, 50, 70)
    results = []
    for where, runtime in (("reference", "native"), (name, name)):
        with lockstep.load(weights).on(where) as model:
            results.append((model.predict(path, features=True), model.logits(path)))
            assert model.runtime == runtime
    (expected, logits), (other, others_logits) = results
    assert others_logits == pytest.approx(logits, abs=1e-4 * float(np.abs(logits).max()))
    assert other.features == pytest.approx(
        expected.features, abs=1e-4 * float(expected.features.max())
    )
    assert (other.classes, other.path) == (expected.classes, path)


def test_an_exported_model_is_run_as_it_is(weights: Path, tmp_path: Path) -> None:
    lockstep.load(weights).export(tmp_path / "model", to="onnx", compare=False)
    path = image_file(tmp_path, 50, 70)
    expected = lockstep.load(weights).on("reference").predict(path)
    for runtime, runs in ((None, list_export_runtimes()[0]), ("native", "native")):
        with lockstep.load(tmp_path / "model").on(runtime) as model:
            prediction = model.predict(path)
            assert model.runtime == runs
        assert prediction.classes == expected.classes
        assert prediction.probabilities == pytest.approx(expected.probabilities, rel=1e-4)


def test_grad_cam_needs_the_runtime_of_a_framework(weights: Path) -> None:
    model = lockstep.load(weights).on(list_export_runtimes()[0])
    with pytest.raises(BackendError, match=r"Grad-CAM.* --runtime"):
        model.predict(np.zeros((40, 40, 3), np.uint8), explain=True)
