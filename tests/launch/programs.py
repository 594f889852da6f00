"""Launches of ranks that are programs of a few lines."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from lockstep.launch.launcher import Watch, launch_ranks
from lockstep.launch.nodes import Start, one_machine

RANK = """
import json, os, signal, sys, time
from pathlib import Path

rank, folder = os.environ["RANK"], Path(sys.argv[1])

def wait_for(*names):
    deadline = time.monotonic() + 60
    while not all((folder / name).exists() for name in names):
        assert time.monotonic() < deadline
        time.sleep(0.005)

def leave(code):
    (Path(os.environ["LOCKSTEP_EXIT_CODE_FOLDER"]) / rank).write_text(str(code))
    sys.exit(code)
"""
"""The beginning of the programs below. They share a folder with the test."""


def set_nothing(rank: int) -> dict[str, str]:
    """Return no more variables."""
    return {}


def launch_programs(
    processes: int,
    program: str,
    folder: Path,
    environment: Callable[[int], dict[str, str]] = set_nothing,
    watch: Watch | None = None,
) -> int:
    """Run a program as ranks, with the variables that `environment` gives; return the code."""
    start = Start(one_machine(processes), environment)
    command = ["-c", RANK + program, str(folder)]
    return launch_ranks(command, lambda: nullcontext(start), watch=watch)


LAUNCH = """
import os, signal, sys
from contextlib import nullcontext
from lockstep.launch.launcher import launch_ranks
from lockstep.launch.nodes import Start, one_machine

def environment(rank):
    {before}
    return {{}}

start = Start(one_machine(2), environment)
sys.exit(launch_ranks(["-c", *sys.argv[1:]], lambda: nullcontext(start)))
"""


@contextmanager
def start_launcher(
    program: str, folder: Path, before: str = "pass"
) -> Iterator[subprocess.Popen[str]]:
    """Launch two ranks from a process that leads a process group, as in a terminal; `before` runs
    before each rank starts.

    At the end of the block the ranks may end. A launcher that does not end is killed.
    """
    process = subprocess.Popen(
        [sys.executable, "-c", LAUNCH.format(before=before), RANK + program, str(folder)],
        env=os.environ | {"TMPDIR": str(folder)},
        start_new_session=True,
        text=True,
    )
    try:
        yield process
    finally:
        (folder / "end").touch()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise
