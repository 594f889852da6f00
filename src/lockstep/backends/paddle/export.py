"""A program for Paddle Inference: the recipe's preprocessing, the model and softmax."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import static

from lockstep.backends.paddle.model import Pass
from lockstep.backends.paddle.program import static_mode
from lockstep.backends.paddle.world import Tensor
from lockstep.backends.shared.operators import Operand
from lockstep.backends.shared.resize import Operations, crop_centre, read_geometry
from lockstep.models.state import check_fit
from lockstep.recipes import Recipe
from lockstep.system.errors import CheckpointError
from lockstep.system.files import write_lines


def export(
    recipe: Recipe,
    tensors: dict[str, np.ndarray],
    classes: tuple[str, ...],
    folder: Path,
    *,
    logits: bool = False,
) -> None:
    """Write `model.json`, the program, and `model.pdiparams`, its weights.

    The program takes `images`, uint8 RGB [N, H, W, 3] of any size, and resizes and crops them as in
    evaluation (`lockstep.backends.shared.resize`). It returns classes, int64 [N], and
    probabilities, float32 [N, logits], in this order. Batch norm is not folded in the program;
    Paddle Inference folds it.

    With `logits` it takes squares, uint8 [N, S, S, 3] where S is the recipe's `eval_crop`, and
    returns only the logits, float32 [N, logits]. The names of the classes are in `classes.txt`, one
    on each line. Raises `CheckpointError` if the recipe computes in another precision than fp32, or
    if the tensors do not fit.
    """
    if recipe.precision != "fp32":
        raise CheckpointError(
            f"a program for Paddle Inference is in fp32, not in {recipe.precision}; leave out"
            " precision here: the precision is chosen when the program is opened for prediction"
        )
    table = {tensor.name: tensor.shape for tensor in recipe.list_tensors()}
    check_fit(table, tensors, "weights")
    folder.mkdir()
    scope = static.Scope()
    cpu = paddle.CPUPlace()
    with static_mode(), static.scope_guard(scope):
        program, images, outputs = _program(recipe, table, returns_logits=logits)
        for name, value in tensors.items():
            scope.var(name).get_tensor().set(np.ascontiguousarray(value, np.float32), cpu)
        static.save_inference_model(
            str(folder / "model"), [images], outputs, static.Executor(cpu), program=program
        )
    write_lines(folder / "classes.txt", classes)


def open_program(folder: Path) -> Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Return the program in a folder, in Paddle Inference: from uint8 images to classes and
    probabilities."""
    # Importing it makes the process keep freed memory.
    from lockstep.backends.paddle.predictor import open_predictor

    return open_predictor(folder).predict


def _program(
    recipe: Recipe, table: dict[str, tuple[int, ...]], *, returns_logits: bool
) -> tuple[static.Program, Tensor, list[Tensor]]:
    """Return a program, its input, and its outputs; weights are parameters of these names and
    shapes."""
    program = static.Program()
    # The second program would initialise the parameters; it is not run.
    with static.program_guard(program, static.Program()):
        side = recipe.eval_crop if returns_logits else None
        images = static.data("images", [None, side, side, 3], "uint8")
        values = {
            name: static.create_parameter(list(shape), "float32", name=name)
            for name, shape in table.items()
        }
        mean = paddle.to_tensor(list(recipe.mean), dtype="float32").reshape([3, 1, 1])
        std = paddle.to_tensor(list(recipe.std), dtype="float32").reshape([3, 1, 1])
        # Transposed first: bytes take less memory, and oneDNN subtracts from whole planes 20 times
        # as fast as from pixels.
        squares = images.transpose([0, 3, 1, 2]).cast("float32")
        if not returns_logits:
            squares = crop_centre(_Number(images), read_geometry(recipe), _Operations()).tensor
            squares = squares.reshape([-1, 3, recipe.eval_crop, recipe.eval_crop])
        x = (squares - mean) / std
        logits = Pass(recipe, values, training=False).logits(x)
        return (
            program,
            images,
            [logits] if returns_logits else [logits.argmax(axis=1), F.softmax(logits, axis=1)],
        )


class _Number(Operand):
    """A tensor of a static program.

    Plain numbers become tensors. Paddle's own operators would make "scale" of them, which Paddle
    Inference 3.3 with oneDNN computes wrongly: it leaves it out after a sum or a product of
    float64, and writes over values that are still needed.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def combine(self, operation: str, other: Any) -> "_Number":
        """Return the result of an operation."""
        operand = (
            other.tensor
            if isinstance(other, _Number)
            else paddle.full([], other, self.tensor.dtype)
        )
        is_quotient = operation == "divide" and self.tensor.dtype == paddle.int64
        return _Number(
            getattr(paddle, "floor_divide" if is_quotient else operation)(self.tensor, operand)
        )


class _Operations(Operations):
    """`lockstep.backends.shared.resize.Operations` of Paddle, in a static program."""

    module = paddle

    def length(self, images: _Number, axis: int) -> _Number:
        return _Number(paddle.shape(images.tensor)[axis].cast("int64"))

    def integer(self, length: _Number) -> _Number:
        return length

    def count(self, first: _Number | int, end: _Number | int) -> _Number:
        start, stop = (
            bound.tensor if isinstance(bound, _Number) else bound for bound in (first, end)
        )
        return _Number(paddle.arange(start, stop, dtype="int64").cast("float64"))

    def call(self, function: str, *arguments: Any) -> _Number:
        values = [value.tensor if isinstance(value, _Number) else value for value in arguments]
        return _Number(getattr(paddle, function)(*values))

    def cast(self, value: _Number, dtype: str) -> _Number:
        return _Number(value.tensor.cast(dtype))

    def round_to_float32(self, value: _Number) -> _Number:
        # Veltkamp's splitting: Paddle Inference 3.3 computes floor wrongly after a cast to float32
        # and back.
        shifted = value * (2.0**29 + 1.0)
        return shifted - (shifted - value)

    def total(self, value: _Number, axis: int) -> _Number:
        return _Number(value.tensor.sum(axis=axis, keepdim=True))

    def take(self, pixels: _Number, index: _Number, axis: int) -> _Number:
        return self.call("gather", pixels, index, axis)
