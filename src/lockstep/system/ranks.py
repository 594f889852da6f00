"""Ranks: how a process finds out that it is one of several, and how several are started on one machine.

The environment variables RANK, WORLD_SIZE and LOCAL_RANK identify a rank.
"""

import ctypes
import json
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from types import FrameType

from lockstep.system.errors import EXIT_DIVERGED, EXIT_INTERRUPTED, EXIT_SAVED_AND_STOPPED, UserError

EXIT_CODE_FOLDER = "LOCKSTEP_EXIT_CODE_FOLDER"
"""Environment variable: the folder where a launched rank writes its exit code. A signal from the launcher would hide the
process's own exit code."""

LOOPBACK = "127.0.0.1"
"""The address at which ranks of one machine meet."""
_ON_ONE_MACHINE = "LOCKSTEP_ON_ONE_MACHINE"
"""Environment variable: set by `launch_ranks`, whose ranks communicate through the loopback interface only."""
_INTERFACE = "lo" if sys.platform.startswith("linux") else "lo0"
_ON_LOOPBACK = {_ON_ONE_MACHINE: "1", "GLOO_SOCKET_IFNAME": _INTERFACE, "NCCL_SOCKET_IFNAME": f"={_INTERFACE}"}
"""Environment variables of ranks on one machine. Gloo and NCCL listen on the given interface; `=` means an exact match."""
_OF_NETWORKS = ("MASTER_ADDR", "MASTER_PORT", "NCCL_COMM_ID", "TF_CONFIG")
"""Environment variables that would make ranks meet at another address."""

_PR_SET_PDEATHSIG = 1


def name_rank(variables: Mapping[str, str], *, reads_tf_config: bool = False) -> None:
    """Set RANK, WORLD_SIZE and LOCAL_RANK where a launcher has set the same in `variables`, or in TF_CONFIG.

    TF_CONFIG does not tell which workers share a machine: each has local rank 0, unless LOCAL_RANK is set.
    """
    if "RANK" in os.environ:
        return
    if variables.get("RANK", "") in os.environ:
        found = {name: os.environ[own] for name, own in variables.items() if own in os.environ}
    elif reads_tf_config and (workers := _workers_of_tf_config()):
        rank, ranks = workers
        found = {"RANK": str(rank), "WORLD_SIZE": str(ranks)}
    else:
        return
    os.environ.update({name: value for name, value in found.items() if name not in os.environ})


def _workers_of_tf_config() -> tuple[int, int] | None:
    """Return this worker's index and the number of workers; None if there is no TF_CONFIG with several tasks."""
    text = os.environ.get("TF_CONFIG", "")
    if not text:
        return None
    try:
        config = json.loads(text)
        cluster: dict[str, list[str]] = config.get("cluster", {})
        if sum(map(len, cluster.values())) < 2:
            return None
        kind, index = config["task"]["type"], int(str(config["task"]["index"]))
        is_sound = all(isinstance(addresses, list) for addresses in cluster.values())
    except (ValueError, TypeError, KeyError, AttributeError):
        is_sound = False
    if not is_sound:
        raise UserError(f"TF_CONFIG is {text:.200}: expected JSON with cluster.worker, task.type and task.index")
    workers = len(cluster.get("worker", []))
    if set(cluster) != {"worker"} or kind != "worker" or not 0 <= index < workers:
        raise UserError(f"TF_CONFIG: task {kind} {index}, expected a worker from 0 to {workers - 1}; list all as workers")
    return index, workers


def free_ports(count: int) -> list[int]:
    """Return `count` free ports of this machine."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind((LOOPBACK, 0))
        return [each.getsockname()[1] for each in sockets]


def is_on_one_machine() -> bool:
    """Return whether all ranks are on this machine, so that they need not listen on a network."""
    return _ON_ONE_MACHINE in os.environ


def is_leading() -> bool:
    """Return whether this is rank 0 or the only process. Only that one prints."""
    return os.environ.get("RANK", "0") == "0"


def follow_launcher() -> None:
    """Make the system send SIGTERM to this rank when its launcher ends for any reason; do nothing without a launcher."""
    if EXIT_CODE_FOLDER in os.environ and sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def leave_exit_code(code: int) -> None:
    """Write the exit code for the launcher, if there is one and it is still running."""
    folder = Path(os.environ.get(EXIT_CODE_FOLDER, ""))
    if EXIT_CODE_FOLDER in os.environ and "RANK" in os.environ and folder.is_dir():
        with suppress(OSError):  # such as a full disk: the launcher then uses the other ranks' codes
            (folder / os.environ["RANK"]).write_text(str(code))


_TOLD = (UserError.exit_code, EXIT_DIVERGED, EXIT_INTERRUPTED, EXIT_SAVED_AND_STOPPED)
"""Exit codes that explain why a launch ended, in order of priority. The first one that any rank has is used."""


def code_of_ranks(folder: Path) -> int:
    """Return the exit code of a launch if not all ranks ended with 0: 2 if a rank had a user error, else 3 if one diverged,
    else 130 or 75 if the ranks saved and stopped, else 1.

    `folder` holds the codes of all ranks that could write one.
    """
    texts = [file.read_text() for file in folder.iterdir()]
    codes = {int(text) for text in texts if text.isdigit()}  # a rank that is killed may leave an empty file
    return next((code for code in _TOLD if code in codes), 1)


LOCKSTEP = ("-P", "-m", "lockstep")
"""What Python is called with to run the command line. -P: no module of the current folder is imported."""


def launch_ranks(
    processes: int,
    arguments: list[str],
    environment: Callable[[int], dict[str, str]],
    inherited: Collection[int] = (),
) -> int:
    """Run this Python with these arguments in n processes on this machine; return the exit code (see `code_of_ranks`).

    `environment` returns a rank's additional environment variables, besides RANK, WORLD_SIZE and LOCAL_RANK. `inherited`
    are file descriptors that every rank gets. SIGTERM, SIGINT and SIGUSR1 are passed on to every rank. When one rank fails,
    the others are asked to stop.

    This process does not listen on any port, and reads only exit codes from the ranks.
    """
    with tempfile.TemporaryDirectory() as folder:
        inherited_variables = {name: value for name, value in os.environ.items() if name not in _OF_NETWORKS}
        running: list[subprocess.Popen[bytes]] = []
        received: list[int] = []  # also sent to ranks that start later

        def pass_on(number: int, _: FrameType | None = None) -> None:
            received.append(number)
            for process in running:
                if process.poll() is None:
                    process.send_signal(number)

        before = {number: signal.signal(number, pass_on) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}
        try:
            for rank in range(processes):
                own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
                variables = {name: str(value) for name, value in own.items()}
                variables |= {EXIT_CODE_FOLDER: folder} | _ON_LOOPBACK
                # In a separate session: the terminal's Ctrl-C reaches a rank only once, through this process.
                started = subprocess.Popen(
                    [sys.executable, *arguments],
                    env=inherited_variables | variables | environment(rank),
                    start_new_session=True,
                    pass_fds=inherited,
                )
                signal.pthread_sigmask(signal.SIG_BLOCK, before)
                running.append(started)
                early = list(received)
                signal.pthread_sigmask(signal.SIG_UNBLOCK, before)
                for number in early:
                    started.send_signal(number)
            _wait_for(running, received, pass_on)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        return 0 if all(process.returncode == 0 for process in running) else code_of_ranks(Path(folder))


_LOOK_SEC = 0.1
_TO_END_ALONE_SEC = 1.0
_SAVED_OR_RUNNING = (None, 0, EXIT_SAVED_AND_STOPPED, EXIT_INTERRUPTED)


def _wait_for(running: list[subprocess.Popen[bytes]], received: list[int], pass_on: Callable[[int], None]) -> None:
    """Return when all ranks have ended.

    When one stops early, the others are asked to stop one second later. An earlier signal could kill a rank that is ending
    for the same reason, before it has written its exit code.

    If a rank failed, the ranks that do not stop are killed after `PATIENCE_SEC`: a rank that waits inside a framework for a
    missing rank does not handle signals. After a second Ctrl-C the same happens sooner.
    """
    ask_at = patience_ends = math.inf
    while any(process.poll() is None for process in running):
        codes = [process.poll() for process in running]
        if ask_at == math.inf and any(codes):
            ask_at = time.monotonic() + _TO_END_ALONE_SEC
        if time.monotonic() > ask_at:
            ask_at = math.nan  # once
            pass_on(signal.SIGTERM)
        if patience_ends == math.inf and any(code not in _SAVED_OR_RUNNING for code in codes):
            patience_ends = time.monotonic() + PATIENCE_SEC
        if received.count(signal.SIGINT) > 1:
            patience_ends = min(patience_ends, time.monotonic() + _PATIENCE_AFTER_CTRL_C_SEC)
        if time.monotonic() > patience_ends:
            pass_on(signal.SIGKILL)
        time.sleep(_LOOK_SEC)


PATIENCE_SEC = 120.0
"""Seconds that ranks have to save and stop after another rank has failed."""
_PATIENCE_AFTER_CTRL_C_SEC = 10.0
