"""`lockstep benchmark compare-published`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lockstep.cli.terminal import format_number, print
from lockstep.system.text import format_count

if TYPE_CHECKING:
    from lockstep.benchmark.compare_published import Beside, Comparison

_TIMES = ("mean", "p50", "p90", "p95", "p99")
_LINE = "{:>10}" + " {:>8}" * len(_TIMES) + "  {:<36} {:<22} {:<9} {:>5}  {}"
_HEAD = _LINE.format(
    "images/s",
    *(f"{name} ms" for name in _TIMES),
    "hardware",
    "software",
    "precision",
    "batch",
    "ours / theirs, source",
)


def command(
    report: Annotated[
        Path, typer.Argument(help="A benchmark report, written by `lockstep benchmark train -o`.")
    ],
    everything: Annotated[
        bool,
        typer.Option(
            "--all",
            help="Also show other hardware, batches and numbers of accelerators.",
        ),
    ] = False,
) -> None:
    """Compare a report with what NVIDIA and MLPerf published.

    Shows rows of the same chip, with speed ratios only if the hardware is the same.
    """
    from lockstep.benchmark.compare_published import compare
    from lockstep.benchmark.report_file import read_benchmark
    from lockstep.recipes.published_speeds import read_speeds

    for comparison in compare(read_benchmark(report), read_speeds(), everything=everything):
        print("\n".join(_describe(comparison)))


def _describe(comparison: "Comparison") -> list[str]:
    from lockstep.benchmark.cells import name_computer
    from lockstep.recipes.published_speeds import PUBLISHED_SIZE

    cell = comparison.cell
    size = comparison.image_size or "unknown"
    times = (format_number(cell["latency_ms"][name], ".2f") for name in _TIMES)
    ours = (
        f"{cell['images_per_sec']:.1f}",
        *times,
        _format_count(comparison.hardware, cell["ranks"]),
    )
    lines = [
        f"{cell['model']}, {cell['what']}, images of {size} pixels (published: {PUBLISHED_SIZE})",
        _HEAD,
        _LINE.format(
            *ours, f"Lockstep, {name_computer(cell)}", cell["dtype"], cell["batch"], "this report"
        ).rstrip(),
    ]
    for beside in comparison.published:
        lines += _list_lines(beside)
    if not comparison.published and not comparison.left_out:
        lines.append("no published figures for this model")
    if comparison.left_out:
        rows = format_count(comparison.left_out, "row")
        line = f"not shown: {rows} of other hardware, batches or numbers of accelerators (--all)"
        if not comparison.published:
            line = f"no published figures for {comparison.hardware}; {line}"
        lines.append(line)
    return [*lines, ""]


def _list_lines(beside: "Beside") -> list[str]:
    row = beside.row
    software = ", ".join(filter(None, (row.framework, row.variant))) or "-"
    ratio = "" if beside.ratio is None else f"{beside.ratio:.2f}, "
    time = f"{row.minutes_to_target:g} min to 75.9 %, " if row.minutes_to_target else ""
    line = _LINE.format(
        format_number(row.images_per_sec, ".1f"),
        *(format_number(getattr(row, f"{name}_ms"), ".2f") for name in _TIMES),
        _format_count(row.accelerator, row.accelerators),
        software,
        row.precision or "-",
        row.batch_images or "-",
        f"{ratio}{time}{row.document}: {row.table}",
    )
    if row.remark is None:
        return [line]
    return [line, f"{'':>{10 + 9 * len(_TIMES) + 2}}({row.remark})"]


def _format_count(name: str, count: int | None) -> str:
    return f"{count or '?'} x {name}"
