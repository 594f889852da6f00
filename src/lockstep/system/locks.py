"""A lock in a folder that several machines share.

On network file systems `flock` may hold on one machine only, or not exist. Creating a file that
must not exist is atomic on all of them: that file is the lock. The holder rewrites it every few
seconds (a beat), and others see by the contents that the holder is alive: clocks of several
machines need not agree. A lock without beats is taken over.

If a holder is suspended for longer than `STALE_SEC`, or the disk is full, two processes can hold
the lock. It is for work that may be done twice, and whose results replace files as a whole.
"""

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.system.regular_files import SETTINGS, read_regular_text
from lockstep.system.strict_json import parsed

BEAT_SEC = 5.0
"""The holder rewrites the file at least this often."""
STALE_SEC = 60.0
"""A lock without a beat for this long is taken over."""
_LOOK_SEC = 0.2

Progress = Callable[[int, int], None]
"""Called with the number of parts that are done, and of all parts, for the process that holds the
lock."""


@dataclass
class Lock:
    """A lock that this process holds."""

    path: Path
    progress: Progress | None = None
    holder: dict[str, Any] = field(default_factory=dict)
    done: int = 0
    total: int = 1
    beats: int = 0

    def tell(self, done: int, total: int) -> None:
        """Report the progress: to this process's user, and with the next beat to the processes that
        wait."""
        self.done = done
        self.total = total
        if self.progress is not None:
            self.progress(done, total)

    def beat(self) -> None:
        """Rewrite the file, unless another process has taken it over."""
        if self.beats and _holder(_read(self.path)) != self.holder:
            return
        self.beats += 1
        about = self.holder | {"beat": self.beats, "done": self.done, "total": self.total}
        with suppress(OSError):  # such as a full disk
            self.path.write_text(json.dumps(about, allow_nan=False), encoding="utf-8")

    def release(self) -> None:
        """Remove the file, unless another process has taken it over."""
        with suppress(OSError):
            if _holder(_read(self.path)) == self.holder:
                self.path.unlink()


@contextmanager
def hold_lock(path: Path, progress: Progress | None = None) -> Iterator[Lock]:
    """Hold the lock `path` in the block. Wait while another process holds it, on this machine or
    another one.

    An exception of `progress` ends the wait. Raises `OSError` if the folder is missing or cannot be
    written to.
    """
    lock = _acquire(path, progress)
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(BEAT_SEC):
            lock.beat()

    beating = threading.Thread(target=beat, name="lockstep-lock", daemon=True)
    beating.start()
    try:
        yield lock
    finally:
        ended.set()
        beating.join()
        lock.release()


def _acquire(path: Path, progress: Progress | None) -> Lock:
    holder = {"machine": _machine(), "pid": os.getpid(), "started": time.time_ns()}
    lock = Lock(path, progress, holder)
    seen = None
    since = time.monotonic()
    theirs = (0, 1)
    while True:
        try:
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
        except FileExistsError:
            text = _read(path)
            if text != seen:
                seen = text
                since = time.monotonic()
            if _has_ended(text) or time.monotonic() - since > STALE_SEC:
                _take_away(path, text)
                continue
            theirs = _progress(text) or theirs
            if progress is not None:
                progress(*theirs)
            time.sleep(_LOOK_SEC)
        else:
            lock.beat()
            return lock


def _take_away(path: Path, text: str) -> None:
    """Remove a lock whose holder has ended. Of several processes only one succeeds."""
    aside = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}")
    # Its holder may have released it before it ended, and another process may hold a new lock.
    if _read(path) != text:
        return
    try:
        path.rename(aside)
    except OSError:  # another process was first
        return
    if _read(aside) != text:  # that process holds a new lock already
        with suppress(OSError):
            os.link(aside, path)
    aside.unlink(missing_ok=True)


def _read(path: Path) -> str:
    try:
        return read_regular_text(path, SETTINGS, errors="replace")
    except OSError:  # released in the meantime
        return ""


def _about(text: str) -> dict[str, Any]:
    try:
        about: Any = parsed(text)
    except ValueError:  # empty, or in the middle of a beat
        return {}
    return about if isinstance(about, dict) else {}


def _holder(text: str) -> dict[str, Any]:
    about = _about(text)
    return {name: about[name] for name in ("machine", "pid", "started") if name in about}


def _progress(text: str) -> tuple[int, int] | None:
    about = _about(text)
    done = about.get("done")
    total = about.get("total")
    if isinstance(done, int) and isinstance(total, int) and total > 0:
        return done, total
    return None


def _has_ended(text: str) -> bool:
    """Return whether the holder is a process of this machine that does not exist any more."""
    about = _about(text)
    number = about.get("pid")
    if about.get("machine") != _machine() or not isinstance(number, int) or number <= 0:
        return False
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):  # another user's
        return False
    return False


def _machine() -> str:
    """Return a text that processes share only if they see each other's numbers: host, boot and
    container."""
    parts = [socket.gethostname()]
    with suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip())
        parts.append(str(Path("/proc/self/ns/pid").readlink()))
    return " ".join(parts)
