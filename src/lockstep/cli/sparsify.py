"""`lockstep sparsify`."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lockstep.cli import options
from lockstep.cli.terminal import escape_line, print, print_json

if TYPE_CHECKING:
    from lockstep.weights import WeightsChoice


def command(
    source: options.WeightsArgument,
    target: Annotated[
        Path | None, typer.Argument(help="New .safetensors file for the pruned weights.")
    ] = None,
    algorithm: Annotated[
        str, typer.Option(metavar="NAME", help="mask_1d, mask_2d_greedy or mask_2d_best.")
    ] = "mask_1d",
    is_check: Annotated[
        bool,
        typer.Option(
            "--check",
            help="Count the zeros of SOURCE; exit code 1 if it is not 2:4 sparse.",
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --check: print JSON.")] = False,
    checkpoint: options.Checkpoint = None,
    ema: options.Ema = None,
    model: options.Model = None,
    ignore: options.Ignore = None,
) -> None:
    """Check weights for 2:4 sparsity, or prune them once."""
    if is_check and target is not None:
        raise typer.BadParameter("--check shows SOURCE as it is; leave out TARGET")
    if as_json and not is_check:
        raise typer.BadParameter("it prints what --check finds; add --check", param_hint="--json")
    if target is None and not is_check:
        raise typer.BadParameter("expected a file to write to, or --check", param_hint="TARGET")
    choice = options.choose_weights(source, checkpoint, ema, model, ignore)
    if target is None:
        _check(choice, as_json)
        return
    from lockstep.weights.pruning import prune

    result = prune(choice, target, algorithm)
    print(
        f"wrote {result['written']}: {algorithm} set {result['zeros']:,} weights in"
        f" {result['tensors']} tensors to 0"
    )
    for remark in result["remarks"]:
        print(f"note: {escape_line(remark)}")
    print(
        "note: accuracy drops until the other weights are trained again: lockstep train --weights"
        f" SOURCE --set sparsity={algorithm} prunes and trains"
    )


def _check(choice: "WeightsChoice", as_json: bool) -> None:
    from lockstep.weights.pruning import check_sparsity

    result = check_sparsity(choice)
    if as_json:
        print_json(result)
    else:
        _print_zeros(result)
    if not result["is_sparse"]:
        raise typer.Exit(1)


def _print_zeros(result: dict[str, Any]) -> None:
    rows = result["tensors"]
    width = max(map(len, ("tensor", *rows)))
    print(f"{'tensor':<{width}} {'groups':>11} {'2 zeros':>9} {'zeros':>11}")
    for name, row in rows.items():
        # Rounded down: 100 % is all of them.
        share = math.floor(1e4 * row["sparse_groups"] / row["groups"]) / 100
        end = "" if row["is_covered"] else "  not pruned"
        print(f"{name:<{width}} {row['groups']:>11,} {share:>7.2f} % {row['zeros']:>11,}{end}")
    covered = sum(row["is_covered"] for row in rows.values())
    if result["is_sparse"]:
        print(f"2:4 sparse in all {covered} pruned tensors")
        return
    claim = ""
    if result["sparsity"] != "none":
        claim = f", although the recipe of the weights has sparsity {result['sparsity']}"
    dense = result["dense"]
    print(
        f"not 2:4 sparse{claim}: {len(dense)} of {covered} tensors, such as {dense[0]}, have groups"
        " with fewer than 2 zeros"
    )
