"""What a step does with its gradients: masks, loss scale, weights, velocities, averages."""

import numpy as np
import paddle

from lockstep.backends.paddle.loss_scale import LossScale
from lockstep.backends.paddle.world import Tensor
from lockstep.backends.shared.layout import Layout
from lockstep.backends.shared.vector_state import VectorState
from lockstep.recipes import Recipe
from lockstep.recipes.schedule import ema_decays


class Update(VectorState):
    """The optimizer of a run. It holds all of the state, in vectors."""

    def __init__(self, recipe: Recipe, layout: Layout, learning_rates: np.ndarray) -> None:
        self._recipe = recipe
        self.layout = layout
        self.values = paddle.zeros([layout.size])
        self.velocity = paddle.zeros([layout.count])
        self.ema = paddle.zeros([layout.size]) if recipe.ema_decay else None
        self.scale = LossScale(recipe)
        self._learning_rates = np.asarray(learning_rates, np.float32)
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
        if self.ema is not None:
            keep = self._ema_decays[step]
            average = self.ema[self.layout.changing_place]
            changed = self.values[self.layout.changing_place]
            average.add_(float(1 - keep) * (changed - average))
        self.done = step + 1

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
