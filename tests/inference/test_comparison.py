"""Exports are run by their own runtime and compared with the weights before they are named."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import lockstep
from lockstep.inference import onnx_model, targets
from lockstep.inference.images import read_square
from lockstep.inference.targets import Target
from lockstep.models.quantisation import layers
from lockstep.recipes import Recipe
from lockstep.system.errors import CheckpointError
from lockstep.weights import open_weights
from lockstep.weights.certificate import draw_photos
from tests.backends import oracle
from tests.edges import softmax
from tests.inference.cases import (
    CLASSES,
    MEAN,
    STD,
    image_file,
    open_session,
    pictures,
    save_random,
)

FORMATS = [
    ("onnx", {}, 1e-4),
    ("onnx", {"precision": "fp16"}, 6e-3),
    ("onnx", {"bare": True, "batch": 3}, 1e-4),
]
"""The other targets take long to write; the tests that write them anyway compare them."""


def logarithms(logits: np.ndarray) -> np.ndarray:
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


@pytest.mark.parametrize(("to", "options", "bound"), FORMATS, ids=str)
def test_an_export_is_within_the_bound_of_its_precision(
    weights: Path, to: str, options: dict[str, Any], bound: float, tmp_path: Path
) -> None:
    result = lockstep.load(weights).export(tmp_path / "model", to=to, **options)["comparison"]
    assert (result["bound"], result["images"], result["top1_agreement"]) == (bound, 8, 1.0)
    assert 0 < result["largest_difference"] < bound
    shorter = [min(size) for size in result["sizes"]]
    assert options.get("bare") or (min(shorter) < 32 and max(shorter) >= 3 * 32)


def faulty(
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]],
) -> None:
    """Make the writer of ONNX models write other weights than it is given."""
    right = onnx_model.build_model
    wrong = lambda recipe, tensors, *rest: right(recipe, change(tensors), *rest)  # noqa: E731
    monkeypatch.setattr(onnx_model, "build_model", wrong)


def test_a_wrong_export_is_refused_with_both_figures_and_leaves_nothing(
    weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = np.arange(10, dtype=np.float32) == 3
    shift = wrong / np.float32(8)
    faulty(monkeypatch, lambda tensors: tensors | {"fc.bias": tensors["fc.bias"] + shift})
    opened = open_weights(weights)
    squares = np.empty((8, 32, 32, 3), np.uint8)
    for photo, square in zip(draw_photos(opened.recipe), squares, strict=True):
        read_square(photo, opened.recipe, square)
    logits = oracle.logits(opened.recipe, opened.tensors, squares)
    difference = (
        np.abs(logarithms(logits + wrong / 8) - logarithms(logits)).max() / np.abs(logits).max()
    )
    with pytest.raises(CheckpointError, match=r"1e-04.* --no-compare") as caught:
        lockstep.load(weights).export(tmp_path / "model", to="onnx")
    [figure] = re.findall(r"differ by (\S+) of the largest logit", str(caught.value))
    assert float(figure) == pytest.approx(difference, rel=0.05)
    assert list(tmp_path.iterdir()) == []


def test_an_export_that_resizes_otherwise_is_refused(
    weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = targets.take_photos
    monkeypatch.setattr(
        targets, "take_photos", lambda model, recipe: right(model, recipe.replace(eval_resize=40))
    )
    with pytest.raises(CheckpointError, match=r"differ .* 1e-04"):
        lockstep.load(weights).export(tmp_path / "model", to="onnx")


def test_without_a_comparison_a_wrong_export_is_written(
    weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faulty(monkeypatch, lambda tensors: tensors | {"fc.bias": tensors["fc.bias"][::-1]})
    assert (
        lockstep.load(weights).export(tmp_path / "model", to="onnx", compare=False)["comparison"]
        is None
    )
    assert (tmp_path / "model" / "model.onnx").is_file()


def test_without_its_runtime_an_export_is_written_and_a_remark_says_what_to_install(
    weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Target, "runtime", lambda self: None)
    result = lockstep.load(weights).export(tmp_path / "model", to="onnx")
    assert result["comparison"] is None
    [remark] = result["remarks"]
    assert re.fullmatch(
        r"not compared with the weights; that needs onnxruntime: pip install onnxruntime==\S+",
        remark,
    )


def test_logits_that_are_no_numbers_are_not_exported(tiny_recipe: Recipe, tmp_path: Path) -> None:
    recipe = tiny_recipe.replace(std=(1e-38, 1.0, 1.0))
    with pytest.raises(CheckpointError, match="computes logits that are not finite numbers"):
        lockstep.load(save_random(recipe, tmp_path / "run")).export(tmp_path / "model", to="onnx")
    assert not (tmp_path / "model").exists()


def test_quantised_weights_are_compared_quantised(tiny_recipe: Recipe, tmp_path: Path) -> None:
    recipe = tiny_recipe.replace(quantisation="int8", mean=MEAN, std=STD)
    weights = save_random(recipe, tmp_path / "run", dict.fromkeys(layers(recipe.spec), 0.0155))
    rounded = lockstep.load(weights).export(tmp_path / "int8", to="onnx")["comparison"]
    in_float = lockstep.load(weights).export(tmp_path / "float", to="onnx", precision="fp32")
    assert (rounded["bound"], in_float["comparison"]["bound"]) == (5e-2, 1e-4)
    assert rounded["largest_difference"] < 1e-3
    assert in_float["remarks"] == [
        "onnx computes in float, but the weights were trained for int8; to quantise, leave out"
        " --precision or set it to int8"
    ]


def test_a_bare_model_maps_normalised_images_to_logits(weights: Path, tmp_path: Path) -> None:
    lockstep.load(weights).export(tmp_path / "model", to="onnx", bare=True, batch=3, compare=False)
    session = open_session(tmp_path / "model" / "model.onnx")
    [input_value], [returned] = session.get_inputs(), session.get_outputs()
    assert input_value.name == "input"
    assert (input_value.type, input_value.shape) == ("tensor(float)", [3, 3, 32, 32])
    assert (returned.name, returned.shape) == ("logits", [3, 10])
    x = ((pictures(32, 32) - MEAN) / STD).transpose(0, 3, 1, 2)
    [logits] = session.run(None, {"input": x.astype(np.float32)})
    assert logits == pytest.approx(
        lockstep.load(weights).on("reference").module()(x), rel=1e-4, abs=1e-5
    )


@pytest.mark.parametrize("bare", [False, True])
def test_photos_have_predicts_answers(weights: Path, bare: bool, tmp_path: Path) -> None:
    """A bare model gets them from the program next to it, which runs without Lockstep."""
    lockstep.load(weights).export(tmp_path / "model", to="onnx", bare=bare, compare=False)
    session = open_session(tmp_path / "model" / "model.onnx")
    photos = [
        image_file(tmp_path, height, width) for height, width in ((32, 32), (97, 61), (300, 411))
    ]
    if bare:
        program = tmp_path / "model" / "preprocessing.py"
        subprocess.run(
            [sys.executable, "-I", program, *photos, tmp_path / "inputs.npy"], check=True
        )
        [logits] = session.run(["logits"], {"input": np.load(tmp_path / "inputs.npy")})
        answers = softmax(logits)
        with pytest.raises(Exception, match="invalid dimensions"):
            session.run(None, {"input": np.zeros((1, 3, 33, 32), np.float32)})
    else:
        pixels = [np.asarray(Image.open(photo).convert("RGB"))[None] for photo in photos]
        answers = np.concatenate(
            [session.run(["probabilities"], {"images": photo})[0] for photo in pixels]
        )
    for prediction, probabilities in zip(
        list(lockstep.load(weights).predict(photos, top=10)), answers, strict=True
    ):
        by_class = dict(zip(prediction.classes, prediction.probabilities, strict=True))
        assert probabilities == pytest.approx([by_class[name] for name in CLASSES], abs=1e-6)


def test_a_bare_model_is_read_back_with_its_preprocessing(weights: Path, tmp_path: Path) -> None:
    lockstep.load(weights).export(tmp_path / "model", to="onnx", bare=True, compare=False)
    opened = open_weights(tmp_path / "model")
    assert (opened.recipe.mean, opened.recipe.std, opened.remarks) == (MEAN, STD, ())
    source = open_weights(weights).tensors
    assert opened.tensors.keys() == source.keys()
    assert all(np.array_equal(value, source[name]) for name, value in opened.tensors.items())


@pytest.mark.parametrize(
    ("options", "refused"),
    [
        ({"batch": 3}, "--batch"),
        ({"bare": True}, "--bare"),
        ({"precision": "int8"}, "--precision int8"),
    ],
)
def test_options_of_onnx_are_refused_for_other_formats(
    weights: Path, options: dict[str, Any], refused: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=f"torchscript .* {refused}.* onnx"):
        lockstep.load(weights).export(tmp_path / "model", to="torchscript", **options)
