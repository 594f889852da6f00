"""What a step does with its gradients: masks, loss scale, weights, velocities, averages."""

import numpy as np
import paddle

from lockstep.backends.paddle.loss_scale import LossScale
from lockstep.backends.paddle.world import Tensor
from lockstep.backends.shared.layout import Layout
from lockstep.backends.shared.vector_state import VectorState
from lockstep.recipes import Recipe
from lockstep.recipes.schedule import bias_corrections, ema_decays


class Update(VectorState):
    """The optimizer of a run. It holds all of the state, in vectors."""

    def __init__(self, recipe: Recipe, layout: Layout, learning_rates: np.ndarray) -> None:
        self._recipe = recipe
        self.layout = layout
        self.values = paddle.zeros([layout.size])
        self.velocity = paddle.zeros([layout.count])
        has_moments = recipe.optimizer != "sgd"
        self.second_moments = paddle.zeros([layout.count]) if has_moments else None
        self.ema = paddle.zeros([layout.size]) if recipe.ema_decay else None
        self.scale = LossScale(recipe)
        self._learning_rates = np.asarray(learning_rates, np.float32)
        self._bias_corrections = bias_corrections(recipe, len(learning_rates))
        self._ema_decays = ema_decays(recipe, len(learning_rates)).astype(np.float32)

    @paddle.no_grad()  # type: ignore[untyped-decorator]
    def take(self, gradient: Tensor, step: int) -> None:
        """Update everything with the gradient of the trained parameters in a step."""
        # A masked weight is 0, and so is its decay. Without a gradient the weight and its velocity
        # stay 0.
        trained = self.layout.trained_place
        if self._removed is not None:
            gradient = paddle.where(self._removed[trained], paddle.zeros([1]), gradient)
        gradient, used = self.scale.step(gradient)
        if self._recipe.clip_norm:
            share = self._recipe.clip_norm / (paddle.linalg.norm(gradient) + 1e-6)
            gradient = gradient * share.clip(max=1.0)
        if self._recipe.optimizer == "sgd":
            self._move_by_velocities(gradient, used, step)
        elif self._recipe.optimizer == "rmsprop_tf":
            self._move_as_rmsprop(gradient, used.cast("float32"), step)
        else:
            self._move_as_adamw(gradient, used.cast("float32"), step)
        if self.ema is not None:
            keep = self._ema_decays[step]
            average = self.ema[self.layout.changing_place]
            changed = self.values[self.layout.changing_place]
            average.add_(float(1 - keep) * (changed - average))
        self.done = step + 1

    def _move_by_velocities(self, gradient: Tensor, used: Tensor, step: int) -> None:
        """Take a step of SGD, unless it is not to be `used`."""
        trained = self.layout.trained_place
        rate = float(self._learning_rates[step])
        weights = self.values[trained]
        velocity = self.velocity[trained]
        before = velocity.clone() if self.scale.is_dynamic else None
        for group in self.layout.groups:
            own_rate = paddle.full([1], rate * group.factor)
            if self.scale.is_dynamic:  # rate 0 leaves the weights unchanged
                own_rate = paddle.where(used, own_rate, paddle.zeros([1]))
            paddle._C_ops.momentum_(
                weights[group.place],
                gradient[group.place],
                velocity[group.place],
                own_rate,
                None,
                self._recipe.momentum,
                self._recipe.nesterov,
                "l2_decay" if group.decay else "",
                group.decay,
                False,
                1.0,
            )
        if before is not None:
            velocity.copy_(paddle.where(used, velocity, before), True)

    # In the next two, `used` is float32 [1]. If it is 0, the rate and the shares of new gradients
    # in means are 0, which changes nothing.

    def _move_as_adamw(self, gradient: Tensor, used: Tensor, step: int) -> None:
        """Take a step of AdamW, or of LAMB, which gives a decayed tensor a rate of its own."""
        recipe = self._recipe
        weights, velocity, second_moments = self._trained_values()
        velocity.add_((1 - recipe.beta1) * used * (gradient - velocity))
        second_moments.add_((1 - recipe.beta2) * used * (gradient.square() - second_moments))
        of_mean, of_root = self._bias_corrections[:, step].tolist()
        roots = of_root * second_moments.sqrt() + recipe.optimizer_epsilon
        move = of_mean * velocity / roots
        rate = float(self._learning_rates[step]) * used
        for group in self.layout.groups:
            own = move[group.place]
            if group.decay:
                own.add_(group.decay * weights[group.place])
            if group.decay and recipe.optimizer == "lamb":
                for place in group.tensors:
                    move[place].multiply_(_find_trust_ratio(weights[place], move[place]))
            weights[group.place].subtract_(rate * group.factor * own)

    def _move_as_rmsprop(self, gradient: Tensor, used: Tensor, step: int) -> None:
        recipe = self._recipe
        weights, velocity, second_moments = self._trained_values()
        gradient = gradient.clone()
        for group in self.layout.groups:
            if group.decay:
                gradient[group.place].add_(group.decay * weights[group.place])
        second_moments.add_((1 - recipe.beta2) * used * (gradient.square() - second_moments))
        rate = float(self._learning_rates[step]) * used
        move = rate * gradient / (second_moments + recipe.optimizer_epsilon).sqrt()
        velocity.multiply_(used * recipe.momentum + (1 - used))
        for group in self.layout.groups:
            velocity[group.place].add_(group.factor * move[group.place])
        weights.subtract_(used * velocity)

    def _trained_values(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the trained weights, their velocities and second moments."""
        trained = self.layout.trained_place
        assert self.second_moments is not None
        return self.values[trained], self.velocity[trained], self.second_moments[trained]

    def _copy_to_array(self, vector: Tensor) -> np.ndarray:
        return vector.numpy()

    def _fill(self, vector: Tensor, values: np.ndarray) -> None:
        vector.copy_(paddle.to_tensor(values), True)

    def _load_removed(self, removed: np.ndarray) -> Tensor:
        return paddle.to_tensor(removed)

    @paddle.no_grad()  # type: ignore[untyped-decorator]
    def _clear_removed(self, vector: Tensor, removed: Tensor) -> None:
        kept = vector[: self.layout.count]
        kept.copy_(paddle.where(removed, paddle.zeros([1]), kept), True)


def _find_trust_ratio(weight: Tensor, move: Tensor) -> Tensor:
    """Return |weight| / |move|, or 1 if one of both is 0."""
    before = paddle.linalg.norm(weight)
    after = paddle.linalg.norm(move)
    return paddle.where((before > 0) & (after > 0), before / after, paddle.ones([]))
