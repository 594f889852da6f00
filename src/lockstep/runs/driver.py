"""The driver: intervals of steps, evaluation, saving, stopping. It works with recipes and runs, and
uses no framework.

An interval is a sequence of steps that needs no action of the host in between. Interval k+1 is
enqueued before interval k is fetched, so that a device never waits for the host to read a loss.
"""

import math
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from lockstep import backends
from lockstep.backends import Engine, Handle, World
from lockstep.backends.emulation import emulation
from lockstep.data import Batch
from lockstep.data.listing import printable
from lockstep.data.loading.loaders import loader_of
from lockstep.data.split import UNREAD, Sets, same_images
from lockstep.models.metrics import Scores, Throughput
from lockstep.models.quantisation import Scales
from lockstep.models.state import State
from lockstep.recipes import Execution, Recipe
from lockstep.recipes.initial_weights import initial_state
from lockstep.recipes.order import (
    evaluation_plans,
    order_evaluation_samples,
    steps_per_epoch,
    training_plans,
)
from lockstep.runs import divergence, ending, starting_weights
from lockstep.runs.after_saving import AfterSaving, after_saving
from lockstep.runs.calibration import about_scales, calibrated, quantise
from lockstep.runs.environment import describe_environment
from lockstep.runs.image_results import Results, write_results
from lockstep.runs.notes import RunFacts, list_unusual_settings, note_determinism_cost
from lockstep.runs.recorder import Recorder
from lockstep.runs.report import Report, build_report, find_changed_fields, read_report
from lockstep.runs.spans import Span, spans
from lockstep.runs.starting_weights import Start
from lockstep.runs.worst_mistakes import load_worst_mistakes
from lockstep.system import heartbeat
from lockstep.system.errors import CheckpointError, DivergedError, Interrupted
from lockstep.system.event_log import DivergedEvent, EvaluateEvent, LogEvent, TrainEvent, read_log
from lockstep.system.files import write_json
from lockstep.system.ranks import restarted
from lockstep.system.signals import StopRequests
from lockstep.weights import checkpoint
from lockstep.weights.run_checkpoints import find_best_step


class Driver:
    """One rank's part of a run. Only rank 0 logs and saves."""

    def __init__(
        self,
        recipe: Recipe,
        execution: Execution,
        world: World,
        engine: Engine,
        sets: Sets,
        out: Path,
        stop: StopRequests,
        recorder: Recorder,
    ) -> None:
        self.recipe = recipe
        self.execution = execution
        self.world = world
        self.engine = engine
        self.training = sets.training
        self.validation = sets.validation
        self.data = sets.data
        self.data_digest = sets.digest
        self.out = out
        self.stop = stop
        self.recorder = recorder
        self.start_notes = list(sets.notes)
        self.stopping = False
        self.asked_for = 0
        self.per_epoch = steps_per_epoch(recipe, len(self.training))
        self.total = recipe.epochs * self.per_epoch
        self.part_images = recipe.global_batch_images // (
            world.ranks * execution.accumulation_steps
        )
        self.interval_began = self.waited_sec = 0.0
        self.throughput = Throughput()
        self.evaluated_weights = ["trained", "ema"] if recipe.ema_decay else ["trained"]
        self.scores: dict[str, Scores] = {}
        self.after_saving: list[AfterSaving] = []
        self.scales: Scales = {}

    def carry_out(self, rates: np.ndarray, start: Start | None) -> Report | None:
        """Train to the end and return the report, on rank 0. `start` holds the weights that were
        given to rank 0.

        Return None, too, if this command ends before the run.
        """
        if self.world.rank == 0:
            self.after_saving = after_saving(self.recipe, self.execution, self.per_epoch)
            self.prepare(start)
        self.world.wait()  # wait: the other ranks read what rank 0 has written
        state, damaged = self.start_state()
        if not self.world.same(state.step):
            raise CheckpointError(
                f"ranks find different checkpoints in {self.out}; all ranks must share this folder"
            )
        if self.world.any(self.world.rank == 0 and self.is_finished(state.step)):
            report = read_report(self.out)
            if report is not None:
                self.recorder.tell(
                    {"kind": "already_finished", "report": report, "out": str(self.out)}
                )
            return report
        if self.world.rank == 0:
            (self.out / "report.json").unlink(
                missing_ok=True
            )  # this file marks the run as finished
        if self.world.rank == 0:  # again, in case the run ended between a checkpoint and this
            self.call_hooks(state)
        self.engine.write(state)
        if self.recipe.sparsity != "none":
            self.engine.mask(starting_weights.read_masks(self.out))
        self.scales = quantise(self.engine, self.recipe, self.out / "checkpoints", state.step)
        unevaluated = self.world.any(self.world.rank == 0 and self.lacks_evaluation(state.step))
        self.begin(state.step, damaged, rates, unevaluated)
        if unevaluated:
            self.evaluate(state.step)
        return self.train_on(state.step)

    def train_on(self, first: int) -> Report | None:
        """Train from step `first` to where this command or the run ends; return the report, on rank
        0, if the run does."""
        if stopped_early := self.early_stop(first):
            return self.finish(first, stopped_early)
        plans = training_plans(
            self.recipe,
            self.training.sizes_for(self.recipe),
            first,
            rank=self.world.rank,
            ranks=self.world.ranks,
            parts=self.execution.accumulation_steps,
        )
        with loader_of(
            self.training, self.recipe, self.execution, size=self.recipe.image_size
        ) as loader:
            step = self.loop(loader.batches(plans), first)
        stopped_early = self.early_stop(step)
        if step == self.total or stopped_early:
            return self.finish(step, stopped_early)
        self.recorder.pause(
            {"kind": "pause", "step": step, "total": self.total, "out": str(self.out)}
        )
        return None

    def is_finished(self, step: int) -> bool:
        """Return whether the run has its report and ends at this step: it is the last one, or early
        stopping decides so.

        A run that was not evaluated at its end (`train_only`) is finished only as long as it is not
        to be evaluated.
        """
        report = read_report(self.out)
        if report is None or report["steps"] != step:
            return False
        if step == self.total:
            return self.execution.train_only or bool(report["final"])
        return self.early_stop_of(read_log(self.out / "log.jsonl", whole=True), step) is not None

    def early_stop(self, step: int) -> str | None:
        """Return why early stopping ends the run at a step before its last one, or None. All ranks
        get the same answer."""
        reason = self.early_stop_of(self.recorder.evaluations, step)
        if not self.world.any(self.world.rank == 0 and reason is not None):
            return None
        return reason or "early stopping"  # only rank 0 has a log

    def early_stop_of(self, log: Sequence[LogEvent], step: int) -> str | None:
        """Return the reason that a log gives for early stopping at a step before the last one, or
        None."""
        return (
            None
            if step == self.total
            else ending.early_stop(log, step, self.execution.early_stopping_patience)
        )

    def prepare(self, start: Start | None) -> None:
        """Write what a new run starts from given weights; of a resumed run, refuse weights it was
        not started from."""
        if checkpoint.steps(self.out / "checkpoints"):
            starting_weights.refuse_others(self.out, start)
            return
        starting_weights.forget(self.out)
        if start is not None:
            values, notes = starting_weights.write(self.out, self.recipe, start)
            state, more = starting_weights.first_state(self.recipe, values, start, self.per_epoch)
            self.start_notes += [*notes, *more]
            if self.recipe.quantisation != "none":
                self.calibrate(state)
            self.write_checkpoint(state)

    def calibrate(self, state: State) -> None:
        """Find the scales of a quantised run from its first state. Raises `Interrupted` if a stop
        is requested meanwhile."""

        def watched(what: str, batches: Iterator[Batch], total: int) -> Iterator[Batch]:
            for batch in self.recorder.watch(what, batches, total):
                if self.stop.requested:
                    raise Interrupted(
                        f"stopped by {self.stop.name} while {what}; nothing is trained yet",
                        self.stop.exit_code,
                    )
                yield batch

        self.engine.write(state)
        self.scales, note = calibrated(
            self.engine, self.recipe, self.training, self.execution, watched
        )
        self.start_notes.append(note)

    def start_state(self) -> tuple[State, list[str]]:
        """Return the newest intact checkpoint's state, or the initial one, and the reasons why
        newer ones were skipped."""
        state, digest, damaged = checkpoint.newest_intact(self.out / "checkpoints")
        if state is None:
            return initial_state(self.recipe), damaged
        if not same_images(digest, self.data_digest):
            raise CheckpointError(
                f"{self.out} was trained or evaluated on other images than those in"
                f" {self.training.source.named}. Restore its images, or use another --out."
            )
        if self.data_digest.endswith(f" {UNREAD}"):
            self.data_digest = (
                digest  # so that later checkpoints still say which validation images the run had
            )
        return state, damaged

    def begin(self, step: int, damaged: list[str], rates: np.ndarray, unevaluated: bool) -> None:
        """Open the log and record where training starts."""
        about = describe_environment(self.execution.backend) | {
            "recipe": self.recipe.based_on,
            "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
            "device": self.world.device,
            "ranks": self.world.ranks,
            "execution": self.execution.fields(),
            "data": str(self.data.resolve()),
            "classes": len(self.training.classes),
            "train": {
                "images": len(self.training),
                "quarantined": self.training.listed_quarantine(),
            },
            "val": {
                "images": len(self.validation),
                "quarantined": self.validation.listed_quarantine(),
            },
        }
        if self.world.rank == 0:
            config = self.recipe.fields() | {
                name: about[name] for name in ("recipe", "device", "ranks", "data")
            }
            self.recorder.open(self.out, step, rates, evaluates_again=unevaluated, about=config)
            write_json(self.out / "environment.json", about)
        self.recorder.log(
            {
                "kind": "start",
                "step": step,
                "total": self.total,
                "steps_per_epoch": self.per_epoch,
                "damaged": damaged,
                "notes": self.notes(step),
                "changed": find_changed_fields(self.recipe),
                "environment": about,
            }
        )
        if restart := restarted():
            self.recorder.log(
                {"kind": "restart", "step": step, "restart": restart[0], "reason": restart[1]}
            )

    def notes(self, step: int) -> list[str]:
        """Return notes on settings that are allowed but rarely intended, for a run at this step."""
        found = list(self.start_notes)
        traced = self.execution.traced_steps
        if traced and not set(traced) & set(range(step, self.total)):
            found.append(
                f"steps {traced.start} to {traced.stop - 1} are not traced: this run has steps"
                f" {step} to {self.total - 1}"
            )
        end = ending.last_step(step, self.total, self.per_epoch, self.execution)
        if end < self.total:
            found.append(
                f"this command stops after step {end} of {self.total}; the same command resumes"
                " there"
            )
        emulated = emulation(
            self.recipe.precision, on_gpu=self.world.on_gpu, backend=self.execution.backend
        )
        if emulated is not None:
            found.append(
                f"{emulated}; {emulated.instead} is not: --set precision={emulated.instead}"
            )
        if not step:  # once in a run
            found += note_determinism_cost(self.recipe, self.execution, self.world)
        return found + list_unusual_settings(self.recipe, self.facts())

    def facts(self) -> RunFacts:
        """Return the facts that the notes are based on."""
        training, validation = (
            np.bincount(index.rows["label"], minlength=len(index.classes))
            for index in (self.training, self.validation)
        )
        names = [printable(name) for name in self.training.classes]
        return RunFacts(names, training, validation, self.per_epoch)

    def lacks_evaluation(self, step: int) -> bool:
        """Return whether an evaluation is due at this step that is not complete in the log, since
        the run was stopped.

        The last evaluation is due until there is a report: the report needs more than the log
        holds. The same is true where early stopping ends the run.
        """
        span = next(spans(max(step - 1, 0), self.total, self.per_epoch, self.execution), None)
        due = step > 0 and span is not None and span.stop == step and span.evaluates
        log = read_log(self.out / "log.jsonl", whole=True)
        logged = [e["weights"] for e in log if e["kind"] == "evaluate" and e["step"] == step]
        ends = step == self.total or self.early_stop_of(log, step) is not None
        return due and (ends or logged != self.evaluated_weights)

    def loop(self, batches: Iterator[Batch], first: int) -> int:
        """Train from step `first` to where this command or the run ends, or until a stop is
        requested; return the step."""
        end = ending.last_step(first, self.total, self.per_epoch, self.execution)
        enqueued: deque[tuple[Handle, float]] = deque()
        self.interval_began = time.perf_counter()
        for span in spans(first, self.total, self.per_epoch, self.execution, end):
            self.waited_sec = 0.0
            if span.traced:
                while enqueued:
                    self.record(*enqueued.popleft())
                handle = self.trace(batches, span)
            else:
                handle = self.engine.train(self.until_stopped(batches, span), span.first)
                if handle.steps:
                    enqueued.append((handle, self.waited_sec))
            pauses = span.saves or self.stopping
            # The newest interval stays on the device, so that the device has work while the host
            # reads the one before.
            while enqueued and (pauses or len(enqueued) > 1 or enqueued[0][0].ready):
                self.record(*enqueued.popleft())
            if not pauses:
                continue
            self.save()
            if self.stopping or span.stop == end:
                # no rank exits before rank 0 has saved: a launcher stops the remaining ranks
                self.world.wait()
            if self.stopping:
                self.interrupt(handle.first + handle.steps)
            if span.evaluates:
                self.evaluate(span.stop)
                if self.early_stop(span.stop):
                    return span.stop
            self.interval_began = time.perf_counter()  # saving and evaluating are not training
        return end

    def trace(self, batches: Iterator[Batch], span: Span) -> Handle:
        """Train under the framework's profiler, whose trace rank 0 writes, and log the steps'
        results."""
        folder = self.out / "profile" / f"step-{span.first:08d}"
        if self.world.rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
        tracing = (
            backends.load(self.execution.backend).profile(folder)
            if self.world.rank == 0
            else nullcontext()
        )
        with tracing:
            handle = self.engine.train(self.until_stopped(batches, span), span.first)
            if handle.steps:
                self.record(handle, self.waited_sec, traced=True)
        if handle.steps:
            last = span.first + handle.steps - 1
            self.recorder.tell(
                {"kind": "trace", "first_step": span.first, "last_step": last, "path": str(folder)}
            )
        self.interval_began = time.perf_counter()  # writing the trace is not training
        return handle

    def until_stopped(self, batches: Iterator[Batch], span: Span) -> Iterator[Batch]:
        """Yield the next batches, of a span; end early once any rank was asked to stop."""
        timed = self.timed(batches)
        for step in range(span.first, span.stop):
            # Asked before the batch is taken: a batch that is not trained on must not be consumed.
            if self.should_stop():
                return
            batch = next(timed)
            # An engine may ask for a batch before it takes the step on the one before, in which it
            # compiles.
            heartbeat.note("training" if self.asked_for > 1 else "compiling", step + 1, moved=True)
            self.asked_for += 1
            yield batch

    def timed(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Yield all batches, and add the time that each is waited for."""
        while True:
            began = time.perf_counter()
            batch = next(batches, None)
            self.waited_sec += time.perf_counter() - began
            if batch is None:
                return
            yield batch

    def should_stop(self) -> bool:
        """Return whether any rank was asked to stop; every rank asks before every batch."""
        self.stopping = self.stopping or self.world.any(self.stop.requested)
        return self.stopping

    def interrupt(self, step: int) -> None:
        """Raise `Interrupted`. The state must be saved already."""
        raise Interrupted(
            f"stopped by {self.stop.name} after step {step} of {self.total}, saved in {self.out}; "
            "the same command resumes from there",
            self.stop.exit_code,
        )

    def record(self, handle: Handle, waited: float, *, traced: bool = False) -> None:
        """Fetch and log the results of an interval's steps. Raises `DivergedError` if a loss is not
        a finite number.

        Throughput ignores steps that are traced.
        """
        interval = self.engine.fetch(handle)
        seconds = interval.finished_at - self.interval_began
        self.interval_began = interval.finished_at
        steps = len(interval.losses)
        if message := divergence.in_training(interval, self.recipe, self.out / "checkpoints"):
            self.diverge(interval.first + steps, message, losses=interval.losses.tolist())
        if not traced:
            self.throughput.add(steps, interval.counts.images, seconds, waited)
        summary = interval.counts.summary()
        event: TrainEvent = {
            "kind": "train",
            "step": interval.first + steps,
            "first_step": interval.first,
            "loss": summary["loss"],
            "top1_percent": summary["top1_percent"],
            "top5_percent": summary["top5_percent"],
            "images": summary["images"],
            "losses": interval.losses.tolist(),
            "loss_scale": interval.loss_scale,
            "images_per_sec": interval.counts.images / seconds,
            "data_wait_share": waited / seconds,
        }
        if traced:
            event["traced"] = True
        self.recorder.log(event)
        heartbeat.note("training")  # also if this was the first step, which compiled

    def diverge(self, step: int, message: str, **figures: Any) -> NoReturn:
        """Log that something is not finite and raise `DivergedError`."""
        event: DivergedEvent = {"kind": "diverged", "step": step, "message": message, **figures}  # type: ignore[typeddict-item]
        self.recorder.log(event)
        raise DivergedError(message)

    @heartbeat.saving()
    def save(self) -> None:
        """Write a checkpoint of the last step and delete old ones."""
        if self.world.rank > 0:
            return
        folder = self.out / "checkpoints"
        state = self.engine.read()
        if not all(np.isfinite(value).all() for value in state.tensors.values()):
            self.diverge(state.step, divergence.in_weights(state.step, self.recipe, folder))
        self.recorder.flush()
        path = self.write_checkpoint(state)
        checkpoint.prune(
            folder, self.execution.keep_checkpoints, find_best_step(self.recorder.evaluations)
        )
        self.recorder.tell({"kind": "save", "step": state.step, "path": str(path)})
        self.call_hooks(state)

    def call_hooks(self, state: State) -> None:
        """Call the hooks that run after each checkpoint."""
        for hook in self.after_saving:
            hook(state)

    def write_checkpoint(self, state: State) -> Path:
        """Write a checkpoint and return its path."""
        about = {
            "recipe": self.recipe.fields(),
            "classes": self.training.classes,
            "step": state.step,
        }
        about |= about_scales(self.scales)
        return checkpoint.save(
            self.out / "checkpoints", state, data_digest=self.data_digest, about=about
        )

    def evaluate(self, step: int) -> None:
        """Evaluate the trained weights and, if there is one, their moving average. The state must
        be saved already.

        Raises `DivergedError` if the loss of an image is not a finite number.
        """
        batches = math.ceil(len(self.validation) / (self.part_images * self.world.ranks))
        for weights in self.evaluated_weights:
            began = time.perf_counter()
            self.waited_sec = 0.0
            scores = self.engine.evaluate(
                self.evaluation_batches(weights, batches), ema=weights == "ema"
            )
            if self.stopping:
                self.interrupt(step)
            seconds = time.perf_counter() - began
            summary = scores.counts().summary()
            if message := divergence.in_evaluation(
                scores, step, self.recipe, self.out / "checkpoints"
            ):
                self.diverge(step, message, weights=weights, **summary)
            self.scores[weights] = scores
            event: EvaluateEvent = {
                "kind": "evaluate",
                "step": step,
                "weights": weights,
                "loss": summary["loss"],
                "top1_percent": summary["top1_percent"],
                "top5_percent": summary["top5_percent"],
                "images": summary["images"],
                "images_per_sec": summary["images"] / seconds,
                "batches": batches,
                "data_wait_share": self.waited_sec / seconds,
            }
            self.recorder.log(event)

    def evaluation_batches(self, weights: str, total: int) -> Iterator[Batch]:
        """Yield this rank's share of the validation images; end early once any rank was asked to
        stop."""
        sizes = self.validation.sizes_for(self.recipe)
        share = {"rank": self.world.rank, "ranks": self.world.ranks}
        plans = evaluation_plans(self.recipe, sizes, self.part_images, **share)
        size = self.recipe.eval_crop
        with loader_of(
            self.validation, self.recipe, self.execution, size=size, evaluation=True
        ) as loader:
            timed = self.timed(loader.batches(plans))
            for number, batch in enumerate(
                self.recorder.watch(f"evaluating {weights} weights", timed, total)
            ):
                if self.should_stop():
                    return
                heartbeat.note("evaluating" if number else "compiling", moved=True)
                yield batch

    @heartbeat.saving()
    def finish(self, step: int, stopped_early: str | None) -> Report | None:
        """Write and return the report of a run that ends at a step, on rank 0. `stopped_early` is
        why it ends there."""
        if self.world.rank > 0:
            return None
        report = build_report(
            self.recipe,
            self.recorder.evaluations,
            steps=step,
            throughput=self.throughput,
            train_sec=self.recorder.train_sec,
            quarantined=len(self.training.quarantined) + len(self.validation.quarantined),
            classes=self.training.classes,
            scores=self.scores,
            device=self.world.device,
            ranks=self.world.ranks,
            stopped_early=stopped_early,
            restarts=self.recorder.restarts,
        )
        samples = order_evaluation_samples(len(self.validation), self.part_images, self.world.ranks)
        scores = {weights: found.sort_by_sample(samples) for weights, found in self.scores.items()}
        if scores:
            write_results(self.out, Results(step, self.validation.digest, scores))
        write_json(self.out / "report.json", report)  # last: this file marks the run as finished
        if (
            scores and self.execution.loggers and self.execution.loader != "synthetic"
        ):  # synthetic images are noise
            self.show_mistakes(scores["trained"], step)
        self.recorder.tell({"kind": "finish", "report": report, "out": str(self.out)})
        return report

    def show_mistakes(self, scores: Scores, step: int) -> None:
        """Pass the worst mistakes to the loggers. The run is finished already: unreadable images
        cause only a warning."""
        try:
            pictures = load_worst_mistakes(self.validation, self.recipe, scores)
        except Exception as error:  # anything that a decoder or a storage raises
            self.recorder.warn(
                f"the worst mistakes cannot be shown: {type(error).__name__}: {error}"
            )
        else:
            self.recorder.show("mistakes", pictures, step)
