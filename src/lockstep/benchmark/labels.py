"""Describe the cells of a report in words."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lockstep.benchmark.cells import name_computer
from lockstep.benchmark.failures import OK
from lockstep.benchmark.iteration_times import format_rate

COMPILING = ("compile", "layout")
"""Axes of the grid that are named only if they are set."""
_OTHERS = 0.05
"""Other programs are mentioned if they used more than this share of the processors."""


def describe_kind(entry: Mapping[str, Any]) -> str:
    """Return what computes a cell, its model and its precision."""
    parts = [name_computer(entry), entry["model"], entry["dtype"]]
    parts += [f"{name} {entry[name]}" for name in COMPILING if entry[name] != "auto"]
    return " ".join(parts)


def name_cell(entry: Mapping[str, Any]) -> str:
    """Return a cell's name, which is unique in a report."""
    return f"{entry['what']} {describe_kind(entry)}, n {entry['ranks']}, batch {entry['batch']}"


def format_interval(entry: Mapping[str, Any]) -> str:
    """Return the 95 % interval of a cell's images per second."""
    low, high = entry["interval"]
    return f"{format_rate(low)} to {format_rate(high)}"


def collect_remarks(entries: Iterable[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Return the remarks on cells, each with the cells that share it."""
    remarks: dict[str, list[str]] = {}
    for entry in entries:
        for remark in list_remarks(entry):
            remarks.setdefault(remark, []).append(name_cell(entry))
    return [(_name_cells(names), remark) for remark, names in remarks.items()]


def _name_cells(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{len(names)} cells, from {names[0]} on"


def list_remarks(entry: Mapping[str, Any]) -> list[str]:
    """Return what a reader should know of a cell before trusting its figures."""
    if entry["status"] != OK:
        return [f"{entry['status']}: {entry['reason']}"]
    remarks = []
    if not entry["steady"]:
        remarks.append(f"not steady: {entry['steady_reason']}")
    share = entry["other_programs_share"] or 0
    if share > _OTHERS:
        remarks.append(f"other programs used {share:.0%} of the processors during the measurement")
    return [*remarks, *entry["remarks"]]
