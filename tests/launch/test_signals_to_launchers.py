"""Signals to a launcher, which it passes on to its ranks."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.launch.programs import launch_programs, start_launcher
from tests.processes import wait_until

WATCHED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


@contextmanager
def handlers(handler: Any) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number in WATCHED}
    try:
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)


def own_handler(number: int, _: object) -> None:
    """Stands for any handler of the launching program."""


def test_signals_are_handled_as_before_after_any_launch(tmp_path: Path) -> None:
    def refuse(rank: int) -> dict[str, str]:
        raise OSError("no place for this rank")

    with handlers(own_handler):
        launch_programs(1, "", tmp_path)
        assert [signal.getsignal(number) for number in WATCHED] == [own_handler] * 3
        with pytest.raises(OSError, match="no place for this rank"):
            launch_programs(1, "", tmp_path, refuse)
        assert [signal.getsignal(number) for number in WATCHED] == [own_handler] * 3


NOTE_SIGNALS = """
def note(number, frame):
    with (folder / f"{rank} received").open("a") as file:
        print(signal.Signals(number).name, file=file)

for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
    signal.signal(number, note)
(folder / f"{rank} is ready").touch()
wait_for("end")
"""


def all_have(folder: Path, what: str) -> bool:
    return all((folder / f"{rank} {what}").exists() for rank in (0, 1))


def send_to_group(process: subprocess.Popen[str], number: signal.Signals) -> None:
    """Send a signal as a terminal does: to the launcher and all processes of its group."""
    os.killpg(process.pid, number)


@pytest.mark.parametrize(
    ("send", "number"),
    [
        (send_to_group, signal.SIGINT),
        (send_to_group, signal.SIGTERM),
        (subprocess.Popen.send_signal, signal.SIGUSR1),
    ],
)
def test_every_rank_gets_a_signal_once(send: Any, number: signal.Signals, tmp_path: Path) -> None:
    with start_launcher(NOTE_SIGNALS, tmp_path) as process:
        wait_until(lambda: all_have(tmp_path, "is ready"))
        send(process, number)
        wait_until(lambda: all_have(tmp_path, "received"))
    assert process.returncode == 0
    for rank in (0, 1):
        assert (tmp_path / f"{rank} received").read_text() == f"{number.name}\n"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_ranks_that_stop_end_the_launch(number: signal.Signals, code: int, tmp_path: Path) -> None:
    program = NOTE_SIGNALS.replace(
        'wait_for("end")', f'wait_for(f"{{rank}} received")\nleave({code})'
    )
    with start_launcher(program, tmp_path) as process:
        wait_until(lambda: all_have(tmp_path, "is ready"))
        process.send_signal(number)
        assert process.wait(60) == code


@pytest.mark.parametrize("started", [0, 1])
def test_a_signal_while_ranks_start_stops_them(started: int, tmp_path: Path) -> None:
    before = f"if rank == {started}: os.kill(os.getpid(), signal.SIGTERM)"
    with start_launcher('wait_for("end")', tmp_path, before) as process:
        try:
            process.wait(40)  # ranks that hear nothing end after a minute
        except subprocess.TimeoutExpired:
            pytest.fail(
                f"SIGTERM was lost that came when {started} ranks had been started", pytrace=False
            )
    assert process.returncode == 1


@pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="other systems do not tell when a parent dies"
)
def test_ranks_that_follow_their_launcher_hear_of_its_sudden_end(tmp_path: Path) -> None:
    program = (
        f"from lockstep.system.ranks import follow_launcher\nfollow_launcher()\n{NOTE_SIGNALS}"
    )
    with start_launcher(program, tmp_path) as process:
        wait_until(lambda: all_have(tmp_path, "is ready"))
        process.kill()
        wait_until(lambda: all_have(tmp_path, "received"))
        # No launcher waits for these ranks: they may still be writing.
        files = [tmp_path / f"{rank} received" for rank in (0, 1)]
        wait_until(lambda: all(file.read_text() for file in files))
    assert [file.read_text() for file in files] == ["SIGTERM\n"] * 2
