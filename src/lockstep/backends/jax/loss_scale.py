"""Loss scaling on the device. The host does not wait to know whether a step overflowed."""

from collections.abc import Mapping
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from lockstep.backends.jax.model import Array, Arrays
from lockstep.backends.shared.loss_scale import LossScaleState
from lockstep.recipes import Recipe


class Scale(NamedTuple):
    """The scale, float32, and the numbers of good and of bad steps in a row, int32."""

    value: Array
    good: Array
    bad: Array


class Adaptation(NamedTuple):
    """How a dynamic scale is adapted: the recipe's numbers."""

    growth: Array
    growth_steps: Array
    backoff: Array
    backoff_steps: Array


class LossScale(LossScaleState):
    """The rule of a loss scale, and where its state is read and written. A step gets the state and
    returns the next one."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.adaptation = Adaptation(
            np.float32(recipe.loss_scale_growth),
            np.int32(recipe.loss_scale_growth_steps),
            np.float32(recipe.loss_scale_backoff),
            np.int32(recipe.loss_scale_backoff_steps),
        )
        self.state = Scale(np.float32(self._initial), np.int32(0), np.int32(0))

    def step(
        self, scale: Scale, gradients: Mapping[str, Array], adaptation: Adaptation
    ) -> tuple[Arrays, Array | None, Scale]:
        """Return the unscaled gradients, whether to use them, and the next state.

        With dynamic scaling, gradients with a value that is not finite are not to be used.
        Otherwise all are, which is None.
        """
        if not self.is_used:
            return dict(gradients), None, scale
        unscaled = {name: gradient / scale.value for name, gradient in gradients.items()}
        if not self.is_dynamic:
            return unscaled, None, scale
        finite = [jnp.all(jnp.isfinite(gradient)) for gradient in gradients.values()]
        is_finite = jnp.all(jnp.stack(finite))
        return unscaled, is_finite, _adapt(scale, is_finite, adaptation)

    def _read_numbers(self) -> tuple[float, float, float]:
        value, good, bad = (np.asarray(number).item() for number in self.state)
        return value, good, bad

    def _write_numbers(self, scale: float, good: int, bad: int) -> None:
        self.state = Scale(np.float32(scale), np.int32(good), np.int32(bad))


def _adapt(scale: Scale, finite: Array, adaptation: Adaptation) -> Scale:
    good = jnp.where(finite, scale.good + 1, 0)
    bad = jnp.where(finite, 0, scale.bad + 1)
    grows = good >= adaptation.growth_steps
    shrinks = bad >= adaptation.backoff_steps
    factor = jnp.where(grows, adaptation.growth, 1.0)
    factor = jnp.where(shrinks, adaptation.backoff, factor)
    return Scale(scale.value * factor, jnp.where(grows, 0, good), jnp.where(shrinks, 0, bad))
