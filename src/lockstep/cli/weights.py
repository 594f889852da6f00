"""`lockstep weights`: list the weights that are known by name."""

from dataclasses import asdict
from typing import Annotated

import typer

from lockstep.cli.terminal import print_json, print_table


def command(
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON, with the addresses of the files.")
    ] = False,
) -> None:
    """List weights to use by name, with their published accuracies.

    Use them as in `lockstep predict NAME` or `lockstep train --weights NAME`; hf:OWNER/MODEL and
    https:// addresses work too.
    """
    from lockstep.weights.hub import locate_cached
    from lockstep.weights.known_weights import read_known_weights

    known = read_known_weights()
    if as_json:
        rows = []
        for name, weights in known.items():
            path = locate_cached(weights)
            cached = str(path) if path.exists() else None
            rows.append({"name": name, **asdict(weights), "cached": cached})
        print_json(rows)
        return
    cells = [("name", "model", "top-1 %", "resize", "crop", "licence", "downloaded")]
    for name, weights in known.items():
        top1 = f"{weights.top1_percent:.2f}"
        sizes = (str(weights.eval_resize), str(weights.eval_crop))
        cached = "yes" if locate_cached(weights).exists() else ""
        cells.append((name, weights.model, top1, *sizes, weights.licence, cached))
    print_table(cells)
