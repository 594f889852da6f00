"""Random states and batches to test engines with."""

from dataclasses import replace
from typing import Any

import numpy as np

from lockstep.data import Batch
from lockstep.models.optimizers import OPTIMIZERS
from lockstep.models.state import State
from lockstep.recipes import Recipe
from tests.backends import oracle


def draw_state(recipe: Recipe, seed: int = 0, step: int = 0) -> State:
    """Return a state in which all tensors are different. Velocities are zero, second moments
    0.01."""
    rng = np.random.default_rng(seed)
    values = {t.name: _random(rng, t.name, t.shape) for t in recipe.list_tensors()}
    momentum = {
        name: np.zeros_like(value)
        for name, value in values.items()
        if not oracle.is_statistic(name)
    }
    average = (
        {name: value * np.float32(0.9) for name, value in values.items()}
        if recipe.ema_decay
        else {}
    )
    second_moments = {}
    if OPTIMIZERS[recipe.optimizer].has_second_moments:
        second_moments = {name: np.full_like(value, 0.01) for name, value in momentum.items()}
    return State(step, values, momentum, average, second_moments=second_moments)


def draw_steady_state(recipe: Recipe, seed: int = 0) -> State:
    """Return a random state whose ReLUs are far from switching.

    Each ReLU passes all values of a channel or, for a third of the channels within a block, none.
    In a model with many layers, rounding switches some ReLU of `draw_state`, and the gradient of
    a tensor changes by a tenth.
    """
    state = draw_state(recipe, seed)
    rng = np.random.default_rng(seed + 2000)
    biases = {}
    for name, value in state.tensors.items():
        if oracle.role(name) == "bn_bias":
            off = name.endswith(".bn2.bias") & (rng.random(value.shape) < 1 / 3)
            biases[name] = (
                np.where(off, -4, 4).astype(np.float32)
                * state.tensors[name.replace("bias", "weight")]
            )
    return replace(state, tensors=state.tensors | biases)


def _random(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> np.ndarray:
    if len(shape) == 1 and oracle.role(name) in ("bn_scale", "bn_var"):
        return rng.uniform(0.5, 1.5, shape).astype(np.float32)
    deviation = np.sqrt(2 / np.prod(shape[1:])) if len(shape) > 1 else 0.3
    return rng.normal(0, deviation, shape).astype(np.float32)


def state_with_logits(recipe: Recipe, logits: list[float]) -> State:
    """Return a state that has these logits for any image."""
    state = draw_state(recipe)
    classifier = {
        "fc.weight": np.zeros_like(state.tensors["fc.weight"]),
        "fc.bias": np.array(logits, np.float32),
    }
    return replace(state, tensors=state.tensors | classifier)


def draw_images(count: int, size: int = 32, seed: int = 0) -> np.ndarray:
    """Return images with large patches of colour, which also differ after pooling: uint8 [N, size,
    size, 3]."""
    rng = np.random.default_rng(seed)
    patch = -(-size // 5)
    patches = rng.integers(0, 256, (count, 5, 5, 3)).repeat(patch, axis=1).repeat(patch, axis=2)
    noise = rng.integers(-30, 31, (count, size, size, 3))
    return np.clip(patches[:, :size, :size] + noise, 0, 255).astype(np.uint8)


def draw_batch(
    recipe: Recipe, count: int = 16, seed: int = 0, *, mixup: str = "none", size: int = 32
) -> Batch:
    """Return a batch, with dropout and stochastic depth if the recipe has them. `mixup` says
    whether it has one coefficient for the "batch" or one for each "sample", or "cut": CutMix's
    boxes in every other image, and MixUp in the others.

    Partners are any indices below half the batch, also repeated ones. They are valid for one and
    for two accumulation parts.
    """
    rng = np.random.default_rng(seed + 1000)
    images = draw_images(count, size, seed)
    labels = rng.integers(0, recipe.logits, count)
    kept: dict[str, np.ndarray] = {}
    spec = recipe.spec
    if recipe.dropout:
        kept["kept_features"] = rng.random((count, spec.features)) >= recipe.dropout
    if recipe.stochastic_depth:
        depth = sum(spec.layers)
        rates = np.linspace(0, recipe.stochastic_depth, depth)
        kept["kept_blocks"] = rng.random((count, depth)) >= rates
    if mixup == "none":
        return Batch(images, labels, **kept)
    drawn = rng.uniform(0.1, 0.9, count).astype(np.float32)
    coefficients = np.repeat(drawn[:1], count) if mixup == "batch" else drawn
    batch = Batch(images, labels, coefficients, rng.integers(0, count // 2, count), **kept)
    return _cut(batch, rng) if mixup == "cut" else batch


def _cut(batch: Batch, rng: np.random.Generator) -> Batch:
    """Return a batch in which every other image has a box of its partner's pixels instead of
    MixUp."""
    count, size = batch.images.shape[:2]
    first = rng.integers(0, size // 2, (count, 2))
    sides = np.minimum(rng.integers(size // 4, size, (count, 2)), size - first)
    boxes = np.concatenate([first, sides], axis=1)
    is_cut = np.arange(count) % 2 == 0
    boxes = (boxes * is_cut[:, None]).astype(np.int32)
    assert batch.coefficients is not None
    outside = (1 - boxes[:, 2] * boxes[:, 3] / size**2).astype(np.float32)
    return replace(
        batch,
        coefficients=np.where(is_cut, np.float32(1), batch.coefficients),
        target_coefficients=np.where(is_cut, outside, batch.coefficients),
        boxes=boxes,
    )


def draw_batches(recipe: Recipe, steps: int, **kind: Any) -> list[Batch]:
    return [draw_batch(recipe, seed=seed, **kind) for seed in range(steps)]
