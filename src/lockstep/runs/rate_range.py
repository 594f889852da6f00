"""The range test of the learning rate (Smith 2015, arXiv:1506.01186): a short training during which
the rate rises exponentially, until the loss diverges."""

import math
import os
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from lockstep import backends
from lockstep.data.loading.loaders import make_loader
from lockstep.recipes import Recipe
from lockstep.recipes.order import training_plans
from lockstep.recipes.schedule import peak_lr
from lockstep.runs.begin import find_state, load_state
from lockstep.runs.context import RunContext, stop_before_training
from lockstep.runs.events import Listener
from lockstep.runs.linear_probe import start_from_probe
from lockstep.runs.opening import open_run
from lockstep.runs.recorder import Recorder
from lockstep.runs.resuming import RunSettings
from lockstep.runs.starting_weights import StartSource
from lockstep.system.errors import UserError
from lockstep.system.signals import StopRequests

LEAST_STEPS = 20
MOST_STEPS = 1000
_SMOOTHING = 0.9
"""Weight of the losses so far in the smoothed loss."""
DIVERGED = 4.0
"""The test ends where the smoothed loss is this many times its lowest value."""
_SAFETY = 10.0
"""The suggested rate is the one with the lowest loss divided by this: there it falls well, and is
far from where it rises."""


@dataclass(frozen=True)
class RateRange:
    """What a range test measured, step by step."""

    rates: list[float]
    losses: list[float]
    """The mean loss of each step's images. A last one may not be finite."""
    smoothed: list[float]
    diverged: bool
    """Whether the loss diverged before the last planned step."""
    lowest: float
    """The rate with the lowest smoothed loss."""
    suggested: float | None
    """The peak learning rate that follows; None if the loss never fell by more than it varies."""
    field: float | None
    """The recipe's field `lr` that gives this peak."""


def find_rate(
    settings: RunSettings,
    weights: str | Path | None = None,
    *,
    steps: int = 200,
    low: float = 1e-6,
    high: float = 10.0,
    listener: Listener | None = None,
) -> RateRange:
    """Train for at most `steps` steps while the rate rises from `low` to `high`, and return the
    losses. The training begins as a run with these settings does: with its images in its order,
    its weights and its linear probe.

    It needs one process. Nothing is kept: `settings.out` is a folder that does not exist. Raises
    `Interrupted` if a stop is requested, and `UserError` for a range that is none.
    """
    if not 0 < low < high < math.inf:
        raise UserError(f"the rates rise from {low:g} to {high:g}; expected 0 < from < to")
    if not LEAST_STEPS <= steps <= MOST_STEPS:
        raise UserError(f"{steps} steps; expected {LEAST_STEPS} to {MOST_STEPS}")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError("the range test computes in one process; start it without a launcher")
    source = None if weights is None else StartSource(weights, resumes=False)
    rates = np.geomspace(low, high, steps)
    with StopRequests() as stop:
        world = backends.load(settings.execution.backend).world(settings.execution)
        with closing(world), Recorder(listener) as recorder:
            plan_rates = partial(_choose_rates, rates)
            with open_run(settings, source, world, recorder, stop, plan_rates=plan_rates) as run:
                start_from_probe(run)
                load_state(run, find_state(run)[0])
                losses = _measure_losses(run, steps)
                return judge(rates[: len(losses)], losses, steps, run.recipe)


def _choose_rates(rates: np.ndarray, recipe: Recipe, steps_per_epoch: int) -> np.ndarray:
    return rates


def _measure_losses(run: RunContext, steps: int) -> list[float]:
    """Return the loss of every step until it diverges."""
    training = run.sets.training
    recipe = run.recipe.replace(epochs=-(-steps // run.steps_per_epoch))
    plans = training_plans(
        recipe,
        training.sizes_for(recipe),
        0,
        labels=training.rows["label"],
        parts=run.execution.accumulation_steps,
    )
    losses: list[float] = []
    with make_loader(training, run.recipe, run.execution, size=run.recipe.image_size) as loader:
        batches = run.recorder.watch(
            "raising the learning rate", loader.batches(islice(plans, steps)), steps
        )
        for step, batch in enumerate(batches):
            stop_before_training(run.stop, "raising the learning rate")
            interval = run.engine.fetch(run.engine.train([batch], step))
            losses.append(float(interval.losses[0]))
            if has_diverged(losses):
                break
    return losses


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
    """Return the smoothed loss below which the loss has fallen, and does not only vary: three
    standard deviations of a smoothed loss below the mean of the first ones."""
    first = np.array(losses[: max(len(losses) // 5, LEAST_STEPS // 2)])
    noise = first.std() * math.sqrt((1 - _SMOOTHING) / (1 + _SMOOTHING))
    return float(first.mean() - 3 * noise)


def describe_range(result: RateRange) -> dict[str, Any]:
    """Return a result as JSON has it."""
    return {
        "suggested_lr": result.field,
        "suggested_peak": result.suggested,
        "lowest_loss_at": result.lowest,
        "diverged": result.diverged,
        "rates": result.rates,
        "losses": result.losses,
        "smoothed_losses": result.smoothed,
    }
