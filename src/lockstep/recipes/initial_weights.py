"""The initial values of a model. They are drawn here once, for every engine."""

import math

import numpy as np

from lockstep.models.architectures import STEM_KERNELS, Tensor
from lockstep.models.optimizers import OPTIMIZERS
from lockstep.models.state import State
from lockstep.recipes.philox import Purpose, draw, normal, uniform
from lockstep.recipes.recipe import Recipe

# Standard deviation of a standard normal distribution that is cut off at ±2. TensorFlow's
# VarianceScaling divides by it.
_TRUNCATED_STD = 0.87962566103423978


def initial_tensors(recipe: Recipe) -> dict[str, np.ndarray]:
    """Return every tensor of the recipe's model at step 0: name -> float32 array, in the model's
    order."""
    spec = recipe.spec
    table = {tensor.name: tensor for tensor in spec.list_tensors(recipe.logits)}
    values = {}
    for i, (name, tensor) in enumerate(table.items()):
        weight = table.get(name.replace(".bias", ".weight"), tensor)
        fan_in = math.prod(weight.shape[1:])
        values[name] = _draw_values(recipe, tensor, fan_in, i)
    if recipe.zero_init_last_bn:
        for block in spec.list_blocks():
            values[f"{block.convs[-1].bn_name}.weight"][:] = 0
    return values


def zero_momentum(recipe: Recipe) -> dict[str, np.ndarray]:
    """Return a zero velocity for every trained tensor: name -> float32 array."""
    return {
        tensor.name: np.zeros(tensor.shape, np.float32)
        for tensor in recipe.list_tensors()
        if tensor.is_trained
    }


def initial_second_moments(recipe: Recipe) -> dict[str, np.ndarray]:
    """Return the second moments of every trained tensor before the first step: name -> float32
    array; nothing if the optimizer has none."""
    first = OPTIMIZERS[recipe.optimizer].first_second_moment
    if first is None:
        return {}
    return {name: value + np.float32(first) for name, value in zero_momentum(recipe).items()}


def initial_state(recipe: Recipe, values: dict[str, np.ndarray] | None = None) -> State:
    """Return the state before the first step, with these tensors, or else with the recipe's initial
    ones."""
    values = values or initial_tensors(recipe)
    average = dict(values) if recipe.ema_decay else {}
    second = initial_second_moments(recipe)
    return State(0, values, zero_momentum(recipe), average, second_moments=second)


def _draw_values(recipe: Recipe, tensor: Tensor, fan_in: int, stream: int) -> np.ndarray:
    """Return the initial values of a tensor. `fan_in` is that of a weight, or of the weight that
    belongs to a bias."""
    if tensor.role in ("bn_scale", "bn_var"):
        return np.ones(tensor.shape, np.float32)
    if tensor.role == "conv_weight" or (tensor.role == "fc_weight" and recipe.fc_init == "as_conv"):
        return _draw_he(recipe, tensor, stream)
    if tensor.role == "fc_weight" or (
        tensor.role in ("fc_bias", "se_bias") and recipe.fc_bias_init == "uniform"
    ):
        return _draw_uniform(recipe, tensor, fan_in, stream)
    return np.zeros(tensor.shape, np.float32)


def _draw_he(recipe: Recipe, tensor: Tensor, stream: int) -> np.ndarray:
    outputs, inputs, *kernel = tensor.shape
    if tensor.name in STEM_KERNELS:
        inputs = recipe.stem_channels
    fan = (inputs if recipe.conv_init_fan == "in" else outputs) * math.prod(kernel)
    std = math.sqrt(2 / fan)
    count = math.prod(tensor.shape)
    if recipe.conv_init == "normal":
        values = normal(recipe.seed, Purpose.WEIGHT, count, stream=stream) * std
    else:
        values = _draw_truncated_normal(recipe.seed, count, stream) * (std / _TRUNCATED_STD)
    return values.reshape(tensor.shape).astype(np.float32)


def _draw_truncated_normal(seed: int, count: int, stream: int) -> np.ndarray:
    # 4.6 % of normal numbers lie beyond two standard deviations. With 8 % more numbers drawn,
    # enough remain for any tensor.
    drawn = normal(seed, Purpose.WEIGHT, count + count // 12 + 256, stream=stream)
    kept = drawn[np.abs(drawn) <= 2][:count]
    assert len(kept) == count
    return kept


def _draw_uniform(recipe: Recipe, tensor: Tensor, fan_in: int, stream: int) -> np.ndarray:
    count = math.prod(tensor.shape)
    raw = draw(recipe.seed, Purpose.WEIGHT, 0, -(-count // 4), epoch=stream).reshape(-1)[:count]
    return ((2 * uniform(raw) - 1) / math.sqrt(fan_in)).reshape(tensor.shape).astype(np.float32)
