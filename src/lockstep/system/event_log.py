"""A run's log, `log.jsonl`: events as JSON, one per line, in the order in which they happened."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lockstep.system.checks import Check, is_count, is_figure, is_list_of, is_number, is_percent, is_rate, is_text, parsed
from lockstep.system.errors import CheckpointError

_FIELDS: dict[str, Check] = {
    "step": is_count,
    "first_step": is_count,
    "total": is_count,
    "images": lambda value: is_count(value) and value > 0,
    "images_per_sec": is_rate,
    "data_wait_share": is_number,
    "loss": is_figure,
    "losses": is_list_of(is_figure),
    "loss_scale": is_figure,
    "top1_percent": is_percent,
    "top5_percent": is_percent,
    "lr": is_figure,
    "elapsed_sec": is_number,
    "weights": is_text,
    "message": is_text,
}
SCORES = ("images", "loss", "top1_percent", "top5_percent")
_NEEDED = {"train": ("first_step", "images", "images_per_sec"), "evaluate": ("weights",)}
_WHOLE = {
    "train": (*SCORES, "images_per_sec", "first_step", "losses", "loss_scale", "data_wait_share"),
    "evaluate": (*SCORES, "images_per_sec", "weights"),
    "diverged": ("message",),
}


def problem_of_entry(entry: Any, *, whole: bool) -> str | None:
    """Return what is wrong with a log entry, or None. With `whole`, it must have every field that training writes."""
    if not isinstance(entry, dict):
        return "it is not an object"
    if not is_text(entry.get("kind")):
        return "it has no kind"
    needed = (_WHOLE if whole else _NEEDED).get(entry["kind"], ())
    problem = problem_of_fields(entry, ("step", *needed))
    if problem is None and entry["kind"] == "train" and not entry["first_step"] < entry["step"]:
        return "its first_step is not below its step"
    return problem


def problem_of_fields(entry: Mapping[str, Any], needed: tuple[str, ...]) -> str | None:
    """Return what is wrong with the fields of an entry, or None. The fields in `needed` must exist."""
    for name, check in _FIELDS.items():
        if name in entry and not check(entry[name]):
            return f"its {name} is {repr(entry[name])[:60]}"
        if name not in entry and name in needed:
            return f"it has no {name}"
    return None


def read_log(path: Path, *, whole: bool = False) -> list[dict[str, Any]]:
    """Return the entries of a log; empty if there is no log. A last line that a killed process truncated is left out.

    With `whole`, entries must have every figure that training writes; otherwise, only what resuming the log needs. Raises
    `CheckpointError` that names the first wrong line.
    """
    if not path.is_file():
        return []
    entries = []
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines[:-1], start=1):
        try:
            entry = parsed(line)
        except ValueError:
            if number == len(lines) - 1:
                break
            raise CheckpointError(f"{path}, line {number} is not JSON; restore the file or use another --out") from None
        problem = problem_of_entry(entry, whole=whole)
        if problem is not None:
            raise CheckpointError(
                f"{path}, line {number} is not a log entry: {problem}; restore the file or use another --out"
            )
        entries.append(entry)
    return entries


def seconds_of(entry: dict[str, Any]) -> float:
    """Return the wall time of a logged training interval or evaluation, in seconds."""
    return float(entry["images"] / entry["images_per_sec"])
