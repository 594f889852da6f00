"""The output of launched ranks except rank 0, in files, and its last lines for the message about a
rank that failed."""

from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO, NamedTuple

from lockstep.launch.nodes import Table
from lockstep.system.workers import LINES_OF_ERROR

_MOST_BYTES = 2**16
"""At most this many bytes of a file are read for its last lines."""


class RankLog(NamedTuple):
    """The file with a rank's output."""

    path: Path
    file: IO[bytes]
    began: int
    """Length of the file before this attempt."""
    stays: bool
    """Whether the file is kept after the launch."""

    def last_lines(self) -> str:
        """Return the last lines of this attempt, indented."""
        with suppress(OSError), self.path.open("rb") as file:
            file.seek(max(self.began, self.path.stat().st_size - _MOST_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
            return "\n".join(f"  {line}" for line in lines[-LINES_OF_ERROR:])
        return ""


def open_logs(
    logs: Path | None, folder: Path, table: Table, stack: ExitStack
) -> dict[int, RankLog]:
    """Open the logs of this machine's ranks, except rank 0, to append to them. They are in `folder`
    if `logs` cannot be written, so that the ranks themselves say why."""
    ranks = range(max(table.first, 1), table.first + table.own.processes)
    with suppress(OSError):
        if logs is not None:
            logs.mkdir(parents=True, exist_ok=True)
            return {rank: _open_log(logs, rank, stack, stays=True) for rank in ranks}
    return {rank: _open_log(folder, rank, stack, stays=False) for rank in ranks}


def _open_log(folder: Path, rank: int, stack: ExitStack, *, stays: bool) -> RankLog:
    path = folder / f"rank-{rank}.log"
    file = stack.enter_context(path.open("ab", buffering=0))
    return RankLog(path, file, file.tell(), stays)
