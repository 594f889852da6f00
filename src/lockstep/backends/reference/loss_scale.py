"""The loss scale, constant or adapted to overflows."""

from lockstep.backends.shared.loss_scale import LossScaleState
from lockstep.recipes import Recipe


class LossScale(LossScaleState):
    """The loss scale in Python's numbers."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.value = self._initial
        self._good = 0
        self._bad = 0

    def adapt(self, overflow: bool) -> None:
        """Adapt the scale to a step with or without overflow."""
        self._good = 0 if overflow else self._good + 1
        self._bad = self._bad + 1 if overflow else 0
        if self._good >= self._recipe.loss_scale_growth_steps:
            self.value = self.value * self._recipe.loss_scale_growth
            self._good = 0
        if self._bad >= self._recipe.loss_scale_backoff_steps:
            self.value = self.value * self._recipe.loss_scale_backoff
            self._bad = 0

    def _read_numbers(self) -> tuple[float, float, float]:
        return self.value, self._good, self._bad

    def _write_numbers(self, scale: float, good: int, bad: int) -> None:
        self.value = scale
        self._good = good
        self._bad = bad
