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
