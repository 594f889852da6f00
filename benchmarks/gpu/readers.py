"""Rows from what commands print or write."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

Row = dict[str, Any]
LEFT_OUT = ("times_sec", "other_definitions")
"""Fields of a report's cells that are not kept."""


def read_rows(printed: str, report: Path) -> list[Row]:
    """Return the JSON objects that a module printed, one a line. A line that a kill cut off is left
    out."""
    lines = [line for line in printed.splitlines(keepends=True) if line.startswith('{"what":')]
    return [json.loads(line) for line in lines if line.endswith("\n")]


def read_lines(printed: str, report: Path) -> list[Row]:
    """Return one row with all lines."""
    return [{"lines": printed.splitlines()}] if printed else []


def read_json(printed: str, report: Path) -> list[Row]:
    """Return the JSON object that a command of Lockstep printed."""
    return [json.loads(printed)] if printed else []


def read_cells(printed: str, report: Path) -> list[Row]:
    """Return the cells of a report of `lockstep benchmark`."""
    if not report.is_file():
        return []
    cells = json.loads(report.read_text(encoding="utf-8"))["cells"]
    rows = []
    for cell in cells:
        row = {name: value for name, value in cell.items() if name not in LEFT_OUT}
        rows.append(row | {"precision": cell["dtype"]})
    return rows


def read_tests(printed: str, report: Path) -> list[Row]:
    """Return a row with the counts of a JUnit report and the operators of which PyTorch warns that
    they have no deterministic kernel, and a row for every test that failed."""
    suites = list(ElementTree.parse(report).getroot().iter("testsuite"))
    counts: Row = {"what": "conformance", "interrupted": "KeyboardInterrupt" in printed}
    for name in ("tests", "failures", "errors", "skipped"):
        counts[name] = sum(int(suite.get(name, "0")) for suite in suites)
    rows = [counts]
    for suite in suites:
        for case in suite.iter("testcase"):
            for fault in (*case.iter("failure"), *case.iter("error")):
                test = f"{case.get('classname')}::{case.get('name')}"
                rows.append({"what": "failure", "test": test, "message": fault.get("message")})
    before = printed.split(" does not have a deterministic implementation")[:-1]
    counts["not deterministic"] = sorted({text.split()[-1] for text in before})
    return rows


READERS: dict[str, Callable[[str, Path], list[Row]]] = {
    "rows": read_rows,
    "lines": read_lines,
    "json": read_json,
    "cells": read_cells,
    "tests": read_tests,
}
