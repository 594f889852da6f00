"""Engines with a fault in an optimizer or in the norm of gradients, and the tests that must find
it."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np

from lockstep.backends.reference import update
from lockstep.backends.reference.engine import ReferenceEngine
from lockstep.backends.reference.update import Pace, Values
from lockstep.recipes import Recipe
from tests.backends import test_optimizers
from tests.backends.fault_finders import Test
from tests.backends.wrong import Array, Build, change_recipe

Rule = Callable[[Recipe, Values, Array, Pace], Values]


def change_rule(change: Callable[[Rule, Recipe, Values, Array, Pace], Values]) -> Build:
    """An engine whose steps are changed. `change` gets the right step and its arguments."""

    class Wrong(ReferenceEngine):
        def _update(self, gradients: dict[str, Array], step: int) -> None:
            with patch.object(update, "step", partial(change, update.step)):
                super()._update(gradients, step)

    return Wrong


def decay_gradients(
    rule: Rule, recipe: Recipe, values: Values, gradient: Array, pace: Pace
) -> Values:
    """Add decay to the gradient, as SGD does."""
    return rule(recipe, values, gradient + pace.decay * values.weight, replace(pace, decay=0.0))


def correct_no_bias(
    rule: Rule, recipe: Recipe, values: Values, gradient: Array, pace: Pace
) -> Values:
    return rule(
        recipe, values, gradient, replace(pace, corrections=dict.fromkeys(pace.corrections, 1.0))
    )


def look_no_step_ahead(
    rule: Rule, recipe: Recipe, values: Values, gradient: Array, pace: Pace
) -> Values:
    """Move NAdam's weights by the mean of gradients alone."""
    corrections = {**pace.corrections, "nesterov_gradient": 0.0}
    return rule(recipe, values, gradient, replace(pace, corrections=corrections))


def adapt_every_tensor(
    rule: Rule, recipe: Recipe, values: Values, gradient: Array, pace: Pace
) -> Values:
    """Multiply all rates by LAMB's ratio, also those of tensors that are not decayed."""
    return rule(recipe, values, gradient, replace(pace, decay=pace.decay or 1e-30))


def adapt_none(rule: Rule, recipe: Recipe, values: Values, gradient: Array, pace: Pace) -> Values:
    """Take AdamW for LAMB."""
    with patch.dict(update.OPTIMIZERS, lamb=update.OPTIMIZERS["adamw"]):
        return rule(recipe, values, gradient, pace)


def keep_the_rate_outside(
    rule: Rule, recipe: Recipe, values: Values, gradient: Array, pace: Pace
) -> Values:
    """Compute RMSProp's velocity without the rate."""
    moved = rule(recipe, values, gradient, replace(pace, rate=1.0))
    weight = values.weight - pace.rate * (values.weight - moved.weight)
    return Values(weight, moved.velocity, moved.second_moment)


def root_before_epsilon(
    rule: Rule, recipe: Recipe, values: Values, gradient: Array, pace: Pace
) -> Values:
    """Add epsilon to the root, where RMSProp adds it under the root, and the other way round."""
    assert values.second_moment is not None
    moments = values.second_moment
    root = np.sqrt(recipe.beta2 * moments + (1 - recipe.beta2) * gradient**2)
    epsilon = recipe.optimizer_epsilon
    wrong = (root + epsilon) ** 2 - root**2
    if recipe.optimizer != "rmsprop_tf":
        wrong = np.sqrt(root**2 * pace.corrections["root"] ** 2 + epsilon)
        wrong -= root * pace.corrections["root"]
    other = SimpleRecipe(recipe, wrong)
    return rule(other, values, gradient, pace)


class SimpleRecipe:
    """A recipe with another epsilon for each value."""

    def __init__(self, recipe: Recipe, epsilon: Array) -> None:
        self._recipe = recipe
        self.optimizer_epsilon = epsilon

    def __getattr__(self, name: str) -> Any:
        return getattr(self._recipe, name)


class ClipsEveryTensor(ReferenceEngine):
    """Limits the norm of every tensor instead of that of all."""

    def _step(self, *arguments: Any) -> Any:
        right = update.clip

        def clip(gradients: dict[str, Array], largest: float) -> dict[str, Array]:
            return {
                name: right({name: gradient}, largest)[name] for name, gradient in gradients.items()
            }

        with patch.object(update, "clip", clip):
            return super()._step(*arguments)


class ClipsTheScaled(ReferenceEngine):
    """Limits the norm of the gradient with its loss scale."""

    def _step(self, *arguments: Any) -> Any:
        right = update.clip

        def clip(gradients: dict[str, Array], largest: float) -> dict[str, Array]:
            return right(gradients, largest * self._scale.value)

        with patch.object(update, "clip", clip):
            return super()._step(*arguments)


def make_test(optimizer: str) -> Test:
    return partial(test_optimizers.test_two_steps_follow_the_formulas, optimizer=optimizer)


ADAMW, LAMB, NADAM, RMSPROP = map(make_test, ("adamw", "lamb", "nadam", "rmsprop_tf"))
SCALED = tuple(
    partial(test_optimizers.test_norms_have_no_loss_scale, loss_scaling=kind)
    for kind in ("static", "dynamic")
)
OPTIMIZER_FAULTS: dict[str, tuple[Any, ...]] = {
    "adds decay to gradients": (change_rule(decay_gradients), ADAMW, LAMB, NADAM),
    "corrects no bias": (change_rule(correct_no_bias), ADAMW, LAMB, NADAM),
    "looks no step ahead": (change_rule(look_no_step_ahead), NADAM),
    "adapts the rates of all tensors": (change_rule(adapt_every_tensor), LAMB),
    "adapts no rates": (change_rule(adapt_none), LAMB),
    "keeps the rate outside the velocity": (change_rule(keep_the_rate_outside), RMSPROP),
    "epsilon in the wrong place": (change_rule(root_before_epsilon), ADAMW, LAMB, RMSPROP),
    "limits every tensor": (ClipsEveryTensor, ADAMW, LAMB, RMSPROP),
    "limits the norm with its loss scale": (ClipsTheScaled, *SCALED),
    "limits nothing": (change_recipe(lambda _: {"clip_norm": 0.0}), ADAMW),
    "averages every step": (change_recipe(lambda _: {"ema_every_steps": 1}), ADAMW),
}
"""A wrong engine, and tests that must all fail with it."""
