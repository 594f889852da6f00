"""Events as a person reads them: a progress bar and lines on a terminal, plain lines otherwise."""

from collections.abc import Callable
from typing import Any, Self

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from lockstep.cli.terminal import console, in_line
from lockstep.launched import is_leading
from lockstep.metrics import as_text


class Reporter:
    """A listener for `lockstep.train` and `lockstep.evaluate`; a context manager."""

    def __init__(self) -> None:
        self.console = console(soft_wrap=True)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
            console=self.console,
            transient=True,
            disable=not self.console.is_terminal or not is_leading(),
        )
        self._tasks: dict[str, TaskID] = {}
        self._tenths: dict[str, int] = {}
        self._total = 0

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def __call__(self, event: dict[str, Any]) -> None:
        """Show an event."""
        show = getattr(self, f"_on_{event['kind']}", None)
        if show is not None:
            show(event)

    def progress(self, what: str) -> Callable[[int, int], None]:
        """Return a function that shows what is done and the total."""
        return lambda done, total: self({"kind": "progress", "what": what, "done": done, "total": total})

    def say(self, text: str) -> None:
        """Print a line above the progress bar."""
        self.console.print(text, markup=False)

    def _advance(self, what: str, done: int, total: int, note: str = "") -> None:
        if what not in self._tasks:
            self._tasks[what] = self._bar.add_task(what, total=total, note="")
        self._bar.update(self._tasks[what], completed=done, note=note)
        if done == total:
            self._bar.remove_task(self._tasks.pop(what))

    def _on_progress(self, event: dict[str, Any]) -> None:
        self._advance(event["what"], event["done"], event["total"])
        # Without a terminal a long task still shows that it lives: one line each tenth.
        done, total = event["done"], event["total"]
        tenth = done * 10 // total
        if not self.console.is_terminal and total >= 1000 and tenth > self._tenths.get(event["what"], 0):
            self._tenths[event["what"]] = tenth
            self.say(f"{event['what']}: {done} of {total}")

    def _on_start(self, event: dict[str, Any]) -> None:
        self._total = event["total"]
        about = event["environment"]
        for message in event["damaged"]:
            self.say(f"skipped a damaged checkpoint: {message}")
        for note in event["notes"]:
            self.say(f"note: {note}")
        ranks = f", {about['ranks']} ranks" if about["ranks"] > 1 else ""
        self.say(
            f"{about['train']['images']} training and {about['val']['images']} validation images on {about['device']}{ranks}"
        )
        bad = [(split, image) for split in ("train", "val") for image in about[split]["quarantined"]]
        if bad:
            self.say(f"{len(bad)} bad images are left out:")
        for split, image in bad[:10]:
            self.say(f"  {split}/{in_line(image['file'])}: {image['reason']}")
        if len(bad) > 10:
            self.say(f"  ... and {len(bad) - 10} more, all in environment.json")
        if event["step"]:
            self.say(f"going on after step {event['step']} of {event['total']}")
        self._advance("training", event["step"], event["total"])

    def _on_train(self, event: dict[str, Any]) -> None:
        note = f"loss {event['loss']:.3f}, {event['images_per_sec']:.1f} images/s"
        self._advance("training", event["step"], self._total, note)
        if not self.console.is_terminal:
            self.say(f"step {event['step']} of {self._total}: {note}, lr {event['lr']:.4g}")

    def _on_evaluate(self, event: dict[str, Any]) -> None:
        name = "" if event["weights"] == "trained" else " (moving average)"
        self.say(
            f"step {event['step']}{name}: top-1 {event['top1_percent']:.2f} %, top-5 {event['top5_percent']:.2f} %, "
            f"loss {as_text(event['loss'])} on {event['images']} images"
        )

    def _on_trace(self, event: dict[str, Any]) -> None:
        self.say(f"traced steps {event['first_step']} to {event['last_step']}: {event['path']}")

    def _on_warning(self, event: dict[str, Any]) -> None:
        self.say(f"warning: {event['message']}")

    def _on_already_finished(self, event: dict[str, Any]) -> None:
        self.say(f"this run was finished at step {event['report']['steps']}; nothing is left to do")
        self._summary(event)

    def _on_finish(self, event: dict[str, Any]) -> None:
        self._summary(event)

    def _summary(self, event: dict[str, Any]) -> None:
        report = event["report"]
        final, best = report["final"]["trained"], report["best"]
        speed = report["images_per_sec"]
        rows = [
            ("top-1", f"{final['top1_percent']:.2f} % of {final['images']} images"),
            ("top-5", f"{final['top5_percent']:.2f} %"),
            ("loss", as_text(final["loss"])),
            ("best top-1", f"{best['top1_percent']:.2f} % at step {best['step']}"),
            ("training time", f"{report['train_sec']:.1f} s"),
            ("throughput", f"{speed:.1f} images/s (first steps left out)" if speed else "too few steps to measure"),
            ("bad images left out", str(report["quarantined"])),
            ("run", event["out"]),
        ]
        for name, value in rows:
            self.say(f"  {name:<20} {value}")
