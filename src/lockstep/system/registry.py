"""Rows: modules of one kind, such as commands or formats of weights, each imported when it is used.

A table holds what must be known before the import. Nothing else imports the module of a row.
"""

import importlib
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Row:
    """A module of a table. Tables of more facts have classes of their own."""

    name: str
    """What it is called in options and messages."""
    module: str
    """The full name of the module."""

    def load(self) -> Any:
        """Return the module. Raises `ImportError` if it needs a package that is not installed."""
        return importlib.import_module(self.module)


def make_table(package: str, *names: str) -> dict[str, Row]:
    """Return the rows of modules of a package by their names, in this order."""
    table = {}
    for name in names:
        table[name] = Row(name, f"{package}.{name.replace('-', '_')}")
    return table
