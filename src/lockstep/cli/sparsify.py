"""`lockstep sparsify`."""

import math
from pathlib import Path
from typing import Annotated, Any

import typer

from lockstep.cli import options
from lockstep.cli.terminal import in_line, print, print_json


def command(
    source: Annotated[Path, typer.Argument(help=options.WEIGHTS)],
    target: Annotated[
        Path | None, typer.Argument(help="A new .safetensors file for the pruned weights.")
    ] = None,
    algorithm: Annotated[
        str, typer.Option(help="What is kept: mask_1d, mask_2d_greedy or mask_2d_best.")
    ] = "mask_1d",
    checked: Annotated[
        bool,
        typer.Option(
            "--check",
            help="Count the zeros of every group of four in SOURCE; exit code 1 if it is not 2:4.",
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --check: print JSON.")] = False,
    checkpoint: options.Checkpoint = "newest",
    ema: options.Ema = False,
    model: options.Model = None,
) -> None:
    """Check weights for 2:4 sparsity, or prune them once."""
    if checked:
        if target is not None:
            raise typer.BadParameter("--check shows SOURCE as it is; leave out TARGET")
        _check(source, checkpoint, ema, model, as_json)
        return
    if as_json:
        raise typer.BadParameter("it prints what --check finds; add --check", param_hint="--json")
    if target is None:
        raise typer.BadParameter("expected a file to write to, or --check", param_hint="TARGET")
    from lockstep.weights.pruning import prune

    done = prune(source, target, algorithm, checkpoint=checkpoint, ema=ema, model=model)
    print(
        f"wrote {done['written']}: {algorithm} set {done['zeros']:,} weights in {done['tensors']}"
        " tensors to 0"
    )
    for remark in done["remarks"]:
        print(f"note: {in_line(remark)}")
    print(
        "note: accuracy drops until the other weights are trained again: lockstep train --weights"
        " prunes and trains"
    )


def _check(source: Path, checkpoint: str, ema: bool, model: str | None, as_json: bool) -> None:
    from lockstep.weights.pruning import check

    found = check(source, checkpoint=checkpoint, ema=ema, model=model)
    if as_json:
        print_json(found)
    else:
        _show(found)
    if not found["is_sparse"]:
        raise typer.Exit(1)


def _show(found: dict[str, Any]) -> None:
    width = max(map(len, ("tensor", *found["tensors"])))
    print(f"{'tensor':<{width}} {'groups':>11} {'2 zeros':>9} {'zeros':>11}")
    for name, each in found["tensors"].items():
        share = (
            math.floor(1e4 * each["sparse_groups"] / each["groups"]) / 100
        )  # rounded down: 100 % is all of them
        end = "" if each["is_covered"] else "  not pruned"
        print(f"{name:<{width}} {each['groups']:>11,} {share:>7.2f} % {each['zeros']:>11,}{end}")
    covered = sum(each["is_covered"] for each in found["tensors"].values())
    dense = found["dense"]
    if found["is_sparse"]:
        print(f"2:4 sparse in all {covered} pruned tensors")
        return
    claim = (
        ""
        if found["sparsity"] == "none"
        else f", although the recipe of the weights has sparsity {found['sparsity']}"
    )
    print(
        f"not 2:4 sparse{claim}: {len(dense)} of {covered} tensors, such as {dense[0]}, have groups"
        " with fewer than 2 zeros"
    )
