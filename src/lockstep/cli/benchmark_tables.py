"""Print a benchmark report as tables."""

from typing import Any

from rich.console import Console
from rich.table import Table

from lockstep.benchmark.cells import name_computer
from lockstep.benchmark.failures import OK
from lockstep.benchmark.iteration_times import format_rate
from lockstep.benchmark.report_file import BenchmarkReport
from lockstep.benchmark.speedups import Pair, compare_settings, pair_claims, pair_reports
from lockstep.cli import terminal

Entry = dict[str, Any]
_PERCENTILES = ("mean", "p50", "p90", "p95", "p99", "p100")
_OTHERS = 0.05
"""Other programs are mentioned if they used more than this share of the processors."""
_WORDS = ("", "95 %", "bound by", "over", "intervals")
_WIDTH = 500
"""Columns that a line may take. A table row is one line on any terminal, so that tools can search
and cut it."""


def line(entry: Entry, *, kept: bool) -> str:
    """Return a cell's result in one line. `kept` says that the result was already in the report."""
    name = _name(entry) + (" (kept)" if kept else "")
    if entry["status"] != OK:
        return f"{name}: {entry['status']}: {str(entry['reason']).splitlines()[0]}"
    return f"{name}: {format_rate(entry['images_per_sec'])} images/s ({_interval(entry)})"


def show(report: BenchmarkReport, other: BenchmarkReport | None) -> None:
    """Print the tables of a report. With another report, also print the two side by side."""
    console = terminal.console(width=_WIDTH)
    measured = [entry for entry in report["cells"] if entry["status"] == OK]
    for what in dict.fromkeys(entry["what"] for entry in measured):
        console.print(f"\n{what}, images/s of all ranks, times of an iteration in ms", markup=False)
        console.print(_rates([entry for entry in measured if entry["what"] == what]))
    pairs = pair_claims(report["cells"])
    if pairs:
        console.print("\nquotients of the rates above", markup=False)
        console.print(_quotients(pairs))
    if other is not None:
        console.print("\nthis report (left) next to the other", markup=False)
        _beside(console, report, other)
    _remarks(console, report["cells"])


def _rates(entries: list[Entry]) -> Table:
    table = _table(
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
        share = entry["roofline"]["share_of_limit"]
        table.add_row(
            _kind(entry),
            str(entry["ranks"]),
            str(entry["batch"]),
            format_rate(entry["images_per_sec"]),
            _interval(entry),
            *(f"{entry['latency_ms'][name]:.1f}" for name in _PERCENTILES),
            f"{entry['data_wait_share']:.1%}",
            _bound(entry),
            "-" if share is None else f"{share:.0%}",
            _number(entry.get("first_answer_sec"), "{:.2f}"),
            _number(entry.get("peak_memory_bytes"), "{:.0f}", 1e-6),
        )
    return table


def _number(value: float | None, form: str, factor: float = 1.0) -> str:
    return "-" if value is None else form.format(factor * value)


def _table(*columns: str) -> Table:
    """Return a table. Columns of words are aligned left, all others right."""
    table = Table(box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="left" if column in _WORDS else "right")
    return table


def _bound(entry: Entry) -> str:
    """Return what limits the speed of a cell, and both ceilings if there are two."""
    loading = entry["loader_only_images_per_sec"]
    if loading is None:
        return str(entry["bound_by"])
    return (
        f"{entry['bound_by']} ({format_rate(entry['compute_only_images_per_sec'])} |"
        f" {format_rate(loading)})"
    )


def _quotients(pairs: list[Pair]) -> Table:
    table = _table("", "over", "images/s", "images/s", "quotient", "intervals", "weak scaling")
    for pair in pairs:
        word = {"compile": "compile ", "ranks": "n "}.get(pair.axis, "")
        table.add_row(
            f"{pair.over['what']} {_name_of(pair)}: {word}{pair.over[pair.axis]}",
            str(pair.under[pair.axis]),
            *_values(pair),
            "" if pair.scaling is None else f"{pair.scaling:.0%}",
        )
    return table


def _name_of(pair: Pair) -> str:
    entry = pair.over
    parts = {"runtime": name_computer(entry)} | {name: entry[name] for name in ("model", "dtype")}
    parts |= {
        name: f"{name} {entry[name]}" for name in ("compile", "layout") if entry[name] != "auto"
    }
    parts |= {"ranks": f"n {entry['ranks']}", "batch": f"batch {entry['batch']}"}
    return " ".join(value for name, value in parts.items() if name != pair.axis)


def _beside(console: Console, report: BenchmarkReport, other: BenchmarkReport) -> None:
    """Print how the measurements of two reports differ, and the cells that both have.

    Rates are divided only if both reports are the same measurement.
    """
    found = compare_settings(report, other)
    pairs = pair_reports(report, other)
    for each in found:
        console.print(f"{each.name}: {each.ours} here, {each.theirs} there", markup=False)
    hinder = [each.name for each in found if not each.divides]
    if hinder:
        console.print(
            f"nothing is divided: the measurements differ in {', '.join(hinder)}", markup=False
        )
    console.print(_side_by_side(pairs, divided=not hinder))
    alone = [
        sum(entry["status"] == OK for entry in each["cells"]) - len(pairs)
        for each in (report, other)
    ]
    if any(alone):
        console.print(
            f"measured only in one report: {alone[0]} cells here, {alone[1]} there", markup=False
        )


def _side_by_side(pairs: list[Pair], *, divided: bool) -> Table:
    table = _table("", "images/s", "images/s", *(("quotient", "intervals") if divided else ()))
    for pair in pairs:
        rate, other, *compared = _values(pair)
        rates = (f"{rate} ({_interval(pair.over)})", f"{other} ({_interval(pair.under)})")
        table.add_row(_name(pair.over), *rates, *(compared if divided else ()))
    return table


def _values(pair: Pair) -> tuple[str, str, str, str]:
    over, under = (format_rate(entry["images_per_sec"]) for entry in (pair.over, pair.under))
    return over, under, f"{pair.quotient:.3f}", "overlap" if pair.overlap else "apart"


def _remarks(console: Console, entries: list[Entry]) -> None:
    """Print the notes on cells. A note that several cells share is printed once."""
    said: dict[str, list[str]] = {}
    for entry in entries:
        if entry["status"] != OK:
            said.setdefault(f"{entry['status']}: {entry['reason']}", []).append(_name(entry))
            continue
        if not entry["steady"]:
            said.setdefault(f"not steady: {entry['steady_reason']}", []).append(_name(entry))
        if (entry["other_programs_share"] or 0) > _OTHERS:
            share = entry["other_programs_share"]
            said.setdefault(
                f"other programs used {share:.0%} of the processors during the measurement", []
            ).append(_name(entry))
        for remark in entry["remarks"]:
            said.setdefault(remark, []).append(_name(entry))
    for what, names in said.items():
        of = names[0] if len(names) == 1 else f"{len(names)} cells, from {names[0]} on"
        console.print(f"{of}: {what}", markup=False)


def _kind(entry: Entry) -> str:
    parts = [name_computer(entry), entry["model"], entry["dtype"]]
    return " ".join(
        parts + [f"{name} {entry[name]}" for name in ("compile", "layout") if entry[name] != "auto"]
    )


def _name(entry: Entry) -> str:
    return f"{entry['what']} {_kind(entry)}, n {entry['ranks']}, batch {entry['batch']}"


def _interval(entry: Entry) -> str:
    low, high = entry["interval"]
    return f"{format_rate(low)} to {format_rate(high)}"
