"""The range test of the learning rate (Smith 2015, arXiv:1506.01186): a short training during which
the rate rises exponentially, until the loss diverges."""

import math
from contextlib import closing
from itertools import islice

import numpy as np

from lockstep import backends
from lockstep.data.loading.loaders import make_loader, plan_training
from lockstep.recipes.rate_range import LEAST_STEPS, RateRange, has_diverged, judge
from lockstep.runs.context import RunContext, stop_before_training
from lockstep.runs.events import Listener
from lockstep.runs.initial_state import find_state, load_state
from lockstep.runs.opening import check_paths, open_run
from lockstep.runs.recorder import Recorder
from lockstep.runs.resuming import RunSettings
from lockstep.runs.starting_weights import find_start
from lockstep.system.errors import UserError
from lockstep.system.ranks import count_ranks
from lockstep.system.signals import StopRequests
from lockstep.weights import AnySource

MOST_STEPS = 1000


def find_rate(
    settings: RunSettings,
    weights: AnySource | None = None,
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
    `Interrupted` if a stop is requested, and `UserError` for a wrong range.
    """
    if not 0 < low < high < math.inf:
        raise UserError(f"the rates rise from {low:g} to {high:g}; expected 0 < from < to")
    if not LEAST_STEPS <= steps <= MOST_STEPS:
        raise UserError(f"steps={steps}; expected {LEAST_STEPS} to {MOST_STEPS}")
    if count_ranks() > 1:
        raise UserError("the range test computes in one process; start it without a launcher")
    source = find_start(weights, None, settings.wanted.model)
    check_paths(settings, source)
    rates = np.geomspace(low, high, steps)
    with StopRequests() as stop:
        world = backends.load(settings.execution.backend).world(settings.execution)
        with closing(world), Recorder(listener) as recorder:
            how = {"plan_rates": lambda recipe, steps_per_epoch: rates}
            with open_run(settings, source, world, recorder, stop, **how) as run:
                load_state(run, find_state(run)[0])
                losses = _measure_losses(run, steps)
                return judge(rates[: len(losses)], losses, steps, run.recipe)


def _measure_losses(run: RunContext, steps: int) -> list[float]:
    """Return the loss of every step until it diverges."""
    training = run.sets.training
    recipe = run.recipe.replace(
        image_size=run.recipe.image_size,  # in all epochs
        epochs=-(-steps // run.steps_per_epoch),
    )
    plans = plan_training(training, recipe, 0, parts=run.execution.accumulation_steps)
    losses: list[float] = []
    with make_loader(training, run.recipe, run.execution) as loader:
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
