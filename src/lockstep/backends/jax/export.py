"""StableHLO: the recipe's preprocessing, the model and softmax as two programs of `jax.export`.

There are two because XLA compiles a program for each shape of its input: photos of another size
then need a new resize, but no new model. Weights are an argument of the model, since XLA would
spend minutes on computing with constants.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import flatbuffers  # noqa: F401  # with which jax.export writes and reads programs
import jax
import jax.numpy as jnp
import numpy as np
from jax import export as jax_export
from safetensors.numpy import load as parse
from safetensors.numpy import save as serialise

from lockstep.backends.jax.model import Array, Arrays, Pass
from lockstep.backends.jax.programs import normalise
from lockstep.backends.shared.channels_last import convert_all, new_arrays
from lockstep.backends.shared.resize import Geometry, Operations, crop_centre, read_geometry
from lockstep.recipes import Recipe
from lockstep.system.files import write_lines
from lockstep.system.regular_files import WEIGHTS, read_regular

RESIZE = "resize.stablehlo"
MODEL = "model.stablehlo"
TENSORS = "weights.safetensors"
CLASSES = "classes.txt"
PLATFORMS = ("cpu", "cuda", "rocm", "tpu")
"""What the programs run on."""


def export_stablehlo(
    recipe: Recipe, tensors: dict[str, np.ndarray], classes: tuple[str, ...], folder: Path
) -> None:
    """Write `resize.stablehlo` and `model.stablehlo`, programs for `jax.export.deserialize`,
    `weights.safetensors` and `classes.txt`.

    The first takes `images`, uint8 RGB [N, H, W, 3] of any size, and returns squares, uint8
    [N, S, S, 3], resized and cropped as in evaluation (`lockstep.backends.shared.resize`). The
    second takes a dictionary of the weights, float32, and squares, and returns a dictionary:
    `classes`, int32 [N], and `probabilities`, float32 [N, logits]. Raises `CheckpointError` if the
    tensors do not fit.
    """
    arrays = convert_all(new_arrays(recipe), tensors, "weights")
    shapes = jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), arrays)
    side = recipe.eval_crop
    model = _export(partial(_answer, recipe), f"n, {side}, {side}, 3", shapes)
    # Places and sums of the resize are int64 and float64; what goes in and out is not.
    with jax.enable_x64(True):
        resize = _export(partial(_crop, read_geometry(recipe)), "n, height, width, 3")
    folder.mkdir()
    (folder / TENSORS).write_bytes(serialise(arrays))
    (folder / RESIZE).write_bytes(resize)
    (folder / MODEL).write_bytes(model)
    write_lines(folder / CLASSES, classes)


def _export(function: Callable[..., Any], shape: str, *first: Any) -> bytearray:
    """Return the program of a function of uint8 images, whose shape has numbers and names, after
    the `first` arguments."""
    images = jax.ShapeDtypeStruct(jax_export.symbolic_shape(shape), jnp.uint8)
    return jax_export.export(jax.jit(function), platforms=PLATFORMS)(*first, images).serialize()


def _answer(recipe: Recipe, values: Arrays, squares: Array) -> dict[str, Array]:
    logits = Pass(recipe, values, training=False).logits(normalise(recipe, squares))
    return {
        "classes": jnp.argmax(logits, axis=1).astype(jnp.int32),
        "probabilities": jax.nn.softmax(logits),
    }


def _crop(geometry: Geometry, images: Array) -> Array:
    """Return what evaluation sees of photos: uint8 [N, S, S, 3]."""
    squares = crop_centre(images, geometry, _Operations())
    return jnp.transpose(squares, (0, 2, 3, 1)).astype(jnp.uint8)


def open_program(folder: Path) -> Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Return the programs in a folder, loaded by JAX's own loader, one after the other: from uint8
    images to classes and probabilities. They are compiled for each shape of images."""
    resize, model = (_load(folder / name) for name in (RESIZE, MODEL))
    values = jax.device_put(parse(read_regular(folder / TENSORS, WEIGHTS)))

    def answer(images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        answers = model(values, resize(images))
        return np.asarray(answers["classes"], np.int64), np.asarray(answers["probabilities"])

    return answer


def _load(file: Path) -> Callable[..., Any]:
    program: Callable[..., Any] = jax.jit(
        jax_export.deserialize(bytearray(read_regular(file, WEIGHTS))).call
    )
    return program


class _Operations(Operations):
    """`lockstep.backends.shared.resize.Operations` of JAX. Lengths may be symbols."""

    module = jnp

    def length(self, images: Array, axis: int) -> Any:
        return images.shape[axis]

    def integer(self, length: Any) -> Array:
        return jnp.asarray(length, jnp.int64)

    def count(self, first: Any, end: Any) -> Array:
        return jnp.arange(end - first, dtype=jnp.float64) + self.real(self.integer(first))

    def cast(self, value: Array, dtype: str) -> Array:
        return value.astype(dtype)

    def round_to_float32(self, value: Array) -> Array:
        # Without this, XLA leaves out a conversion that another one undoes.
        return jax.lax.reduce_precision(value, exponent_bits=8, mantissa_bits=23)

    def total(self, value: Array, axis: int) -> Array:
        return jnp.sum(value, axis=axis, keepdims=True)

    def take(self, pixels: Array, index: Array, axis: int) -> Array:
        return jnp.take(pixels, index, axis=axis, mode="clip")

    def product(self, a: Array, b: Array) -> Array:
        return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)
