"""Read the folder of a run, whether the run is finished, stopped or still training: as a whole, or
by epochs, as other programs report their runs."""

import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np

from lockstep.data.images import printable
from lockstep.recipes import Recipe, difference, load_recipe
from lockstep.recipes.best_evaluation import find_best
from lockstep.recipes.order import steps_per_epoch
from lockstep.recipes.published import RECIPES
from lockstep.runs.environment import Environment, read_environment
from lockstep.runs.image_results import BEST_FILE, Results, read_results
from lockstep.runs.report import Evaluation, Report, find_best_checkpoint, read_report
from lockstep.system.errors import CheckpointError, as_path
from lockstep.system.event_log import EvaluateEvent, LogEvent, TrainEvent, read_log
from lockstep.system.text import format_count
from lockstep.weights.checkpoint_choice import explain_lost_best


@dataclass(frozen=True)
class Run:
    """The contents of a run's folder, whether the run is finished, stopped or still training.

    >>> import lockstep
    >>> run = lockstep.read_run("run")
    >>> run.step, run.final["trained"]["top1_percent"], run.is_best(7, "trained")
    (7, 10.0, True)
    """

    folder: Path
    """The path of the folder."""
    name: str
    """The name that pages and tables show."""
    recipe: Recipe
    """The recipe of the run, complete."""
    environment: Environment
    """The contents of environment.json; empty if the run never started or the file is damaged."""
    log: Sequence[LogEvent]
    """The events of log.jsonl, in order."""
    report: Report | None
    """The contents of report.json; None if the run is not finished."""
    results: Results | None
    """The scores of each image in the newest evaluation; None if they are missing."""
    best_results: Results | None = None
    """The scores in the best evaluation; None if that is the newest one, or they are missing."""

    @cached_property
    def training(self) -> list[TrainEvent]:
        """The training events of the log, one for each interval, in the order of steps."""
        return [event for event in self.log if event["kind"] == "train"]

    @cached_property
    def evaluations(self) -> list[EvaluateEvent]:
        """The evaluation events of the log, in the order of steps."""
        return [event for event in self.log if event["kind"] == "evaluate"]

    @cached_property
    def losses(self) -> np.ndarray:
        """The mean training loss of every logged step, float64 [steps]; NaN if it is not finite."""
        losses = []
        for event in self.training:
            losses += event["losses"]
        return np.array(losses, np.float64)

    @cached_property
    def curves(self) -> dict[str, dict[str, np.ndarray]]:
        """Figures of the log as float64 arrays, by group and name; NaN where there is none.

        "train" has values for each interval, "trained" and "ema" for each evaluation of these
        weights. `step` is the number of steps done.
        """
        groups: dict[str, list[Mapping[str, Any]]] = {}
        for event in (*self.training, *self.evaluations):
            groups.setdefault(str(event.get("weights", "train")), []).append(event)
        curves: dict[str, dict[str, np.ndarray]] = {}
        for group, events in groups.items():
            names = {name for event in events for name, value in event.items() if _is_figure(value)}
            curves[group] = {}
            for name in sorted(names):
                values = [event.get(name) for event in events]
                curves[group][name] = np.array(values, np.float64)
        return curves

    @property
    def best_checkpoint(self) -> Path:
        """The best checkpoint, or the newest one without evaluations: a path for `lockstep.load`.

        Raises:
            CheckpointError: There is no checkpoint.
        """
        return find_best_checkpoint(self.folder)

    @property
    def backend(self) -> str:
        """The name of the backend; "unknown" if the run never started."""
        return str(self.environment.get("execution", {}).get("backend", "unknown"))

    @property
    def step(self) -> int:
        """The number of steps done."""
        return max((entry["step"] for entry in self.log), default=0)

    @property
    def steps(self) -> int | None:
        """The number of steps of the whole run; None if it never started."""
        for event in reversed(self.log):
            if event["kind"] == "start" and "total" in event:
                return event["total"]
        return None

    @property
    def trouble(self) -> str | None:
        """Why there is no final result; None if there is one."""
        if self.report is not None:
            return None
        if self.log and self.log[-1]["kind"] == "diverged":
            return f"diverged: {self.log[-1]['message']}"
        of = f" of {self.steps}" if self.steps else ""
        trouble = f"not finished: at step {self.step}{of}"
        first = self.best_results or self.results  # the order of the page
        if first is not None:
            return f"{trouble}; classes and mistakes are those of step {first.step}"
        if not self.step:
            return trouble
        run = shlex.quote(printable(str(self.folder)))
        return f"{trouble}; lockstep evaluate {run} shows its accuracy and classes"

    @property
    def ending(self) -> str | None:
        """How a finished run ended, if that is unusual; else None."""
        if self.report is None:
            return None
        place = f"step {self.report['steps']}"
        if self.steps:
            place += f" of {self.steps}"
        parts = []
        if "stopped_early" in self.report:
            parts.append(f"stopped early at {place}: {self.report['stopped_early']}")
        if times := self.report.get("restarts", 0):
            count = format_count(times, "time")
            parts.append(f"the ranks were restarted {count} after a failure")
        if not self.report["final"]:
            parts.append(f"finished at {place} without an evaluation there")
        return "; ".join(parts) or None

    @property
    def gaps(self) -> str | None:
        """Where losses are not finite, which curves cannot show; None if all are finite."""
        steps = []
        for entry in self.training:
            for step, loss in enumerate(entry["losses"], start=entry["first_step"] + 1):
                if not _is_finite(loss):
                    steps.append(step)
        evaluations = [
            f"{e['step']} ({e['weights']})" for e in self.evaluations if not _is_finite(e["loss"])
        ]
        places = []
        if steps:
            places.append(f"in training at {len(steps)} steps, the first of them {steps[0]}")
        if evaluations:
            places.append(f"in the evaluation at step {', '.join(evaluations[:3])}")
        if not places:
            return None
        return f"The loss is not finite {' and '.join(places)}; the curves leave these out."

    @property
    def final(self) -> Mapping[str, Evaluation | EvaluateEvent]:
        """The last evaluation by kind of weights, "trained" or "ema"; the newest if unfinished."""
        if self.report is not None:
            return self.report["final"]
        last = self.evaluations[-1]["step"] if self.evaluations else None
        return {entry["weights"]: entry for entry in self.evaluations if entry["step"] == last}

    @cached_property
    def best(self) -> EvaluateEvent | None:
        """The evaluation of the best checkpoint; None if the run was never evaluated."""
        return find_best(self.evaluations, self.recipe.selection)

    @cached_property
    def lost_best(self) -> str:
        """Which checkpoint is used if the best one is missing; "" if it exists."""
        return explain_lost_best(self.folder)

    def is_best(self, step: int, weights: str) -> bool:
        """Return whether an evaluation is the best one.

        Args:
            step: The number of steps before the evaluation.
            weights: The kind of weights, "trained" or "ema".
        """
        best = self.best
        return best is not None and (best["step"], best["weights"]) == (step, weights)

    def find_results(self, step: int, weights: str) -> Results | None:
        """Return the scores of each image in an evaluation; None if they are missing.

        Args:
            step: The number of steps before the evaluation.
            weights: The kind of weights, "trained" or "ema".
        """
        for results in filter(None, (self.results, self.best_results)):
            if results.step == step and weights in results.scores:
                return results
        return None

    @property
    def class_folders(self) -> tuple[str, ...]:
        """The classes of the images by their folders; empty if they are unknown."""
        if self.report is not None:
            return tuple(self.report["classes"])
        return () if self.results is None else self.results.classes

    @property
    def classes(self) -> list[str]:
        """The names of the classes as pages show them; empty if they are unknown."""
        return list(map(printable, self.class_folders))

    @property
    def recipe_name(self) -> str:
        """The name of the recipe that this run uses or is based on; "" if it is unknown."""
        return printable(self.recipe.based_on)

    @property
    def class_count(self) -> int | None:
        """The number of classes of the images; None if it is unknown."""
        return len(self.report["classes"]) if self.report else self.environment.get("classes")

    @cached_property
    def nearest_recipe(self) -> tuple[str, dict[str, tuple[Any, Any]]]:
        """The nearest published recipe, and the fields that differ as (published, this run's)."""
        names = [self.recipe.based_on] if self.recipe.based_on in RECIPES else list(RECIPES)
        differences = {name: difference(RECIPES[name](), self.recipe) for name in names}
        nearest = min(names, key=lambda name: len(differences[name]))
        return nearest, differences[nearest]


def read_run(folder: str | Path, name: str = "") -> Run:
    """Read the folder of a run that is finished, stopped or still training.

    Args:
        folder: The folder of the run.
        name: A name for pages and tables; by default that of the folder.

    Returns:
        What the folder holds.

    Raises:
        CheckpointError: The folder holds no run, or its contents cannot be read.

    >>> import lockstep
    >>> run = lockstep.read_run("run")
    >>> run.curves["trained"]["top1_percent"].tolist(), run.best_checkpoint.name
    ([10.0], 'step-00000007')
    """
    folder = as_path(folder, "folder")
    if not (folder / "recipe.yaml").is_file():
        raise CheckpointError(
            f"{folder} is not a run's folder: it has no recipe.yaml; expected the --out of lockstep"
            " train"
        )
    report = read_report(folder)
    log = read_log(folder / "log.jsonl", whole=True)
    environment: Environment = {}
    with suppress(CheckpointError):  # a report shows what a damaged file lacks as unknown
        environment = read_environment(folder)
    run = Run(
        folder=folder,
        name=printable(name or folder.resolve().name),
        recipe=load_recipe(folder),
        environment=environment,
        log=log,
        report=report,
        results=_read_newest_results(folder, log, is_finished=report is not None),
    )
    run = replace(run, best_results=_read_best_results(run))
    for results in filter(None, (run.results, run.best_results)):
        _check_indexes(run, results)
    return run


def _check_indexes(run: Run, results: Results) -> None:
    """Raise `CheckpointError` if results name classes that the run does not have."""
    for scores in results.scores.values():
        label = scores.labels.max(initial=-1)
        prediction = scores.predictions.max(initial=-1)
        if label >= len(run.classes) or prediction >= run.recipe.logits:
            raise CheckpointError(
                f"{run.folder}: the results of step {results.step} name classes that the run does"
                " not have; remove validation.npz and best-validation.npz to continue without them"
            )


def _read_newest_results(
    folder: Path, log: Sequence[LogEvent], *, is_finished: bool
) -> Results | None:
    """Return the results in a run's folder; None if they are not of the newest evaluation in the
    log of an unfinished run."""
    results = read_results(folder)
    if is_finished or results is None:
        return results
    steps = [entry["step"] for entry in log if entry["kind"] == "evaluate"]
    is_newest = steps and steps[-1] == results.step
    return results if is_newest and results.classes else None


def _read_best_results(run: Run) -> Results | None:
    """Return the results of the best evaluation; None if it is the newest one, or if the folder has
    those of another one."""
    best = run.best
    if best is None or run.results is None or best["step"] == run.results.step:
        return None
    results = read_results(run.folder, BEST_FILE)
    if results is None or (results.step, results.digest) != (best["step"], run.results.digest):
        return None
    return results if list(results.scores) == [best["weights"]] else None


def _is_figure(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


@dataclass(frozen=True)
class Epoch:
    """What a run logged in one epoch."""

    number: int
    """The epoch's number, from 0."""
    intervals: tuple[TrainEvent, ...]
    """Training entries in order; at least one."""
    evaluations: dict[str, EvaluateEvent]
    """Entries of the evaluation at the end of the epoch, by weights ("trained", "ema"); empty
    without an evaluation."""

    @property
    def timed_intervals(self) -> tuple[TrainEvent, ...]:
        """The intervals whose speed counts: all except those of profiled steps."""
        return tuple(entry for entry in self.intervals if "traced" not in entry)

    @property
    def lr(self) -> float:
        """The learning rate of the last step."""
        return float(self.intervals[-1]["lr"])

    def mean(self, name: Literal["loss", "top1_percent", "top5_percent"]) -> float:
        """Return the mean of a figure over the epoch's images, from the means of the intervals; NaN
        if one has none."""
        total = 0.0
        for entry in self.intervals:
            value = entry[name]
            total += math.nan if value is None else value * entry["images"]
        return total / count_images(self.intervals)


@dataclass(frozen=True)
class LoggedRun:
    """The facts about a run in its folder."""

    recipe: Recipe
    environment: Environment
    steps_per_epoch: int
    epochs: tuple[Epoch, ...]
    """The epochs that were started."""
    seconds: float
    """Time from the start of each process to its last entry, added up over all processes."""
    ended_at: float
    """Time of the last entry, in seconds since 1970."""


def count_images(entries: Iterable[TrainEvent]) -> int:
    """Return the number of images in some training intervals."""
    return sum(entry["images"] for entry in entries)


def count_steps(entries: Iterable[TrainEvent]) -> int:
    """Return the number of steps in some training intervals."""
    return sum(entry["step"] - entry["first_step"] for entry in entries)


def read_epochs(folder: Path) -> LoggedRun:
    """Read a run's folder. Raises `CheckpointError` if it holds no run, a corrupt run, or one that
    has trained nothing."""
    run = read_run(folder)
    environment = read_environment(folder)  # refuses a damaged one, which a report leaves out
    images = environment.get("train", {}).get("images")
    ranks = environment.get("ranks")
    if not run.log or not environment:
        raise CheckpointError(f"{folder}: nothing was trained yet")
    if images is None or ranks is None:
        raise CheckpointError(
            f"{folder / 'environment.json'} lacks the number of training images or of ranks;"
            " restore the file"
        )
    for entry in run.log:
        missing = {"elapsed_sec", *(["lr"] if entry["kind"] == "train" else [])} - entry.keys()
        if missing:
            raise CheckpointError(
                f"{folder / 'log.jsonl'}: the entry of step {entry['step']} has no {min(missing)}"
            )
    per_epoch = steps_per_epoch(run.recipe, images)
    epochs = group_by_epoch(run.log, per_epoch)
    if not epochs:
        raise CheckpointError(f"{folder}: nothing was trained yet")
    ended_at = (folder / "log.jsonl").stat().st_mtime
    return LoggedRun(
        run.recipe, environment, per_epoch, epochs, sum_process_seconds(run.log), ended_at
    )


def group_by_epoch(entries: Iterable[LogEvent], per_epoch: int) -> tuple[Epoch, ...]:
    """Return the epochs in which something was trained. `per_epoch` is the number of steps of an
    epoch."""
    # No interval lies in two epochs, and evaluations are at the ends of epochs.
    intervals: dict[int, list[TrainEvent]] = {}
    evaluations: dict[int, dict[str, EvaluateEvent]] = {}
    for entry in entries:
        if entry["kind"] == "train":
            intervals.setdefault(entry["first_step"] // per_epoch, []).append(entry)
        if entry["kind"] == "evaluate":
            evaluations.setdefault(entry["step"] // per_epoch - 1, {})[entry["weights"]] = entry
    return tuple(
        Epoch(number, tuple(events), evaluations.get(number, {}))
        for number, events in sorted(intervals.items())
    )


def sum_process_seconds(entries: Sequence[LogEvent]) -> float:
    """Return the time of all processes of a log in seconds. Every process logs its start and counts
    from there."""
    ends = [before for before, after in pairwise(entries) if after["kind"] == "start"]
    return float(sum(entry["elapsed_sec"] for entry in [*ends, *entries[-1:]]))
