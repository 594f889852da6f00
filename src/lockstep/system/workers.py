"""Worker processes, which carry out a part of a command: how to run and follow one, and how it
reports progress."""

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

LINES_OF_ERROR = 20
"""This many of the last lines that a failed worker printed are kept."""
_RANK_VARIABLES = re.compile(
    "(RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|GROUP_RANK|TF_CONFIG|MASTER_ADDR|MASTER_PORT"
    "|LOCKSTEP_(EXIT_CODE_FOLDER|LAUNCHER|PATIENCE|RESTARTED|LISTEN_ADDRESS|TORCH_STORE)"
    "|LOCKSTEP_(HOSTS_.*|RENDEZVOUS|BIND|SECRET)"
    "|PADDLE_(TRAINER|MASTER|CURRENT_|LOCAL_).*|HOROVOD_(RANK|SIZE|LOCAL_.*)|DMLC_.*"
    "|SLURM_(STEP_ID|PROCID)|OMPI_COMM_WORLD_.*|PMI_(RANK|SIZE))"
)
"""Environment variables of all launchers that make a process a rank."""


@dataclass(frozen=True)
class Ended:
    """How a worker ended."""

    code: int
    """The exit code; negative if a signal ended the worker."""
    errors: str
    """The last lines that the worker wrote to stderr."""


def carry_out(
    command: Sequence[str | Path], folder: Path, progress: Callable[[int, int], None]
) -> Ended:
    """Run a worker to its end, with its temporary files in `folder`. `progress` is called with its
    progress (see `tell`).

    If this process is interrupted, the worker is killed. Raises `OSError` if there is no such
    program.
    """
    # A worker is never a rank, even if this process is one. Its temporary files are deleted
    # together with the folder.
    environment = {
        name: value for name, value in os.environ.items() if not _RANK_VARIABLES.fullmatch(name)
    }
    environment["TMPDIR"] = str(folder)
    environment["PYTHONSAFEPATH"] = "1"  # a worker must not import modules from the current folder
    with (folder / "errors.txt").open("w+", encoding="utf-8", errors="replace") as errors:
        with subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            encoding="utf-8",
            errors="replace",  # a framework may print any bytes
            env=environment,
        ) as process:
            try:
                assert process.stdout is not None
                _follow(process.stdout, progress)
                # before its stdin is closed: that would make the worker end (see `end_with_parent`)
                process.wait()
            except BaseException:
                process.kill()
                raise
        errors.seek(0)
        lines = errors.read().strip().splitlines()[-LINES_OF_ERROR:]
        return Ended(process.returncode, "\n".join(lines))


def _follow(lines: IO[str], progress: Callable[[int, int], None]) -> None:
    for line in lines:
        if line.startswith('{"done"'):  # a framework may print other lines
            state = json.loads(line)
            progress(state["done"], state["total"])


def tell(done: int, total: int) -> None:
    """Report this worker's progress to the process that waits for it."""
    print(json.dumps({"done": done, "total": total}, allow_nan=False), flush=True)


def end_with_parent() -> None:
    """Make this process end at once when the process that waits for it has ended."""
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    sys.stdin.read()  # returns only when the other side is closed
    os._exit(1)
