"""Fixtures: a logger that records its calls, and a picture to log."""

import sys
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from lockstep.runs.loggers import LOGGERS, Kind, Logger, Opening, Picture


class Noting(Logger):
    """A logger that records its calls, and raises in the calls it is configured to fail in."""

    def __init__(self, opening: Opening, calls: list[tuple[Any, ...]], fails_at: set[str]) -> None:
        self.calls = calls
        self.fails_at = fails_at
        self.key = opening.key or f"key {len(calls)}"
        self._note("open", opening.key, dict(opening.about))

    def figures(self, values: Mapping[str, float], step: int) -> None:
        self._note("figures", dict(values), step)

    def images(self, pictures: Sequence[Picture], step: int) -> None:
        self._note("images", [picture.name for picture in pictures], step)

    def close(self, outcome: str) -> None:
        self._note("close", outcome)

    def _note(self, what: str, *details: Any) -> None:
        self.calls.append((what, *details))
        if what in self.fails_at:
            raise OSError("the disk is full")


class Notebook:
    """The calls that the logger "noting" got, and the calls in which it fails."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.fails_at: set[str] = set()

    def select(self, what: str) -> list[tuple[Any, ...]]:
        return [details for name, *details in self.calls if name == what]


@pytest.fixture
def noting(monkeypatch: pytest.MonkeyPatch) -> Notebook:
    """A logger with the name "noting"."""
    notebook = Notebook()
    module = ModuleType("lockstep.runs.loggers.noting")
    vars(module)["open_logger"] = lambda opening: Noting(opening, notebook.calls, notebook.fails_at)
    monkeypatch.setitem(sys.modules, "lockstep.runs.loggers.noting", module)
    monkeypatch.setitem(LOGGERS, "noting", Kind(("numpy",), "", forgets=False))
    return notebook


@pytest.fixture
def picture() -> Picture:
    """Eight by six pixels, all different."""
    return Picture(
        "mistakes/01", "dots predicted as rays", np.arange(144, dtype=np.uint8).reshape(6, 8, 3)
    )
