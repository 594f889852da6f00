"""`lockstep.load` and the object that it returns: what it is, where it computes, and what it
keeps."""

import gc
import inspect
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import lockstep
from lockstep.inference.prediction import Predictor
from lockstep.recipes import Execution
from lockstep.system.errors import BackendError, CheckpointError, DataError, UserError
from lockstep.verification.bounds import BOUNDS, distance
from tests.inference.conftest import SaveWeights

IMAGE = np.zeros((40, 40, 3), np.uint8)


@pytest.fixture
def collects_nothing() -> Iterator[None]:
    """Switch the collector of cycles off."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_a_model_says_what_it_is(save_weights: SaveWeights) -> None:
    path = save_weights(classes=tuple("abcdefghi<"))
    model = lockstep.load(path, preprocessing={"image_size": 40}, unknown_below=0.5)
    assert (model.classes[0], model.origin, model.unknown_below) == ("a", "Lockstep", 0.5)
    assert model.network["layers"] == [1, 1, 1, 1]
    assert model.preprocessing["eval_crop"] == 40
    for part in (str(path), "10 classes", "40 x 40 pixels", "from Lockstep", "on torch"):
        assert part in repr(model)
        assert f"<td>{part}</td>" in model._repr_html_()


def test_where_and_how_it_computes_is_chosen_step_by_step(save_weights: SaveWeights) -> None:
    model = lockstep.load(save_weights())
    elsewhere = model.on("reference", batch=2).on(precision="fp32").on("native")
    assert elsewhere.predict(IMAGE).classes == model.predict(IMAGE).classes
    assert (elsewhere._options.batch, elsewhere._options.precision) == (2, "fp32")
    assert elsewhere._options.execution == Execution(backend="reference")
    assert model._options.execution == Execution()
    assert model.on("openvino").on("reference").runtime == "native"


def test_an_export_is_described_without_its_weights(
    save_weights: SaveWeights, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = save_weights()
    lockstep.load(source).export(tmp_path / "onnx", to="onnx", compare=False)
    expected = lockstep.load(source).on("reference").predict(IMAGE)
    with monkeypatch.context() as patch:
        patch.setattr("lockstep.inference.source.open_weights", pytest.fail)
        model = lockstep.load(tmp_path / "onnx")
        assert "an export, 10 classes" in repr(model)
        assert model.predict(IMAGE).classes == expected.classes
    assert model.network == lockstep.load(source).network
    assert model.on("torch").runtime == "native"


@pytest.mark.parametrize(
    ("choice", "error", "message"),
    [
        ({"where": "onnxruntim"}, BackendError, "no backend or runtime .* onnxruntime"),
        ({"where": "jx"}, BackendError, "no backend or runtime 'jx'. .* jax"),
        ({"listener": "print"}, UserError, "listener is 'print'; expected a function"),
        ({"batch": 0}, UserError, "batch is 0; expected at least 1"),
    ],
)
def test_a_place_that_there_is_not_is_named(
    save_weights: SaveWeights, choice: dict[str, Any], error: type[Exception], message: str
) -> None:
    model = lockstep.load(save_weights())
    with pytest.raises(error, match=message):
        model.on(**choice)


def test_what_is_missing_is_an_error_of_load(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no run, no file and no checkpoint"):
        lockstep.load(tmp_path / "missing")
    with pytest.raises(UserError, match=r"weights is a dict; .* torch\.save\(weights, FILE\)"):
        lockstep.load({"fc.weight": IMAGE})  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"folder is a list; .* one run's folder"):
        lockstep.read_run(["a", "b"])  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"threshold .* is 2; expected 0 to 1"):
        lockstep.load(tmp_path, unknown_below=2)


def test_one_image_gives_one_prediction_and_several_an_iterator(save_weights: SaveWeights) -> None:
    model = lockstep.load(save_weights())
    one = model.predict(IMAGE, top=2)
    for several in ([IMAGE], iter([IMAGE]), IMAGE[None]):
        [prediction] = model.predict(several, top=2)
        assert prediction == one
    [logits] = model.logits([IMAGE])
    np.testing.assert_array_equal(model.logits(IMAGE), logits)


def test_the_module_computes_the_logits_of_what_preprocess_returns(
    save_weights: SaveWeights, tmp_path: Path
) -> None:
    model = lockstep.load(save_weights())
    inputs = torch.from_numpy(model.preprocess(IMAGE))
    [same] = model.preprocess([IMAGE])
    assert np.array_equal(inputs, same)
    logits = model.module()(inputs[None])[0].detach().numpy()
    assert distance(logits, model.logits(IMAGE)) < BOUNDS["logits"].value
    (tmp_path / "text.jpg").write_text("text")
    with pytest.raises(DataError, match=r"text\.jpg: "):
        model.preprocess(tmp_path / "text.jpg")


def test_the_engine_stays_open_until_the_model_is_closed(
    save_weights: SaveWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = []
    original = Predictor.__init__

    def count(self: Predictor, *arguments: Any, **options: Any) -> None:
        opened.append(options)
        original(self, *arguments, **options)

    monkeypatch.setattr(Predictor, "__init__", count)
    with lockstep.load(save_weights()) as model:
        for _ in range(3):
            model.predict(IMAGE)
        model.predict(IMAGE, features=True)
    assert len(opened) == 2
    model.predict(IMAGE)
    assert len(opened) == 3


@pytest.mark.usefixtures("collects_nothing")
def test_a_model_that_nothing_refers_to_is_freed_at_once(save_weights: SaveWeights) -> None:
    model = lockstep.load(save_weights())
    predictions = model.predict([IMAGE, IMAGE])
    next(predictions)
    predictor = weakref.ref(model._predictors[False, False])
    del model
    assert next(predictions).classes  # an iterator keeps its model
    del predictions
    assert predictor() is None


def test_no_signature_is_long() -> None:
    methods = [value for value in vars(lockstep.Model).values() if inspect.isfunction(value)]
    for function in (lockstep.load, *methods):
        names = inspect.signature(function).parameters.keys() - {"self"}
        most = 9 if function is lockstep.load else 8
        assert len(names) <= most, function
