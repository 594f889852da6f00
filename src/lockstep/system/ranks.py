"""Ranks: how a process finds out that it is one of several, and how it reports to the launcher that
started it.

The environment variables RANK, WORLD_SIZE and LOCAL_RANK identify a rank.
"""

import ctypes
import os
import secrets
import signal
import socket
import sys
from contextlib import ExitStack, suppress
from pathlib import Path

from lockstep.system.errors import LockstepError
from lockstep.system.strict_json import parsed

EXIT_CODE_FOLDER = "LOCKSTEP_EXIT_CODE_FOLDER"
"""Environment variable: the launcher's folder, where a rank writes its exit code and its heartbeat.
A signal from the launcher would hide the process's own exit code."""
LAUNCHER = "LOCKSTEP_LAUNCHER"
"""Environment variable: the process id of a rank's launcher."""
PATIENCE = "LOCKSTEP_PATIENCE"
"""Environment variable: the seconds that a rank has to stop after its launcher has ended."""
RESTARTED = "LOCKSTEP_RESTARTED"
"""Environment variable of ranks that were started again: JSON with the number of the `restart` and
the `reason`."""

LOOPBACK = "127.0.0.1"
"""The address at which ranks of one machine meet."""
LISTEN_ADDRESS = "LOCKSTEP_LISTEN_ADDRESS"
"""Environment variable of launched ranks: the only address, besides loopback, at which a rank may
listen."""
OF_NETWORKS = ("MASTER_ADDR", "MASTER_PORT", "NCCL_COMM_ID", "TF_CONFIG", "LOCKSTEP_SECRET")
"""Environment variables that ranks do not get from their launcher: the launchers' secret, and those
that would make them meet at another address."""
_ELASTIC_RESTART = "TORCHELASTIC_RESTART_COUNT"
"""Environment variable: how often torchrun has started its ranks again."""

_NOT_GIVEN = range(20000, 30000)
"""Ports that no program gets that asks for any: those are from 32768 on Linux, else from 49152."""
_PR_SET_PDEATHSIG = 1


def free_ports(count: int, address: str = LOOPBACK) -> list[int]:
    """Return `count` ports that are free at an address of this machine. Until ranks listen on them,
    which takes seconds, the system gives those of loopback to nobody else."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for listener in sockets:
            _bind(listener, address)
        return [listener.getsockname()[1] for listener in sockets]


def _bind(listener: socket.socket, address: str) -> None:
    # Firewalls between machines may open only what the system gives.
    for _ in range(100 if address == LOOPBACK else 0):
        with suppress(OSError):
            listener.bind((address, secrets.choice(_NOT_GIVEN)))
            return
    listener.bind((address, 0))


def listen_address() -> str | None:
    """Return the only address, besides loopback, at which this rank may listen; None if another
    launcher started it."""
    return os.environ.get(LISTEN_ADDRESS)


def count_ranks() -> int:
    """Return the number of ranks that train together, as their launcher says; 1 without one."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def make_rank_error(reason: str = "") -> LockstepError:
    """Return the error of a rank that cannot continue because another one has ended."""
    shown = f" ({reason:.200})" if reason else ""
    return LockstepError(f"another rank has ended; its message says why{shown}")


def is_leading() -> bool:
    """Return whether this is rank 0 or the only process. Only that one prints."""
    return os.environ.get("RANK", "0") == "0"


def follow_launcher() -> None:
    """Make the system send SIGTERM to this rank when its launcher ends for any reason; do nothing
    without a launcher."""
    if EXIT_CODE_FOLDER in os.environ and sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if has_lost_launcher():  # before the system was asked
        os.kill(os.getpid(), signal.SIGTERM)


def has_lost_launcher() -> bool:
    """Return whether a launcher has started this rank and has ended."""
    return LAUNCHER in os.environ and os.environ[LAUNCHER] != str(os.getppid())


def launcher_folder() -> Path | None:
    """Return the launcher's folder; None without a launcher, or if the launcher has ended and
    removed it."""
    folder = Path(os.environ.get(EXIT_CODE_FOLDER, ""))
    is_rank = EXIT_CODE_FOLDER in os.environ and "RANK" in os.environ
    return folder if is_rank and folder.is_dir() else None


def find_restart() -> tuple[int, str] | None:
    """Return how often all ranks were started again in this launch, and why the last time; None if
    they were not."""
    if RESTARTED in os.environ:
        restart = parsed(os.environ[RESTARTED])
        return int(restart["restart"]), str(restart["reason"])
    count = os.environ.get(_ELASTIC_RESTART, "")
    if not count.isdigit() or int(count) == 0:
        return None
    return int(count), "torchrun restarted the ranks"


def leave_exit_code(code: int) -> None:
    """Write the exit code for the launcher, if there is one and it is still running."""
    folder = launcher_folder()
    if folder is not None:
        # A disk may be full: the launcher then uses the other ranks' codes.
        with suppress(OSError):
            (folder / os.environ["RANK"]).write_text(str(code))
