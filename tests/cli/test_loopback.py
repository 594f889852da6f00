"""Processes that `lockstep launch` starts on one machine listen only on the loopback interface, and
stop together."""

import os
import re
import signal
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from lockstep.weights import checkpoint
from tests.backends.launchers import LAUNCHED
from tests.hosts import variables
from tests.processes import LOOPBACK, finish, is_running, listening, running, wait_until
from tests.soak import SOAK


def family(process: int) -> Iterator[int]:
    """Yield a process and all its descendants."""
    yield process
    children: list[str] = []
    with suppress(OSError):  # the process has ended in the meantime
        for task in Path(f"/proc/{process}/task").iterdir():
            with suppress(OSError):  # or the thread
                children += (task / "children").read_text().split()
    for child in children:
        yield from family(int(child))


@pytest.mark.slow
# Of the other engines, `tests/backends/test_ranks.py` sees the sockets.
@pytest.mark.parametrize("launcher", LAUNCHED if SOAK else LAUNCHED[-1:])
def test_ranks_and_their_launcher_listen_on_loopback_alone_and_a_signal_to_any_stops_all(
    launcher: str,
    recipe_file: Path,
    textures: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # With which MXNet's scheduler listens on all interfaces.
    monkeypatch.setenv("DMLC_USE_KUBERNETES", "1")
    backend, _, distributed = launcher.partition(" ")
    how = [
        "--backend",
        backend,
        "--set",
        f"distributed={distributed or 'native'}",
        "--set",
        "epochs=500",
    ]
    log = tmp_path / "run" / "log.jsonl"
    train = ["train", "--recipe", recipe_file, "--data", textures, "--out", log.parent, *how]
    with running("launch", "-n", 2, "--", *train) as process:
        wait_until(
            lambda: (log.exists() and '"train"' in log.read_text()) or process.poll() is not None,
            seconds=300,
        )
        addresses = {number: listening(number) for number in family(process.pid)}
        ranks = [number for number in addresses if b"\0RANK=" in variables(number)]
        assert len(ranks) == 2
        if launcher == LAUNCHED[-1]:
            process.send_signal(signal.SIGTERM)
        else:
            os.kill(ranks[1], signal.SIGUSR1)
        code, _, errors = finish(process)
    assert code == 75, errors
    wait_until(lambda: not any(map(is_running, ranks)), seconds=10)
    assert checkpoint.newest_intact(log.parent / "checkpoints")[0] is not None
    stopped = re.findall(
        r"after step (\d+) of", errors + (log.parent / "logs" / "rank-1.log").read_text()
    )
    assert len(stopped) == 2
    assert len(set(stopped)) == 1, "both stop after the same step"
    assert any(addresses.values()), "ranks that train together listen somewhere"
    assert set().union(*addresses.values()) <= LOOPBACK, addresses


@pytest.mark.parametrize("address", ["0.0.0.0", "::"])
def test_a_socket_open_to_all_is_seen(address: str) -> None:
    kind = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=kind):
        assert not listening(os.getpid()) <= LOOPBACK
