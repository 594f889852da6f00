from typing import Any

import numpy as np
import pytest
import torch

from lockstep.backends.torch.update import LossScale
from lockstep.data import Batch
from lockstep.recipes import Recipe
from tests.backends.native import Facts, Groups, Steps

FACTS = Facts(
    step="_loss",
    reason="can't allocate memory",
    full="Tried to allocate 20 GiB",
    advice="doctor",
    weights=("nvidia-pytorch", "a.pth", ("tensors", "momentum")),
    last_rank={"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "13"},
    optimizers=("adamw", "nadam"),
    borrows=True,
)


def find_obstacle(precision: str) -> str | None:
    return None


def images(normalised: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(normalised.transpose(0, 3, 1, 2).copy())


def array(logits: torch.Tensor) -> np.ndarray:
    return logits.detach().numpy()


def exhaust_host(*_: object) -> torch.Tensor:
    return torch.empty(2**50)


def exhaust_gpu(*_: object) -> torch.Tensor:
    raise torch.OutOfMemoryError(f"CUDA out of memory. {FACTS.full}.")


def find_trained(module: torch.nn.Module) -> set[str]:
    return {name for name, parameter in module.named_parameters() if parameter.requires_grad}


def gradients(module: torch.nn.Module, x: torch.Tensor) -> dict[str, np.ndarray]:
    module(x).square().sum().backward()
    return {
        name: parameter.grad.numpy()
        for name, parameter in module.named_parameters()
        if parameter.grad is not None
    }


def set_gpus(patch: pytest.MonkeyPatch, count: int) -> None:
    patch.setattr(torch.cuda, "is_available", lambda: count > 0)
    patch.setattr(torch.cuda, "device_count", lambda: count)


def loss_scale(recipe: Recipe) -> LossScale:
    return LossScale(recipe, torch.device("cpu"))


def take_step(scale: LossScale, gradients: list[list[float]]) -> list[list[float]]:
    """Take the step with `torch.optim.SGD`, which divides by the scale itself and skips the step on
    an overflow."""
    weights = [torch.ones(len(gradient), requires_grad=True) for gradient in gradients]
    optimizer = torch.optim.SGD(weights, lr=torch.tensor(0.5), momentum=0.9, fused=True)
    for weight, gradient in zip(weights, gradients, strict=True):
        weight.grad = torch.tensor(gradient)

    def update(value: torch.Tensor | None, overflow: torch.Tensor | None) -> None:
        # type: ignore[attr-defined]
        optimizer.grad_scale = value
        optimizer.found_inf = overflow
        optimizer.step()

    scale.step([torch.tensor(gradient) for gradient in gradients], update)
    return [weight.tolist() for weight in weights]


def tensorfloat() -> list[bool]:
    return [torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32]


def set_tensorfloat(used: list[bool]) -> None:
    torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = used


def step_in_groups(groups: Groups, momentum: float) -> list[np.ndarray]:
    """Take a first step with `torch.optim.SGD`, a group for each tensor."""
    own = []
    for weight, gradient, rate in groups:
        parameter = torch.nn.Parameter(torch.tensor(weight))
        parameter.grad = torch.tensor(gradient)
        own.append({"params": [parameter], "lr": rate})
    torch.optim.SGD(own, momentum=momentum, nesterov=True).step()
    return [group["params"][0].detach().numpy() for group in own]


def take_own_steps(recipe: Recipe, weight: np.ndarray, steps: Steps) -> np.ndarray:
    parameter = torch.nn.Parameter(torch.tensor(weight))
    facts = {"betas": (recipe.beta1, recipe.beta2), "eps": recipe.optimizer_epsilon}
    facts |= {"weight_decay": recipe.weight_decay}
    own: torch.optim.Optimizer = torch.optim.AdamW([parameter], **facts)
    if recipe.optimizer == "nadam":
        own = torch.optim.NAdam([parameter], **facts, decoupled_weight_decay=True)
    for gradient, rate in steps:
        own.param_groups[0]["lr"] = rate
        parameter.grad = torch.tensor(gradient)
        own.step()
    return parameter.detach().numpy()


def count_differentiated_convolutions(engine: Any, batch: Batch) -> int:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as trace:
        engine.train([batch], 0)
    events = {event.key: event.count for event in trace.key_averages()}
    return events.get("aten::convolution_backward", 0)
