"""Tests for every engine: optimizers with second moments, and the norm of gradients, against the
reference's formulas in float64 (`lockstep.verification.comparison`), which
`test_optimizer_formulas` compares with PyTorch and timm."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from lockstep.models.state import State
from lockstep.recipes import Recipe
from lockstep.verification.bounds import BOUNDS, distance
from lockstep.verification.comparison import find_gradients, take_step
from lockstep.verification.workload import SHOWN_OPTIMIZERS
from tests.backends import oracle
from tests.backends.cases import FP16, Arrays, bits, parameters
from tests.backends.conftest import Start
from tests.backends.drawing import draw_batch, draw_batches, draw_state
from tests.backends.steps import FROZEN_AND_RATES

every_optimizer = pytest.mark.parametrize("optimizer", SHOWN_OPTIMIZERS)
FIRST = 3
"""Number of the first step: bias is corrected by the number, not since the engine's start."""
RATES = [9.0] * FIRST + [2e-2, 5e-3, 9.0]


def make_recipe(recipe: Recipe, optimizer: str) -> Recipe:
    """Return a recipe with frozen tensors, rates by tensor, decay, and an average of every second
    step."""
    changes = FROZEN_AND_RATES | {"nesterov": False, "epochs": 1, "ema_every_steps": 2}
    changes |= {"weight_decay_roles": ("conv_weight", "fc_weight")}
    changes |= {"optimizer": optimizer, "optimizer_epsilon": 1e-3, "beta1": 0.7, "beta2": 0.8}
    return recipe.replace(**changes | {"ema_start": "constant"})


def make_state(recipe: Recipe) -> State:
    """Return a state in which a step has been before, and a tensor without any weights."""
    state = draw_state(recipe, step=FIRST)
    velocities = parameters(draw_state(recipe, seed=2))
    second_moments = {name: 0.1 * value**2 + 0.01 for name, value in velocities.items()}
    empty = {"layer2.0.conv3.weight": np.zeros_like(state.tensors["layer2.0.conv3.weight"])}
    return replace(
        state,
        tensors=state.tensors | empty,
        momentum={name: 0.1 * value for name, value in velocities.items()},
        second_moments=second_moments,
    )


def make_masks(state: State) -> Arrays:
    rng = np.random.default_rng(0)
    names = ("layer2.0.conv1.weight", "layer1.0.conv1.weight")
    return {name: rng.random(state.tensors[name].shape) < 0.5 for name in names}


def find_gradient(recipe: Recipe, state: State, batch: Any, masks: Arrays) -> Arrays:
    """Return the gradient of trained tensors in two parts in float64."""
    plain = recipe.replace(optimizer="sgd", momentum=0.0, weight_decay=0.0, ema_decay=0.0)
    plain = plain.replace(clip_norm=0.0)
    start = State(0, state.tensors, parameters(draw_state(recipe)))
    trained = oracle.train(plain, start, [batch], RATES, 2, masks)
    momentum = trained.state.momentum
    return {name: momentum[name] for name in momentum if oracle.rate_factor(recipe, name)}


def check_step(recipe: Recipe, before: State, after: State, step: int) -> None:
    """Compare second moments, weights and averages with what follows from the velocities."""
    gradients = find_gradients(recipe, before, after, RATES[step])
    stepped = take_step(recipe, before, gradients, step, RATES[step])
    names = list(gradients)
    moments = {name: after.second_moments[name] for name in names}
    assert distance(moments, stepped.second_moments) < BOUNDS["optimizer"].value
    weights = {name: after.tensors[name] for name in names}
    assert distance(weights, stepped.tensors) < BOUNDS["operation"].value
    keep = 1.0 if step % 2 else recipe.ema_decay
    averages = {
        name: keep * before.ema[name] + (1 - keep) * after.tensors[name].astype(np.float64)
        for name in before.ema
        if name in names or oracle.is_statistic(name)
    }
    moving = {name: after.ema[name] for name in names}
    expected = {name: averages[name] for name in names}
    assert distance(moving, expected) < BOUNDS["operation"].value
    for kind in ("tensors", "momentum", "second_moments", "ema"):
        of_frozen = [
            {
                name: value
                for name, value in getattr(state, kind).items()
                if name not in names and not oracle.is_statistic(name)
            }
            for state in (before, after)
        ]
        assert bits(of_frozen[0]) == bits(of_frozen[1]), kind


@every_optimizer
def test_two_steps_follow_the_formulas(start: Start, tiny_recipe: Recipe, optimizer: str) -> None:
    recipe = make_recipe(tiny_recipe, optimizer)
    state = make_state(recipe)
    masks = make_masks(state)
    batches = draw_batches(recipe, 2)
    gradient = find_gradient(recipe, state, batches[0], masks)
    norm = np.sqrt(sum(np.square(value, dtype=np.float64).sum() for value in gradient.values()))
    recipe = recipe.replace(clip_norm=round(norm / 3, 3))
    engine = start(recipe, state, RATES, accumulation_steps=2)
    engine.mask(masks)
    states = [engine.read()]
    for step, batch in enumerate(batches, FIRST):
        engine.train([batch], step)
        states.append(engine.read())
        check_step(recipe, *states[-2:], step)
    first = find_gradients(recipe, *states[:2], RATES[FIRST])
    expected = {name: value * (recipe.clip_norm / norm) for name, value in gradient.items()}
    assert distance(first, expected) < BOUNDS["gradient"].value
    for name, mask in masks.items():
        for kind in ("tensors", "momentum", "second_moments", "ema"):
            assert not getattr(states[-1], kind)[name][~mask].any()


@pytest.mark.parametrize("loss_scaling", ["static", "dynamic"])
def test_norms_have_no_loss_scale(start: Start, tiny_recipe: Recipe, loss_scaling: str) -> None:
    changes = {"loss_scaling": loss_scaling, "loss_scale": 64.0, "weight_decay": 0.0}
    for largest in (0.5, 1e3):
        recipe = tiny_recipe.replace(**FP16 | changes, clip_norm=largest)
        engine = start(recipe)
        engine.train([draw_batch(recipe, 4)], 0)
        velocities = engine.read().momentum.values()
        norm = np.sqrt(sum(np.square(value, dtype=np.float64).sum() for value in velocities))
        if largest == 0.5:
            limited = norm
    assert limited == pytest.approx(0.5, rel=1e-4)
    assert 1 < norm < 1e3, "a smaller norm stays"
