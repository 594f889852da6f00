"""SavedModel: the recipe's preprocessing, the model and softmax in one graph."""

from pathlib import Path

import numpy as np
import tensorflow as tf

from lockstep.backends.tensorflow.model import Model, Tensor, graph
from lockstep.recipes import Recipe
from lockstep.system.errors import CheckpointError


def export(recipe: Recipe, tensors: dict[str, np.ndarray], classes: tuple[str, ...], folder: Path) -> None:
    """Write a SavedModel.

    Its `serving_default` takes `images`, uint8 RGB [N, H, W, 3], and returns `classes`, int64 [N], and `probabilities`,
    float32 [N, logits]. Images of the evaluation's size are used unchanged. Others are resized and cropped as in evaluation.
    TensorFlow's resize may round a pixel differently than the loaders. The names of the classes are in
    `assets.extra/classes.txt`, one on each line. Raises `CheckpointError` if TensorFlow has no such resize.
    """
    if recipe.interpolation == "bicubic" and not recipe.antialias:
        raise CheckpointError(
            "a SavedModel resizes images, and TensorFlow's bicubic resize without antialiasing weighs pixels differently "
            "(a = -0.5) than evaluation does (a = -0.75); export weights whose recipe has antialias: true, or export to "
            "onnx, which leaves the resize to you"
        )
    module = _Serving(recipe, tensors)
    images = tf.TensorSpec([None, None, None, 3], tf.uint8, name="images")
    tf.saved_model.save(module, str(folder), {"serving_default": graph(module.serve, input_signature=[images])})
    if classes:
        extra = folder / "assets.extra"  # the folder of a SavedModel for files that TensorFlow does not read
        extra.mkdir()
        (extra / "classes.txt").write_text("".join(f"{name}\n" for name in classes), encoding="utf-8")


class _Serving(tf.Module):  # type: ignore[misc]
    def __init__(self, recipe: Recipe, tensors: dict[str, np.ndarray]) -> None:
        super().__init__()
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
        resized = recipe.eval_resize * size // tf.reduce_min(size)
        top, left = tf.unstack(tf.cast(tf.round(tf.cast(resized - recipe.eval_crop, tf.float32) / 2), tf.int32))
        whole = tf.image.resize(images, resized, method=recipe.interpolation, antialias=recipe.antialias)
        square = whole[:, top : top + recipe.eval_crop, left : left + recipe.eval_crop]
        return tf.saturate_cast(tf.round(square), tf.uint8)
