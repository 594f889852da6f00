"""Programs for LiteRT (TensorFlow Lite), which runs on phones: the model and softmax for one
square, in fp32 or int8.

TensorFlow's own converter writes them, and its own interpreter runs them.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import tensorflow as tf

from lockstep.backends.shared.import_side_effects import silence_output
from lockstep.backends.tensorflow.export import SquareProgram
from lockstep.backends.tensorflow.model import graph
from lockstep.recipes import Recipe
from lockstep.system.machine import share_of_cores


def build_program(
    recipe: Recipe, tensors: dict[str, np.ndarray], squares: Iterable[np.ndarray] | None
) -> bytes:
    """Return the content of `model.tflite`.

    The program takes `images`, a square, uint8 RGB [1, S, S, 3], and returns `classes`, int64 [1],
    and `probabilities`, float32 [1, logits]. With `squares`, uint8 [N, S, S, 3], it is quantised to
    int8 with the range of every value on them. Raises `CheckpointError` if the tensors do not fit.
    """
    module = SquareProgram(recipe, tensors)
    images = tf.TensorSpec([1, recipe.eval_crop, recipe.eval_crop, 3], tf.uint8, name="images")
    serve = graph(module.serve, input_signature=[images]).get_concrete_function()
    converter = tf.lite.TFLiteConverter.from_concrete_functions([serve], module)
    if squares is None:
        with silence_output():
            return bytes(converter.convert())
    return _quantise(converter, squares)


def _quantise(converter: tf.lite.TFLiteConverter, squares: Iterable[np.ndarray]) -> bytes:
    """Return a program in int8: weights with a scale for each output channel, values with one."""

    def yield_inputs() -> Iterator[dict[str, np.ndarray]]:
        for batch in squares:
            for square in batch:
                yield {"images": square[None]}

    converter.optimizations = [tf.lite.Optimize.DEFAULT]
    converter.representative_dataset = yield_inputs
    # With 8 bits, probabilities would be multiples of 1/256. Only the debugger can leave out an
    # operator.
    options = tf.lite.experimental.QuantizationDebugOptions(denylisted_ops=["SOFTMAX"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        # Its output stays, as the progress of the calibration is among it.
        debugger = tf.lite.experimental.QuantizationDebugger(
            converter=converter, debug_dataset=yield_inputs, debug_options=options
        )
    with silence_output():
        return bytes(debugger.get_nondebug_quantized_model())


def load_program(data: bytes) -> Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Return a program in TensorFlow's interpreter: from a square, uint8 [1, S, S, 3], to classes
    and probabilities."""
    with silence_output():  # it warns that the interpreter moves to another package
        interpreter = tf.lite.Interpreter(model_content=data, num_threads=share_of_cores())
        interpreter.allocate_tensors()
    run = interpreter.get_signature_runner()

    def answer(images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        answers = run(images=images)
        return answers["classes"], answers["probabilities"]

    return answer
