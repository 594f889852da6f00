from typing import Any

import numpy as np
import pytest

# First, because it suppresses Paddle's greetings
from lockstep.backends.paddle.update import LossScale
from lockstep.backends.paddle.world import PaddleWorld
from lockstep.data import Batch
from lockstep.recipes import Recipe
from tests.backends.native import Facts, Groups, Steps

# isort: split
import paddle

FACTS = Facts(
    step="_gradients_of_part",
    reason="Fail to alloc memory",
    full="Out of memory error on GPU 0. Cannot allocate 20.0GB memory on GPU 0",
    advice="paddlepaddle-gpu",
    weights=("nvidia-paddle", "a", ("tensors", "momentum")),
    last_rank={
        "PADDLE_MASTER": "10.0.0.1:13",
        "PADDLE_TRAINER_ENDPOINTS": "10.0.0.1:11,10.0.0.1:12,10.0.0.2:21,10.0.0.2:22",
        "PADDLE_CURRENT_ENDPOINT": "10.0.0.2:22",
        "PADDLE_TRAINERS_NUM": "4",
        "PADDLE_TRAINER_ID": "3",
    },
    optimizers=("adamw", "lamb"),
    borrows=True,
    counted="on",
    compiles_quickly=True,
)


def find_obstacle(precision: str) -> str | None:
    return None


class OfTwo(PaddleWorld):
    """Rank 0 of two. The other rank never starts, so this world is only for building an engine."""

    def __init__(self) -> None:
        self.rank = 0
        self.ranks = 2
        self.on_gpu = False
        self.device = "made up"


def images(normalised: np.ndarray) -> Any:
    return paddle.to_tensor(normalised.transpose(0, 3, 1, 2))


def array(logits: Any) -> np.ndarray:
    return logits.numpy()


def exhaust_host(*_: object) -> Any:
    return paddle.empty([2**50])


def exhaust_gpu(*_: object) -> Any:
    raise MemoryError(
        f"\n\nResourceExhaustedError: \n\n{FACTS.full}, 70.0GB memory has been allocated."
        "\n\nPlease check it.\n"
    )


def find_trained(module: Any) -> set[str]:
    return {name for name, parameter in module.named_parameters() if not parameter.stop_gradient}


def gradients(module: Any, x: Any) -> dict[str, np.ndarray]:
    module(x).square().sum().backward()
    return {
        name: parameter.grad.numpy()
        for name, parameter in module.named_parameters()
        if parameter.grad is not None
    }


def set_gpus(patch: pytest.MonkeyPatch, count: int) -> None:
    patch.setattr(paddle, "is_compiled_with_cuda", lambda: count > 0)
    patch.setattr(paddle.device.cuda, "device_count", lambda: count)


def loss_scale(recipe: Recipe) -> LossScale:
    return LossScale(recipe)


def take_step(scale: LossScale, gradients: list[list[float]]) -> list[list[float]]:
    unscaled, _ = scale.step(paddle.to_tensor(np.concatenate(gradients).astype(np.float32)))
    ends = np.cumsum([len(gradient) for gradient in gradients])
    return [part.tolist() for part in np.split(1 - 0.5 * unscaled.numpy(), ends[:-1])]


def step_in_groups(groups: Groups, momentum: float) -> list[np.ndarray]:
    """Take a first step with Paddle's Momentum, a group for each tensor."""
    own = []
    for weight, gradient, rate in groups:
        initial = paddle.nn.initializer.Assign(weight)
        parameter = paddle.create_parameter(
            list(weight.shape), "float32", default_initializer=initial
        )
        parameter.grad = paddle.to_tensor(gradient)
        own.append({"params": [parameter], "learning_rate": rate})
    paddle.optimizer.Momentum(1.0, momentum, own, use_nesterov=True).step()
    return [group["params"][0].numpy() for group in own]


def take_own_steps(recipe: Recipe, weight: np.ndarray, steps: Steps) -> np.ndarray:
    initial = paddle.nn.initializer.Assign(weight)
    parameter = paddle.create_parameter(list(weight.shape), "float32", default_initializer=initial)
    own: Any
    betas = {"beta1": recipe.beta1, "beta2": recipe.beta2, "epsilon": recipe.optimizer_epsilon}
    if recipe.optimizer == "adamw":
        own = paddle.optimizer.AdamW(
            1.0, weight_decay=recipe.weight_decay, parameters=[parameter], **betas
        )
    else:
        own = paddle.optimizer.Lamb(1.0, recipe.weight_decay, parameters=[parameter], **betas)
    for gradient, rate in steps:
        own.set_lr(rate)
        parameter.grad = paddle.to_tensor(gradient)
        own.step()
    return parameter.numpy()


def count_differentiated_convolutions(engine: Any, batch: Batch) -> int:
    engine.train([batch], 0)
    (program,) = engine._gradients_of_part._programs.values()
    (graph,) = [
        cell.cell_contents
        for cell in program.__closure__
        if isinstance(cell.cell_contents, paddle.static.Program)
    ]
    return [operation.name() for operation in graph.global_block().ops].count("pd_op.conv2d_grad")
