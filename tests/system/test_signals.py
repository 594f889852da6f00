import os
import signal
import subprocess
import sys
import threading

import pytest

from lockstep.system.signals import StopRequests

WATCHED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


def handlers() -> list[object]:
    return [signal.getsignal(number) for number in WATCHED]


def test_nothing_is_requested_before_a_signal_comes() -> None:
    with StopRequests() as stop:
        assert not stop.requested
        assert stop.received is None


@pytest.mark.parametrize(
    ("number", "exit_code"),
    [(signal.SIGTERM, 75), (signal.SIGUSR1, 75), (signal.SIGINT, 130)],
    ids=str,
)
def test_a_signal_decides_the_exit_code(number: signal.Signals, exit_code: int) -> None:
    with StopRequests() as stop:
        os.kill(os.getpid(), number)
        assert stop.requested
        assert stop.received is number
        assert stop.exit_code == exit_code


def test_a_request_to_another_rank_ends_with_75() -> None:
    assert StopRequests().exit_code == 75


def test_a_second_interrupt_does_not_wait() -> None:
    with StopRequests() as stop:
        signal.raise_signal(signal.SIGINT)
        assert stop.requested
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize(
    "numbers",
    [
        (signal.SIGTERM, signal.SIGINT),
        (signal.SIGTERM, signal.SIGTERM),
        (signal.SIGUSR1, signal.SIGUSR1),
    ],
    ids=str,
)
def test_only_a_second_interrupt_does_not_wait(numbers: tuple[signal.Signals, ...]) -> None:
    with StopRequests() as stop:
        for number in numbers:
            signal.raise_signal(number)
        assert stop.received is numbers[-1]


def test_the_handlers_before_are_restored_even_after_an_error() -> None:
    before = handlers()
    inside = []

    def fail() -> None:
        with StopRequests():
            inside.extend(handlers())
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert not set(before) & set(inside)
    assert handlers() == before


def test_an_outer_one_knows_what_an_inner_one_received() -> None:
    with StopRequests() as outer:
        with StopRequests():
            signal.raise_signal(signal.SIGTERM)
        assert outer.received is signal.SIGTERM
        with StopRequests() as next_inner:
            assert next_inner.received is signal.SIGTERM


def test_outside_the_main_thread_no_signal_is_watched() -> None:
    before = handlers()
    seen = []

    def work() -> None:
        with StopRequests() as stop:
            seen.append((handlers() == before, stop.requested))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [(True, False)]
    assert handlers() == before


INTERRUPTED_CALLBACK = """
import signal, sys, time, weakref
from lockstep.cli.options import interrupt_on_signals
from lockstep.system.errors import Interrupted
from lockstep.system import signals

class Value: pass

interrupt_on_signals()
signals._REPEAT_AFTER_SEC = 1.0  # on a busy machine, it could come within the callback
signals.repeat_lost_interrupts()
value = Value()
reference = weakref.ref(value, lambda _: signal.raise_signal({number}))
try:
    del value
    while True:
        time.sleep(0.05)
except (KeyboardInterrupt, Interrupted) as stop:
    print(type(stop).__name__)
"""


@pytest.mark.parametrize(
    ("number", "expected"),
    [(signal.SIGINT, "KeyboardInterrupt"), (signal.SIGTERM, "Interrupted")],
    ids=str,
)
def test_a_signal_in_a_callback_is_not_lost(number: signal.Signals, expected: str) -> None:
    code = INTERRUPTED_CALLBACK.format(number=int(number))
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert (result.stdout, result.stderr) == (f"{expected}\n", "")
