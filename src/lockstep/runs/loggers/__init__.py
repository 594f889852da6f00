"""Loggers: TensorBoard, MLflow, Weights & Biases, and files in the formats of NVIDIA's examples.

They get a run's figures, or the entries of its log, in addition to the log. A run does not depend
on them. If a logger fails, one warning is shown and the logger gets nothing more. A resumed run
continues in the same place, and nothing is sent twice.
"""

import importlib
import importlib.metadata
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, cast

import numpy as np
from typing_extensions import TypedDict

from lockstep.system.errors import CheckpointError, UserError
from lockstep.system.event_log import LogEvent
from lockstep.system.files import write_json
from lockstep.system.regular_files import TEXT, read_regular
from lockstep.system.schema import Count, matches
from lockstep.system.strict_json import parsed

Outcome = Literal["finished", "stopped", "failed"]
"""How a process of a run ended. A run that was stopped can resume."""


@dataclass(frozen=True)
class Picture:
    """An image to show."""

    name: str
    """A path, such as `mistakes/01`."""
    caption: str
    pixels: np.ndarray
    """uint8 [height, width, 3]."""

    @property
    def full_name(self) -> str:
        """Name and caption joined, for loggers without captions. All characters are valid in file
        names and tags."""
        return self.name + "_" + re.sub(r"[^-\w]", "_", self.caption)


@dataclass(frozen=True)
class Opening:
    """What a logger needs to begin or resume a run."""

    folder: Path
    """The run's folder."""
    step: int
    """The run's current step. Figures of later steps that were logged before are sent again."""
    about: Mapping[str, Any]
    """Recipe and environment, as plain values."""
    key: str | None
    """The logger's name for the run, from when it began; None for a new run."""
    log: Sequence[LogEvent] = ()
    """The log up to the current step."""


class Known(TypedDict):
    """What is known of a logger that cannot discard figures."""

    key: str | None
    """Its name for the run."""
    sent: dict[str, Count]
    """The newest step of each group of figures that it got."""


class Logger:
    """A destination for figures, images or entries of the log; a logger overrides what it takes.
    Any exception it raises is caught."""

    key: str
    """The logger's name for the run, by which it is found again."""

    def figures(self, values: Mapping[str, float], step: int) -> None:
        """Log figures by name, such as `train/loss`."""

    def images(self, pictures: Sequence[Picture], step: int) -> None:
        """Log images."""

    def entry(self, entry: LogEvent) -> None:
        """Take an entry that was just logged. The first one is that of the start."""

    def close(self, outcome: Outcome) -> None:
        """Send what is left and close."""


@dataclass(frozen=True)
class Kind:
    """A kind of logger: what it needs and how it resumes."""

    distributions: tuple[str, ...]
    """One of these distributions must be installed; empty if none is needed."""
    install: str
    """The command that installs it."""
    forgets: bool
    """Whether it discards figures after the step it resumes at, so that they can be sent again."""

    def is_installed(self) -> bool:
        """Return whether one of the distributions is installed, without importing it."""
        for name in self.distributions:
            try:
                importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                continue
            return True
        return not self.distributions


LOGGERS: dict[str, Kind] = {
    "tensorboard": Kind(("tensorboardX",), "pip install tensorboardX", forgets=True),
    "mlflow": Kind(
        ("mlflow", "mlflow-skinny"),
        "pip install mlflow-skinny==3.17.2 alembic sqlalchemy",
        forgets=False,
    ),
    "wandb": Kind(("wandb",), "pip install wandb==0.31.0", forgets=False),
    "dlll": Kind((), "", forgets=True),
    "nvidia-report": Kind((), "", forgets=True),
}
"""Kinds of loggers by name. `open_logger(opening)` of the module of the same name, with _ for -,
opens one."""


def check_installed(names: Sequence[str]) -> None:
    """Raise `UserError` unless the packages of these loggers are installed."""
    for name in names:
        if not LOGGERS[name].is_installed():
            raise UserError(
                f"logger {name!r} needs {LOGGERS[name].distributions[0]}: {LOGGERS[name].install}"
            )


class Loggers:
    """The loggers of one run. `loggers.json` in the run's folder holds their names for the run and
    what was sent to them."""

    def __init__(self, names: Sequence[str], opening: Opening, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._file = opening.folder / "loggers.json"
        self._known = _read_known(self._file) if self._file.is_file() else {}
        self._open: dict[str, Logger] = {}
        for name in names:
            with self._catch_errors(name):
                self._open[name] = self._open_logger(name, opening)

    def _open_logger(self, name: str, opening: Opening) -> Logger:
        key = self._known[name]["key"] if name in self._known else None
        logger: Logger = _import_module(name).open_logger(replace(opening, key=key))
        if not LOGGERS[name].forgets and key != logger.key:
            self._known[name] = {"key": logger.key, "sent": {}}
            write_json(self._file, self._known)
        return logger

    def figures(self, group: str, values: Mapping[str, float], step: int) -> None:
        """Send figures of a group, such as `train`. Within a group, steps must increase."""
        tagged = {f"{group}/{name}": value for name, value in values.items()}
        for name, logger in self._select_due(group, step):
            with self._catch_errors(name):
                logger.figures(tagged, step)

    def images(self, group: str, pictures: Sequence[Picture], step: int) -> None:
        """Send the images of a group."""
        for name, logger in self._select_due(group, step):
            with self._catch_errors(name):
                logger.images(pictures, step)

    def entry(self, entry: LogEvent) -> None:
        """Pass an entry of the log on."""
        for name, logger in list(self._open.items()):
            with self._catch_errors(name):
                logger.entry(entry)

    def close(self, outcome: Outcome) -> None:
        """Close all loggers."""
        for name, logger in list(self._open.items()):
            with self._catch_errors(name):
                logger.close(outcome)

    def _select_due(self, group: str, step: int) -> list[tuple[str, Logger]]:
        """Return the loggers that do not have this yet, and record it as sent: a killed process
        sends nothing twice."""
        due = []
        for name, logger in self._open.items():
            if not LOGGERS[name].forgets:
                sent = self._known[name]["sent"]
                if step <= sent.get(group, -1):
                    continue
                sent[group] = step
            due.append((name, logger))
        if any(not LOGGERS[name].forgets for name, _ in due):
            write_json(self._file, self._known)
        return due

    @contextmanager
    def _catch_errors(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._open.pop(name, None)
            self._warn(
                f"{name} failed and is off from this step on: {type(error).__name__}: {error}"
            )


def _import_module(name: str) -> ModuleType:
    return importlib.import_module(f"lockstep.runs.loggers.{name.replace('-', '_')}")


def _read_known(file: Path) -> dict[str, Known]:
    """Return the loggers' names for a run and what was sent to them. Raises `CheckpointError` if
    the file is damaged."""
    try:
        known = parsed(read_regular(file, TEXT))
    except ValueError:
        known = None
    if not matches(known, dict[str, Known]):
        raise CheckpointError(
            f"{file} is damaged; restore it, or remove it to let the loggers begin a new run"
        )
    return cast(dict[str, Known], known)
