"""The reference's optimizers against those of PyTorch and timm in float64, and against each
framework's own.

The recorded weights are those of `torch.optim.AdamW` of PyTorch 2.13.0, of its `NAdam` with
decoupled decay and float64 as the default, and of `Lamb` and `RMSpropTF` of timm 1.0.31, after six
steps in float64 from the values that are drawn here, with the norm of gradients limited to 1: by
`max_grad_norm` of `Lamb`, which has no 1e-6, else by `torch.nn.utils.clip_grad_norm_`.
"""

from types import ModuleType
from typing import Any

import numpy as np
import pytest

from lockstep.backends.reference import update
from lockstep.recipes import Recipe
from lockstep.recipes.schedule import find_corrections
from lockstep.verification.bounds import distance
from tests.backends.conftest import for_frameworks

SHAPES = ((4, 3, 3, 3), (5, 4), (5,), (3,))
"""The third tensor is not decayed, the last one begins with zeros."""
DECAYS = (0.05, 0.05, 0.0, 0.05)
RATES = (0.01, 0.02, 0.03, 0.01, 0.005, 0.001)
RECORDED: dict[str, tuple[dict[str, Any], list[list[float]], float]] = {
    "adamw": (
        {"beta2": 0.95},
        [
            [0.11053557218948441, -0.12774485001226726],
            [-2.277940084057463, 0.38040897689269704],
            [-0.5138073303679598, -1.0890548622356495],
            [-0.003538913930507209, -0.03642941139357686],
        ],
        1e-14,
    ),
    "lamb": (
        {"beta2": 0.95},
        [
            [0.10784887229718879, -0.11536852309551344],
            [-2.292028520352412, 0.3800191382564217],
            [-0.5138073297695341, -1.089054860897712],
            [0.009774753705992532, -0.01047551308224046],
        ],
        2e-8,
    ),
    "nadam": (
        {"beta2": 0.95},
        [
            [0.1298228921818009, -0.11745780668205295],
            [-2.2699788303769592, 0.3690143962327996],
            [-0.504409824487952, -1.062193309674002],
            [-0.010769785874964806, -0.01940721103956345],
        ],
        1e-14,
    ),
    "rmsprop_tf": (
        {"beta2": 0.95, "momentum": 0.9},
        [
            [0.12699842157935695, -0.12134178792224153],
            [-2.2369030551410636, 0.37330765352376205],
            [-0.5517513610351319, -1.037578067303357],
            [-0.006148025932665315, -0.013858081093299083],
        ],
        1e-14,
    ),
}
"""Fields of the recipe, the first two weights of every tensor, and how far they may differ."""


def start_at(recipe: Recipe, weight: np.ndarray) -> update.Values:
    """Return a weight with what the optimizer keeps before the first step."""
    first = float(recipe.optimizer == "rmsprop_tf")
    return update.Values(weight, 0 * weight, np.full_like(weight, first))


def take_step(
    recipe: Recipe, values: update.Values, gradient: np.ndarray, step: int, decay: float
) -> update.Values:
    corrections = {name: table[step] for name, table in find_corrections(recipe, 6).items()}
    pace = update.Pace(RATES[step], decay, corrections)
    return update.step(recipe, values, gradient, pace)


@pytest.mark.parametrize("optimizer", RECORDED)
def test_six_steps_are_those_of_pytorch_and_timm(optimizer: str) -> None:
    changes, recorded, tolerance = RECORDED[optimizer]
    recipe = Recipe(optimizer=optimizer, optimizer_epsilon=1e-6, clip_norm=1.0, **changes)
    random = np.random.default_rng(0)
    weights = [random.normal(size=shape) for shape in SHAPES]
    weights[3][:] = 0
    steps = [[0.3 * random.normal(size=shape) for shape in SHAPES] for _ in RATES]
    steps[2] = [20 * gradient for gradient in steps[2]]
    values = [start_at(recipe, weight) for weight in weights]
    for step, gradients in enumerate(steps):
        limited = update.clip(dict(zip("abcd", gradients, strict=True)), recipe.clip_norm)
        for i, gradient in enumerate(limited.values()):
            values[i] = take_step(recipe, values[i], gradient, step, DECAYS[i])
    ends = [value.weight.ravel()[:2].tolist() for value in values]
    assert np.abs(np.array(ends) - recorded).max() < tolerance


@for_frameworks
def test_steps_are_those_of_the_frameworks_own_optimizers(native: ModuleType) -> None:
    random = np.random.default_rng(1)
    weight = random.normal(size=(6, 5)).astype(np.float32)
    gradients = [random.normal(size=weight.shape).astype(np.float32) for _ in RATES]
    for optimizer in native.FACTS.optimizers:
        recipe = Recipe(optimizer=optimizer, beta2=0.95, momentum=0.8, weight_decay=0.05)
        steps = list(zip(gradients, RATES, strict=True))
        own = native.take_own_steps(recipe, weight, steps)
        values = start_at(recipe, weight)
        for step, gradient in enumerate(gradients):
            values = take_step(recipe, values, gradient, step, recipe.weight_decay)
        assert distance(values.weight, own) < 1e-5, optimizer
