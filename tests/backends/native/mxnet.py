import json
import os
from typing import Any

import numpy as np
import pytest

# First, because it sets the number of threads
from lockstep.backends.mxnet.update import LossScale
from lockstep.data import Batch
from lockstep.recipes import Recipe
from lockstep.system.machine import arithmetic
from tests.backends.native import Facts, Groups, Steps

# isort: split
import mxnet as mx

FACTS = Facts(
    step="_forward_and_back",
    reason="Failed to allocate CPU Memory",
    full="cudaMalloc failed: out of memory",
    advice="mxnet-cu112",
    weights=("nvidia-mxnet", "a", ("tensors", "momentum")),
    last_rank={
        "DMLC_ROLE": "worker",
        "DMLC_PS_ROOT_URI": "10.0.0.1",
        "DMLC_PS_ROOT_PORT": "13",
        "DMLC_NODE_HOST": "10.0.0.2",
        "DMLC_USE_KUBERNETES": "0",
        "DMLC_LOCAL": "0",
        "DMLC_NUM_WORKER": "4",
        "DMLC_NUM_SERVER": "1",
        "LOCKSTEP_HOSTS_ADDRESS": "10.0.0.1:14",
        "LOCKSTEP_HOSTS_KEY": "a secret of this start",
    },
    optimizers=("lamb",),
    batch="a step",
    any_size=False,
    compile="on",
    compiles_quickly=True,
)


def find_obstacle(precision: str) -> str | None:
    if precision == "bf16" and "AVX-512" not in arithmetic().extensions:
        return "MXNet computes in bf16 only on processors with AVX-512"
    return None


def images(normalised: np.ndarray) -> Any:
    return mx.nd.array(normalised.transpose(0, 3, 1, 2))


def array(logits: Any) -> np.ndarray:
    return logits.asnumpy()


def exhaust_host(*_: object) -> Any:
    # MXNet refuses an array of more than 2**31 values for another reason.
    raise mx.MXNetError("Traceback:\n  Failed to allocate CPU Memory")


def exhaust_gpu(*_: object) -> Any:
    raise mx.MXNetError(f"Traceback:\n  {FACTS.full}")


def find_trained(module: Any) -> set[str]:
    return {
        name for name, parameter in module.collect_params().items() if parameter.grad_req != "null"
    }


def gradients(module: Any, x: Any) -> dict[str, np.ndarray]:
    with mx.autograd.record(train_mode=False):
        loss = module(x).square().sum()
    loss.backward(train_mode=False)
    parameters = module.collect_params().items()
    return {
        name: parameter.grad().asnumpy()
        for name, parameter in parameters
        if parameter.grad_req != "null"
    }


def set_gpus(patch: pytest.MonkeyPatch, count: int) -> None:
    patch.setattr(mx.context, "num_gpus", lambda: count)


def loss_scale(recipe: Recipe) -> LossScale:
    return LossScale(recipe, mx.cpu())


def take_step(scale: LossScale, gradients: list[list[float]]) -> list[list[float]]:
    """Take the step as the engine does, which divides by a scale that does not adapt itself."""
    gradient = mx.nd.array(np.concatenate(gradients))
    unscaled = scale.step(gradient)[0] if scale.is_dynamic else gradient / scale.fixed
    ends = np.cumsum([len(gradient) for gradient in gradients])
    return [part.tolist() for part in np.split(1 - 0.5 * unscaled.asnumpy(), ends[:-1])]


def tensorfloat() -> list[bool]:
    """Return the switch of NVIDIA's libraries. They use TensorFloat-32 unless it is 0."""
    return [os.environ.get("NVIDIA_TF32_OVERRIDE") != "0"]


def set_tensorfloat(used: list[bool]) -> None:
    os.environ["NVIDIA_TF32_OVERRIDE"] = str(int(*used))


def step_in_groups(groups: Groups, momentum: float) -> list[np.ndarray]:
    """Take a first step with MXNet's NAG, which is SGD with Nesterov's momentum."""
    optimizer = mx.optimizer.NAG(learning_rate=1.0, momentum=momentum)
    optimizer.set_lr_mult({number: rate for number, (_, _, rate) in enumerate(groups)})
    moved = []
    for number, (weight, gradient, _) in enumerate(groups):
        array = mx.nd.array(weight)
        state = optimizer.create_state(number, array)
        optimizer.update(number, array, mx.nd.array(gradient), state)
        moved.append(array.asnumpy())
    return moved


def take_own_steps(recipe: Recipe, weight: np.ndarray, steps: Steps) -> np.ndarray:
    own = mx.optimizer.LAMB(
        learning_rate=1.0,
        beta1=recipe.beta1,
        beta2=recipe.beta2,
        epsilon=recipe.optimizer_epsilon,
        wd=recipe.weight_decay,
    )
    array = mx.nd.array(weight)
    state = own.create_state(0, array)
    for gradient, rate in steps:
        own.set_learning_rate(rate)
        own.update(0, array, mx.nd.array(gradient), state)
    return array.asnumpy()


def count_differentiated_convolutions(engine: Any, batch: Batch) -> int:
    mx.nd.waitall()
    mx.profiler.set_config(
        profile_all=True, aggregate_stats=True, continuous_dump=False, filename=os.devnull
    )
    mx.profiler.set_state("run")
    with mx.engine.bulk(0):  # otherwise many operators are one event
        engine.fetch(engine.train([batch], 0))
    mx.nd.waitall()
    mx.profiler.set_state("stop")
    counts = json.loads(mx.profiler.dumps(reset=True, format="json"))
    operators = counts["Time"]["operator"]
    return int(operators.get("_backward_Convolution", {"Count": 0})["Count"])
