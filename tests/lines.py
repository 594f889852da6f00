"""Checks of lines that the program prints, or notes, by what a reader needs in each."""

import re
from collections.abc import Sequence


def check_lines(lines: str | Sequence[str], *patterns: str) -> None:
    """Check that there is one line for each pattern, in this order, with a match of it."""
    if isinstance(lines, str):
        lines = lines.splitlines()
    assert len(lines) == len(patterns), lines
    for line, pattern in zip(lines, patterns, strict=True):
        assert re.search(pattern, line), line


def read_table(text: str) -> list[list[str]]:
    """Return the rows of a table: a line each, with ` | ` between cells. An indented line continues
    the row above it."""
    rows = re.sub(r"\n +", " ", text.strip()).splitlines()
    return [re.split(r" \|(?: |$)", row) for row in rows]
