"""`lockstep predict`."""

from pathlib import Path
from typing import Annotated

import typer

from lockstep.cli import options
from lockstep.cli.terminal import in_line, print, print_json
from lockstep.system.defaults import DEFAULT_BACKEND


def command(
    images: Annotated[list[Path], typer.Argument(help="Image files.")],
    source: Annotated[
        Path,
        typer.Option("--run", help=options.WEIGHTS),
    ],
    top: Annotated[int, typer.Option(help="Classes to show for each image.", min=1)] = 5,
    which: options.Which = "newest",
    ema: options.Ema = False,
    model: options.Model = None,
    classes: options.Classes = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: one object for each image.")] = False,
    backend: options.Backend = DEFAULT_BACKEND,
    assignments: options.Set = None,
) -> None:
    """Show the likely classes of images and their probabilities."""
    from lockstep import predict
    from lockstep.weights.class_names import described

    how = options.for_inference(assignments, backend)
    how |= {"model": model, "classes": classes, "listener": options.show_note}
    found = predict(source, images, top=top, which=which, ema=ema, **how)
    if as_json:
        rows = [
            {"path": str(p.path), "classes": p.classes, "probabilities": [round(x, 6) for x in p.probabilities]}
            for p in found
        ]
        print_json(rows)
        return
    for prediction in found:
        print(in_line(str(prediction.path)))
        for name, probability in zip(prediction.classes, prediction.probabilities, strict=True):
            print(f"  {100 * probability:6.2f} %  {in_line(described(name))}")
