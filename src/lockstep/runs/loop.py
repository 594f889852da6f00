"""The training loop: intervals of steps, and saving and evaluating between them.

An interval is a sequence of steps that needs no action of the host in between. Interval k+1 is
enqueued before interval k is fetched, so that a device never waits for the host to read a loss.
"""

import time
from collections import deque
from collections.abc import Iterator
from contextlib import nullcontext
from typing import cast

import numpy as np

from lockstep import backends
from lockstep.backends import Handle
from lockstep.data import Batch
from lockstep.data.loading.loaders import make_loader, plan_training
from lockstep.runs.context import RunContext
from lockstep.runs.evaluate import evaluate
from lockstep.runs.finish import finish
from lockstep.runs.report import Report
from lockstep.runs.save import save
from lockstep.runs.step_plan import (
    IntervalPlan,
    find_early_stop,
    find_last_step,
    plan_intervals,
)
from lockstep.system import heartbeat
from lockstep.system.event_log import TrainEvent


def train_from(run: RunContext, first: int) -> Report | None:
    """Train from step `first` to where this command or the run ends; return the report, on rank 0,
    if the run does."""
    stopped_early = find_early_stop(run, first)
    if stopped_early:
        return finish(run, first, stopped_early)
    training = run.sets.training
    plans = plan_training(
        training,
        run.recipe,
        first,
        rank=run.world.rank,
        ranks=run.world.ranks,
        parts=run.execution.accumulation_steps,
    )
    with make_loader(training, run.recipe, run.execution) as loader:
        step = TrainingLoop(run, loader.batches(plans)).train(first)
    stopped_early = find_early_stop(run, step)
    if step == run.total_steps or stopped_early:
        return finish(run, step, stopped_early)
    run.recorder.pause(
        {"kind": "pause", "step": step, "total": run.total_steps, "out": str(run.out)}
    )
    return None


class TrainingLoop:
    """Trains on batches, interval by interval."""

    def __init__(self, run: RunContext, batches: Iterator[Batch]) -> None:
        self._run = run
        self._batches = batches
        self._interval_began = 0.0
        self._size = 0
        self._requested_batches = 0
        """Batches that the engine has requested since their images have this size."""

    def train(self, first: int) -> int:
        """Train from step `first` to where this command or the run ends, or until a stop is
        requested; return the step."""
        run = self._run
        end = find_last_step(first, run.total_steps, run.steps_per_epoch, run.execution)
        enqueued: deque[tuple[Handle, float]] = deque()
        self._interval_began = time.perf_counter()
        for plan in plan_intervals(first, run.total_steps, run.steps_per_epoch, run.execution, end):
            run.waited_sec = 0.0
            if plan.traced:
                while enqueued:
                    self._record(*enqueued.popleft())
                handle = self._trace(plan)
            else:
                handle = run.engine.train(self._load_batches(plan), plan.first)
                if handle.steps:
                    enqueued.append((handle, run.waited_sec))
            pauses = plan.saves or run.is_stopping
            # The newest interval stays on the device, so that the device has work while the host
            # reads the one before.
            while enqueued and (pauses or len(enqueued) > 1 or enqueued[0][0].ready):
                self._record(*enqueued.popleft())
            if not pauses:
                continue
            save(run)
            if run.is_stopping or plan.stop == end:
                # no rank exits before rank 0 has saved: a launcher stops the remaining ranks
                run.world.wait()
            if run.is_stopping:
                run.interrupt(handle.first + handle.steps)
            if plan.evaluates:
                evaluate(run, plan.stop)
                if find_early_stop(run, plan.stop):
                    return plan.stop
            self._interval_began = time.perf_counter()  # saving and evaluating are not training
        return end

    def _trace(self, plan: IntervalPlan) -> Handle:
        """Train under the framework's profiler, whose trace rank 0 writes, and log the steps'
        results."""
        run = self._run
        folder = run.out / "profile" / f"step-{plan.first:08d}"
        if run.leads:
            folder.mkdir(parents=True, exist_ok=True)
            profiler = backends.load(run.execution.backend).profile(folder)
        else:
            profiler = nullcontext()
        with profiler:
            handle = run.engine.train(self._load_batches(plan), plan.first)
            if handle.steps:
                self._record(handle, run.waited_sec, traced=True)
        if handle.steps:
            last = plan.first + handle.steps - 1
            run.recorder.send(
                {"kind": "trace", "first_step": plan.first, "last_step": last, "path": str(folder)}
            )
        self._interval_began = time.perf_counter()  # writing the trace is not training
        return handle

    def _load_batches(self, plan: IntervalPlan) -> Iterator[Batch]:
        """Yield the batches of an interval; end early once any rank was asked to stop."""
        batches = self._run.time_batches(self._batches)
        for step in range(plan.first, plan.stop):
            # Asked before the batch is taken: a batch that is not trained on must not be consumed.
            if self._run.should_stop():
                return
            batch = next(batches)
            size = batch.images.shape[1]
            if size != self._size:
                self._size = size
                self._requested_batches = 0
            # An engine may request a batch before it takes the step on the one before, in which it
            # compiles for the size of its images.
            has_compiled = self._requested_batches > 1
            heartbeat.note("training" if has_compiled else "compiling", step + 1, moved=True)
            self._requested_batches += 1
            yield batch

    def _record(self, handle: Handle, waited_sec: float, *, traced: bool = False) -> None:
        """Fetch and log the results of an interval's steps. Raises `DivergedError` if a loss is not
        a finite number."""
        run = self._run
        interval = run.engine.fetch(handle)
        seconds = interval.finished_at - self._interval_began
        self._interval_began = interval.finished_at
        steps = len(interval.losses)
        bad = np.flatnonzero(~np.isfinite(interval.losses))
        if len(bad):
            problem = (
                f"the loss is {interval.losses[bad[0]]} at step {interval.first + bad[0]}, within"
                f" steps {interval.first} to {interval.first + steps - 1}"
            )
            run.diverge(interval.first + steps, problem, losses=interval.losses.tolist())
        figures = {
            "kind": "train",
            "step": interval.first + steps,
            "first_step": interval.first,
            **interval.counts.summary(),
            "losses": interval.losses.tolist(),
            "loss_scale": interval.loss_scale,
            "images_per_sec": interval.counts.images / seconds,
            "data_wait_share": waited_sec / seconds,
        }
        event = cast(TrainEvent, figures)
        if traced:
            event["traced"] = True
        run.recorder.log(event)
        heartbeat.note("training")  # also if this was the first step, which compiled
