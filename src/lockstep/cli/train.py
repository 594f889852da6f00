"""`lockstep train`."""

from pathlib import Path
from typing import Annotated

import typer

from lockstep.cli import options


def command(
    out: Annotated[Path, typer.Option(help="Folder of the run; a run that is there resumes, and needs no other option.")],
    recipe: Annotated[
        str | None,
        typer.Option(
            help="A published recipe (`lockstep recipes`), a YAML file or a run's folder; by default that of a run that is "
            "there, else one that suits the images and the device (docs/my-images.md)."
        ),
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="Training and validation images, in any storage format (docs/data.md).")
    ] = None,
    split: Annotated[
        float | None,
        typer.Option(help="Share of the images to set apart for validation, such as 0.1, where the data set has no such."),
    ] = None,
    weights: Annotated[
        Path | None, typer.Option(help="Start a new run from these: a run, a checkpoint or a file; see docs/checkpoints.md.")
    ] = None,
    backend: Annotated[str | None, typer.Option(help="Framework: see `lockstep doctor`; torch by default.")] = None,
    loader: options.Loader = None,
    xla: Annotated[bool, typer.Option("--xla", help="Compile the step: TensorFlow's XLA, or torch.compile.")] = False,
    distributed: options.Distributed = None,
    model_prefix: Annotated[
        str | None, typer.Option(help="Also write every epoch's weights for MXNet: PREFIX-symbol.json, PREFIX-0001.params.")
    ] = None,
    tensorboard: Annotated[
        bool | None,
        typer.Option(
            "--tensorboard/--no-tensorboard", help="Write events for TensorBoard into the run's folder; the default."
        ),
    ] = None,
    loggers: Annotated[
        list[str] | None, typer.Option("--logger", help="Send figures to mlflow or wandb, too; may be repeated.")
    ] = None,
    profile: Annotated[
        str | None, typer.Option(metavar="N[:M]", help="Trace M steps (1 unless said) from step N on into the run's folder.")
    ] = None,
    assignments: options.Set = None,
) -> None:
    """Train a recipe, or resume a run, evaluating and saving.

    The same command again, or --out alone, resumes a run where it stopped.
    """
    from lockstep import train
    from lockstep.cli.console import Reporter
    from lockstep.runs.resuming import complete
    from lockstep.system.ranks import is_leading

    changes, how = options.fields(
        assignments,
        backend=backend,
        **options.traced_steps(profile),
        loader=loader,
        compile="on" if xla else None,
        distributed=distributed,
        model_prefix=model_prefix,
        loggers=_loggers(tensorboard, loggers),
    )
    if split is not None:
        changes["validation_share"] = split
    asked = complete(out, recipe, data, changes=changes, how=how)
    options.prepare(asked.execution.backend)
    with Reporter() as reporter:
        if asked.taken and is_leading():
            reporter({"kind": "taken", "out": str(out), "taken": asked.taken})
        train(
            asked.recipe,
            asked.data,
            out,
            changes=None if asked.recipe else changes,
            weights=weights,
            execution=asked.execution,
            listener=reporter,
        )


def _loggers(tensorboard: bool | None, others: list[str] | None) -> list[str] | None:
    """Return where figures go; None if nothing was said of it."""
    if tensorboard is None and others is None:
        return None
    return list(dict.fromkeys([*([] if tensorboard is False else ["tensorboard"]), *(others or [])]))
