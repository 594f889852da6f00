"""Make a finished run small: its best checkpoint, without what only training needs."""

import fcntl
import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lockstep.runs.report import read_report
from lockstep.system.errors import CheckpointError
from lockstep.weights import checkpoint
from lockstep.weights.choosing import choose_weights, explain_lost_best


def slim_run(folder: Path, *, keeps_newest: bool = False) -> tuple[list[int], list[int], int, str]:
    """Keep the best checkpoint of a finished run, and the newest one on request, without velocities
    and means of squared gradients. Such a run cannot resume. An interrupted call can be repeated.

    Return the steps that are kept, those that are removed, the bytes that are freed, and that the
    best checkpoint is gone, if it is. Raises `CheckpointError` if the folder holds no finished run,
    if a process trains in it, or if a checkpoint to keep is damaged.
    """
    checkpoints = folder / "checkpoints"
    _check_folder(folder, checkpoints)
    with _hold_run(folder):
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


def refuse_slim(folder: Path) -> None:
    """Raise `CheckpointError` if the run in a folder cannot resume, because it was made small."""
    checkpoints = folder / "checkpoints"
    saved = checkpoint.steps(checkpoints)
    if saved and checkpoint.is_slim(checkpoint.checkpoint_path(checkpoints, saved[-1])):
        raise CheckpointError(
            f"{folder} cannot resume: `lockstep runs slim` removed the velocities of its"
            " checkpoints. To train on, start a new run from its weights: lockstep train --weights"
            f" {shlex.quote(str(folder))} --data DATA --out ANOTHER"
        )


@contextmanager
def _hold_run(folder: Path) -> Iterator[None]:
    """Hold the lock of a run in the block. Raises `CheckpointError` if a process trains in it."""
    try:
        lock = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be written to: {error.strerror}") from None
    with os.fdopen(lock):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CheckpointError(f"a process is training in {folder}; wait for its end") from None
        yield


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
