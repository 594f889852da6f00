from typing import Any

import numpy as np
import pytest

from lockstep.backends.paddle.loss_scale import LossScale  # first, because it suppresses Paddle's greetings
from lockstep.recipes import Recipe

# isort: split
import paddle

FRAMEWORK = "paddle"
LOGITS = np.float32
ANY_SIZE = True
ADVICE = "paddlepaddle-gpu"
REASON = "Fail to alloc memory"
STEP = "_gradients_of_part"
BATCH = "16 images"


def images(normalised: np.ndarray) -> Any:
    return paddle.to_tensor(normalised.transpose(0, 3, 1, 2))


def array(logits: Any) -> np.ndarray:
    return logits.numpy()


def exhausted(*_: object) -> Any:
    return paddle.empty([2**50])


def trained(module: Any) -> set[str]:
    return {name for name, parameter in module.named_parameters() if not parameter.stop_gradient}


def gradients(module: Any, x: Any) -> dict[str, np.ndarray]:
    module(x).square().sum().backward()
    return {name: parameter.grad.numpy() for name, parameter in module.named_parameters() if parameter.grad is not None}


def set_gpus(patch: pytest.MonkeyPatch, count: int) -> None:
    patch.setattr(paddle, "is_compiled_with_cuda", lambda: count > 0)
    patch.setattr(paddle.device.cuda, "device_count", lambda: count)


def loss_scale(recipe: Recipe) -> LossScale:
    return LossScale(recipe)


def stepped(scale: LossScale, gradients: list[list[float]]) -> list[list[float]]:
    unscaled, _ = scale.step(paddle.to_tensor(np.concatenate(gradients).astype(np.float32)))
    ends = np.cumsum([len(gradient) for gradient in gradients])
    return [part.tolist() for part in np.split(1 - 0.5 * unscaled.numpy(), ends[:-1])]
