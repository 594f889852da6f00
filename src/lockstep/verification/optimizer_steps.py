"""What a step of an optimizer must give, by the reference's formulas in float64.

A step changes its own velocities, so these show which gradients it had. Second moments and weights
follow from those gradients. So the rounding of gradients hides nothing.
"""

from collections.abc import Mapping

import numpy as np

from lockstep.backends.reference import update
from lockstep.models.optimizers import OPTIMIZERS
from lockstep.models.state import State
from lockstep.recipes import Recipe
from lockstep.recipes.schedule import find_corrections
from lockstep.recipes.trained_tensors import rate_factors

Arrays = dict[str, np.ndarray]


def take_step(
    recipe: Recipe, before: State, gradients: Mapping[str, np.ndarray], step: int, rate: float
) -> State:
    """Return the trained tensors, their velocities and second moments after a step with number
    `step`, from 0, and limited gradients: float64."""
    after = State(step + 1, {}, {})
    tables = find_corrections(recipe, step + 1)
    corrections = {name: float(table[step]) for name, table in tables.items()}
    decays = find_decays(recipe)
    for name, factor in rate_factors(recipe).items():
        kept = (before.tensors, before.momentum, before.second_moments)
        values = update.Values(*(arrays[name].astype(np.float64) for arrays in kept if arrays))
        pace = update.Pace(rate * factor, decays[name], corrections)
        moved = update.step(recipe, values, gradients[name].astype(np.float64), pace)
        after.tensors[name] = moved.weight
        after.momentum[name] = moved.velocity
        if moved.second_moment is not None:
            after.second_moments[name] = moved.second_moment
    return after


def find_gradients(recipe: Recipe, before: State, after: State, rate: float) -> Arrays:
    """Return the limited gradients, without decay, that follow from the velocities that an engine
    computed: float64. A velocity is a mean of gradients, or the moves of RMSProp."""
    gradients = {}
    decays = find_decays(recipe)
    for name, factor in rate_factors(recipe).items():
        old = before.momentum[name].astype(np.float64)
        new = after.momentum[name].astype(np.float64)
        if OPTIMIZERS[recipe.optimizer].velocity == "mean":
            gradients[name] = (new - recipe.beta1 * old) / (1 - recipe.beta1)
        else:
            squares = after.second_moments[name].astype(np.float64)
            root = np.sqrt(squares + recipe.optimizer_epsilon)
            move = (new - recipe.momentum * old) / (rate * factor)
            gradients[name] = move * root - decays[name] * before.tensors[name]
    return gradients


def find_decays(recipe: Recipe) -> dict[str, float]:
    """Return the weight decay of every tensor."""
    table = recipe.list_tensors()
    return {tensor.name: recipe.weight_decay * recipe.decays(tensor) for tensor in table}
