"""What a step of an optimizer must give, by the formulas of `Recipe.optimizer` in float64.

A step at rate r changes its own velocities, so these show which gradients it had. Second moments
follow from those gradients, and the weights from velocities and second moments. So the rounding of
gradients hides nothing.
"""

from dataclasses import dataclass

import numpy as np

from lockstep.models.state import State
from lockstep.recipes import Recipe
from lockstep.recipes.trained_tensors import rate_factors

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class OptimizerStep:
    """A step with number `step`, from 0, of an optimizer with second moments."""

    recipe: Recipe
    before: State
    after: State
    """Its momentum, second moments and tensors are those that an engine computed."""
    step: int
    rate: float

    @property
    def rates(self) -> dict[str, float]:
        """The rate of every trained tensor."""
        factors = rate_factors(self.recipe)
        return {name: self.rate * factor for name, factor in factors.items()}

    @property
    def decays(self) -> dict[str, float]:
        """The weight decay of every tensor."""
        table = self.recipe.list_tensors()
        return {t.name: self.recipe.weight_decay * self.recipe.decays(t) for t in table}

    def gradients(self) -> Arrays:
        """Return the limited gradients, without decay, that follow from the velocities."""
        recipe = self.recipe
        gradients = {}
        for name, rate in self.rates.items():
            old = self.before.momentum[name].astype(np.float64)
            new = self.after.momentum[name].astype(np.float64)
            if recipe.optimizer == "rmsprop_tf":
                root = np.sqrt(self._second_moment(name) + recipe.optimizer_epsilon)
                decay = self.decays[name] * self.before.tensors[name]
                gradients[name] = (new - recipe.momentum * old) / rate * root - decay
            else:
                gradients[name] = (new - recipe.beta1 * old) / (1 - recipe.beta1)
        return gradients

    def velocities(self, gradients: Arrays) -> Arrays:
        """Return the velocities after a step with these limited gradients."""
        recipe = self.recipe
        velocities = {}
        for name, rate in self.rates.items():
            old = self.before.momentum[name].astype(np.float64)
            gradient = gradients[name].astype(np.float64)
            if recipe.optimizer == "rmsprop_tf":
                gradient += self.decays[name] * self.before.tensors[name]
                root = np.sqrt(self._second_moment(name) + recipe.optimizer_epsilon)
                velocities[name] = recipe.momentum * old + rate * gradient / root
            else:
                velocities[name] = recipe.beta1 * old + (1 - recipe.beta1) * gradient
        return velocities

    def second_moments(self) -> Arrays:
        """Return the second moments that follow from the velocities."""
        beta2 = self.recipe.beta2
        moments = {}
        for name, gradient in self.gradients().items():
            if self.recipe.optimizer == "rmsprop_tf":
                gradient = gradient + self.decays[name] * self.before.tensors[name]
            old = self.before.second_moments[name].astype(np.float64)
            moments[name] = beta2 * old + (1 - beta2) * gradient**2
        return moments

    def weights(self) -> Arrays:
        """Return the weights that follow from velocities and second moments."""
        recipe = self.recipe
        number = self.step + 1
        weights = {}
        for name, rate in self.rates.items():
            weight = self.before.tensors[name].astype(np.float64)
            velocity = self.after.momentum[name].astype(np.float64)
            if recipe.optimizer == "rmsprop_tf":
                weights[name] = weight - velocity
                continue
            mean = velocity / (1 - recipe.beta1**number)
            root = np.sqrt(self._second_moment(name) / (1 - recipe.beta2**number))
            move = mean / (root + recipe.optimizer_epsilon) + self.decays[name] * weight
            if recipe.optimizer == "lamb" and self.decays[name]:
                move *= _divide_lengths(weight, move)
            weights[name] = weight - rate * move
        return weights

    def _second_moment(self, name: str) -> np.ndarray:
        return self.after.second_moments[name].astype(np.float64)


def limit_norm(recipe: Recipe, gradients: Arrays) -> Arrays:
    """Return gradients within the recipe's `clip_norm`."""
    norm = np.sqrt(sum(np.square(gradient).sum() for gradient in gradients.values()))
    share = min(1.0, recipe.clip_norm / (norm + 1e-6))
    return {name: share * gradient for name, gradient in gradients.items()}


def _divide_lengths(weight: np.ndarray, move: np.ndarray) -> float:
    """Return |weight| / |move|, or 1 if one of both is 0."""
    before = float(np.sqrt(np.square(weight).sum()))
    after = float(np.sqrt(np.square(move).sum()))
    return before / after if before and after else 1.0
