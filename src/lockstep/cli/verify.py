"""`lockstep verify`."""

import signal
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from lockstep.cli import options
from lockstep.cli.terminal import format_number, make_console, print, print_json

Backends = Annotated[
    str | None, typer.Option(metavar="A,B", help="Frameworks (default: all that are installed).")
]
Model = Annotated[str | None, typer.Option(metavar="NAME", help="Model instead of the recipe's.")]
Steps = Annotated[
    int | None, typer.Option(help="Steps of the free run (default: 20, or 3 with --full).", min=3)
]
Precision = Annotated[str, typer.Option(metavar="NAME", help="fp32, tf32, bf16 or fp16.")]
Full = Annotated[
    bool, typer.Option("--full", help="Use the full-size model instead of a narrow one at 64 px.")
]
Plot = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Draw the loss curves (.png, .svg or .pdf).")
]


def command(
    backends: Backends = None,
    model: Model = None,
    recipe: options.Recipe = "resnet50-paddle-90ep",
    steps: Steps = None,
    precision: Precision = "fp32",
    full: Full = False,
    plot: Plot = None,
    as_json: options.AsJson = False,
) -> None:
    """Show that all backends compute the same numbers.

    Compares each one with a reference in NumPy; exit code 1 if a difference is larger than rounding
    explains.
    """
    from lockstep import verify
    from lockstep.cli.console import Reporter

    if plot is not None:
        from lockstep.verification.plot import check_path
        from lockstep.verification.plot import plot as draw

        check_path(plot)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _exit)  # as Ctrl-C: stop the worker and remove its folder
    names = None if backends is None else [name.strip() for name in backends.split(",")]
    with Reporter(is_quiet=as_json) as reporter:
        report = verify(
            names,
            recipe=recipe,
            model=model,
            steps=steps,
            precision=precision,
            full=full,
            listener=reporter,
        )
    if as_json:
        print_json(report)
    else:
        _show(report)
    if plot is not None:
        draw(report, plot)
    raise typer.Exit(0 if report["passed"] else 1)


def _exit(number: int, frame: object) -> NoReturn:
    raise SystemExit(128 + number)


def _show(report: dict[str, Any]) -> None:
    from rich.table import Table

    out = make_console()
    recipe = report["recipe"]
    sizes = " and ".join(dict.fromkeys(str(size) for _, size in recipe["image_sizes"]))
    kind = "the model itself" if report["full"] else "a narrow variant"
    out.print(
        f"{report['steps']} steps of {report['images']} images at {sizes} px in"
        f" {recipe['precision']}, {kind}, against NumPy in float64"
        f" ({report['reference']['seconds']:.1f} s)",
        markup=False,
        soft_wrap=True,
    )
    columns = ("backend", "quantity", "largest difference", "relative", "bound", "")
    table = Table(*columns, box=None, pad_edge=False)
    for name, result in report["engines"].items():
        for row in result["rows"]:
            table.add_row(name, *_format_cells(row))
        if "seconds" in result:
            table.add_row(name, "time", "", f"{result['seconds']:.1f} s", "", "")
    if report["furthest_apart"]:
        table.add_row("any two", *_format_cells(report["furthest_apart"]))
    out.print(table)
    for name, result in report["engines"].items():
        print(f"{name}: {_summarise(result)}")
    if recipe["precision"] == "tf32":
        print("note: without a GPU that has TensorFloat-32, tf32 is fp32")
    if report["passed"]:
        print("all within bounds")
    elif any("error" in result for result in report["engines"].values()):
        print("NOT verified: a backend did not run")
    else:
        print("NOT within bounds; docs/explanation/numerics.md explains each quantity")


def _format_cells(row: dict[str, Any]) -> list[str]:
    largest = format_number(row["largest"], ".1e")
    relative = format_number(row["relative"], ".1e")
    verdict = "ok" if row["passed"] else "FAILED"
    return [row["quantity"], largest, relative, f"{row['bound']:.0e}", verdict]


def _summarise(result: dict[str, Any]) -> str:
    if "error" in result:
        return f"failed: {result['error']}"
    loader = result["loader"]
    parts = ("samples", "windows", "flips", "draws", "augmentations")
    same = [name for name in parts if loader[name]]
    off = loader["largest_pixel_difference"]
    pixels = f"pixels (within {off} of 255)" if off else "pixels"
    return (
        f"{result['version']} on {result['device']}, free run {result['train_sec']:.2f} s; "
        f"its loader gives the same {', '.join((*same, pixels))}"
    )
