"""A program for Paddle Inference: the recipe's preprocessing, the model and softmax."""

from pathlib import Path

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import static

from lockstep.backends.paddle.model import Pass
from lockstep.backends.paddle.program import static_mode
from lockstep.backends.paddle.world import Tensor
from lockstep.models.architectures import model_spec
from lockstep.models.architectures import tensors as tensors_of
from lockstep.models.state import check_fit
from lockstep.recipes import Recipe
from lockstep.system.errors import CheckpointError
from lockstep.system.files import write_lines


def export(
    recipe: Recipe, tensors: dict[str, np.ndarray], classes: tuple[str, ...], folder: Path, *, logits: bool = False
) -> None:
    """Write `model.json`, the program, and `model.pdiparams`, its weights.

    The program takes `images`: uint8 RGB [N, S, S, 3], where S is the recipe's `eval_crop`. It returns classes, int64 [N],
    and probabilities, float32 [N, logits], in this order. Batch norm is not folded in the program; Paddle Inference folds
    it. With `logits` it returns only the logits, float32 [N, logits]. The names of the classes are in `classes.txt`, one on
    each line. Raises `CheckpointError` if the recipe computes in another precision than fp32, or if the tensors do not fit.
    """
    if recipe.precision != "fp32":
        raise CheckpointError(
            f"a program for Paddle Inference is in fp32, not in {recipe.precision}; leave out precision here: "
            "the precision is chosen when the program is opened for prediction"
        )
    table = {tensor.name: tensor.shape for tensor in tensors_of(model_spec(recipe.model), recipe.logits)}
    check_fit(table, tensors, "weights")
    folder.mkdir()
    scope, cpu = static.Scope(), paddle.CPUPlace()
    with static_mode(), static.scope_guard(scope):
        program, images, outputs = _program(recipe, table, returns_logits=logits)
        for name, value in tensors.items():
            scope.var(name).get_tensor().set(np.ascontiguousarray(value, np.float32), cpu)
        static.save_inference_model(str(folder / "model"), [images], outputs, static.Executor(cpu), program=program)
    write_lines(folder / "classes.txt", classes)


def answers(folder: Path, images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return classes and probabilities of uint8 images, from the program in a folder, run by Paddle Inference."""
    from lockstep.backends.paddle.predictor import open_predictor  # which makes the process keep freed memory

    return open_predictor(folder).predict(images)


def _program(
    recipe: Recipe, table: dict[str, tuple[int, ...]], *, returns_logits: bool
) -> tuple[static.Program, Tensor, list[Tensor]]:
    """Return a program, its input, and its outputs; weights are parameters of these names and shapes."""
    program = static.Program()
    with static.program_guard(program, static.Program()):  # the second would initialise the parameters; it is not run
        images = static.data("images", [None, recipe.eval_crop, recipe.eval_crop, 3], "uint8")
        values = {name: static.create_parameter(list(shape), "float32", name=name) for name, shape in table.items()}
        mean, std = (paddle.to_tensor(list(each), dtype="float32").reshape([3, 1, 1]) for each in (recipe.mean, recipe.std))
        # Transposed first: bytes take less memory, and oneDNN subtracts from whole planes 20 times as fast as from pixels.
        x = (images.transpose([0, 3, 1, 2]).cast("float32") - mean) / std
        logits = Pass(recipe, values, training=False).logits(x)
        return program, images, [logits] if returns_logits else [logits.argmax(axis=1), F.softmax(logits, axis=1)]
