"""Compare rates of cells: of one report that differ in one field, and of two reports."""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from itertools import chain
from typing import Any

from lockstep.benchmark.cells import Cell, name_computer
from lockstep.benchmark.failures import OK
from lockstep.benchmark.grid import identify
from lockstep.benchmark.iteration_times import overlap, quotient
from lockstep.benchmark.report_file import BenchmarkReport, find_environment
from lockstep.inference.runtimes import NATIVE

Entry = dict[str, Any]
"""A cell of a report."""


@dataclass(frozen=True)
class Pair:
    """Two cells with figures."""

    axis: str
    """The one field that differs; empty for the same cell of two reports."""
    over: Entry
    under: Entry

    @property
    def quotient(self) -> float:
        """The first rate over the second, both as they are printed."""
        return quotient(self.over["images_per_sec"], self.under["images_per_sec"])

    @property
    def overlap(self) -> bool:
        """Whether the intervals of both rates overlap. If they do, this pair alone shows no
        difference."""
        return overlap(self.over["interval"], self.under["interval"])

    @property
    def scaling(self) -> float | None:
        """The weak scaling of a pair that differs in ranks: the ratio of the rates over the ratio
        of the ranks.

        1 is perfect if every rank has its own device. None for other pairs.
        """
        if self.axis != "ranks":
            return None
        return self.quotient * self.under["ranks"] / self.over["ranks"]


def pair_claims(cells: list[Entry]) -> list[Pair]:
    """Return the pairs of cells for the claims of NVIDIA's documents, as far as measured. All other
    fields are equal.

    The claims compare mixed precision with fp32, v1.5 with v1, a compiler with none, NHWC with
    NCHW, several ranks with one, and another runtime with the native one.
    """
    measured = [entry for entry in cells if entry["status"] == OK]
    axes = ("dtype", "model", "compile", "layout", "ranks", "runtime")
    return list(chain.from_iterable(_pair_axis(measured, axis) for axis in axes))


def _pair_axis(entries: list[Entry], axis: str) -> Iterator[Pair]:
    others = [field.name for field in fields(Cell) if field.name != axis]
    for over in entries:
        base = _choose_baseline(over, axis)
        for under in entries:
            if under[axis] == base and all(over[name] == under[name] for name in others):
                yield Pair(axis, over, under)


def _choose_baseline(entry: Entry, axis: str) -> Any:
    """Return the value of a field in the baseline of an entry; None if there is no baseline."""
    value = entry[axis]
    if axis == "model":
        return value.removesuffix(".5") if value.endswith("-v1.5") else None
    if axis in _SWITCHES:
        return _SWITCHES[axis].get(value)
    base = {"dtype": "fp32", "ranks": 1, "runtime": NATIVE}[axis]
    return None if value == base else base


_SWITCHES = {"compile": {"on": "off"}, "layout": {"nhwc": "nchw"}}


@dataclass(frozen=True)
class Difference:
    """A difference in how two reports were measured."""

    name: str
    ours: Any
    theirs: Any
    divides: bool
    """Whether rates may still be divided: both reports measured the same thing on the same machine.
    """


_SAME = ("recipe", "changes", "execution", "num_examples", "processor", "cores", "gpus")
"""Settings that must be equal if two cells are the same measurement."""
_PASSING = ("processor_mhz", "gpus")
"""Fields of an environment that are not compared: clocks of the moment, and what the settings
contain already."""


def compare_settings(report: BenchmarkReport, other: BenchmarkReport) -> list[Difference]:
    """Return the differences of settings, and of environments of backends in both reports. None is
    a missing value."""
    differences = list(_compare(report.get("settings", {}), other.get("settings", {}), ""))
    for backend in dict.fromkeys(map(name_computer, report["cells"])):
        ours = find_environment(report, backend)
        theirs = find_environment(other, backend)
        if ours and theirs:
            passing = {f"{backend}: {name}" for name in _PASSING}
            compared = _compare(ours, theirs, f"{backend}: ")
            differences += [row for row in compared if row.name not in passing]
    return differences


def _compare(ours: dict[str, Any], theirs: dict[str, Any], prefix: str) -> Iterator[Difference]:
    for key in dict.fromkeys([*ours, *theirs]):
        name = prefix + key
        if ours.get(key) != theirs.get(key):
            yield Difference(name, ours.get(key), theirs.get(key), name not in _SAME)


def pair_reports(report: BenchmarkReport, other: BenchmarkReport) -> list[Pair]:
    """Return the cells that have figures in both reports: those of the first over those of the
    second."""
    theirs = {identify(entry): entry for entry in other["cells"] if entry["status"] == OK}
    ours = [entry for entry in report["cells"] if entry["status"] == OK]
    both = [entry for entry in ours if identify(entry) in theirs]
    return [Pair("", entry, theirs[identify(entry)]) for entry in both]
