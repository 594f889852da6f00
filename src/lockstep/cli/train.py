"""`lockstep train`."""

from pathlib import Path
from typing import Annotated

import typer

from lockstep.cli import options


def command(
    recipe: Annotated[str, typer.Option(help="A published recipe (`lockstep recipes`), a YAML file or a run's folder.")],
    data: Annotated[Path, typer.Option(help="Training and validation images, in any storage format (docs/data.md).")],
    out: Annotated[Path, typer.Option(help="Folder of the run; a run that is there goes on.")],
    weights: Annotated[
        Path | None, typer.Option(help="Start a new run from these: a run, a checkpoint or a file; see docs/checkpoints.md.")
    ] = None,
    backend: options.Backend = "torch",
    loader: options.Loader = None,
    xla: Annotated[bool, typer.Option("--xla", help="Compile the step: TensorFlow's XLA, or torch.compile.")] = False,
    distributed: options.Distributed = None,
    model_prefix: Annotated[
        str | None, typer.Option(help="Also write every epoch's weights for MXNet: PREFIX-symbol.json, PREFIX-0001.params.")
    ] = None,
    tensorboard: Annotated[bool, typer.Option(help="Write events for TensorBoard into the run's folder.")] = True,
    loggers: Annotated[
        list[str] | None, typer.Option("--logger", help="Send figures to mlflow or wandb, too; may be repeated.")
    ] = None,
    profile: Annotated[
        str | None, typer.Option(metavar="N[:M]", help="Trace M steps (1 unless said) from step N on into the run's folder.")
    ] = None,
    assignments: options.Set = None,
) -> None:
    """Train a recipe, evaluating and saving as it goes; the same command again goes on where it stopped."""
    from lockstep import load_recipe, train
    from lockstep.cli.console import Reporter

    changes, execution = options.settings(
        assignments,
        backend,
        **options.traced_steps(profile),
        loader=loader,
        compile="on" if xla else None,
        distributed=distributed,
        model_prefix=model_prefix,
        loggers=list(dict.fromkeys([*(["tensorboard"] if tensorboard else []), *(loggers or [])])),
    )
    with Reporter() as reporter:
        recipe_now = load_recipe(recipe).replace(**changes)
        train(recipe_now, data, out, weights=weights, execution=execution, listener=reporter)
