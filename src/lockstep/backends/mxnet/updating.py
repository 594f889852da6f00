"""What a step does with its gradients: masks, loss scale, weights, velocities, averages."""

from typing import Any

import mxnet as mx
import numpy as np

from lockstep.backends.mxnet.loss_scale import Array, LossScale
from lockstep.backends.shared.layout import Layout
from lockstep.backends.shared.vector_state import VectorState
from lockstep.recipes import Recipe
from lockstep.recipes.schedule import ema_decays


class Update(VectorState):
    """The optimizer of a run. It holds all of the state, in vectors."""

    def __init__(
        self, recipe: Recipe, layout: Layout, learning_rates: np.ndarray, context: Any
    ) -> None:
        self._recipe = recipe
        self._context = context
        self.layout = layout
        self.values = mx.nd.zeros(layout.size, context)
        self.velocity = mx.nd.zeros(layout.count, context)
        self.ema = mx.nd.zeros(layout.size, context) if recipe.ema_decay else None
        self.scale = LossScale(recipe, context)
        self._learning_rates = [float(rate) for rate in learning_rates]
        self._ema_decays = ema_decays(recipe, len(learning_rates)).astype(np.float32)

    def take(self, gradient: Array, step: int) -> None:
        """Update everything with the gradient of the trained parameters in a step, which it may
        overwrite."""
        # A masked weight is 0, and so is its decay. Without a gradient the weight and its velocity
        # stay 0.
        rate = self._learning_rates[step]
        scale = 1 / self.scale.fixed
        trained = self.layout.trained_place
        velocity = self.velocity[trained]
        weights = self.values[trained]
        if self._removed is not None:
            gradient = mx.nd.where(self._removed[trained], mx.nd.zeros_like(gradient), gradient)
        used = None
        if self.scale.is_dynamic:
            gradient, used = self.scale.step(gradient)
        before = velocity.copy() if self.scale.is_dynamic or self._recipe.nesterov else None
        # MXNet's operator has the learning rate inside the velocity. At rate -1 its velocity is the
        # canonical one. Its new weights are not used and overwrite the gradient.
        for group in self.layout.groups:
            mx.nd.sgd_mom_update(
                weights[group.place],
                gradient[group.place],
                velocity[group.place],
                lr=-1.0,
                momentum=self._recipe.momentum,
                wd=group.decay,
                rescale_grad=scale,
                out=gradient[group.place],
            )
        move = velocity
        momentum = self._recipe.momentum
        # It moves by g + m * v, where g = v - m * (the velocity before).
        if self._recipe.nesterov and before is not None:
            move = (1 + momentum) * velocity - momentum * before
        old = weights.copy() if used is not None else None
        for group in self.layout.groups:
            own = weights[group.place]
            mx.nd.sgd_update(own, move[group.place], lr=rate * group.factor, wd=0.0, out=own)
        if used is not None and before is not None:
            is_used = mx.nd.broadcast_like(used, before)
            weights[:] = mx.nd.where(is_used, weights, old)
            velocity[:] = mx.nd.where(is_used, velocity, before)
        if self.ema is not None:
            keep = self._ema_decays[step]
            average = self.ema[self.layout.changing_place]
            average += float(1 - keep) * (self.values[self.layout.changing_place] - average)
        self.done = step + 1

    def _copy_to_array(self, vector: Array) -> np.ndarray:
        return vector.asnumpy()

    def _fill(self, vector: Array, values: np.ndarray) -> None:
        vector[:] = values

    def _load_removed(self, removed: np.ndarray) -> Array:
        return mx.nd.array(removed, self._context, np.float32)

    def _clear_removed(self, vector: Array, removed: Array) -> None:
        kept = vector[: self.layout.count]
        kept[:] = mx.nd.where(removed, mx.nd.zeros_like(kept), kept)
