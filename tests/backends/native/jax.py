from functools import partial
from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lockstep.backends.jax import convolutions, model, programs
from lockstep.backends.jax.update import LossScale
from lockstep.data import Batch
from lockstep.recipes import Execution, Recipe
from tests.backends.native import Facts, Groups

FACTS = Facts(
    step="_train_step",
    reason="Out of memory allocating",
    full="Out of memory allocating 21474836480 bytes",
    advice="jax-cuda",
    scenarios=("local", "synchronised"),
    weights=("torchax", "a.npz", ("tensors",)),
    last_rank={
        "JAX_COORDINATOR_ADDRESS": "10.0.0.1:13",
        "LOCKSTEP_HOSTS_ADDRESS": "10.0.0.1:14",
        "LOCKSTEP_HOSTS_KEY": "a secret of this start",
    },
)


def find_obstacle(precision: str) -> str | None:
    return None


def images(normalised: np.ndarray) -> Any:
    return jnp.asarray(normalised)


def array(logits: Any) -> np.ndarray:
    return np.asarray(logits)


def exhaust_host(*_: object) -> Any:
    raise jax.errors.JaxRuntimeError(f"RESOURCE_EXHAUSTED: {FACTS.reason} 1125899906842624 bytes.")


def exhaust_gpu(*_: object) -> Any:
    raise jax.errors.JaxRuntimeError(f"RESOURCE_EXHAUSTED: {FACTS.full}.")


def find_trained(module: Any) -> set[str]:
    return set(module.params)


def gradients(module: Any, x: Any) -> dict[str, np.ndarray]:
    def compute_loss(params: Any) -> Any:
        return jnp.sum(jnp.square(module.apply(params, x)))

    return {
        name: np.asarray(value) for name, value in jax.grad(compute_loss)(module.params).items()
    }


class _Gpu:
    platform = "gpu"

    def __init__(self, number: int) -> None:
        self.device_kind = f"GPU {number}"


def set_gpus(patch: pytest.MonkeyPatch, count: int) -> None:
    cpus = jax.local_devices(backend="cpu")
    gpus = [_Gpu(number) for number in range(count)]
    patch.setattr(jax, "local_devices", lambda *, backend=None: cpus if backend else gpus or cpus)


def loss_scale(recipe: Recipe) -> LossScale:
    return LossScale(recipe)


def take_step(scale: LossScale, gradients: list[list[float]]) -> list[list[float]]:
    by_name = {str(number): jnp.array(gradient) for number, gradient in enumerate(gradients)}
    unscaled, used, scale.state = scale.step(scale.state, by_name, scale.adaptation)
    return [
        (1 - 0.5 * jnp.where(used is None or used, gradient, 0.0)).tolist()
        for gradient in unscaled.values()
    ]


def step_in_groups(groups: Groups, momentum: float) -> list[np.ndarray]:
    """Take a first step by the formula: JAX itself has no optimizers."""
    return [weight - rate * (1 + momentum) * gradient for weight, gradient, rate in groups]


def count_differentiated_convolutions(engine: Any, batch: Batch) -> int:
    count = 0

    @partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4, 5, 6))
    def convolve(x: Any, kernel: Any, *settings: Any) -> Any:
        *others, on_gpu = settings
        return convolutions.convolve(x, kernel, *others, on_gpu=on_gpu)

    def keep(x: Any, kernel: Any, *settings: Any) -> tuple[Any, Any]:
        return convolve(x, kernel, *settings), (x, kernel)

    def differentiate(*arguments: Any) -> Any:
        nonlocal count
        count += 1
        *settings, on_gpu, kept, d_y = arguments
        compute = partial(convolutions.convolve, on_gpu=on_gpu)
        return jax.vjp(lambda *operands: compute(*operands, *settings), *kept)[1](d_y)

    convolve.defvjp(keep, differentiate)

    def convolve_counted(x: Any, kernel: Any, *settings: Any, on_gpu: bool) -> Any:
        return convolve(x, kernel, *settings, on_gpu)

    step = programs.Step(engine._recipe, Execution(), engine._world)
    with patch.object(model, "convolve", convolve_counted):
        jax.eval_shape(
            step.take,
            engine._values,
            {},
            {},
            jax.tree.map(lambda column: column[0], engine._table),
            engine._numbers,
            engine._place_batch(batch),
        )
    return count
