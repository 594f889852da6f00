"""The checkpoints of a run: the newest, the best, or that of a step."""

from collections.abc import Iterable
from pathlib import Path

from lockstep.system.errors import CheckpointError
from lockstep.system.event_log import LogEvent, read_log
from lockstep.weights import checkpoint


def find_checkpoint(path: Path, name: str) -> Path:
    """Return the path of a run's checkpoint: "newest", "best", or that of a step. Return any other
    path unchanged. Raises `CheckpointError`."""
    folder = path / "checkpoints"
    if not folder.is_dir():
        if name != "newest" and path.exists():
            raise CheckpointError(
                f"{path} is no run, so it has no checkpoint {name!r} to choose; name the file"
                " itself"
            )
        return path
    steps = checkpoint.steps(folder)
    if not steps:
        raise CheckpointError(f"{path} has no checkpoint yet")
    if name == "newest":
        return checkpoint.checkpoint_path(folder, steps[-1])
    if name == "best":
        step = find_best_step(read_log(path / "log.jsonl"))
        if step is None:
            raise CheckpointError(f"{path} was never evaluated, so it has no best checkpoint")
        return checkpoint.checkpoint_path(folder, step)
    if not name.isdigit() or int(name) not in steps:
        raise CheckpointError(
            f"{path} has no checkpoint {name!r}; it has newest, best and steps {steps}"
        )
    return checkpoint.checkpoint_path(folder, int(name))


def find_best_step(log: Iterable[LogEvent]) -> int | None:
    """Return the step with the highest top-1 in a log, the earliest if several are equal; None
    without an evaluation."""
    scores = [
        (event["top1_percent"], -event["step"])
        for event in log
        if event["kind"] == "evaluate" and event["weights"] == "trained" and "top1_percent" in event
    ]
    return -int(max(scores)[1]) if scores else None
