"""What a listener gets: the events of the log (`lockstep.system.event_log`), and those that are
not logged.

Every event is a dictionary; its `kind` says which fields it has.
"""

from collections.abc import Callable
from typing import Any, Literal, TypedDict

from lockstep.runs.report import Report
from lockstep.system.event_log import LogEvent


class MessageEvent(TypedDict):
    """A note: something that is allowed, but that users should know before the work begins. Or a
    warning: something went wrong, but the work continues. Or a detail that few users need."""

    kind: Literal["note", "warning", "detail"]
    message: str


class ProgressEvent(TypedDict):
    """A part of a long task is done."""

    kind: Literal["progress"]
    what: str
    """What is being done, such as "listing images"."""
    done: int
    total: int


class SettingsEvent(TypedDict):
    """A command that resumes a run uses its settings for what the user did not give."""

    kind: Literal["settings"]
    out: str
    origins: dict[str, str]
    """What was taken, by the argument that was not given."""


class SettledEvent(TypedDict):
    """The values of the recipe `my-images` or `fine-tune` were chosen."""

    kind: Literal["settled"]
    lines: list[str]
    """What was chosen and why."""


class LinearProbeEvent(TypedDict):
    """The linear probe that a run starts from was evaluated: a first answer."""

    kind: Literal["linear_probe"]
    top1_percent: float
    images: int
    """Number of validation images."""
    seconds: float
    """Time that features, fit and evaluation took."""


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
    kept: bool


class PauseEvent(TypedDict):
    """The command ends before the run, as its options ask. A checkpoint of its last step was
    saved."""

    kind: Literal["pause"]
    step: int
    total: int
    out: str


class FinishEvent(TypedDict):
    """The run is finished: by this process, or before it began."""

    kind: Literal["finish", "already_finished"]
    report: Report
    out: str


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
