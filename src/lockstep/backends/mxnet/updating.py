"""What a step does with its gradients: masks, loss scale, weights, velocities, averages."""

from typing import Any

import mxnet as mx
import numpy as np

from lockstep.backends.mxnet.loss_scale import Array, LossScale
from lockstep.backends.shared.layout import Layout
from lockstep.backends.shared.vector_state import VectorState
from lockstep.recipes import Recipe
from lockstep.recipes.schedule import bias_corrections, ema_decays


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
        has_moments = recipe.optimizer != "sgd"
        self.second_moments = mx.nd.zeros(layout.count, context) if has_moments else None
        self.ema = mx.nd.zeros(layout.size, context) if recipe.ema_decay else None
        self.scale = LossScale(recipe, context)
        self._learning_rates = [float(rate) for rate in learning_rates]
        self._bias_corrections = bias_corrections(recipe, len(learning_rates))
        self._ema_decays = ema_decays(recipe, len(learning_rates)).astype(np.float32)

    def take(self, gradient: Array, step: int) -> None:
        """Update everything with the gradient of the trained parameters in a step, which it may
        overwrite."""
        # A masked weight is 0, and so is its decay. Without a gradient the weight and its velocity
        # stay 0.
        if self._removed is not None:
            removed = self._removed[self.layout.trained_place]
            gradient = mx.nd.where(removed, mx.nd.zeros_like(gradient), gradient)
        used = None
        if self.scale.is_dynamic:
            gradient, used = self.scale.step(gradient)
        if self._recipe.clip_norm:
            norm = gradient.norm() / self.scale.fixed
            share = mx.nd.minimum(self._recipe.clip_norm / (norm + 1e-6), 1)
            gradient = mx.nd.broadcast_mul(gradient, share)
        if self._recipe.optimizer == "sgd":
            self._move_by_velocities(gradient, used, step)
        elif self._recipe.optimizer == "rmsprop_tf":
            self._move_as_rmsprop(gradient / self.scale.fixed, used, step)
        else:
            self._move_as_adamw(gradient / self.scale.fixed, used, step)
        if self.ema is not None:
            keep = self._ema_decays[step]
            average = self.ema[self.layout.changing_place]
            average += float(1 - keep) * (self.values[self.layout.changing_place] - average)
        self.done = step + 1

    def _move_by_velocities(self, gradient: Array, used: Array | None, step: int) -> None:
        """Take a step of SGD, unless `used`, float32 [1], is 0. It overwrites the gradient."""
        rate = self._learning_rates[step]
        scale = 1 / self.scale.fixed
        trained = self.layout.trained_place
        velocity = self.velocity[trained]
        weights = self.values[trained]
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

    # In the next two, `used` is float32 [1]. If it is 0, the rate and the shares of new gradients
    # in means are 0, which changes nothing.

    def _move_as_adamw(self, gradient: Array, used: Array | None, step: int) -> None:
        """Take a step of AdamW, or of LAMB, which gives a decayed tensor a rate of its own."""
        recipe = self._recipe
        weights, velocity, second_moments = self._trained_values()
        velocity += _times(used, (1 - recipe.beta1) * (gradient - velocity))
        second_moments += _times(used, (1 - recipe.beta2) * (gradient.square() - second_moments))
        of_mean, of_root = self._bias_corrections[:, step].tolist()
        roots = of_root * second_moments.sqrt() + recipe.optimizer_epsilon
        move = of_mean * velocity / roots
        for group in self.layout.groups:
            own = move[group.place]
            if group.decay:
                own += group.decay * weights[group.place]
            if group.decay and recipe.optimizer == "lamb":
                for place in group.tensors:
                    ratio = _find_trust_ratio(weights[place], move[place])
                    move[place] = mx.nd.broadcast_mul(move[place], ratio)
            moving = weights[group.place]
            moving -= _times(used, self._learning_rates[step] * group.factor * own)

    def _move_as_rmsprop(self, gradient: Array, used: Array | None, step: int) -> None:
        recipe = self._recipe
        weights, velocity, second_moments = self._trained_values()
        for group in self.layout.groups:
            if group.decay:
                own = gradient[group.place]
                own += group.decay * weights[group.place]
        second_moments += _times(used, (1 - recipe.beta2) * (gradient.square() - second_moments))
        move = gradient / (second_moments + recipe.optimizer_epsilon).sqrt()
        for group in self.layout.groups:
            own = move[group.place]
            own *= self._learning_rates[step] * group.factor
        change = move - (1 - recipe.momentum) * velocity
        velocity += _times(used, change)
        weights -= _times(used, velocity)

    def _trained_values(self) -> tuple[Array, Array, Array]:
        """Return the trained weights, their velocities and second moments."""
        trained = self.layout.trained_place
        assert self.second_moments is not None
        return self.values[trained], self.velocity[trained], self.second_moments[trained]

    def _copy_to_array(self, vector: Array) -> np.ndarray:
        return vector.asnumpy()

    def _fill(self, vector: Array, values: np.ndarray) -> None:
        vector[:] = values

    def _load_removed(self, removed: np.ndarray) -> Array:
        return mx.nd.array(removed, self._context, np.float32)

    def _clear_removed(self, vector: Array, removed: Array) -> None:
        kept = vector[: self.layout.count]
        kept[:] = mx.nd.where(removed, mx.nd.zeros_like(kept), kept)


def _times(used: Array | None, change: Array) -> Array:
    """Return a change, or zeros if it is not to be used."""
    return change if used is None else mx.nd.broadcast_mul(change, used)


def _find_trust_ratio(weight: Array, move: Array) -> Array:
    """Return |weight| / |move|, or 1 if one of both is 0: float32 [1]."""
    before = weight.norm()
    after = move.norm()
    return mx.nd.where((before > 0) * (after > 0), before / after, mx.nd.ones_like(before))
