"""The loss scale, constant or adapted to overflows."""

from lockstep.recipes import Recipe


class LossScale:
    """The loss scale. A dynamic one grows after enough consecutive steps without overflow and
    shrinks after enough with one.

    The recipe's `loss_scale_growth_steps` and `loss_scale_backoff_steps` are the numbers of steps.
    """

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        used = recipe.precision == "fp16" and recipe.loss_scaling != "none"
        self.is_dynamic = used and recipe.loss_scaling == "dynamic"
        self.value = recipe.loss_scale if used else 1.0
        self._good = self._bad = 0

    def adapt(self, overflow: bool) -> None:
        """Adapt the scale to a step with or without overflow."""
        self._good, self._bad = (0, self._bad + 1) if overflow else (self._good + 1, 0)
        if self._good >= self._recipe.loss_scale_growth_steps:
            self.value = self.value * self._recipe.loss_scale_growth
            self._good = 0
        if self._bad >= self._recipe.loss_scale_backoff_steps:
            self.value = self.value * self._recipe.loss_scale_backoff
            self._bad = 0

    def read(self) -> dict[str, float]:
        """Return the canonical state; empty unless the scale is dynamic."""
        if not self.is_dynamic:
            return {}
        return {"scale": self.value, "good_steps": self._good, "bad_steps": self._bad}

    def write(self, state: dict[str, float]) -> None:
        """Replace the state. An empty state stands for the recipe's initial one."""
        if self.is_dynamic:
            self.value = state.get("scale", self._recipe.loss_scale)
            self._good, self._bad = (
                int(state.get(name, 0)) for name in ("good_steps", "bad_steps")
            )
