"""Heartbeats: every rank writes what it does into a small file, and its launcher reads it.

A thread beats while the rank compiles, evaluates or saves, since frameworks release Python's lock
there. A call in C that holds the lock, such as loading a framework, stops the thread. The launcher
therefore also counts the processor time that a rank uses as a sign of life
(`lockstep.launch.watch`).
"""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast, get_args

from lockstep.system.ranks import PATIENCE, has_lost_launcher, launcher_folder

Activity = Literal["starting", "compiling", "training", "evaluating", "saving"]
"""What a rank does. "starting" lasts to the first step; commands that do not train stay there."""

BEAT_SEC = 0.5
"""Seconds from one beat to the next."""
_BYTES = 64
"""Length of the file. A beat replaces all of it, so that a full disk does not end the beats."""


@dataclass(frozen=True)
class Beat:
    """What a rank does."""

    number: int = 0
    """Counts the beats. A new number is a sign of life."""
    activity: Activity = "starting"
    step: int = 0
    """Number of training steps of the run that were begun."""
    moves: int = 0
    """Number of batches, of training and evaluation, that the process has taken."""


def beat_file(folder: Path, rank: int | str) -> Path:
    """Return the file of a rank in the launcher's folder."""
    return folder / f"{rank}.beat"


def read_beat(path: Path) -> Beat | None:
    """Return the beat in a file; None if there is none, or only a part of one."""
    try:
        number, activity, step, moves = path.read_text(encoding="utf-8").split()
        known = activity in get_args(Activity)
        return Beat(int(number), cast(Activity, activity), int(step), int(moves)) if known else None
    except (OSError, ValueError):
        return None


class Heart:
    """Writes the beats of this process into a file."""

    def __init__(self, path: Path) -> None:
        self._beat = Beat()
        self._lock = threading.Lock()
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)

    @property
    def activity(self) -> Activity:
        """What the process does."""
        return self._beat.activity

    def beat(
        self, activity: Activity | None = None, step: int | None = None, *, moved: bool = False
    ) -> None:
        """Beat, and write what has changed since the last beat."""
        with self._lock:
            now = self._beat
            activity = activity or now.activity
            step = now.step if step is None else step
            self._beat = Beat(now.number + 1, activity, step, now.moves + moved)
            text = " ".join(map(str, (self._beat.number, activity, step, self._beat.moves)))
            with suppress(OSError):  # a full disk, before the first beat
                os.pwrite(self._file, f"{text:<{_BYTES - 1}}\n".encode(), 0)

    def go_on(self) -> None:
        """Beat until the process ends.

        A process whose launcher has ended may save and stop within the launcher's patience. It is
        then ended, because it may be waiting for a lost rank.
        """
        patience = float(os.environ.get(PATIENCE, "inf"))
        lost_at = None
        while True:
            time.sleep(BEAT_SEC)
            self.beat()
            if has_lost_launcher():
                lost_at = lost_at or time.monotonic()
                if time.monotonic() > lost_at + patience:
                    os.kill(os.getpid(), signal.SIGKILL)


_hearts: list[Heart] = []
"""The heart of this process, if a launcher has started it."""


def begin() -> None:
    """Begin to beat if a launcher has started this process."""
    folder = launcher_folder()
    if folder is not None:
        with suppress(OSError):  # a full disk: processor time remains as a sign of life
            _hearts.append(Heart(beat_file(folder, os.environ["RANK"])))
            threading.Thread(
                target=_hearts[0].go_on, name="lockstep-heartbeat", daemon=True
            ).start()


@contextmanager
def saving() -> Iterator[None]:
    """Note that this process saves, and, after the block, what it did before. Also a decorator."""
    before = [heart.activity for heart in _hearts]
    note("saving")
    try:
        yield
    finally:
        for activity in before:
            note(activity)


def note(activity: Activity, step: int | None = None, *, moved: bool = False) -> None:
    """Note what this process does from here on, the number of training steps begun, and whether it
    has taken a batch."""
    for heart in _hearts:
        heart.beat(activity, step, moved=moved)
