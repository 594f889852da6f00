"""Which checkpoint of a run is used, and which of its weights."""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from lockstep.recipes import load_recipe
from lockstep.recipes.best_evaluation import Selection, describe_best, find_best
from lockstep.system.errors import CheckpointError
from lockstep.system.event_log import EvaluateEvent, read_log
from lockstep.weights.checkpoint import checkpoint_path, steps
from lockstep.weights.run_identity import read_identity


@dataclass(frozen=True)
class Choice:
    """The weights to use of a source."""

    path: Path
    """A checkpoint, or a source that is not a run."""
    ema: bool
    """Whether the moving average is used instead of the trained weights."""
    remarks: tuple[str, ...] = ()
    """Which checkpoint is used, if nobody named one and there are several, or if the best is gone.
    """
    evaluation: EvaluateEvent | None = None
    """The evaluation for which they were chosen."""


def choose_weights(source: Path, checkpoint: str | None, ema: bool | None) -> Choice:
    """Return the weights to use of a run; a source that is not a run is returned unchanged.

    - `checkpoint` is "newest", "best" or a step's number. None is the best one, or the newest one
      of a run that was never evaluated.
    - `ema` chooses the moving average (True) or the trained weights (False). None is whichever is
      better of the best checkpoint, and the trained weights of another one.

    Raises `CheckpointError` if there is no such checkpoint.
    """
    folder = source / "checkpoints"
    if not folder.is_dir():
        if checkpoint not in (None, "newest") and source.exists():
            raise CheckpointError(
                f"{source} is not a run and has no checkpoint {checkpoint!r}; name the file itself"
            )
        return Choice(source, bool(ema))
    saved = steps(folder)
    read_identity(source)  # refuses checkpoints of two runs
    if not saved:
        raise CheckpointError(f"{source} has no checkpoint")
    if checkpoint == "newest":
        return Choice(checkpoint_path(folder, saved[-1]), bool(ema))
    if checkpoint in (None, "best"):
        return _choose_best(source, saved, ema, is_named=checkpoint is not None)
    if not checkpoint.isdigit() or int(checkpoint) not in saved:
        raise CheckpointError(
            f"{source} has no checkpoint {checkpoint!r}; it has newest, best and steps {saved}"
        )
    return Choice(checkpoint_path(folder, int(checkpoint)), bool(ema))


def _find_lost_best(source: Path) -> EvaluateEvent | None:
    """Return the best evaluation of a run if its checkpoint is gone, else None."""
    best = find_best(_list_evaluations(source), _read_selection(source))
    if best is None or checkpoint_path(source / "checkpoints", best["step"]).is_dir():
        return None
    return best


def explain_lost_best(source: Path) -> str:
    """Return, in words, that the best checkpoint of a run is gone and which one commands use; "" if
    it is there."""
    if _find_lost_best(source) is None:
        return ""
    with suppress(CheckpointError):
        return "; ".join(choose_weights(source, None, None).remarks) or "its checkpoints are gone"
    return "its checkpoints are gone"


def _choose_best(source: Path, saved: list[int], ema: bool | None, *, is_named: bool) -> Choice:
    """Return the best weights of a run among its saved checkpoints, or the newest ones if there are
    no others and nobody named the best."""
    selection = _read_selection(source)
    lost = _find_lost_best(source)
    best = find_best(_list_candidates(source, saved, ema), selection)
    reason = "the run was never evaluated"
    if lost is not None:
        reason = f"the best checkpoint is gone ({describe_best(lost, selection)})"
    if best is None and is_named:
        raise CheckpointError(f"{source} has no best checkpoint: {reason}")
    step = saved[-1]
    uses_average = bool(ema)
    if best is None:
        remark = f"using the newest checkpoint, of step {step}: {reason}"
    else:
        step = best["step"]
        if ema is None:
            uses_average = best["weights"] == "ema"
        remark = f"using the best checkpoint: {describe_best(best, selection)}"
        if lost is not None:
            remark = f"{reason}; using the best one left: {describe_best(best, selection)}"
        if step != saved[-1]:
            remark += f"; --checkpoint newest uses step {saved[-1]}"
    is_silent = is_named or not (len(saved) > 1 or uses_average)
    remarks = () if is_silent and lost is None else (remark,)
    path = checkpoint_path(source / "checkpoints", step)
    return Choice(path, uses_average, remarks, best)


def _list_candidates(source: Path, saved: list[int], ema: bool | None) -> list[EvaluateEvent]:
    """Return the evaluations of saved checkpoints, of the weights that may be used."""
    events = [event for event in _list_evaluations(source) if event["step"] in saved]
    if ema is None:
        return events
    return [event for event in events if (event["weights"] == "ema") == ema] or events


def _list_evaluations(source: Path) -> list[EvaluateEvent]:
    return [event for event in read_log(source / "log.jsonl") if event["kind"] == "evaluate"]


def _read_selection(source: Path) -> Selection:
    if not (source / "recipe.yaml").is_file():
        return "top1"
    return load_recipe(source / "recipe.yaml").selection
