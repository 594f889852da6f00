"""Requests to stop by signal. They are recorded on arrival and handled between steps."""

import signal
import sys
import threading
from types import FrameType
from typing import TYPE_CHECKING, Self

from lockstep.system.errors import EXIT_INTERRUPTED, EXIT_SAVED_AND_STOPPED, Interrupted

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

_WATCHED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
_REPEAT_AFTER_SEC = 0.02
"""Callbacks are short: after this time the main thread runs other Python code."""


def repeat_lost_interrupts() -> None:
    """Make a signal count that arrives while a callback runs.

    The handlers of SIGINT and, in some commands, SIGTERM raise an exception where the main thread
    is. Python ignores what the callback of a weak reference, a finaliser or `__del__` raises, so
    the exception would be lost there and the command would go on. The signal is sent again.
    """
    show = sys.unraisablehook

    def repeat(unraisable: "UnraisableHookArgs") -> None:
        if isinstance(unraisable.exc_value, KeyboardInterrupt):
            _send_again(signal.SIGINT)
        elif isinstance(unraisable.exc_value, Interrupted):
            _send_again(signal.SIGTERM)
        else:
            show(unraisable)

    sys.unraisablehook = repeat


def _send_again(number: signal.Signals) -> None:
    main = threading.main_thread().ident
    timer = threading.Timer(_REPEAT_AFTER_SEC, signal.pthread_kill, (main, number))
    timer.daemon = True
    timer.start()


class StopRequests:
    """While open, SIGTERM, SIGUSR1 and a first Ctrl-C set `requested`. A second Ctrl-C interrupts
    at once.

    A context manager. An inner one knows what the outer one has received, and passes on what it
    receives itself. Outside the main thread Python cannot handle signals, so none are watched
    there.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._previous: dict[signal.Signals, object] = {}
        self._outer: StopRequests | None = None

    @property
    def requested(self) -> bool:
        """Whether to stop after this step."""
        return self.received is not None

    @property
    def name(self) -> str:
        """The name of the signal, for a message."""
        if self.received == signal.SIGINT:
            return "Ctrl-C"
        return self.received.name if self.received else "a signal to another rank"

    @property
    def exit_code(self) -> int:
        """130 after Ctrl-C, 75 after another signal or a signal to another rank."""
        return EXIT_INTERRUPTED if self.received == signal.SIGINT else EXIT_SAVED_AND_STOPPED

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._note) for number in _WATCHED}
            outer = getattr(self._previous[signal.SIGTERM], "__self__", None)
            if isinstance(outer, StopRequests):
                self._outer = outer
                self.received = self.received or outer.received
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        if self._outer is not None:
            self._outer.received = self.received or self._outer.received

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received == signal.SIGINT and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = signal.Signals(number)
