"""Classes and weights of models to use trained weights with."""

import math
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from PIL import Image

import lockstep
from lockstep.inference.images import read_square
from lockstep.models.state import State
from lockstep.proof.command import check_model
from lockstep.proof.record import read_proof
from lockstep.proof.runtimes import OPENERS
from lockstep.recipes import Recipe
from lockstep.weights import checkpoint, open_weights
from lockstep.weights.calibration import TemperatureFit
from tests.edges import softmax

MEAN = (100.0, 110.0, 120.0)
STD = (50.0, 60.0, 70.0)
FIT: TemperatureFit = {
    **{"temperature": 3.0, "images": 150, "loss_before": 0.5, "loss_after": 0.4},
    **{"error_percent_before": 9.0, "error_percent_after": 2.0},
}
"""What a calibration may have found."""
CLASSES = (
    *("blobs", "bricks", "checks", "dots", "grid", "rays", "rings", "spiral", "stripes", "zigzag"),
)


def random_tensors(recipe: Recipe, seed: int) -> dict[str, np.ndarray]:
    """Return weights that give different images different results: scaled so that activations
    neither vanish nor grow."""
    random = np.random.default_rng(seed)
    values = {}
    for tensor in recipe.list_tensors():
        drawn = random.standard_normal(tensor.shape, np.float32)
        if tensor.role in ("conv_weight", "fc_weight"):
            drawn *= math.sqrt(2 / math.prod(tensor.shape[1:]))
        elif tensor.role in ("bn_scale", "bn_var"):
            drawn = np.exp(0.2 * drawn)
        values[tensor.name] = drawn
    return values


def check_with_proof(folder: Path, target: str) -> None:
    """Compare a program with its proof in its own runtime, as `check.py` does."""
    proof = read_proof(folder / "proof")
    lines, code = check_model(proof, *OPENERS[target](folder), must_normalise=True)
    assert code == 0, lines


def image_file(folder: Path, height: int, width: int, suffix: str = ".png") -> Path:
    path = folder / f"{height}x{width}{suffix}"
    coarse = np.random.default_rng(height * width).integers(0, 256, (5, 7, 3), np.uint8)
    Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC).save(path)
    return path


def prepare_photo(path: Path, recipe: Recipe) -> np.ndarray:
    """Return float32 [1, 3, H, W] as the recipe describes it: resize the shorter side, crop the
    centre, normalise."""
    picture = Image.open(path).convert("RGB")
    width, height = picture.size
    scale = recipe.eval_resize
    size = (scale * width // height, scale) if height <= width else (scale, scale * height // width)
    bicubic = recipe.interpolation == "bicubic"
    if recipe.antialias:
        pixels = np.asarray(
            picture.resize(size, Image.Resampling.BICUBIC if bicubic else Image.Resampling.BILINEAR)
        )
    else:
        pixels = cv2.resize(
            np.asarray(picture),
            size,
            interpolation=cv2.INTER_CUBIC if bicubic else cv2.INTER_LINEAR,
        )
    top = round((size[1] - recipe.eval_crop) / 2)
    left = round((size[0] - recipe.eval_crop) / 2)
    pixels = pixels[top : top + recipe.eval_crop, left : left + recipe.eval_crop]
    normalised = (pixels.astype(np.float64) - recipe.mean) / recipe.std
    return normalised.transpose(2, 0, 1)[None].astype(np.float32)


def save_tensors(
    folder: Path,
    recipe: Recipe,
    tensors: dict[str, np.ndarray],
    *,
    classes: Sequence[str] = CLASSES,
    **others: Any,
) -> Path:
    """Write weights as a run does, with other fields of what is noted of them; return the path."""
    about = {"recipe": recipe.fields(), "classes": classes, **others}
    state = State(3, tensors, {})
    return checkpoint.save(folder / "checkpoints", state, data_digest="", about=about)


def save_random(recipe: Recipe, folder: Path, scales: dict[str, float] | None = None) -> Path:
    """Write random weights whose probabilities are not near 1, since those would hide differences;
    return the path."""
    tensors = random_tensors(recipe, 1)
    tensors["fc.weight"] = tensors["fc.weight"] / 50
    return save_tensors(folder, recipe, tensors, scales=scales)


def pictures(height: int, width: int) -> np.ndarray:
    """Return three images with large spots."""
    spots = np.random.default_rng(height).integers(0, 256, (3, 4, 4, 3), np.uint8)
    rows, columns = (np.arange(length) * 4 // length for length in (height, width))
    return spots[:, rows][:, :, columns]


def read_squares(images: np.ndarray, recipe: Recipe) -> np.ndarray:
    """Return what `predict` makes of photos, uint8 [N, H, W, 3]: uint8 [N, S, S, 3]."""
    squares = np.empty((len(images), recipe.eval_crop, recipe.eval_crop, 3), np.uint8)
    for image, square in zip(images, squares, strict=True):
        read_square(image, recipe, square)
    return squares


def compute_expected(weights: Path, photos: np.ndarray) -> np.ndarray:
    """Return the reference's probabilities of photos as `predict` prepares them, float64."""
    recipe = open_weights(weights).recipe
    squares = read_squares(photos, recipe).astype(np.float64)
    x = ((squares - recipe.mean) / recipe.std).transpose(0, 3, 1, 2)
    return softmax(np.asarray(lockstep.load(weights).on("reference").module()(x)))


def assert_answers(answers: Mapping[str, Any], wanted: np.ndarray, whole: type = np.int64) -> None:
    """Check the classes and the probabilities of a program. A relative error of a probability is an
    absolute error of a logit."""
    classes, probabilities = (np.asarray(answers[name]) for name in ("classes", "probabilities"))
    assert (classes.dtype, probabilities.dtype) == (whole, np.float32)
    assert probabilities == pytest.approx(wanted, rel=1e-5)
    assert classes.tolist() == wanted.argmax(axis=1).tolist()
    assert wanted.max() < 0.95


def open_session(model: Path | bytes) -> Any:
    """Return a session of ONNX Runtime on the CPU."""
    import onnxruntime

    return onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])


def run_alone(
    program: str, arguments: Sequence[object], batches: list[np.ndarray], folder: Path
) -> tuple[list[Path], str]:
    """Run a program with batches of images in a separate process, which imports nothing of this
    folder; return the files of the batches, and what is printed."""
    paths = [folder / f"{i}.npy" for i in range(len(batches))]
    for path, batch in zip(paths, batches, strict=True):
        np.save(path, batch)
    command = [sys.executable, "-I", "-c", program, *arguments, *paths]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, cwd=folder)
    assert done.returncode == 0, done.stderr
    return paths, done.stdout


def read_as_tensorflow_1(pixels: np.ndarray, resize: int, crop: int) -> np.ndarray:
    """Return what NVIDIA's TensorFlow code evaluates of an image, in whole numbers: uint8 [crop,
    crop, 3]."""
    import tensorflow as tf

    sides = tf.cast(tf.shape(pixels)[:2], tf.float32)
    size = tf.cast(sides * (tf.constant(resize, tf.float32) / tf.reduce_min(sides)), tf.int32)
    [resized] = tf.compat.v1.image.resize_bilinear(
        pixels[None], size, half_pixel_centers=False
    ).numpy()
    top, left = ((side - crop) // 2 for side in resized.shape[:2])
    return np.floor(resized[top : top + crop, left : left + crop] + 0.5).astype(np.uint8)
