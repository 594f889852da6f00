"""The optimizers, as data. Their formulas for a framework are in `backends/<name>/update.py`."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Optimizer:
    """What everything except the formula itself must know of an optimizer."""

    source: str
    formula: str
    """One step, as the documentation of `Recipe.optimizer` shows it."""
    velocity: Literal["sum", "mean", "move"] = "mean"
    """What a velocity (`State.momentum`) is: a sum of gradients in which older ones fade; their
    mean, not corrected for bias; or a sum of moves, which has the learning rate (w -= v)."""
    first_second_moment: float | None = 0.0
    """The means of squared gradients before the first step; None if the optimizer keeps none."""
    decays: Literal["gradient", "move"] = "move"
    """What weight decay is added to: the gradient, or the move before the learning rate."""
    corrections: tuple[str, ...] = ()
    """What the formula needs of `lockstep.recipes.schedule.find_corrections`."""
    has_trust_ratio: bool = False
    """Whether the move of a decayed tensor gets the length of the tensor, unless one is 0."""

    @property
    def has_second_moments(self) -> bool:
        """Whether the optimizer keeps means of squared gradients."""
        return self.first_second_moment is not None


OPTIMIZERS = {
    "sgd": Optimizer(
        source="SGD with momentum, as in PyTorch",
        formula="g += weight_decay*w; v = momentum*v + g; w -= lr*v.",
        velocity="sum",
        first_second_moment=None,
        decays="gradient",
    ),
    "adamw": Optimizer(
        source="arXiv:1711.05101",
        formula="v = beta1*v + (1 - beta1)*g; s = beta2*s + (1 - beta2)*g^2; u = v/(1 - beta1^t) /"
        " (sqrt(s/(1 - beta2^t)) + optimizer_epsilon) + weight_decay*w; w -= lr*u.",
        corrections=("mean", "root"),
    ),
    "lamb": Optimizer(
        source="arXiv:1904.00962, as in timm",
        formula='u as in "adamw"; in tensors that are decayed, u is multiplied by |w|/|u| unless'
        " one of both norms is 0; w -= lr*u. timm also limits the norm of all gradients to 1:"
        " `clip_norm`.",
        corrections=("mean", "root"),
        has_trust_ratio=True,
    ),
    "nadam": Optimizer(
        source="Dozat 2016, as in PyTorch with decoupled weight decay",
        formula='v and s as in "adamw"; m(t) = beta1*(1 - 0.96^(t/250)/2); M = m(1)*...*m(t);'
        " u = (v*m(t+1)/(1 - M*m(t+1)) + g*(1 - m(t))/(1 - M)) / (sqrt(s/(1 - beta2^t)) +"
        " optimizer_epsilon) + weight_decay*w; w -= lr*u.",
        corrections=("nesterov_mean", "nesterov_gradient", "root"),
    ),
    "rmsprop_tf": Optimizer(
        source="TensorFlow's RMSProp",
        formula="g += weight_decay*w; s, 1 before the first step, becomes beta2*s + (1 -"
        " beta2)*g^2; v = momentum*v + lr*g/sqrt(s + optimizer_epsilon); w -= v.",
        velocity="move",
        first_second_moment=1.0,
        decays="gradient",
    ),
}
"""The rows by the names in recipes."""
