"""Processes that carry out a part of a command: how one is run and followed, and what it owes whoever waits for it."""

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
"""Of what a failed worker said last."""
_OF_RANKS = re.compile(
    "(RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|TF_CONFIG|MASTER_ADDR|MASTER_PORT"
    "|LOCKSTEP_(EXIT_CODE_FOLDER|ON_ONE_MACHINE|TORCH_STORE|HOSTS_.*)"
    "|PADDLE_(TRAINER|MASTER|CURRENT_|LOCAL_).*|HOROVOD_(RANK|SIZE|LOCAL_.*)|DMLC_.*)"
)
"""Environment variables by which a process knows that it is a rank, of all launchers."""


@dataclass(frozen=True)
class Ended:
    """How a worker ended."""

    code: int
    """Its exit code; negative if a signal ended it."""
    said: str
    """The last lines it wrote to its errors."""


def carry_out(command: Sequence[str | Path], folder: Path, progress: Callable[[int, int], None]) -> Ended:
    """Run a worker to its end, with its temporary files in `folder`; `progress` hears what it tells (see `tell`).

    If this process is interrupted, the worker is killed. Raises `OSError` if there is no such program.
    """
    # A worker is no rank of anything, whatever this process is, and what it leaves behind goes with the folder.
    environment = {name: value for name, value in os.environ.items() if not _OF_RANKS.fullmatch(name)}
    environment["TMPDIR"] = str(folder)
    environment["PYTHONSAFEPATH"] = "1"  # a module in the current folder is none of a worker's
    with (folder / "errors.txt").open("w+", encoding="utf-8", errors="replace") as errors:
        with subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            encoding="utf-8",
            errors="replace",  # a framework may print what it likes
            env=environment,
        ) as process:
            try:
                assert process.stdout is not None
                _follow(process.stdout, progress)
                process.wait()  # before its stdin is closed, by which it would know that nobody waits for it
            except BaseException:
                process.kill()
                raise
        errors.seek(0)
        return Ended(process.returncode, "\n".join(errors.read().strip().splitlines()[-LINES_OF_ERROR:]))


def _follow(lines: IO[str], progress: Callable[[int, int], None]) -> None:
    for line in lines:
        if line.startswith('{"done"'):  # a framework may print lines of its own
            told = json.loads(line)
            progress(told["done"], told["total"])


def tell(done: int, total: int) -> None:
    """Tell the process that waits for this worker how far it is."""
    print(json.dumps({"done": done, "total": total}, allow_nan=False), flush=True)


def end_with_parent() -> None:
    """Have this process end at once when the process that waits for it has gone."""
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    sys.stdin.read()  # nothing comes but the end, when nobody holds the other side any more
    os._exit(1)
