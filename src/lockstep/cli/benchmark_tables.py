"""Print a benchmark report as tables."""

from typing import Any

from rich.console import Console
from rich.table import Table

from lockstep.benchmark.cells import name_computer
from lockstep.benchmark.failures import OK
from lockstep.benchmark.iteration_times import format_rate
from lockstep.benchmark.labels import (
    COMPILING,
    collect_remarks,
    describe_kind,
    format_interval,
    name_cell,
)
from lockstep.benchmark.report_file import BenchmarkReport
from lockstep.benchmark.speedups import Pair, compare_settings, pair_claims, pair_reports
from lockstep.cli import terminal
from lockstep.cli.terminal import format_number

Entry = dict[str, Any]
_PERCENTILES = ("mean", "p50", "p90", "p95", "p99", "p100")
_WORDS = ("", "95 %", "bound by", "over", "intervals")
_WIDTH = 500
"""Columns that a line may take. A table row is one line on any terminal, so that tools can search
and cut it."""


def describe_cell(entry: Entry, *, kept: bool) -> str:
    """Return a cell's result in one line. `kept` says that the result was already in the report."""
    name = name_cell(entry)
    if kept:
        name += " (kept)"
    if entry["status"] != OK:
        return f"{name}: {entry['status']}: {str(entry['reason']).splitlines()[0]}"
    return f"{name}: {format_rate(entry['images_per_sec'])} images/s ({format_interval(entry)})"


def show_report(report: BenchmarkReport, other: BenchmarkReport | None) -> None:
    """Print the tables of a report. With another report, also print the two side by side."""
    console = terminal.make_console(width=_WIDTH)
    measured = [entry for entry in report["cells"] if entry["status"] == OK]
    for what in dict.fromkeys(entry["what"] for entry in measured):
        console.print(f"\n{what}: images/s of all ranks, iteration times in ms", markup=False)
        console.print(_build_rates([entry for entry in measured if entry["what"] == what]))
    pairs = pair_claims(report["cells"])
    if pairs:
        console.print("\nratios of the rates above", markup=False)
        console.print(_build_quotients(pairs))
    if other is not None:
        console.print("\nthis report (left) next to the other", markup=False)
        _show_beside(console, report, other)
    _show_remarks(console, report["cells"])


def _build_rates(entries: list[Entry]) -> Table:
    table = _make_table(
        "",
        "n",
        "batch",
        "images/s",
        "95 %",
        *_PERCENTILES,
        "waits",
        "bound by",
        "of limit",
        "first, s",
        "MB",
    )
    for entry in entries:
        memory = entry.get("peak_memory_bytes")
        if memory is not None:
            memory *= 1e-6
        table.add_row(
            describe_kind(entry),
            str(entry["ranks"]),
            str(entry["batch"]),
            format_rate(entry["images_per_sec"]),
            format_interval(entry),
            *(f"{entry['latency_ms'][name]:.1f}" for name in _PERCENTILES),
            f"{entry['data_wait_share']:.1%}",
            _describe_bound(entry),
            format_number(entry["roofline"]["share_of_limit"], ".0%"),
            format_number(entry.get("first_answer_sec"), ".2f"),
            format_number(memory, ".0f"),
        )
    return table


def _make_table(*columns: str) -> Table:
    """Return a table. Columns of words are aligned left, all others right."""
    table = Table(box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="left" if column in _WORDS else "right")
    return table


def _describe_bound(entry: Entry) -> str:
    """Return what limits the speed of a cell, and both ceilings if there are two."""
    loading = entry["loader_only_images_per_sec"]
    if loading is None:
        return str(entry["bound_by"])
    return (
        f"{entry['bound_by']} ({format_rate(entry['compute_only_images_per_sec'])} |"
        f" {format_rate(loading)})"
    )


def _build_quotients(pairs: list[Pair]) -> Table:
    table = _make_table("", "over", "images/s", "images/s", "ratio", "intervals", "weak scaling")
    for pair in pairs:
        word = {"compile": "compile ", "ranks": "n "}.get(pair.axis, "")
        table.add_row(
            f"{pair.over['what']} {_name_pair(pair)}: {word}{pair.over[pair.axis]}",
            str(pair.under[pair.axis]),
            *_format_pair(pair),
            format_number(pair.scaling, ".0%"),
        )
    return table


def _name_pair(pair: Pair) -> str:
    entry = pair.over
    parts = {"runtime": name_computer(entry)} | {name: entry[name] for name in ("model", "dtype")}
    for name in COMPILING:
        if entry[name] != "auto":
            parts[name] = f"{name} {entry[name]}"
    parts |= {"ranks": f"n {entry['ranks']}", "batch": f"batch {entry['batch']}"}
    return " ".join(value for name, value in parts.items() if name != pair.axis)


def _show_beside(console: Console, report: BenchmarkReport, other: BenchmarkReport) -> None:
    """Print how the measurements of two reports differ, and the cells that both have.

    Ratios are shown only if both reports made the same measurement.
    """
    differences = compare_settings(report, other)
    pairs = pair_reports(report, other)
    for setting in differences:
        text = f"{setting.name}: {setting.ours} here, {setting.theirs} there"
        console.print(text, markup=False)
    hinder = [setting.name for setting in differences if not setting.divides]
    if hinder:
        console.print(
            f"no ratios are shown: the measurements differ in {', '.join(hinder)}", markup=False
        )
    console.print(_build_pairs(pairs, divided=not hinder))
    here = _count_measured(report) - len(pairs)
    there = _count_measured(other) - len(pairs)
    if here or there:
        text = f"measured in only one report: {here} cells here, {there} there"
        console.print(text, markup=False)


def _count_measured(report: BenchmarkReport) -> int:
    return sum(entry["status"] == OK for entry in report["cells"])


def _build_pairs(pairs: list[Pair], *, divided: bool) -> Table:
    columns = ["", "images/s", "images/s"]
    if divided:
        columns += ["quotient", "intervals"]
    table = _make_table(*columns)
    for pair in pairs:
        rate, other, *compared = _format_pair(pair)
        rate = f"{rate} ({format_interval(pair.over)})"
        other = f"{other} ({format_interval(pair.under)})"
        cells = [name_cell(pair.over), rate, other, *compared]
        table.add_row(*cells[: len(columns)])
    return table


def _format_pair(pair: Pair) -> tuple[str, str, str, str]:
    over, under = (format_rate(entry["images_per_sec"]) for entry in (pair.over, pair.under))
    return over, under, f"{pair.quotient:.3f}", "overlap" if pair.overlap else "apart"


def _show_remarks(console: Console, entries: list[Entry]) -> None:
    """Print the notes on cells. A note that several cells share is printed once."""
    for cells, remark in collect_remarks(entries):
        console.print(f"{cells}: {remark}", markup=False)
