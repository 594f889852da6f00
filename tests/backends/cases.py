"""States and batches to test engines with, and functions that compare their results."""

import hashlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lockstep.data import Batch
from lockstep.models.architectures import MODELS, ModelSpec, narrow_model
from lockstep.models.state import State
from lockstep.recipes import Recipe
from lockstep.verification.bounds import distance
from tests.backends import oracle
from tests.backends.drawing import draw_batch, draw_state, draw_steady_state

Arrays = dict[str, np.ndarray]

NARROW: dict[str, Any] = {"layers": (2, 1, 1, 1), "stem_width": 8, "widths": (8, 8, 16, 16)}
BASIC = ModelSpec(block="basic", expansion=1, **NARROW)
V1 = ModelSpec(block="bottleneck", expansion=2, stride_in="1x1", **NARROW)
MODERN = ModelSpec(
    block="bottleneck",
    expansion=2,
    groups=2,
    stem="tiered",
    shortcut_pool=True,
    squeeze_widths=(4, 2, 0, 3),
    blur="after",
    **NARROW,
)
"""A model with all parts that torchvision's ResNets lack."""
BLURRED = ModelSpec(block="basic", expansion=1, blur="before", **NARROW)
PUBLISHED = ("resnet50", "resnext101-32x4d")
NARROWED: dict[str, dict[str, Any]] = {
    f"narrow {name}": {"model": narrow_model(MODELS[name])} for name in PUBLISHED
}
"""Fields that turn a recipe into one of a published model with fewer channels and layers."""

OTHER_COLOURS = {"mean": (10.0, 100.0, 200.0), "std": (30.0, 60.0, 120.0)}
"""Values far apart, so that a mixed-up channel or a swapped mean and deviation is noticed."""

WEIGHTED = {"class_weights": tuple(0.25 * k for k in range(10))}
"""Weights that are all different; class 0 does not count."""

BINARY: dict[str, Any] = {"loss": "binary_cross_entropy"}

FP16: dict[str, Any] = {"precision": "fp16"}

RATES = (3e-4, 6e-5, 9e-4, 1.5e-4, 6e-4, 3e-5, 4.5e-4, 2.4e-4, 7.5e-4, 9e-5, 3.6e-4, 2.1e-4)
"""Learning rates that change with every step, so that the rate of another step, or a rate inside
the velocity, is noticed. They are small, because at ordinary rates a ReLU that rounding switches
leads to another trajectory."""


def normalise(images: np.ndarray, recipe: Recipe) -> np.ndarray:
    """Return the images that a loaded module expects, float32 [N, H, W, 3], of uint8 images [N, H,
    W, 3]."""
    return ((images - np.array(recipe.mean)) / np.array(recipe.std)).astype(np.float32)


@dataclass(frozen=True)
class Step:
    """The inputs for a test of a step."""

    changes: dict[str, Any] = field(default_factory=dict)
    """Fields of the recipe."""
    mixup: str = "none"
    parts: int = 1
    size: int = 32
    is_steady: bool = False
    """Whether the step starts from `draw_steady_state`."""

    def begin(self, recipe: Recipe, count: int = 16) -> tuple[Recipe, State, Batch]:
        """Return the recipe, and the first state and batch."""
        recipe = recipe.replace(weight_decay=0.0, **self.changes)
        state = draw_steady_state(recipe) if self.is_steady else draw_state(recipe)
        return recipe, state, draw_batch(recipe, count, mixup=self.mixup, size=self.size)


def subtract_states(end: State, start: State) -> Arrays:
    """Return the change of every parameter. Statistics change much more and would hide it from
    `distance`."""
    return {
        name: end.tensors[name].astype(np.float64) - value
        for name, value in parameters(start).items()
    }


def compare_changes(end: State, expected: State, start: State) -> float:
    """Return the distance between the changes of parameters since `start`."""
    return distance(subtract_states(end, start), subtract_states(expected, start))


def statistics(state: State) -> Arrays:
    return {name: value for name, value in state.tensors.items() if oracle.is_statistic(name)}


def parameters(state: State) -> Arrays:
    return {name: value for name, value in state.tensors.items() if not oracle.is_statistic(name)}


def bits(values: Arrays) -> str:
    """Return a digest that is equal only if every bit is equal. -0 differs from 0, and a NaN equals
    itself.

    It is a digest, because pytest needs minutes to explain a difference in megabytes.
    """
    digest = hashlib.sha256()
    for name, value in values.items():
        digest.update(f"{name} {value.shape} {value.dtype}".encode() + value.tobytes())
    return digest.hexdigest()


def all_bits(state: State) -> tuple[object, ...]:
    """Return a digest that is equal only if two states are equal to the last bit."""
    parts = (state.tensors, state.momentum, state.ema, state.second_moments)
    return state.step, state.scaler, *map(bits, parts)
