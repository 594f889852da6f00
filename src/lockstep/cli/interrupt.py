"""How commands that start workers end at a signal."""

import signal
from types import FrameType
from typing import NoReturn


def interrupt_on_signals() -> None:
    """Make SIGTERM and SIGHUP act as Ctrl-C does: workers stop, and results are kept."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    from lockstep.system.errors import EXIT_SAVED_AND_STOPPED, Interrupted

    raise Interrupted(f"stopped by {signal.Signals(number).name}", EXIT_SAVED_AND_STOPPED)
