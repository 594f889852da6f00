"""A job for a scheduler: a Lockstep command, the machines that it needs, and for how long."""

import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep.launch.launcher import LOCKSTEP
from lockstep.launch.rendezvous_address import STDIN
from lockstep.system.errors import UserError

SAVING_SEC = 300
"""Seconds before the end of a job's time at which it is asked to save and stop."""
_TIME = re.compile(r"(?:(\d+)-)?(\d+):([0-5]\d):([0-5]\d)")


@dataclass(frozen=True)
class Job:
    """A Lockstep command, and the machines on which it runs."""

    name: str
    nodes: int
    """Number of machines."""
    processes: int
    """Ranks on each machine."""
    command: tuple[str, ...]
    """What the ranks run, such as train --data DATA --out RUN."""
    launch: tuple[str, ...] = ()
    """More options of `lockstep launch`."""
    seconds: int | None = None
    """The time limit. None: the scheduler's default."""
    gpus: int = 0
    """GPUs on each machine."""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z]([-a-z0-9]{0,50}[a-z0-9])?", self.name):
            raise UserError(
                f"--name is {self.name!r}, expected at most 52 lower-case letters, digits and -,"
                " beginning with a letter"
            )

    def list_arguments(self, node: int, place: str, bind: str | None = None) -> list[str]:
        """Return the arguments of Python that start the launcher of a node. The first line of its
        input is the secret, and it ends when the input closes.

        All nodes connect to `place`, HOST:PORT of node 0. `bind` is where this node listens; None:
        the address from which it reaches node 0.
        """
        words = ["-n", str(self.processes), "--nodes", str(self.nodes), "--node-rank", str(node)]
        words += ["--rendezvous", place, "--secret-file", STDIN]
        if bind is not None:
            words += ["--bind", bind]
        return [*LOCKSTEP, "launch", *words, *self.launch, "--", *self.command]


def read_time(text: str) -> int:
    """Return the seconds of a time limit such as 4:00:00 or 2-12:00:00. Raises `UserError`.

    >>> read_time("1-02:00:00")
    93600
    """
    parts = _TIME.fullmatch(text)
    if parts is None:
        raise UserError(f"--time is {text!r}, expected H:MM:SS or D-HH:MM:SS, such as 4:00:00")
    days, hours, minutes, seconds = (int(part or 0) for part in parts.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def name_runs(recipes: Sequence[str], folder: Path) -> dict[str, Path]:
    """Return the run folder of each recipe, named after it. Raises `UserError` if two have the same
    name."""
    runs = {recipe: folder / Path(recipe).stem for recipe in recipes}
    if len(set(runs.values())) < len(recipes):
        raise UserError(
            f"--recipes {','.join(recipes)}: the names must differ, because they name the runs"
        )
    return runs


def hand_in(command: Sequence[str], text: str) -> subprocess.CompletedProcess[str]:
    """Run a scheduler's program with a text as input. Raises `UserError` if it is not installed."""
    try:
        return subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise UserError(f"--now needs {command[0]}, which is not installed here") from None
