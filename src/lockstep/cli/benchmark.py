"""`lockstep benchmark`: `convert` and `loader`; the others are in the files `benchmark_*.py`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from lockstep.cli import benchmark_grid, benchmark_published, options
from lockstep.cli.terminal import print, print_json

app = typer.Typer(help="Measure training, inference and loaders.", no_args_is_help=True)
for name, summary in benchmark_grid.COMMANDS.items():
    app.command(name, help=summary)(benchmark_grid.measure)
app.command("cell", hidden=True)(benchmark_grid.cell)
app.command("compare-published")(benchmark_published.command)


@app.command("convert")
def convert(
    source: Annotated[Path, typer.Argument(help="A run, or a benchmark report.")],
    form: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="nvidia-report or timm (for a run), nvidia-benchmark (for a report), or dlll.",
        ),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="The file to write.")],
) -> None:
    """Write a run or a report in another program's format."""
    from lockstep.benchmark.foreign_reports import convert as write

    # It is not renamed into place: the target may be /dev/stdout.
    out.write_text(write(source, form), encoding="utf-8")


Data = Annotated[
    Path,
    typer.Argument(help="Images in any format; a data set's training images."),
]
Loaders = Annotated[
    str, typer.Option(metavar="A,B", help="Loaders; the first one is the baseline.")
]
Threads = Annotated[int, typer.Option(min=1, help="Threads and cores for each loader.")]
Batch = Annotated[int, typer.Option(min=1, help="Images per batch.")]
Size = Annotated[int, typer.Option(min=1, help="Height and width of the output, in pixels.")]
Seconds = Annotated[float, typer.Option(min=0.1, help="Seconds per measurement.")]
Turns = Annotated[int, typer.Option(min=1, help="Measurements per loader; the loaders alternate.")]


@app.command("loader")
def loader(
    data: Data,
    loaders: Loaders = "host,dali",
    threads: Threads = 2,
    batch: Batch = 64,
    size: Size = 224,
    seconds: Seconds = 5.0,
    turns: Turns = 3,
    as_json: options.AsJson = False,
) -> None:
    """Measure Lockstep's loaders on your images.

    Prints images per second, and processor time per image.
    """
    from lockstep.benchmark.loader import Work, compare
    from lockstep.cli.console import Reporter

    work = Work(str(data), threads, batch, size, seconds)
    with Reporter(is_quiet=as_json) as reporter:
        progress = reporter.progress("measuring")
        comparison = compare(loaders.split(","), work, turns, progress)
    if as_json:
        print_json(comparison)
    else:
        _show(comparison["results"], threads)


def _show(results: dict[str, Any], threads: int) -> None:
    first = next(iter(results))
    print(
        f"{'loader':<16} {'images/s':>9} {'per core':>9} {'CPU ms':>8} {'peak MB':>8}  {first} is"
        " faster by"
    )
    for name, result in results.items():
        if "missing" in result:
            print(f"{name:<16} cannot run: {result['missing']}")
            continue
        rate = result["images_per_sec"]
        baseline = results[first].get("images_per_sec")
        ratio = f"{baseline / rate:>8.2f}" if baseline else ""
        print(
            f"{name:<16} {rate:>9.0f} {rate / threads:>9.0f} {result['cpu_ms']:>8.3f}"
            f" {result['peak_mb']:>8.0f}  {ratio}"
        )
