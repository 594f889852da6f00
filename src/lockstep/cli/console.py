"""Show events to a person: a progress bar and lines on a terminal, plain lines elsewhere."""

import shlex
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    Task,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Column
from rich.text import Text

from lockstep.cli.best_so_far import Outlook, StepPace
from lockstep.cli.terminal import escape_line, make_console
from lockstep.data.images import printable
from lockstep.models.accuracy_interval import format_accuracy
from lockstep.models.metrics import describe_metrics, list_metrics
from lockstep.recipes.best_evaluation import describe_best, describe_place, is_better
from lockstep.recipes.field_validation import format_value, shorten_text
from lockstep.runs.report import Report
from lockstep.system.event_log import EvaluateEvent, RestartEvent, StartEvent, TrainEvent
from lockstep.system.ranks import is_leading
from lockstep.system.text import format_count
from lockstep.weights.checkpoint_choice import explain_lost_best

if TYPE_CHECKING:
    from lockstep.runs import events


_WITHIN_EPOCH = ("evaluate", "progress", "save")
"""Events between the last step of an epoch and its line."""
_SHOWN_NOTES = 4
_SILENCE_SEC = 300
"""Without a terminal, a longer epoch prints a line this often."""


class _TimeLeft(TimeRemainingColumn):
    """Shows the time left that a task reports, or else an estimate from the speed of its bar."""

    def render(self, task: Task) -> Text:
        """Return the text of a task."""
        left = task.fields.get("left")
        if left is None:
            return super().render(task)
        return Text(f"{left} left", style="progress.remaining")


def format_time_left(seconds: float) -> str:
    """Return an estimated time, rounded for a person to read.

    >>> [format_time_left(seconds) for seconds in (0.2, 75, 3 * 3600 + 125, 50 * 3600)]
    ['1 s', '1 min', '3 h 2 min', '2 d 2 h']
    """
    if seconds < 60:
        return f"{max(round(seconds), 1)} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, rest = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {rest} min"
    return f"{hours // 24} d {hours % 24} h"


def _advise_on_ending(step: int, out: str) -> str:
    """Return how to continue a run that stopped early at a step."""
    if step == 0:  # after its linear probe
        return (
            "to train the classifier on augmented images: repeat the command with --set"
            " flip_probability=0.5 and another --out"
        )
    return (
        f"to continue: lockstep train --out {shlex.quote(out)} --set early_stopping_epochs=0, or a"
        " larger number"
    )


def _list_accuracies(report: Report, out: str) -> list[tuple[str, str]]:
    """Return a summary's rows on the evaluations of the run in `out`."""
    rows = []
    best = report["best"]
    final = report["final"].get("trained")
    if best is not None:
        rows += describe_metrics(best, len(report["classes"]))
        place = describe_place(best)
        rows[0] = (rows[0][0], f"{rows[0][1]}, best {place}")
        if lost := explain_lost_best(Path(out)):
            rows.append(("", lost))
    if final is None:
        rows.append(("last step" if rows else "top-1", "not evaluated"))
    elif best is None:
        rows += describe_metrics(final, len(report["classes"]))
    elif (best["step"], best.get("weights", "trained")) != (report["steps"], "trained"):
        last = describe_best(final | {"step": report["steps"]}, report.get("selection", "top1"))
        rows.append(("last step", last))
    if report.get("published") is not None:
        from lockstep.recipes.published_accuracies import describe_comparison

        rows += describe_comparison(report["published"])
    return rows


def _describe_images(about: Mapping[str, Any]) -> str:
    """Return a line on a run's images and device, from its environment."""
    line = f"{about['train']['images']} training"
    is_evaluated = not about.get("execution", {}).get("train_only")
    if is_evaluated:
        line += f" and {about['val']['images']} validation"
    line += f" images on {about['device']}"
    if about["ranks"] > 1:
        line += f", {about['ranks']} ranks"
    if not is_evaluated:
        line += ", without evaluation"
    return line


class Reporter:
    """A listener for training and models (`Model.on`); a context manager.

    An epoch has one line, with its evaluation. With `is_verbose`, every interval and every
    evaluation has one, and details are shown too. With `to_stderr`, standard output is left to
    results; if these go to the terminal, there is no bar between them. With `is_quiet`, no event is
    shown.
    """

    def __init__(
        self, *, to_stderr: bool = False, is_quiet: bool = False, is_verbose: bool = False
    ) -> None:
        self._is_quiet = is_quiet
        self._is_verbose = is_verbose
        self.console = make_console(soft_wrap=True, stderr=to_stderr)
        self._bar = Progress(
            TextColumn("{task.description}"),
            # leaves room for epoch, steps, time left and loss in 80 columns
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            _TimeLeft(table_column=Column(no_wrap=True)),
            TextColumn("{task.fields[note]}"),
            console=self.console,
            transient=True,
            redirect_stdout=not to_stderr,
            disable=not self.console.is_terminal
            or not is_leading()
            or (to_stderr and sys.stdout.isatty()),
        )
        self._tasks: dict[str, TaskID] = {}
        self._tenths: dict[str, int] = {}
        self._total = self._per_epoch = self._epochs = 0
        self._pace: StepPace | None = None
        self._classes = sys.maxsize
        self._outlook: Outlook | None = None
        self._is_settled = False
        self._line = self._left = ""
        self._evaluation: EvaluateEvent | None = None
        """The best evaluation of the epoch that the line is about."""
        self._last_evaluated = "trained"
        self._is_probing = False
        self._second = 0.0
        """When the newest line of an epoch was made."""
        self._said: set[str] = set()
        """Lines that all folds of a cross-validation share."""

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._end_line()
        self._bar.stop()

    def __call__(self, event: "events.Event") -> None:
        """Show an event."""
        if self._is_quiet:
            return
        if event["kind"] not in _WITHIN_EPOCH:
            self._end_line()
        show = getattr(self, f"_show_{event['kind']}", None)
        if show is not None:
            show(event)

    def progress(self, what: str) -> Callable[[int, int], None]:
        """Return a function that takes how much is done and the total, and shows the progress."""
        return lambda done, total: self(
            {"kind": "progress", "what": what, "done": done, "total": total}
        )

    def say(self, text: str) -> None:
        """Print a line above the progress bar."""
        self.console.print(text, markup=False)

    def _say_once(self, text: str) -> None:
        if text not in self._said:
            self.say(text)
        self._said.add(text)

    def _advance(
        self,
        what: str,
        done: int,
        total: int,
        note: str = "",
        left: str | None = None,
        title: str = "",
    ) -> None:
        if what not in self._tasks:
            # Start at the steps done before: a bar that jumps there would count them as speed.
            self._tasks[what] = self._bar.add_task(
                what, total=total, completed=done, note="", left=None
            )
        self._bar.update(
            self._tasks[what],
            total=total,
            completed=done,
            note=note,
            left=left,
            description=title or what,
        )
        if done == total:
            self._bar.remove_task(self._tasks.pop(what))

    def _show_progress(self, event: "events.ProgressEvent") -> None:
        self._advance(event["what"], event["done"], event["total"])
        # Without a terminal, a long task prints one line for each tenth, to show that it is
        # running.
        done = event["done"]
        total = event["total"]
        tenth = done * 10 // total
        if (
            not self.console.is_terminal
            and total >= 1000
            and tenth > self._tenths.get(event["what"], 0)
        ):
            self._tenths[event["what"]] = tenth
            self.say(f"{event['what']}: {done} of {total}")

    def _show_settled(self, event: "events.SettledEvent") -> None:
        self._is_settled = True
        for line in event["lines"] if self._is_verbose else event["lines"][:1]:
            self.say(line)

    def _show_linear_probe(self, event: "events.LinearProbeEvent") -> None:
        accuracy = format_accuracy(event["top1_percent"], event["images"])
        self.say(f"linear probe: {accuracy} after {format_time_left(event['seconds'])}")

    def _show_settings(self, event: "events.SettingsEvent") -> None:
        self.say(f"resuming {event['out']} with {', '.join(event['origins'].values())}")

    def _show_start(self, event: StartEvent) -> None:
        self._total = event["total"]
        self._second = 0.0
        about = event["environment"]
        self._per_epoch = event.get("steps_per_epoch", 0)
        self._epochs = self._total // self._per_epoch if self._per_epoch else 0
        if "elapsed_sec" in event:
            self._pace = StepPace(self._per_epoch, event["step"], event["elapsed_sec"])
        self._classes = about["classes"]
        self._outlook = Outlook.read(event)
        for message in event["damaged"]:
            self.say(f"skipped a corrupt checkpoint: {message}")
        shown = sys.maxsize if self._is_verbose else _SHOWN_NOTES
        for note in [*event["notes"][:shown], *(event.get("details", []) * self._is_verbose)]:
            self._say_once(f"note: {note}")
        if len(event["notes"]) > shown:
            self._say_once(f"  ... and {len(event['notes']) - shown} more, all in log.jsonl")
        self._last_evaluated = event.get("evaluates", ["trained"])[-1]
        self._is_probing = event.get("probes", False)
        is_known = self._is_settled or event["step"]  # a run that resumes has its recipe
        if self._per_epoch and (self._is_verbose or not is_known):
            self.say(self._describe_recipe(about.get("recipe", ""), event.get("changed", {})))
        self.say(_describe_images(about))
        self._show_quarantine(about, is_new=not event["step"])
        if event["step"]:
            self.say(f"resuming after step {event['step']} of {event['total']}")
        self._advance(
            "training", event["step"], event["total"], title=self._name_epoch(event["step"] + 1)
        )

    def _show_quarantine(self, about: Mapping[str, Any], *, is_new: bool) -> None:
        """Say how many images are left out; at the beginning of a run, also which."""
        lines = []
        for split in ("train", "val"):
            root = about[split].get("root", split)
            images = about[split]["quarantined"]
            lines += [
                f"  {escape_line(root + '/' + bad['file'])}: {bad['reason']}" for bad in images
            ]
        if lines:
            end = ":" if is_new else ", listed in environment.json"
            self._say_once(f"{format_count(len(lines), 'bad image')} left out{end}")
        if not is_new:
            return
        if len(lines) > 10:
            lines[10:] = [f"  ... and {len(lines) - 10} more, all in environment.json"]
        for line in lines:
            self._say_once(line)

    def _describe_recipe(self, name: str, changed: dict[str, Any]) -> str:
        length = f"{format_count(self._epochs, 'epoch')} of {format_count(self._per_epoch, 'step')}"
        if not name:
            return f"recipe: {length}"
        text = f"recipe {printable(name)}"
        if changed:
            some = [
                shorten_text(f"{field}={format_value(value)}", 40)
                for field, value in list(changed.items())[:6]
            ]
            text += f" with {printable(', '.join(some))}"
        if len(changed) > 6:
            text += f" and {format_count(len(changed) - 6, 'other field')}"
        return f"{text}: {length}"

    def _name_epoch(self, step: int) -> str:
        """Return the epoch of a step, counted from 1; "training" if the epoch is unknown."""
        if not self._per_epoch:
            return "training"
        return f"epoch {min((step - 1) // self._per_epoch + 1, self._epochs)} of {self._epochs}"

    def _estimate_time_left(self, event: TrainEvent) -> str | None:
        """Return the time left, estimated from the speed of this process. It includes evaluation
        and saving."""
        if self._pace is None:
            return None
        step_sec = self._pace.add(event)
        if step_sec is None or event["step"] >= self._total:
            return None
        return format_time_left(step_sec * (self._total - event["step"]))

    def _show_restart(self, event: RestartEvent) -> None:
        self.say(f"restart {event['restart']} after a failure: {event['reason']}")

    def _show_train(self, event: TrainEvent) -> None:
        step = event["step"]
        left = self._estimate_time_left(event)
        epoch = self._name_epoch(step)
        loss = f"loss {event['loss']:.3f}"
        note = f"{loss}, {event['images_per_sec']:.1f} images/s"
        outlook = self._outlook
        best = outlook.name_best() if outlook is not None else ""
        in_bar = f"{loss}, {best}" if best else note
        self._advance("training", step, self._total, in_bar, left, epoch)
        if left and outlook is not None and outlook.patience:
            left = f"at most {left}"
        second = event.get("elapsed_sec", 0.0)
        is_whole = self._per_epoch and step % self._per_epoch == 0
        if is_whole and not self._is_verbose:
            self._line = f"{epoch}: {loss}"
            self._left = left or ""
            self._second = second
            return
        is_due = not self._per_epoch or second - self._second >= _SILENCE_SEC
        if self._is_verbose or (is_due and not self.console.is_terminal):
            where = f"{epoch}, step" if self._per_epoch else "step"
            line = f"{where} {step} of {self._total}: {note}, lr {event['lr']:.4g}"
            if left:
                line += f", {left} left"
            self.say(line)
            self._second = second

    def _end_line(self) -> None:
        """Print the line of an epoch, if there is one."""
        line = self._line
        self._line = ""
        if not line:
            return
        if self._evaluation is not None:
            average = self._evaluation["weights"] == "ema"
            line += f"; validation{' of the moving average' * average}: "
            line += self._describe_evaluation(self._evaluation)
            self._evaluation = None
        self.say(f"{line}; {self._left} left" if self._left else line)

    def _describe_evaluation(self, event: EvaluateEvent, images: str = "") -> str:
        """Return the figures of an evaluation of `images`, and what follows from them."""
        shown = filter(lambda metric: not metric.is_of_classes, list_metrics(event, self._classes))
        figures = ", ".join([f"{metric.title} {metric.describe(event)}" for metric in shown])
        if self._outlook is not None:
            images += self._outlook.describe(event, names_best=bool(images))
        return figures + images

    def _show_evaluate(self, event: EvaluateEvent) -> None:
        is_average = event["weights"] == "ema"
        if self._outlook is not None:
            self._outlook.add(event)
        if self._line:
            selection = self._outlook.selection if self._outlook is not None else "top1"
            if self._evaluation is None or is_better(event, self._evaluation, selection):
                self._evaluation = event
            if event["weights"] == self._last_evaluated:
                self._end_line()
        elif self._is_verbose or event["step"] or not (is_average or self._is_probing):
            name = " (moving average)" if is_average else ""
            images = f" on {format_count(event['images'], 'image')}"
            self.say(f"step {event['step']}{name}: {self._describe_evaluation(event, images)}")

    def _show_trace(self, event: "events.TraceEvent") -> None:
        self.say(f"traced steps {event['first_step']} to {event['last_step']}: {event['path']}")

    def _show_warning(self, event: "events.MessageEvent") -> None:
        self.say(f"warning: {event['message']}")

    def _show_detail(self, event: "events.MessageEvent") -> None:
        if self._is_verbose:
            self.say(f"note: {event['message']}")

    def _show_pause(self, event: "events.PauseEvent") -> None:
        self.say(
            f"stopped after step {event['step']} of {event['total']} as requested; saved in"
            f" {event['out']}. Repeat the command to resume; to train to the end: lockstep train"
            f" --out {shlex.quote(event['out'])}"
        )

    def _show_already_finished(self, event: "events.FinishEvent") -> None:
        line = f"this run is finished (step {event['report']['steps']})"
        if "stopped_early" not in event["report"]:
            line += "; nothing is left to do"
        self.say(line)
        self._show_finish(event)

    def _show_finish(self, event: "events.FinishEvent") -> None:
        report = event["report"]
        speed = report["images_per_sec"]
        if "stopped_early" in report:
            self.say(f"stopped early at step {report['steps']}: {report['stopped_early']}")
            self.say(_advise_on_ending(report["steps"], event["out"]))
        throughput = "too few steps to measure"
        if speed:
            throughput = f"{speed:.1f} images/s (first steps left out)"
        rows = [
            *_list_accuracies(report, event["out"]),
            ("training time", f"{report['train_sec']:.1f} s"),
            ("throughput", throughput),
        ]
        if report["quarantined"]:
            rows.append(("bad images left out", str(report["quarantined"])))
        if "restarts" in report:
            rows.append(("restarts", str(report["restarts"])))
        rows.append(("run", event["out"]))
        for name, value in rows:
            self.say(f"  {name:<20} {value}")
