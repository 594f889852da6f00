"""What a listener gets: the events of the log (`lockstep.system.event_log`), and those that are
not logged.

Every event is a dictionary; its `kind` says which fields it has.
"""

from collections.abc import Callable
from typing import Any, Literal, TypedDict

from lockstep.runs.report import Report
from lockstep.system.event_log import LogEvent


class MessageEvent(TypedDict):
    """A note before the work begins, a warning about something that went wrong while the work
    continues, or a detail that few need."""

    kind: Literal["note", "warning", "detail"]
    message: str


class ProgressEvent(TypedDict):
    """A part of a long task is done."""

    kind: Literal["progress"]
    what: str
    """What is in progress, such as "listing images"."""
    done: int
    """The number of parts that are done."""
    total: int


class SettingsEvent(TypedDict):
    """A run that resumes takes the settings that you left out from its folder."""

    kind: Literal["settings"]
    out: str
    origins: dict[str, str]
    """The values that were chosen, by the argument that you left out."""


class SettledEvent(TypedDict):
    """The values of the recipe `my-images` or `fine-tune` were chosen."""

    kind: Literal["settled"]
    lines: list[str]
    """What was chosen, and why."""


class LinearProbeEvent(TypedDict):
    """The linear probe that a run starts from was evaluated, which gives a first accuracy."""

    kind: Literal["linear_probe"]
    top1_percent: float
    images: int
    """The number of validation images."""
    seconds: float
    """The time that features, fit and evaluation took."""


class TraceEvent(TypedDict):
    """The profiler's trace of some steps was written."""

    kind: Literal["trace"]
    first_step: int
    last_step: int
    path: str


class SaveEvent(TypedDict):
    """A checkpoint was written."""

    kind: Literal["save"]
    step: int
    path: str


class CellEvent(TypedDict):
    """A cell of a benchmark was measured, or kept from an earlier report."""

    kind: Literal["cell"]
    cell: dict[str, Any]
    """The cell with its figures, as in the report of the benchmark."""
    kept: bool
    """Whether the figures come from an earlier report."""


class PauseEvent(TypedDict):
    """A command ends before the run does, as its options ask; its last step was saved."""

    kind: Literal["pause"]
    step: int
    total: int
    out: str
    """The folder of the run."""


class FinishEvent(TypedDict):
    """The run is finished: by this process, or earlier."""

    kind: Literal["finish", "already_finished"]
    report: Report
    out: str
    """The folder of the run."""


Event = (
    LogEvent
    | MessageEvent
    | ProgressEvent
    | SettingsEvent
    | SettledEvent
    | LinearProbeEvent
    | TraceEvent
    | SaveEvent
    | CellEvent
    | PauseEvent
    | FinishEvent
)
Listener = Callable[[Event], None]
"""A function that is called with every event, logged or not."""
