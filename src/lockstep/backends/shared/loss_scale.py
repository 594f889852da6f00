"""What the loss scales of all engines share: when one is used, and its canonical state."""

from lockstep.recipes import Recipe


class LossScaleState:
    """The loss scale, constant or adapted to overflows by the recipe's rule.

    A dynamic one grows after `loss_scale_growth_steps` consecutive steps without overflow, and
    shrinks after `loss_scale_backoff_steps` with one. A framework's own scaler has a different rule
    or waits for every step.
    """

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self.is_used = recipe.precision == "fp16" and recipe.loss_scaling != "none"
        self.is_dynamic = self.is_used and recipe.loss_scaling == "dynamic"
        self._initial = recipe.loss_scale if self.is_used else 1.0

    def read(self) -> dict[str, float]:
        """Return the canonical state; empty unless the scale is dynamic."""
        if not self.is_dynamic:
            return {}
        scale, good, bad = self._read_numbers()
        return {"scale": scale, "good_steps": int(good), "bad_steps": int(bad)}

    def write(self, state: dict[str, float]) -> None:
        """Replace the state. An empty state stands for the recipe's initial one."""
        if self.is_dynamic:
            self._write_numbers(
                state.get("scale", self._recipe.loss_scale),
                int(state.get("good_steps", 0)),
                int(state.get("bad_steps", 0)),
            )

    def _read_numbers(self) -> tuple[float, float, float]:
        """Return the scale, and the numbers of good and of bad steps in a row."""
        raise NotImplementedError

    def _write_numbers(self, scale: float, good: int, bad: int) -> None:
        raise NotImplementedError
