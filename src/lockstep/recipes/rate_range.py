"""What a range test of the learning rate (Smith 2015, arXiv:1506.01186) shows: where the loss
diverges, and which rate follows."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from lockstep.recipes import Recipe
from lockstep.recipes.schedule import peak_lr

LEAST_STEPS = 20
_SMOOTHING = 0.9
"""Weight of the losses so far in the smoothed loss."""
DIVERGED = 4.0
"""The test ends where the smoothed loss is this many times its lowest value."""
_SAFETY = 10.0
"""The suggested rate is the one with the lowest loss divided by this: there the loss falls well,
far from where it rises."""


@dataclass(frozen=True)
class RateRange:
    """What a range test measured, step by step."""

    rates: list[float]
    losses: list[float]
    """The mean loss of each step's images. The last one may not be finite."""
    smoothed: list[float]
    diverged: bool
    """Whether the loss diverged before the last planned step."""
    lowest: float
    """The rate with the lowest smoothed loss."""
    suggested: float | None
    """The peak learning rate that follows; None if the loss never fell by more than it varies."""
    field: float | None
    """The recipe's field `lr` that gives this peak."""


def smooth(losses: list[float]) -> np.ndarray:
    """Return the exponential moving average of losses, without the bias of its beginning."""
    average = 0.0
    values = []
    for count, loss in enumerate(losses, start=1):
        average = _SMOOTHING * average + (1 - _SMOOTHING) * loss
        values.append(average / (1 - _SMOOTHING**count))
    return np.array(values)


def has_diverged(losses: list[float]) -> bool:
    """Return whether the last loss is not finite, or the smoothed one far above its lowest."""
    smoothed = smooth(losses)
    return not math.isfinite(losses[-1]) or bool(smoothed[-1] > DIVERGED * smoothed.min())


def judge(rates: np.ndarray, losses: list[float], steps: int, recipe: Recipe) -> RateRange:
    """Return the result of a test of `steps` steps that has these losses."""
    smoothed = smooth(losses)
    finite = np.where(np.isfinite(smoothed), smoothed, np.inf)
    lowest = int(finite.argmin())
    suggested = None
    if finite[lowest] < _find_least_drop(losses):
        suggested = float(f"{rates[lowest] / _SAFETY:.2g}")
    scale = peak_lr(recipe) / recipe.lr
    return RateRange(
        rates.tolist(),
        losses,
        smoothed.tolist(),
        len(losses) < steps or has_diverged(losses),
        float(rates[lowest]),
        suggested,
        None if suggested is None else float(f"{suggested / scale:.3g}"),
    )


def _find_least_drop(losses: list[float]) -> float:
    """Return the smoothed loss below which the loss has fallen by more than it varies: three
    standard deviations of a smoothed loss below the mean of the first ones."""
    first = np.array(losses[: max(len(losses) // 5, LEAST_STEPS // 2)])
    noise = first.std() * math.sqrt((1 - _SMOOTHING) / (1 + _SMOOTHING))
    return float(first.mean() - 3 * noise)


def describe_range(result: RateRange) -> dict[str, Any]:
    """Return a result as a value for JSON."""
    return {
        "suggested_lr": result.field,
        "suggested_peak": result.suggested,
        "lowest_loss_at": result.lowest,
        "diverged": result.diverged,
        "rates": result.rates,
        "losses": result.losses,
        "smoothed_losses": result.smoothed,
    }
