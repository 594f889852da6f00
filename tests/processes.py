"""Run `lockstep` as a user does, and programs of tests, in separate processes."""

import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]

PATIENT_SEC = 300
"""Seconds until something counts as hung. Frameworks that take seconds to load take minutes on a
machine with other work."""

ONE_THREAD = {
    "NPROC": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TF_NUM_INTRAOP_THREADS": "1",
}
"""Variables with which JAX, OpenMP, NumPy and TensorFlow compute in one thread. More slow down
models this small, and twenty times if another test uses the other core."""


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "lockstep", *map(str, arguments)]


def mxnet_python() -> Path:
    """Return the Python of MXNet's environment: `make mxnet-env` makes it, or LOCKSTEP_MXNET_PYTHON
    names it."""
    python = Path(
        os.environ.get("LOCKSTEP_MXNET_PYTHON") or ROOT / ".venv-mxnet" / "bin" / "python"
    )
    assert python.is_file(), f"there is no {python}; make it with: make mxnet-env"
    return python


def with_triton() -> dict[str, str]:
    """Return the environment of a process that imports Triton.

    `make` installs it outside of the packages: its import ends a process that has imported
    TensorFlow, and PyTorch's compiler imports it wherever it can.
    """
    if find_spec("triton") is not None:  # a build of PyTorch with CUDA has it
        return dict(os.environ)
    folder = Path(sys.prefix) / "triton"
    assert (folder / "triton").is_dir(), (
        f"there is no Triton in {folder}; install it with: make .venv/.dev"
    )
    return os.environ | {
        "PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]).rstrip(
            os.pathsep
        )
    }


def run_module(*words: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a module of Python's in a process that can import Triton."""
    return subprocess.run(
        [sys.executable, "-m", *map(str, words)],
        cwd=ROOT,
        env=with_triton() | environment,
        capture_output=True,
        text=True,
        timeout=2000,
        check=False,
    )


def python(program: str, **more: Any) -> tuple[int, str, str]:
    """Run a Python program; return its exit code, output and errors. `more` is passed on to
    `subprocess.run`."""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENT_SEC, **more
    )
    return done.returncode, done.stdout, done.stderr


def start(*arguments: object) -> subprocess.Popen[str]:
    """Start a command without input, with its output and errors in pipes."""
    return subprocess.Popen(
        command(*arguments),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str], seconds: float = PATIENT_SEC) -> tuple[int, str, str]:
    """Wait for a command; return its exit code, output and errors."""
    try:
        output, errors = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise
    return process.returncode, output, errors


def call(*arguments: object, seconds: float = PATIENT_SEC) -> tuple[int, str, str]:
    """Run a command until it ends."""
    return finish(start(*arguments), seconds)


@contextmanager
def running(*arguments: object, room: int | None = None) -> Iterator[subprocess.Popen[str]]:
    """Start a command. It is killed at the end of the block if it is still running.

    With `room`, it is a training that tells of each interval and waits after so many bytes of
    output, until `finish` reads them. So it cannot end before the test acts.
    """
    process = start(*arguments, *([] if room is None else ["--verbose"]))
    try:
        if room is not None:
            _leave_room(process, room)
        yield process
    finally:
        process.kill()
        if process.stdout is not None and not process.stdout.closed:
            process.communicate()


def _leave_room(process: subprocess.Popen[str], room: int) -> None:
    """Fill the pipe of a process that has just started with empty lines, up to so many bytes."""
    assert process.stdout is not None
    size = fcntl.fcntl(process.stdout, fcntl.F_SETPIPE_SZ, 4096)
    with Path(f"/proc/self/fd/{process.stdout.fileno()}").open("wb", buffering=0) as pipe:
        pipe.write(b"\n" * (size - room))


def room_for(steps: int) -> int:
    """Return the bytes of output in which a training tells of so many steps, one in a line, and of
    a few more."""
    return 300 + 85 * (max(steps, 0) + 4)


def wait_until(condition: Callable[[], bool], seconds: float = PATIENT_SEC) -> None:
    """Wait until another process has done something."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.005)


def is_running(process: int) -> bool:
    """Return whether a process has not ended. One that nobody has waited for yet has ended."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:  # it can also end while its file is read
        return False


def listening(process: int) -> set[str]:
    """Return where a process listens, as /proc writes addresses; nowhere if it has ended."""
    folder = Path(f"/proc/{process}")
    links = set()
    try:
        for file in (folder / "fd").iterdir():
            with suppress(OSError):  # closed in the meantime
                links.add(str(file.readlink()))
        rows = [
            row.split()
            for name in ("tcp", "tcp6")
            for row in (folder / "net" / name).read_text().splitlines()
        ]
    except OSError:
        return set()
    return {
        row[1].split(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in links
    }


def as_proc_writes(address: str) -> set[str]:
    """Return an IPv4 address as /proc writes it on a little-endian processor, and the same within
    IPv6."""
    digits = "".join(f"{int(part):02X}" for part in reversed(address.split(".")))
    return {digits, f"0000000000000000FFFF0000{digits}"}


LOOPBACK = as_proc_writes("127.0.0.1") | {"00000000000000000000000001000000"}
"""127.0.0.1, the same in IPv6, and ::1, as /proc writes them."""
