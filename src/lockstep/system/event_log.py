"""A run's log, `log.jsonl`: events as JSON, one per line, in the order in which they happened.

Events are dictionaries, in memory as in the file. Their `kind` says which fields they have. Entries
of other kinds and other fields are kept as they are.
"""

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict

from lockstep.system import strict_json
from lockstep.system.errors import CheckpointError
from lockstep.system.regular_files import RECORDS, read_regular
from lockstep.system.schema import Figure


class Summary(TypedDict):
    """The results of some images."""

    loss: Figure
    """The mean loss; null in a file if it is not finite."""
    top1_percent: float
    top5_percent: float
    images: int


class StartEvent(TypedDict):
    """A process begins or resumes the run."""

    kind: Literal["start"]
    step: int
    """Number of steps done before."""
    run: NotRequired[str]
    """The id of the run; older logs do not have it."""
    total: int
    """Number of steps of the whole run."""
    steps_per_epoch: int
    damaged: list[str]
    """Why newer checkpoints were skipped."""
    notes: list[str]
    """What the user may want to change."""
    details: NotRequired[list[str]]
    """Details of the start that few users need."""
    changed: dict[str, Any]
    """The recipe's fields that differ from the published recipe, with their values in this run."""
    environment: dict[str, Any]
    """The contents of environment.json."""
    selection: NotRequired[str]
    """The value that decides which evaluation is the best: `Recipe.selection`."""
    early_stopping_epochs: NotRequired[int]
    best: NotRequired["EvaluateEvent | None"]
    """The best evaluation so far. Older logs do not have this and the two fields before it."""
    elapsed_sec: NotRequired[float]
    evaluates: NotRequired[list[str]]
    """The kinds of weights that are evaluated, in order."""
    probes: NotRequired[bool]
    """Whether this process fitted a linear probe, whose accuracy follows."""


class TrainEvent(Summary):
    """An interval of training steps is done."""

    kind: Literal["train"]
    step: int
    """Number of steps done after the interval."""
    first_step: int
    """The interval's first step, counted from 0."""
    losses: list[float]
    """The mean loss of every step."""
    loss_scale: float
    images_per_sec: float
    data_wait_share: float
    """Share of the time in which the backend waited for images."""
    traced: NotRequired[bool]
    """Whether the steps ran under the profiler. Their speed does not count then."""
    lr: NotRequired[float]
    """The learning rate of the last step."""
    elapsed_sec: NotRequired[float]
    """Seconds since the process began."""


class EvaluateEvent(Summary):
    """The validation images were evaluated. More fields hold other metrics
    (`lockstep.models.metrics`)."""

    kind: Literal["evaluate"]
    step: int
    weights: str
    """"trained" or "ema"."""
    images_per_sec: float
    batches: NotRequired[int]
    """Number of batches of a rank."""
    data_wait_share: NotRequired[float]
    """Share of the time in which the backend of rank 0 waited for images."""
    elapsed_sec: NotRequired[float]


class RestartEvent(TypedDict):
    """A launcher has started all ranks again after a failure. It follows the entry of the start."""

    kind: Literal["restart"]
    step: int
    restart: int
    """The number of the restart in its launch, from 1."""
    reason: str
    """What caused the restart, in a sentence."""
    elapsed_sec: NotRequired[float]


class DivergedEvent(TypedDict):
    """A loss, a score or a weight is not a finite number, and the run ends. The entry also has the
    figures that show it."""

    kind: Literal["diverged"]
    step: int
    message: str
    elapsed_sec: NotRequired[float]


LogEvent = StartEvent | RestartEvent | TrainEvent | EvaluateEvent | DivergedEvent

_CHECKS: dict[str, strict_json.Check] = {
    **dict.fromkeys(("step", "first_step", "total", "restart"), strict_json.is_count),
    **dict.fromkeys(("images", "batches"), strict_json.is_positive),
    "images_per_sec": strict_json.is_rate,
    **dict.fromkeys(("data_wait_share", "elapsed_sec"), strict_json.is_number),
    **dict.fromkeys(("loss", "loss_scale", "lr"), strict_json.is_figure),
    "losses": strict_json.is_list_of(strict_json.is_figure),
    **dict.fromkeys(("weights", "reason", "message", "run"), strict_json.is_text),
}
_NEEDED_TO_RESUME = {"train": {"first_step", "images", "images_per_sec"}, "evaluate": {"weights"}}
_WHOLE = {
    "train": TrainEvent.__required_keys__,
    "evaluate": EvaluateEvent.__required_keys__,
    "restart": {"reason"},
    "diverged": {"message"},
}


def find_problem(entry: Any, *, whole: bool) -> str | None:
    """Return what is wrong with a log entry, or None. With `whole`, it must have every field that
    training writes."""
    if not isinstance(entry, dict):
        return "it is not an object"
    if not strict_json.is_text(entry.get("kind")):
        return "it has no kind"
    needed = (_WHOLE if whole else _NEEDED_TO_RESUME).get(entry["kind"], set())
    problem = find_field_problem(entry, {"step", *needed})
    if problem is None and entry["kind"] == "train" and not entry["first_step"] < entry["step"]:
        return "its first_step is not below its step"
    return problem


def find_field_problem(entry: Mapping[str, Any], needed: Collection[str]) -> str | None:
    """Return what is wrong with an entry's fields, or None. The fields in `needed` must exist."""
    percents = filter(lambda name: name.endswith("_percent"), sorted({*needed, *entry}))
    for name, check in (_CHECKS | dict.fromkeys(percents, strict_json.is_percent)).items():
        if name in entry and not check(entry[name]):
            return f"its {name} is {repr(entry[name])[:60]}"
        if name not in entry and name in needed:
            return f"it has no {name}"
    return None


def read_log(path: Path, *, whole: bool = False) -> list[LogEvent]:
    """Return the entries of a log; empty if there is no log. A last line that a killed process
    truncated is left out.

    With `whole`, entries must have every figure that training writes; otherwise, only what resuming
    the log needs. Raises `CheckpointError` that names the first wrong line.
    """
    if not path.is_file():
        return []
    entries: list[LogEvent] = []
    lines = read_regular(path, RECORDS).split(b"\n")
    for number, line in enumerate(lines[:-1], start=1):
        try:
            entry = strict_json.parsed(line)
        except ValueError:
            if number == len(lines) - 1:
                break
            raise CheckpointError(
                f"{path}, line {number} is not JSON; restore the file or use another --out"
            ) from None
        problem = find_problem(entry, whole=whole)
        if problem is not None:
            raise CheckpointError(
                f"{path}, line {number} is not a log entry: {problem}; restore the file or use"
                " another --out"
            )
        entries.append(entry)
    return entries


def compute_seconds(entry: TrainEvent | EvaluateEvent) -> float:
    """Return the wall time of a logged training interval or evaluation, in seconds."""
    return entry["images"] / entry["images_per_sec"]


WARMUP_STEPS = 10
"""The speed of this many first steps of a process does not count: they compile, allocate and fill
caches."""


def select_warm(log: Iterable[LogEvent]) -> list[TrainEvent]:
    """Return the intervals of training whose speed counts: without the first steps of a process
    and profiled steps."""
    intervals = []
    warm_from = WARMUP_STEPS
    for entry in log:
        if entry["kind"] == "start":
            warm_from = entry["step"] + WARMUP_STEPS
        elif entry["kind"] == "train" and entry["first_step"] >= warm_from:
            intervals.append(entry)
    return [interval for interval in intervals if "traced" not in interval]


def measure_throughput(log: Iterable[LogEvent]) -> tuple[float | None, float | None]:
    """Return images per second of wall time in training, and the share of the time spent waiting
    for data; both None if no interval counts."""
    images = seconds = waited = 0.0
    for interval in select_warm(log):
        images += interval["images"]
        seconds += compute_seconds(interval)
        waited += interval["data_wait_share"] * compute_seconds(interval)
    return (images / seconds, waited / seconds) if seconds else (None, None)
