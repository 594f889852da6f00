import json
from typing import Any

import numpy as np
import pytest

# First, because it suppresses TensorFlow's greetings
from lockstep.backends.tensorflow.update import LossScale
from lockstep.backends.tensorflow.world import TensorflowWorld
from lockstep.data import Batch
from lockstep.recipes import Recipe
from lockstep.system.machine import arithmetic
from tests.backends.native import Facts, Groups, Steps

# isort: split
import tensorflow as tf

FACTS = Facts(
    step="_train_step",
    scenarios=("local", "synchronised"),
    reason="OOM when allocating",
    full="OOM when allocating tensor with shape[64,112,112] and type float on GPU:0",
    advice="TF_CPP_MIN_LOG_LEVEL=0",
    weights=("nvidia-tensorflow", "a", ("tensors", "momentum")),
    last_rank={
        "TF_CONFIG": json.dumps(
            {
                "cluster": {"worker": ["10.0.0.1:11", "10.0.0.1:12", "10.0.0.2:21", "10.0.0.2:22"]},
                "task": {"type": "worker", "index": 3},
            }
        )
    },
    optimizers=("adamw", "rmsprop_tf"),
)


def find_obstacle(precision: str) -> str | None:
    processor = arithmetic()
    if precision == "bf16" and processor.limit and "AVX-512" not in processor.extensions:
        return (
            f"TensorFlow asks oneDNN for what {processor.limit} forbids it; without that limit it"
            " computes bf16 itself"
        )
    return None


class OfTwo(TensorflowWorld):
    """Rank 0 of two. The other rank never starts, so this world is only for building an engine."""

    rank = 0
    ranks = 2

    def __init__(self, on_gpu: bool) -> None:
        self.on_gpu = on_gpu
        self.device = "made up"


def images(normalised: np.ndarray) -> Any:
    return tf.constant(normalised)


def array(logits: Any) -> np.ndarray:
    return logits.numpy()


def exhaust_host(*_: object) -> Any:
    # TensorFlow would ask for memory again for ten seconds.
    raise tf.errors.ResourceExhaustedError(
        None, None, "OOM when allocating tensor with shape[64,112,112]\nand much more"
    )


def exhaust_gpu(*_: object) -> Any:
    raise tf.errors.ResourceExhaustedError(
        None, None, f"{FACTS.full} by allocator GPU_0_bfc\nand much more"
    )


def find_trained(module: Any) -> set[str]:
    return {variable.name.removesuffix(":0") for variable in module.trainable_variables}


def gradients(module: Any, x: Any) -> dict[str, np.ndarray]:
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.square(module(x)))
    pairs = zip(
        module.trainable_variables, tape.gradient(loss, module.trainable_variables), strict=True
    )
    return {
        variable.name.removesuffix(":0"): gradient.numpy()
        for variable, gradient in pairs
        if gradient is not None
    }


def set_gpus(patch: pytest.MonkeyPatch, count: int) -> None:
    gpus = [f"GPU {number}" for number in range(count)]
    patch.setattr(tf.config, "list_physical_devices", lambda kind: gpus)
    patch.setattr(tf.config, "get_visible_devices", lambda kind: gpus)


def loss_scale(recipe: Recipe) -> LossScale:
    return LossScale(recipe)


def take_step(scale: LossScale, gradients: list[list[float]]) -> list[list[float]]:
    unscaled, _ = scale.step(
        {str(number): tf.constant(gradient) for number, gradient in enumerate(gradients)}
    )
    return [(1 - 0.5 * gradient.numpy()).tolist() for gradient in unscaled.values()]


def tensorfloat() -> list[bool]:
    return [tf.config.experimental.tensor_float_32_execution_enabled()]


def set_tensorfloat(used: list[bool]) -> None:
    tf.config.experimental.enable_tensor_float_32_execution(*used)


def step_in_groups(groups: Groups, momentum: float) -> list[np.ndarray]:
    """Take a first step with Keras' SGD, one for each tensor: it has no groups."""
    moved = []
    for weight, gradient, rate in groups:
        variable = tf.Variable(weight)
        optimizer = tf.keras.optimizers.SGD(rate, momentum=momentum, nesterov=True)
        optimizer.apply([tf.constant(gradient)], [variable])
        moved.append(variable.numpy())
    return moved


def take_own_steps(recipe: Recipe, weight: np.ndarray, steps: Steps) -> np.ndarray:
    """Take steps with Keras' AdamW, or with TensorFlow's operation of RMSProp, which has no decay.

    Keras' epsilon is another one, which makes no difference as long as it is tiny.
    """
    variable = tf.Variable(weight)
    mean_square = tf.Variable(tf.ones_like(variable))
    velocity = tf.Variable(tf.zeros_like(variable))
    own = tf.keras.optimizers.AdamW(
        1.0, recipe.weight_decay, recipe.beta1, recipe.beta2, recipe.optimizer_epsilon
    )
    for gradient, rate in steps:
        if recipe.optimizer == "adamw":
            own.learning_rate = rate
            own.apply([tf.constant(gradient)], [variable])
            continue
        tf.raw_ops.ResourceApplyRMSProp(
            var=variable.handle,
            ms=mean_square.handle,
            mom=velocity.handle,
            lr=rate,
            rho=recipe.beta2,
            momentum=recipe.momentum,
            epsilon=recipe.optimizer_epsilon,
            grad=gradient + np.float32(recipe.weight_decay) * variable.numpy(),
        )
    return variable.numpy()


def count_differentiated_convolutions(engine: Any, batch: Batch) -> int:
    columns = (tf.constant(batch.pixels), tf.constant(batch.labels))
    step = engine._train_step.get_concrete_function(tf.constant(0, tf.int64), *columns)
    engine.train([batch], 0)
    gradients = set()
    for operation in step.graph.get_operations():
        if operation.type.startswith("Conv2DBackprop"):
            result = operation.inputs[2]  # the gradient of a convolution's result
            # Where TensorFlow has no kernels for groups, each group has a slice of it.
            while result.op.type == "Slice":
                result = result.op.inputs[0]
            gradients.add(result.name)
    return len(gradients)
