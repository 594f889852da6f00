"""`lockstep train`."""

import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lockstep.cli import options
from lockstep.cli.command import rare
from lockstep.cli.terminal import print
from lockstep.system.ranks import is_leading

if TYPE_CHECKING:
    from lockstep.runs.events import Event, Listener
    from lockstep.runs.resuming import RunSettings
    from lockstep.weights import WeightsChoice


def command(
    out: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Folder of the run; an existing run resumes.")
    ],
    recipe: Annotated[
        str | None,
        typer.Option(metavar="RECIPE", help=f"{options.RECIPE} (default: one that fits)."),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="Training and validation images, in any format."),
    ] = None,
    split: Annotated[
        float | None,
        typer.Option(
            metavar="SHARE",
            help="Share to validate on if there is no validation set (default: 0.3).",
        ),
    ] = None,
    folds: Annotated[
        int | None,
        typer.Option(
            metavar="K",
            min=2,
            max=1000,
            help="Cross-validate: train K runs, OUT/fold-1 to OUT/fold-K.",
        ),
    ] = None,
    weights: Annotated[
        str | None,
        typer.Option(
            metavar="SOURCE", help="Start from a run, a file or a name (`lockstep weights`)."
        ),
    ] = None,
    model: options.Model = None,
    ignore: options.Ignore = None,
    resume_from: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH", help="Resume from another program's checkpoint, such as NVIDIA's."
        ),
    ] = None,
    backend: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Framework; `lockstep doctor` lists them (default: torch)."
        ),
    ] = None,
    loader: options.Loader = None,
    compile: Annotated[
        str | None,
        rare(metavar="MODE", help="Compile with torch.compile or XLA: auto, on or off."),
    ] = None,
    distributed: options.Distributed = None,
    model_prefix: Annotated[
        str | None,
        rare(metavar="PREFIX", help="Also write every epoch's weights as PREFIX-0001.params."),
    ] = None,
    keep_global_batch: Annotated[
        bool,
        rare("--keep-global-batch", help="On other numbers of ranks, keep the parts of a step."),
    ] = False,
    train_only: Annotated[
        bool, rare("--train-only", help="Never evaluate; validation images may be missing.")
    ] = False,
    stop_after_epochs: Annotated[
        int | None, typer.Option(help="Stop after N more epochs; the same command resumes.")
    ] = None,
    stop_after_steps: Annotated[
        int | None, rare(help="Stop after N more steps; the same command resumes.")
    ] = None,
    early_stopping_epochs: Annotated[
        int | None, typer.Option(help="End the run after N epochs without improvement.")
    ] = None,
    tensorboard: Annotated[
        bool | None,
        rare(
            "--tensorboard/--no-tensorboard",
            help="Write TensorBoard events into the run's folder (default: yes).",
        ),
    ] = None,
    loggers: Annotated[
        list[str] | None,
        typer.Option(
            "--logger",
            metavar="NAME",
            help="Also log to mlflow, wandb, dlll or nvidia-report; repeatable.",
        ),
    ] = None,
    profile: Annotated[
        str | None,
        rare(
            metavar="N[:M]",
            help="Write a trace of M steps (default: 1), from step N, into the run.",
        ),
    ] = None,
    trust_run: Annotated[
        bool,
        rare(
            "--trust-run", help="Use files, addresses and modules that only the run's folder names."
        ),
    ] = False,
    verbose: Annotated[
        bool, rare("--verbose", help="Print a line per interval of steps, and details.")
    ] = False,
    assignments: options.Set = None,
) -> None:
    """Train or resume a run; evaluate and save checkpoints.

    To resume a run, repeat its command, or give --out alone.

    Example: lockstep train --data photos --out run
    """
    from lockstep.runs.resuming import complete_settings
    from lockstep.runs.train import run_training

    changes, how = options.read_fields(
        assignments,
        backend=backend,
        **options.parse_profile(profile),
        loader=loader,
        compile=compile,
        distributed=distributed,
        model_prefix=model_prefix,
        train_only=train_only or None,
        keep_global_batch=keep_global_batch or None,
        stop_after_epochs=stop_after_epochs,
        stop_after_steps=stop_after_steps,
        loggers=_choose_loggers(tensorboard, loggers),
    )
    if split is not None:
        changes["validation_share"] = split
    if early_stopping_epochs is not None:
        changes["early_stopping_epochs"] = early_stopping_epochs

    def complete(folder: Path, fields: dict[str, Any]) -> "RunSettings":
        return complete_settings(
            folder, recipe, data, changes=changes | fields, how=how, trust_run=trust_run
        )

    if folds is not None:
        if resume_from is not None:
            raise typer.BadParameter("--folds starts new runs; leave out --resume-from")
        choose = partial(options.choose_start, weights, model, ignore)
        _train_folds(out, folds, complete, choose, is_verbose=verbose)
        return
    settings = complete(out, {})
    source = options.choose_start(resume_from or weights, model, ignore, settings)
    options.prepare(settings.execution, out)
    starts = (source, None) if resume_from is None else (weights, source)
    with _open_listener(verbose) as listener:
        report = run_training(settings, *starts, listener=listener)
    if report and is_leading():
        print(describe_next(out, "PHOTO"))


def describe_next(run: Path, photo: Path | str) -> str:
    """Return commands that use a finished run, for a person to type."""
    name = shlex.quote(str(run))
    return (
        f"next:   lockstep report {name}\n        lockstep predict {name} {shlex.quote(str(photo))}"
        f"\n        lockstep serve {name}"
    )


@contextmanager
def _open_listener(is_verbose: bool) -> "Iterator[Listener]":
    """Yield a listener that shows the events of a run."""
    from lockstep.cli.console import Reporter

    with Reporter(is_verbose=is_verbose) as reporter:

        def listener(event: "Event") -> None:
            options.show_note(event)
            reporter(event)

        yield listener


def _train_folds(
    out: Path,
    folds: int,
    complete: "Callable[[Path, dict[str, Any]], RunSettings]",
    choose: "Callable[[RunSettings], WeightsChoice | None]",
    *,
    is_verbose: bool,
) -> None:
    from lockstep.runs.folds import describe_folds, fold_folder, train_folds

    first = complete(fold_folder(out, 1), {"folds": folds, "fold": 1})
    source = choose(first)
    options.prepare(first.execution, out)
    with _open_listener(is_verbose) as listener:
        summary = train_folds(out, folds, complete, weights=source, listener=listener)
    if summary is not None:
        print(describe_folds(summary))
        print(
            "to train a model for use, repeat the command without --folds, with another --out, and"
            " with --split 0.3 if there are no validation images"
        )


def _choose_loggers(tensorboard: bool | None, others: list[str] | None) -> list[str] | None:
    """Return where metrics go; None if neither option is given."""
    if tensorboard is None and others is None:
        return None
    first = [] if tensorboard is False else ["tensorboard"]
    return list(dict.fromkeys(first + (others or [])))
