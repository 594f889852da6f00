"""Make a finished run small: its best checkpoint, without what only training needs."""

from pathlib import Path

from lockstep.runs.folder import hold_run
from lockstep.runs.report import read_report
from lockstep.system.errors import CheckpointError
from lockstep.weights import checkpoint
from lockstep.weights.checkpoint_choice import choose_weights, explain_lost_best


def slim_run(folder: Path, *, keeps_newest: bool = False) -> tuple[list[int], list[int], int, str]:
    """Keep the best checkpoint of a finished run, and the newest one on request, without velocities
    and means of squared gradients. Such a run cannot resume. An interrupted call can be repeated.

    Return the steps that are kept, those that are removed, the bytes that are freed, and which
    checkpoint stands in if the best one is missing. Raises `CheckpointError` if the folder holds no
    finished run, if a process trains in it, or if a checkpoint to keep is damaged.
    """
    checkpoints = folder / "checkpoints"
    _check_folder(folder, checkpoints)
    with hold_run(folder):
        _check_folder(folder, checkpoints)
        saved = checkpoint.steps(checkpoints)
        kept = [int(choose_weights(folder, None, None).path.name.partition("-")[2])]
        if keeps_newest and saved[-1] not in kept:
            kept.append(saved[-1])
        lost = explain_lost_best(folder)
        before = _count_bytes(checkpoints)
        for step in kept:
            checkpoint.drop_velocities(checkpoint.checkpoint_path(checkpoints, step))
        removed = sorted({*saved}.difference(kept))
        checkpoint.remove(checkpoints, removed)
        return kept, removed, before - _count_bytes(checkpoints), lost


def _check_folder(folder: Path, checkpoints: Path) -> None:
    """Raise `CheckpointError` if there is no finished run, or if checkpoints are links: what is
    elsewhere may be another run's."""
    if read_report(folder) is None or not checkpoints.is_dir():
        raise CheckpointError(
            f"{folder} is not a finished run; expected the --out of lockstep train, with a"
            " report.json and checkpoints"
        )
    for path in (checkpoints, *checkpoints.iterdir()):
        if path.is_symlink():
            raise CheckpointError(f"{path} is a link; expected a folder. Remove the link")


def _count_bytes(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*"))
