"""What a process does that `lockstep launch` started as one of several ranks."""

import ctypes
import os
import signal
import sys
from pathlib import Path

EXIT_CODE_FOLDER = "LOCKSTEP_EXIT_CODE_FOLDER"
"""Environment variable: where a launched rank leaves its exit code, which the frameworks' launchers do not pass on."""

_PR_SET_PDEATHSIG = 1


def is_leading() -> bool:
    """Return whether this is rank 0 or the only process; it alone speaks."""
    return os.environ.get("RANK", "0") == "0"


def follow_launcher() -> None:
    """Have the system send SIGTERM to this rank when its launcher dies, however it dies; nothing if there is none."""
    if EXIT_CODE_FOLDER in os.environ and sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def leave_exit_code(code: int) -> None:
    """Tell the launcher, if there is one and it still lives."""
    folder = Path(os.environ.get(EXIT_CODE_FOLDER, ""))
    if EXIT_CODE_FOLDER in os.environ and "RANK" in os.environ and folder.is_dir():
        (folder / os.environ["RANK"]).write_text(str(code))
