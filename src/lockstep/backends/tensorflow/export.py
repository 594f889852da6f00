"""SavedModel: the recipe's preprocessing, the model and softmax in one graph."""

from pathlib import Path

import numpy as np
import tensorflow as tf

from lockstep.backends.shared.resizing import samples_itself
from lockstep.backends.tensorflow.model import Model, Tensor, graph
from lockstep.recipes import Recipe
from lockstep.system.errors import CheckpointError
from lockstep.system.files import write_lines


def export(recipe: Recipe, tensors: dict[str, np.ndarray], classes: tuple[str, ...], folder: Path) -> None:
    """Write a SavedModel.

    Its `serving_default` takes `images`, uint8 RGB [N, H, W, 3], and returns `classes`, int64 [N], and `probabilities`,
    float32 [N, logits]. Images of the evaluation's size are used unchanged. Others are resized and cropped as in evaluation.
    TensorFlow's resize may round a pixel differently than the loaders. The names of the classes are in
    `assets.extra/classes.txt`, one on each line. Raises `CheckpointError` if TensorFlow has no such resize, or if the graph
    would have to filter in the geometry of an original (`lockstep.backends.shared.resizing`).
    """
    if recipe.interpolation == "bicubic" and not recipe.eval_antialias:
        raise CheckpointError(
            "a SavedModel resizes images, and TensorFlow's bicubic resize without antialiasing weighs pixels differently "
            "(a = -0.5) than evaluation does (a = -0.75); export weights whose recipe has eval_antialias: true, or export "
            "to onnx, which leaves the resize to you"
        )
    module = _Serving(recipe, tensors)
    images = tf.TensorSpec([None, None, None, 3], tf.uint8, name="images")
    tf.saved_model.save(module, str(folder), {"serving_default": graph(module.serve, input_signature=[images])})
    if classes:
        extra = folder / "assets.extra"  # the folder of a SavedModel for files that TensorFlow does not read
        extra.mkdir()
        write_lines(extra / "classes.txt", classes)


def answers(folder: Path, images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return classes and probabilities of uint8 images, from the SavedModel in a folder, loaded by TensorFlow's loader."""
    loaded = tf.saved_model.load(str(folder))
    found = loaded.signatures["serving_default"](images=tf.constant(images))
    return found["classes"].numpy(), found["probabilities"].numpy()


class _Serving(tf.Module):  # type: ignore[misc]
    def __init__(self, recipe: Recipe, tensors: dict[str, np.ndarray]) -> None:
        super().__init__()
        self._samples = samples_itself(recipe, "a SavedModel")
        self._recipe, self._model = recipe, Model(recipe, tensors)
        self._mean, self._std = tf.constant(recipe.mean), tf.constant(recipe.std)

    def serve(self, images: Tensor) -> dict[str, Tensor]:
        """Return classes and probabilities of images of one size."""
        side = self._recipe.eval_crop
        size = tf.shape(images)[1:3]
        squares = tf.cond(tf.reduce_all(size == side), lambda: images, lambda: self._centre(images, size))
        squares = tf.ensure_shape(squares, [None, side, side, 3])
        logits = self._model((tf.cast(squares, tf.float32) - self._mean) / self._std)
        return {"classes": tf.argmax(logits, axis=1), "probabilities": tf.nn.softmax(logits)}

    def _centre(self, images: Tensor, size: Tensor) -> Tensor:
        """Return the centre squares as in `lockstep.recipes.order.centre_plan`, rounded to whole numbers."""
        recipe = self._recipe
        if self._samples:
            return self._sampled(images, size)
        resized = recipe.eval_resize * size // tf.reduce_min(size)
        top, left = tf.unstack(tf.cast(tf.round(tf.cast(resized - recipe.eval_crop, tf.float32) / 2), tf.int32))
        whole = tf.image.resize(images, resized, method=recipe.interpolation, antialias=recipe.eval_antialias)
        square = whole[:, top : top + recipe.eval_crop, left : left + recipe.eval_crop]
        return tf.saturate_cast(tf.round(square), tf.uint8)

    def _sampled(self, images: Tensor, size: Tensor) -> Tensor:
        """Return the centre squares in the geometry of the recipe, as `lockstep.data.decoding.sampling` does."""
        recipe, shorter = self._recipe, tf.reduce_min(size)
        resized = _sides(recipe, size, shorter)
        surplus = resized - recipe.eval_crop
        half = surplus // 2
        odd = {"even": half % 2, "up": 1, "down": 0}[recipe.eval_offset_rounding]
        offset = tf.cast(half + surplus % 2 * odd, tf.float32)
        lengths, wanted = tf.cast(size, tf.float32), tf.cast(resized, tf.float32)
        steps, starts = lengths / wanted, tf.zeros(2)
        if recipe.eval_sampling == "half_pixel_symmetric":
            steps = tf.fill([2], tf.cast(shorter, tf.float32) / tf.reduce_min(wanted))
            starts = lengths / 2 - wanted * steps / 2
        elif recipe.eval_sampling == "asymmetric":
            starts = 0.5 - 0.5 * steps
        pixels = tf.cast(images, tf.float32)
        for axis in range(2):
            at = starts[axis] + (offset[axis] + tf.range(recipe.eval_crop, dtype=tf.float32) + 0.5) * steps[axis] - 0.5
            pixels = _blended(pixels, at, size[axis], axis + 1)
        return tf.saturate_cast(tf.floor(pixels + 0.5), tf.uint8)


def _sides(recipe: Recipe, size: Tensor, shorter: Tensor) -> Tensor:
    """Return height and width after the resize, int32 [2], rounded as `eval_side_rounding` says."""
    if recipe.eval_side_rounding == "nearest":
        return (2 * recipe.eval_resize * size + shorter) // (2 * shorter)
    if recipe.eval_side_rounding == "down":
        return recipe.eval_resize * size // shorter
    scale = tf.constant(recipe.eval_resize, tf.float32) / tf.cast(shorter, tf.float32)
    return tf.maximum(tf.cast(tf.cast(size, tf.float32) * scale, tf.int32), recipe.eval_crop)


def _blended(pixels: Tensor, at: Tensor, length: Tensor, axis: int) -> Tensor:
    """Return pixels sampled at these positions along an axis, from the two nearest of each."""
    lower = tf.floor(at)
    share = tf.reshape(at - lower, [-1, 1, 1] if axis == 1 else [-1, 1])
    first = tf.cast(lower, tf.int32)
    before, after = (tf.gather(pixels, tf.clip_by_value(first + i, 0, length - 1), axis=axis) for i in range(2))
    return before + (after - before) * share
