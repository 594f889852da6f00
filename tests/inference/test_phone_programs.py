"""Programs for phones: written for one square, run by the formats' own runtimes."""

import importlib.util
import re
import runpy
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lockstep
from lockstep.inference.export import _plan_program, _remark_on_precision
from lockstep.inference.targets import find_target
from lockstep.models.quantisation import layers
from lockstep.recipes import Execution, Recipe
from lockstep.system.errors import BackendError, CheckpointError
from lockstep.weights import open_weights
from tests.inference.cases import CLASSES, MEAN, STD, check_with_proof, image_file, save_random
from tests.soak import in_a_soak

REFERENCE = Execution(backend="reference")
SIZES = ((32, 32), (97, 61), (120, 200), (20, 50))
FILES = {"executorch": "model.pte", "litert": "model.tflite"}
Run = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]


@dataclass(frozen=True)
class Exported:
    target: str
    folder: Path
    result: dict[str, Any]

    def open(self) -> Run:
        """Return the program as an app runs it: from a square to classes and probabilities."""
        file = str(self.folder / FILES[self.target])
        if self.target == "litert":
            import tensorflow as tf

            with pytest.warns(UserWarning, match="deprecated"):
                run = tf.lite.Interpreter(file).get_signature_runner("serving_default")
            return lambda square: tuple(run(images=square)[name] for name in ANSWERS)
        import torch
        from executorch.runtime import Runtime

        program = Runtime.get().load_program(file)
        return lambda square: tuple(
            value.numpy()
            for value in program.load_method("forward").execute([torch.tensor(square)])
        )


ANSWERS = ("classes", "probabilities")


@pytest.fixture(scope="module")
def weights(tiny_recipe: Recipe, tmp_path_factory: pytest.TempPathFactory) -> Path:
    recipe = tiny_recipe.replace(mean=MEAN, std=STD, eval_resize=36)
    return save_random(recipe, tmp_path_factory.mktemp("weights"))


@pytest.fixture(
    scope="module",
    params=["litert", pytest.param("executorch", marks=in_a_soak)],  # which needs a minute
)
def target(request: pytest.FixtureRequest) -> str:
    if request.param == "executorch" and importlib.util.find_spec("executorch") is None:
        pytest.skip("executorch is not installed: make .venv/.dev")
    return str(request.param)


@pytest.fixture(scope="module")
def exported(weights: Path, target: str, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    folder = tmp_path_factory.mktemp(target) / "program"
    return Exported(target, folder, lockstep.load(weights).export(folder, to=target))


@pytest.fixture(scope="module")
def data(weights: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Photos of several sizes, each in the folder of the class that the reference finds likeliest:
    its top-1 is 100 %."""
    root = tmp_path_factory.mktemp("data")
    for number in range(24):
        height, width = SIZES[number % len(SIZES)]
        path = image_file(root, height + number, width)
        prediction = lockstep.load(weights).on("reference").predict(path)
        folder = root / ("train" if number % 2 else "val") / prediction.classes[0]
        folder.mkdir(parents=True, exist_ok=True)
        path.rename(folder / path.name)
    return root


def test_photos_have_predicts_answers(exported: Exported, weights: Path, tmp_path: Path) -> None:
    prepare = runpy.run_path(str(exported.folder / "preprocessing.py"))["prepare"]
    run = exported.open()
    for height, width in SIZES:
        photo = image_file(tmp_path, height, width)
        square = prepare(str(photo))
        classes, probabilities = run(square)
        assert (classes.dtype, classes.shape) == (np.int64, (1,))
        wanted = lockstep.load(weights).on("reference").predict(photo, top=len(CLASSES))
        likeliest = np.argsort(-probabilities[0])
        assert [CLASSES[place] for place in likeliest] == list(wanted.classes)
        assert CLASSES[classes[0]] == wanted.classes[0]
        assert probabilities[0, likeliest] == pytest.approx(wanted.probabilities, abs=1e-6)


def test_an_export_is_compared_and_lies_next_to_what_an_app_needs(exported: Exported) -> None:
    assert exported.result["takes"].endswith("crops of 32 x 32 pixels: uint8 RGB [1, 32, 32, 3]")
    comparison = exported.result["comparison"]
    assert comparison["images"] == 8
    assert comparison["largest_difference"] < comparison["bound"] == 1e-4
    names = {path.name for path in exported.folder.iterdir()}
    names -= {"README.md", "classes.txt", "export.json", "preprocessing.py", "proof"}
    assert names == {FILES[exported.target]}
    check_with_proof(exported.folder, exported.target)


def test_it_is_evaluated_as_its_weights_are(exported: Exported, weights: Path, data: Path) -> None:
    result = lockstep.load(exported.folder).on("program", batch=5).evaluate(data).to_json()
    expected = lockstep.load(weights).on(execution=REFERENCE).evaluate(data).to_json()
    assert result["runtime"].startswith(f"{exported.target} (")
    assert result["per_class"] == expected["per_class"]
    assert result["loss"] == pytest.approx(expected["loss"], rel=1e-4)


def test_int8_is_smaller_and_near_the_weights(
    exported: Exported, weights: Path, data: Path, tmp_path: Path
) -> None:
    target = exported.target
    result = lockstep.load(weights).export(
        tmp_path / "int8", to=target, precision=lockstep.Int8(data, tolerance=10)
    )
    loss = result["int8"]
    assert loss["top1_before"] == 100
    assert loss["top1_after"] >= 90
    assert (loss["calibration_images"], loss["validation_images"]) == (12, 12)
    assert 1e-4 < result["comparison"]["largest_difference"] < 0.1
    small, large = (
        (folder / FILES[target]).stat().st_size for folder in (tmp_path / "int8", exported.folder)
    )
    assert small < 0.85 * large, "weights are a part of so small a model"
    answer = lockstep.load(tmp_path / "int8").on("program").evaluate(data).to_json()
    assert (answer["precision"], answer["top1_percent"]) == ("int8", loss["top1_after"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bare": True}, "litert has no --bare"),
        ({"batch": 2}, "litert has no --batch"),
        ({"precision": "fp16"}, "litert is written in fp32 or int8, not in fp16"),
        ({"precision": "int8"}, "int8 needs images, .*: --data DATA"),
        (
            {"precision": lockstep.Int8("unused", method="entropy")},
            "no method 'entropy' to calibrate litert with. Known: minmax",
        ),
    ],
)
def test_what_a_phones_format_does_not_have_is_refused(
    weights: Path, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=message):
        lockstep.load(weights).export(tmp_path / "model", to="litert", **options)


def test_scales_of_training_are_not_used(tiny_recipe: Recipe, tmp_path: Path) -> None:
    recipe = tiny_recipe.replace(quantisation="int8")
    scales = dict.fromkeys(layers(recipe.spec), 1.0)
    source = save_random(recipe, tmp_path, scales)
    weights = open_weights(source)
    target = find_target("litert")
    for precision, remark in (
        (None, "litert computes in float, .*export --to onnx"),
        ("int8", "is quantised after training, without the scales"),
    ):
        wanted = _plan_program(target, weights, precision, None, bare=False)
        assert (wanted.weights.scales, wanted.weights.recipe.quantisation) == ({}, "none")
        [only] = _remark_on_precision(target, weights, precision)
        assert re.search(remark, only)


def test_without_executorch_one_message_says_how_to_get_it(
    weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "lockstep.backends.torch.executorch_program", raising=False)
    used_first = "executorch.backends.xnnpack.partition.xnnpack_partitioner"
    monkeypatch.setitem(sys.modules, used_first, None)
    with pytest.raises(BackendError, match=r"needs executorch: pip install executorch==\S+ torcha"):
        lockstep.load(weights).export(tmp_path / "model", to="executorch")
    assert not (tmp_path / "model").exists()
