"""Exported models, loaded by their framework, compared with `Model.predict`, and the preprocessing
next to them in words."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import lockstep
from lockstep import backends
from lockstep.backends import Framework
from lockstep.inference.export import choose_target
from lockstep.inference.images import read_square
from lockstep.inference.preprocessing_file import FILE, write_preprocessing
from lockstep.models.state import State
from lockstep.recipes import Execution, Recipe
from lockstep.recipes.initial_weights import zero_momentum
from lockstep.recipes.published import RECIPES
from lockstep.system.errors import BackendError, CheckpointError
from lockstep.system.machine import arithmetic
from lockstep.weights import open_weights
from tests.backends.cases import NARROWED
from tests.backends.drawing import draw_images
from tests.edges import softmax
from tests.inference.cases import (
    CLASSES,
    MEAN,
    STD,
    random_tensors,
    read_as_tensorflow_1,
    read_squares,
    run_alone,
    save_tensors,
)
from tests.soak import in_a_soak

INFER = """
import sys
import numpy as np
from paddle import inference

program, weights, *batches = sys.argv[1:]
predictor = inference.create_predictor(inference.Config(program, weights))
for path in batches:
    predictor.get_input_handle("images").copy_from_cpu(np.load(path))
    predictor.run()
    names = predictor.get_output_names()
    outputs = [predictor.get_output_handle(name).copy_to_cpu() for name in names]
    assert "lockstep" not in sys.modules
    np.savez(path + ".npz", classes=outputs[0], probabilities=outputs[1])
"""

ON_PADDLE = [
    pytest.param({**changes, "padding": padding}, id=f"{name}, {padding}", marks=marks)
    for (name, changes), paddings in zip(
        NARROWED.items(), (("same", "symmetric"), ("symmetric", "same")), strict=True
    )
    for padding, marks in zip(paddings, ([], [in_a_soak]), strict=True)
]
"""Every network and every padding once, and all of both under `make soak`."""


@pytest.fixture
def weights(tiny_recipe: Recipe, tmp_path: Path) -> Path:
    """A checkpoint of random weights that give different images different results."""
    recipe = tiny_recipe.replace(eval_resize=48, eval_crop=40, mean=MEAN, std=STD)
    return save_tensors(tmp_path, recipe, random_tensors(recipe, 1))


@pytest.mark.parametrize("shape", [(376, 500), (131, 97)], ids=str)
def test_the_tensorflow_recipe_evaluates_as_tensorflow_1_in_the_loader_and_in_a_saved_model(
    shape: tuple[int, int], tiny_recipe: Recipe, tmp_path: Path
) -> None:
    import tensorflow as tf

    from lockstep.backends.shared.resize import crop_centre, read_geometry
    from lockstep.backends.tensorflow.export import _Operations

    published = RECIPES["resnet50-tensorflow-90ep"]()
    recipe = published.replace(model=tiny_recipe.model, logits=10, precision="fp32")
    pixels = np.random.default_rng(shape[0]).integers(0, 256, (*shape, 3), np.uint8)
    Image.fromarray(pixels).save(tmp_path / "image.png", compress_level=1)
    expected = read_as_tensorflow_1(pixels, 256, 224).astype(int)
    square = np.empty((224, 224, 3), np.uint8)
    read_square(tmp_path / "image.png", recipe, square)
    assert np.abs(square - expected).max() <= 1
    served = crop_centre(tf.constant(pixels[None]), read_geometry(recipe), _Operations()).numpy()
    assert np.array_equal(served[0].transpose(1, 2, 0), square)


@pytest.mark.parametrize(
    ("installed", "options", "name"),
    [
        ("onnx onnxruntime torch tensorflow", (None, None, False), "onnx"),
        ("onnx onnxruntime torch", ("int8", 4, True), "onnx"),
        ("onnx onnxruntime torch", ("fp16", None, False), "onnx"),
        ("onnxruntime torch", (None, None, False), "torch-export"),
        ("onnx torch tensorflow", ("fp32", None, False), "torch-export"),
        ("onnx onnxruntime torch tensorflow", ("bf16", None, False), "savedmodel"),
        ("paddlepaddle", (None, None, False), "paddle-inference"),
        ("torch", (None, None, True), "onnx"),
        ("", (None, None, False), "onnx"),
    ],
)
def test_without_a_format_one_that_can_run_here_is_written(
    installed: str,
    options: tuple[str | None, int | None, bool],
    name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def find_version(framework: Framework) -> str | None:
        return "1.0" if set(framework.distributions) & set(installed.split()) else None

    monkeypatch.setattr(Framework, "version", find_version)
    assert choose_target(options[0], options[1], bare=options[2]).name == name


def test_nothing_is_overwritten(weights: Path, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    with pytest.raises(CheckpointError, match="model already exists; name a new folder"):
        lockstep.load(weights).export(tmp_path / "model", compare=False)
    assert not any((tmp_path / "model").iterdir())


def test_an_unknown_format_is_refused_with_what_there_is(weights: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"'saved-model' .* savedmodel"):
        lockstep.load(weights).export(tmp_path / "model", to="saved-model", compare=False)


# Paddle Inference


def save_undecided(recipe: Recipe, folder: Path) -> Path:
    """Write random weights whose probabilities are not near 1, since those would hide differences;
    return the path."""
    tensors = random_tensors(recipe, 1)
    images = draw_images(2, recipe.eval_crop, seed=9)
    factor = np.float32(3 / np.abs(logits(recipe, tensors, images)).max())
    tensors |= {name: factor * tensors[name] for name in ("fc.weight", "fc.bias")}
    return save_tensors(folder, recipe, tensors)


def logits(recipe: Recipe, tensors: dict[str, np.ndarray], images: np.ndarray) -> np.ndarray:
    """Return the Paddle engine's results for images of the evaluation's size."""
    execution = Execution.of({"backend": "paddle", "device": "cpu"})
    backend = backends.load("paddle")
    with backend.engine(recipe, np.zeros(1), backend.world(execution), execution) as engine:
        engine.write(State(0, tensors, zero_momentum(recipe)))
        return engine.predict(images).astype(np.float64)


def expected(weights: Path, images: np.ndarray) -> np.ndarray:
    """Return the Paddle engine's probabilities of photos, prepared as `predict` does."""
    opened = open_weights(weights)
    return softmax(logits(opened.recipe, opened.tensors, read_squares(images, opened.recipe)))


def assert_equal(classes: np.ndarray, probabilities: np.ndarray, wanted: np.ndarray) -> None:
    assert (classes.dtype, probabilities.dtype) == (np.int64, np.float32)
    assert probabilities == pytest.approx(wanted, abs=1e-5)
    assert probabilities == pytest.approx(wanted, rel=1e-3)
    assert classes.tolist() == wanted.argmax(axis=1).tolist()
    assert wanted.max() < 0.9
    # Different images have different results.
    assert len(wanted) == 1 or np.ptp(np.log(wanted), axis=0).max() > 0.02


@pytest.mark.slow
def test_paddle_alone_answers_as_the_engine(tiny_recipe: Recipe, tmp_path: Path) -> None:
    weights = save_undecided(
        tiny_recipe.replace(eval_resize=48, eval_crop=40, mean=MEAN, std=STD), tmp_path
    )
    lockstep.load(weights).export(tmp_path / "model", to="paddle-inference", compare=False)
    names = (tmp_path / "model" / "classes.txt").read_text()
    assert names.splitlines() == list(CLASSES)
    batches = [draw_images(1, 61, seed=1), draw_images(3, 40, seed=3)]
    files = [tmp_path / "model" / name for name in ("model.json", "model.pdiparams")]
    paths, _ = run_alone(INFER, files, batches, tmp_path)
    for batch, path in zip(batches, paths, strict=True):
        answer = np.load(f"{path}.npz")
        assert_equal(answer["classes"], answer["probabilities"], expected(weights, batch))


@pytest.mark.parametrize("changes", ON_PADDLE)
def test_the_predictor_answers_as_the_engine(
    tiny_recipe: Recipe, changes: dict[str, Any], tmp_path: Path
) -> None:
    from lockstep.backends.paddle.predictor import Options, open_predictor

    weights = save_undecided(
        tiny_recipe.replace(eval_resize=48, eval_crop=40, mean=MEAN, std=STD, **changes), tmp_path
    )
    lockstep.load(weights).export(tmp_path / "model", to="paddle-inference", compare=False)
    batches = [draw_images(count, 40, seed=count) for count in (1, 3)]
    wanted = [expected(weights, batch) for batch in batches]
    for onednn in (True, False):
        predictor = open_predictor(tmp_path / "model", Options(onednn=onednn))
        for place in (0, 1, 0):
            assert_equal(*predictor.predict(batches[place]), wanted[place])


def test_the_predictor_computes_in_bf16_where_the_processor_does(
    tiny_recipe: Recipe, tmp_path: Path
) -> None:
    from lockstep.backends.paddle.predictor import Options, open_predictor

    weights = save_undecided(tiny_recipe.replace(eval_resize=48, eval_crop=40), tmp_path)
    lockstep.load(weights).export(tmp_path / "model", to="paddle-inference", compare=False)
    batch = draw_images(3, 40)
    options = Options(precision="bf16")
    if "bf16" in arithmetic().precisions:
        _, probabilities = open_predictor(tmp_path / "model", options).predict(batch)
        assert probabilities == pytest.approx(expected(weights, batch), abs=0.02)
    else:
        with pytest.raises(BackendError, match="which this one lacks; use precision='fp32'"):
            open_predictor(tmp_path / "model", options)


def test_the_predictor_refuses_what_is_not_a_batch_of_images(weights: Path, tmp_path: Path) -> None:
    from lockstep.backends.paddle.predictor import open_predictor

    lockstep.load(weights).export(tmp_path / "model", to="paddle-inference", compare=False)
    predictor = open_predictor(tmp_path / "model")
    for images in (
        draw_images(1, 48)[0],
        draw_images(1, 40).astype(np.float32),
        draw_images(1, 40)[:0],
    ):
        with pytest.raises(ValueError, match=r"images are .*, expected uint8 \(N, H, W, 3\)"):
            predictor.predict(images)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "gpu"}, "device is 'gpu', expected one of cpu, cuda"),
        ({"precision": "int8"}, "precision is 'int8', expected on cpu one of fp32, bf16"),
        ({"precision": "bf16", "onednn": False}, "bf16 needs onednn=True"),
    ],
)
def test_other_options_are_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    from lockstep.backends.paddle.predictor import Options, open_predictor

    with pytest.raises(BackendError, match=message):
        open_predictor(tmp_path, Options(**options))


def test_the_predictor_refuses_a_folder_without_a_program(tmp_path: Path) -> None:
    from lockstep.backends.paddle.predictor import open_predictor

    with pytest.raises(CheckpointError, match=r"model\.json"):
        open_predictor(tmp_path)


@pytest.mark.parametrize("to", ["paddle-inference", "torchscript", "torch-export", "onnx"])
def test_formats_in_fp32_refuse_bf16(weights: Path, to: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"fp32.* bf16"):
        lockstep.load(weights).export(tmp_path / "model", to=to, precision="bf16", compare=False)
    assert not (tmp_path / "model").exists()


WORDS: list[tuple[dict[str, Any], str]] = [
    ({}, "rounded down"),
    ({"eval_side_rounding": "nearest"}, "halves up"),
    ({"eval_side_rounding": "float32_down"}, "computed in float32"),
    ({}, "to the even number"),
    ({"eval_offset_rounding": "up"}, "rounded up"),
    ({}, "fills the rounded sides"),
    ({"eval_sampling": "half_pixel_symmetric"}, "scale of the shorter side"),
    ({"eval_sampling": "asymmetric"}, "i times the scale"),
    ({"exif_orientation": True}, "EXIF"),
]


@pytest.mark.parametrize(("changes", "words"), WORDS)
def test_preparation_is_in_words(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    write_preprocessing(tmp_path, Recipe(**changes), normalises=False)
    description = (tmp_path / FILE).read_text(encoding="utf-8").split('"""')[1]
    assert words in description
