"""Launching: start this machine's ranks as processes, watch them, stop them together, and restart
them.

The decisions are in `lockstep.launch.watch`; this file observes and acts.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import IO, Any, NamedTuple, Self

from lockstep.launch.nodes import Start, Table
from lockstep.launch.rendezvous import Link
from lockstep.launch.watch import (
    PATIENCE_SEC,
    Elsewhere,
    Ending,
    Fault,
    Outcome,
    Rank,
    choose_code,
    describe_fault,
    find_fault,
    has_explained_itself,
    is_busy,
    next_signal,
    update_rank,
    will_try_again,
)
from lockstep.system.heartbeat import beat_file, read_beat
from lockstep.system.machine import process_facts
from lockstep.system.ranks import EXIT_CODE_FOLDER, LAUNCHER, OF_NETWORKS, PATIENCE, RESTARTED
from lockstep.system.workers import LINES_OF_ERROR

LOCKSTEP = ("-P", "-m", "lockstep")
"""Python's arguments that run the command line. -P: imports nothing from the current folder."""
_LOOK_SEC = 0.1
_LONGEST_LOOK_SEC = 1.0
"""A longer time from one look to the next counts as this long: the launcher and the ranks were
suspended."""


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


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")


@dataclass(frozen=True)
class Watch:
    """How a launch is watched, and how it reacts to a fault."""

    patience_sec: float = PATIENCE_SEC
    """Seconds after which the launch ends if a rank shows no sign of life, or no rank takes a
    batch."""
    restarts: int = 0
    """All ranks are started again at most this many times."""
    logs: Path | None = None
    """The folder of `rank-N.log`, with the output of every rank except rank 0. None: a temporary
    folder."""
    say: Callable[[str], None] = _say
    """Prints a message for the user."""


Starting = Callable[[], AbstractContextManager[Start]]
"""A context that is entered for each start of the ranks. It yields how to start them, and keeps
what they need while they run."""


def launch_ranks(
    arguments: list[str], starting: Starting, link: Link | None = None, watch: Watch | None = None
) -> int:
    """Run this Python with these arguments as this machine's ranks; return the exit code (see
    `read_code`).

    `starting` comes from the backend (`Backend.prepare_ranks`). `link` connects the other machines,
    whose ranks end with these. SIGTERM, SIGINT and SIGUSR1 are passed on to every rank. When one
    rank fails or hangs, the others are asked to stop, and killed if they do not. All ranks then
    restart, at most `watch.restarts` times (`lockstep.launch.watch`).

    This process does not listen on any port, and reads only exit codes and heartbeats from the
    ranks.
    """
    watch = watch or Watch()
    outcomes: list[Outcome] = []
    with Signals() as signals:
        while True:
            restart = {"restart": len(outcomes), "reason": outcomes[-1].reason} if outcomes else {}
            with starting() as start:
                outcome = _attempt(arguments, start, restart, _Around(watch, signals, link))
                if link is not None:  # the machines start their ranks together, and end together
                    gathered = link.gather(outcome.fields(), threading.TIMEOUT_MAX)
                    outcome = outcome.join(
                        [fields and Outcome.parse(fields) for fields in gathered]
                    )
            outcomes.append(outcome)
            again, why = will_try_again(outcomes, watch.restarts)
            if why:
                watch.say(f"lockstep: {why}")
            if not again:
                return outcome.code


class _Around(NamedTuple):
    """What stays the same in all attempts."""

    watch: Watch
    signals: "Signals"
    link: Link | None


def read_code(folder: Path) -> int:
    """Return the exit code of a launch if not all ranks ended with 0: 2 if a rank had a user error,
    else 3 if one diverged, else 130 or 75 if the ranks saved and stopped, else 1.

    `folder` holds the codes of all ranks that could write one.
    """
    return choose_code(map(_read_number, folder.iterdir()))


def _read_number(file: Path) -> int | None:
    """Return the exit code that a rank wrote; None if there is none. A rank that is killed may
    leave an empty file."""
    with suppress(OSError, ValueError):
        return int(file.read_text()) if file.name.isdigit() else None
    return None


class Signals:
    """Signals to this process, passed on to the running ranks. A context manager."""

    WATCHED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)

    def __init__(self) -> None:
        self.received: list[int] = []
        """Signals from outside, also sent to ranks that start later."""
        self.running: list[subprocess.Popen[bytes]] = []
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._pass_on) for number in self.WATCHED}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _pass_on(self, number: int, _: FrameType | None) -> None:
        self.received.append(number)
        self.send(number)

    def send(self, number: int) -> None:
        """Send a signal to every running rank."""
        for process in self.running:
            if process.poll() is None:
                process.send_signal(number)

    def start(self, command: list[str], **how: Any) -> subprocess.Popen[bytes]:
        """Start a rank."""
        # In a separate session: the terminal's Ctrl-C reaches a rank only once, through this
        # process.
        process = subprocess.Popen(command, start_new_session=True, **how)
        signal.pthread_sigmask(signal.SIG_BLOCK, self.WATCHED)
        self.running.append(process)
        early = list(self.received)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self.WATCHED)
        for number in early:
            process.send_signal(number)
        return process

    def end_all(self) -> None:
        """Kill every running rank, and wait for it: starting the ranks may have failed."""
        self.send(signal.SIGKILL)
        for process in self.running:
            process.wait()
        self.running = []


def _attempt(
    arguments: list[str], start: Start, restart: dict[str, Any], around: _Around
) -> Outcome:
    """Start all ranks, and return how they ended."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        stack.callback(around.signals.end_all)
        table = start.table
        logs = open_logs(around.watch.logs, folder, start.table, stack)
        about = {
            EXIT_CODE_FOLDER: str(folder),
            LAUNCHER: str(os.getpid()),
            PATIENCE: str(around.watch.patience_sec),
        }
        if restart:
            about[RESTARTED] = json.dumps(restart, allow_nan=False)
        inherited = {name: value for name, value in os.environ.items() if name not in OF_NETWORKS}
        ranks = []
        for local_rank in range(table.own.processes):
            rank = table.first + local_rank
            variables = inherited | table.variables(local_rank) | about
            variables |= start.environment(local_rank)
            output = None
            if rank in logs:
                output = logs[rank].file
                variables["PYTHONUNBUFFERED"] = "1"  # what a killed rank has printed is in its log
            process = around.signals.start(
                [sys.executable, *arguments],
                env=variables,
                pass_fds=start.inherited,
                stdout=output,
                stderr=output,
            )
            ranks.append(Rank(rank, process.pid))
        return _Launched(ranks, table, folder, logs, around).run()


class _Launched:
    """The ranks of this machine, from their start to their end."""

    def __init__(
        self,
        ranks: list[Rank],
        table: Table,
        folder: Path,
        logs: dict[int, RankLog],
        around: _Around,
    ) -> None:
        self.ranks = ranks
        self.table = table
        self.folder = folder
        self.logs = logs
        self.watch, self.signals, self.link = around
        self.ending = Ending()
        self.reason = ""
        self._now = 0.0
        self._looked_at = time.monotonic()
        self._shared: bool | None = None
        self._elsewhere = Elsewhere()

    def run(self) -> Outcome:
        """Watch the ranks until they end, and return how they ended."""
        while self.look():
            time.sleep(_LOOK_SEC)
        failed = self.ending.fault is not None
        code = 0 if {rank.code for rank in self.ranks} == {0} else read_code(self.folder)
        step = max(rank.beat.step for rank in self.ranks)
        was_asked = bool(self.signals.received)
        return Outcome(code, self.reason, step, failed=failed, was_asked=was_asked)

    def look(self) -> bool:
        """Look at all ranks once, and act on it. Return whether one is still running."""
        looked_at = time.monotonic()
        self._now += min(looked_at - self._looked_at, _LONGEST_LOOK_SEC)
        self._looked_at = looked_at
        self.ranks = list(map(self._update, self.ranks, self.signals.running))
        if self.ending.fault is None:
            reasons = self._look_elsewhere()
            patience = self.watch.patience_sec
            fault = find_fault(self.ranks, self._now, patience, self._elsewhere)
            if fault is None and reasons:
                fault = Fault("elsewhere", self._now, reason=reasons[0])
            if fault is not None:
                self.ending = replace(self.ending, fault=fault, found_at=self._now)
                self._explain(fault)
        if self.ending.insisted_at is None and self.signals.received.count(signal.SIGINT) > 1:
            self.ending = replace(self.ending, insisted_at=self._now)
        number = next_signal(self.ranks, self._now, self.watch.patience_sec, self.ending)
        if number is not None:
            self.signals.send(number)
            self.ending = replace(self.ending, asked_at=self._now)
        return any(rank.code is None for rank in self.ranks)

    def _update(self, rank: Rank, process: subprocess.Popen[bytes]) -> Rank:
        """Return a rank as it is now."""
        if rank.code is not None:
            return rank
        state, processor_sec = process_facts(rank.pid)  # before it is waited for
        code = process.poll()
        return update_rank(
            rank,
            self._now,
            beat=read_beat(beat_file(self.folder, rank.number)),
            state=state,
            processor_sec=processor_sec,
            code=code,
            reported=None if code is None else _read_number(self.folder / str(rank.number)),
        )

    def _look_elsewhere(self) -> list[str]:
        """Share with the other machines whether a rank here starts, compiles or saves, for which
        all ranks wait; return their faults."""
        if self.link is None:
            return []
        here = is_busy(self.ranks)
        if here != self._shared:
            self._shared = here
            self.link.share({"is_busy": here})
        states = self.link.states().values()
        others = any(state.get("is_busy") is True for state in states)
        if others != self._elsewhere.is_busy:
            self._elsewhere = Elsewhere(others, self._now)
        reasons = [str(state["fault"]) for state in states if "fault" in state]
        for node in self.link.lost():
            place = f"node {node} ({self.table.nodes[node].address})"
            reasons.append(f"the launcher of {place} has ended or cannot be reached")
        return reasons

    def _explain(self, fault: Fault) -> None:
        """Show a fault, and tell the other machines."""
        self.reason = describe_fault(fault, self.ranks, socket.gethostname(), self._now)
        if self.link is not None and fault.rank is not None:
            self.link.share({"fault": self.reason})
        if has_explained_itself(fault, self.ranks):
            return
        text = f"lockstep: {self.reason}. Stopping all ranks."
        log = self.logs.get(fault.rank.number) if fault.rank is not None else None
        if log is not None and (lines := log.last_lines()):
            place = f", {log.path}" if log.stays else ""
            text += f"\nThe last lines of its output{place}:\n{lines}"
        self.watch.say(text)
