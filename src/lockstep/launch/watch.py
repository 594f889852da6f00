"""Watching ranks: decide from what a launcher sees of its ranks what it does. All functions are
pure.

A rank shows a sign of life with every heartbeat, and by using processor time. It moves when it
takes a batch. A launch has one of these faults:

- ended: a rank has ended with an error or by a signal;
- silent: a rank has shown no sign of life for the patience: it is stopped, or its machine is;
- stalled: all ranks train or evaluate, also on other machines, but none here has moved for the
  patience;
- elsewhere: another machine has a fault, or cannot be reached.

After a fault all ranks are asked to stop. Ranks that wait for each other cannot, and are killed
soon after.
"""

import math
import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from lockstep.system.errors import (
    EXIT_DIVERGED,
    EXIT_INTERRUPTED,
    EXIT_SAVED_AND_STOPPED,
    UserError,
)
from lockstep.system.heartbeat import Beat
from lockstep.system.text import format_count

PATIENCE_SEC = 120.0
"""Default patience: seconds without a sign of life or a batch after which ranks count as hung."""
GRACE_SEC = 10.0
"""Seconds that ranks have to stop after a fault, before they are killed. While one is saving, they
have the patience."""
TO_END_ALONE_SEC = 1.0
"""Seconds that ranks have to end by themselves after the first one has ended. An earlier signal
could kill a rank that is ending for the same reason, before it has written its exit code."""
AFTER_CTRL_C_SEC = 10.0
"""Seconds that ranks have to stop after a second Ctrl-C."""
_HUNG_SEC = 5.0
"""A rank without a sign of life for this long is to blame if another rank fails meanwhile: ranks
beat twice a second."""
_SLOWER = 3
"""A batch may take this many times as long as the slowest one so far, however short the patience
is."""
_MOVING = ("training", "evaluating")
"""Activities in which a rank takes one batch after another."""
_STOPPED = (EXIT_SAVED_AND_STOPPED, EXIT_INTERRUPTED)
"""Exit codes of ranks that have stopped as they were asked to."""
_WELL = (None, 0, *_STOPPED)
"""Exit codes of ranks without a fault."""


@dataclass(frozen=True)
class Rank:
    """A rank, as its launcher last saw it. Times are in seconds of the launcher's clock."""

    number: int
    pid: int
    heard_at: float = 0.0
    """Time of the last sign of life."""
    moved_at: float = 0.0
    """Time at which the rank last took a batch, or began to do something else."""
    beat: Beat = field(default_factory=Beat)
    processor_sec: float = 0.0
    """Processor time that it has used."""
    state: str = ""
    """The state of its process in the letters of /proc; "" if unknown."""
    slowest_sec: float = 0.0
    """The longest time from one batch to the next."""
    code: int | None = None
    """The exit code of its process, negative after a signal; None while it runs."""
    reported: int | None = None
    """The exit code that it wrote for the launcher; None if it could not."""
    ended_at: float = 0.0


def update_rank(
    rank: Rank,
    now: float,
    *,
    beat: Beat | None,
    processor_sec: float,
    state: str,
    code: int | None,
    reported: int | None,
) -> Rank:
    """Return a rank as it is now. `beat` is None if it cannot be read."""
    beat = beat or rank.beat
    lives = beat.number != rank.beat.number or processor_sec > rank.processor_sec
    same = beat.activity == rank.beat.activity
    moved = beat.moves != rank.beat.moves or not same
    slowest = rank.slowest_sec
    if moved and same and beat.activity in _MOVING:
        slowest = max(slowest, now - rank.moved_at)
    return replace(
        rank,
        heard_at=now if lives else rank.heard_at,
        moved_at=now if moved else rank.moved_at,
        beat=beat,
        processor_sec=processor_sec,
        state=state,
        slowest_sec=slowest,
        code=code,
        reported=reported,
        ended_at=now if rank.code is None else rank.ended_at,
    )


@dataclass(frozen=True)
class Fault:
    """Why a launch ends."""

    kind: Literal["ended", "silent", "stalled", "elsewhere"]
    began_at: float
    """Time of the end, of the last sign of life or of the last batch."""
    rank: Rank | None = None
    """The rank that is to blame. None if it is on another machine."""
    reason: str = ""
    """What another machine's launcher says."""


@dataclass(frozen=True)
class Elsewhere:
    """What the ranks of other machines do."""

    is_busy: bool = False
    """Whether one of them starts, compiles or saves. All others wait for it."""
    changed_at: float = 0.0
    """When that became true or false."""


def find_fault(
    ranks: Sequence[Rank], now: float, patience: float, elsewhere: Elsewhere = Elsewhere()
) -> Fault | None:
    """Return the first fault of this machine's ranks, or None. `patience` is in seconds."""
    running = [rank for rank in ranks if rank.code is None]
    failed = [rank for rank in ranks if _has_failed(rank)]
    if failed:
        return _judge_failed(failed, running, now)
    if not running:
        return None
    quietest = min(running, key=_get_heard_at)
    began = max(elsewhere.changed_at, *(rank.moved_at for rank in running))
    longest = max(patience, _SLOWER * max(rank.slowest_sec for rank in ranks))
    stalls = not (is_busy(ranks) or elsewhere.is_busy) and now > began + longest
    # The others stall because of a silent rank, and stalled a little before it counted as silent.
    if now > quietest.heard_at + (patience / 2 if stalls else patience):
        return Fault("silent", quietest.heard_at, quietest)
    if stalls:
        return Fault("stalled", began, min(running, key=lambda rank: rank.beat.moves))
    return None


def _judge_failed(failed: list[Rank], running: list[Rank], now: float) -> Fault | None:
    began = min(rank.ended_at for rank in failed)
    first = min(failed, key=_blame)
    if running and now <= began + TO_END_ALONE_SEC:
        return None
    # Some frameworks watch ranks, too, and end those that wait for one that hangs.
    hung = [rank for rank in running if rank.heard_at < min(began, now - _HUNG_SEC)]
    if hung and first.reported not in _EXPLAINED:
        quietest = min(hung, key=_get_heard_at)
        return Fault("silent", quietest.heard_at, quietest)
    return Fault("ended", began, first)


def _has_failed(rank: Rank) -> bool:
    """Return whether a rank has ended with a fault. One that has saved and stopped has not, though
    a signal to stop came while its process was ending."""
    if rank.code == -signal.SIGTERM and rank.reported in _STOPPED:
        return False
    return rank.code not in _WELL


def _get_heard_at(rank: Rank) -> float:
    return rank.heard_at


def is_busy(ranks: Sequence[Rank]) -> bool:
    """Return whether one of the ranks starts, compiles or saves, which has no limit."""
    return any(rank.code is None and rank.beat.activity not in _MOVING for rank in ranks)


def _blame(rank: Rank) -> tuple[int, float, int]:
    """Return a key by which the rank comes first that caused the end of the others.

    A rank that could not write its exit code was killed or crashed. The others may have ended
    because of it, with code 1.
    """
    place = [*_EXPLAINED, rank.reported].index(rank.reported)
    return place, rank.ended_at, rank.number


_EXPLAINED = (None, UserError.exit_code, EXIT_DIVERGED)
"""Exit codes of ranks that did not end because of another one, the most likely cause first."""


@dataclass(frozen=True)
class Ending:
    """What has led to the end of a launch so far. Times are None for what has not happened."""

    fault: Fault | None = None
    found_at: float = 0.0
    """When the fault was found."""
    asked_at: float | None = None
    """When all ranks were asked to stop because of a fault, or because one has stopped."""
    insisted_at: float | None = None
    """When Ctrl-C came for the second time."""


def next_signal(
    ranks: Sequence[Rank], now: float, patience: float, ending: Ending
) -> signal.Signals | None:
    """Return the signal that all running ranks get now, or None."""
    if ending.insisted_at is not None and now > ending.insisted_at + AFTER_CTRL_C_SEC:
        return signal.SIGKILL
    if ending.asked_at is None:
        stopped_at = min(
            (rank.ended_at for rank in ranks if rank.code in _STOPPED), default=math.inf
        )
        asks = ending.fault is not None or now > stopped_at + TO_END_ALONE_SEC
        return signal.SIGTERM if asks else None
    if ending.fault is None:
        return None
    saving = any(rank.beat.activity == "saving" for rank in ranks if rank.code is None)
    ends = max(ending.found_at + GRACE_SEC, ending.fault.began_at + patience if saving else 0.0)
    return signal.SIGKILL if now > ends else None


_EXPLAINING = (UserError.exit_code, EXIT_DIVERGED, EXIT_INTERRUPTED, EXIT_SAVED_AND_STOPPED)
"""Exit codes that explain why a launch ended, in order of priority. The first one that any rank has
is used."""


def choose_code(codes: Iterable[int | None]) -> int:
    """Return the exit code of a launch that failed or was stopped, from the codes of its ranks or
    machines."""
    known = set(codes)
    return next((code for code in _EXPLAINING if code in known), 1)


@dataclass(frozen=True)
class Outcome:
    """How an attempt to run all ranks ended."""

    code: int
    """The exit code of the launch if it is the last attempt."""
    reason: str
    """The fault, in a sentence; "" without one."""
    step: int
    """Number of training steps of the run that were begun."""
    failed: bool
    """Whether there was a fault."""
    was_asked: bool
    """Whether a signal to the launcher asked the ranks to stop."""

    def fields(self) -> dict[str, Any]:
        """Return the outcome as an object of JSON."""
        return asdict(self)

    @classmethod
    def parse(cls, fields: Mapping[str, Any]) -> "Outcome":
        """Return the outcome in an object of JSON, from a launcher of the same version."""
        return cls(
            int(fields["code"]),
            str(fields["reason"]),
            int(fields["step"]),
            bool(fields["failed"]),
            bool(fields["was_asked"]),
        )

    @property
    def is_curable(self) -> bool:
        """Whether restarting the ranks may help: no rank had a user error or diverged."""
        final = (0, UserError.exit_code, EXIT_DIVERGED)
        return self.failed and not self.was_asked and self.code not in final

    def join(self, all_nodes: Sequence["Outcome | None"]) -> "Outcome":
        """Return the outcome on all machines, which is the same on all of them. None stands for a
        lost one."""
        outcomes = [outcome for outcome in all_nodes if outcome is not None]
        are_complete = len(outcomes) == len(all_nodes)
        codes = {outcome.code for outcome in outcomes}
        return Outcome(
            0 if are_complete and codes == {0} else choose_code(codes),
            self.reason,
            max(outcome.step for outcome in outcomes),
            failed=are_complete and any(outcome.failed for outcome in outcomes),
            was_asked=any(outcome.was_asked for outcome in outcomes),
        )


def will_try_again(outcomes: Sequence[Outcome], restarts: int) -> tuple[bool, str]:
    """Return whether all ranks restart after these attempts, and a message for the user.

    Two attempts in a row that end at the same step are enough: a third would end there too.
    """
    last = outcomes[-1]
    if not last.is_curable or restarts == 0:
        return False, ""
    if len(outcomes) > restarts:
        times = f"{format_count(restarts, 'time')}, as often as --restarts {restarts} allows"
        return False, f"the ranks were restarted {times}"
    if len(outcomes) > 1 and outcomes[-2].step == last.step:
        return False, f"the ranks failed twice at step {last.step}, so they are not restarted"
    count = f"{len(outcomes)} of {restarts}"
    return True, f"all ranks restart ({count}) from the newest checkpoint"


# Sentences

_STATES = {
    "T": "its process is stopped (state T)",
    "t": "a debugger has stopped its process (state t)",
    "D": "its process waits for a disk or a network file system (state D)",
    "Z": "its process has ended, but the system keeps it (state Z)",
    "S": "its process sleeps (state S)",
    "R": "its process runs (state R)",
}


def has_explained_itself(fault: Fault, ranks: Sequence[Rank]) -> bool:
    """Return whether rank 0, whose output is always shown, has reported a fault: its own, or the
    same one."""
    for rank in ranks:
        if rank.number == 0 and rank.reported is not None and fault.rank is not None:
            is_explained = rank.reported in (UserError.exit_code, EXIT_DIVERGED)
            return rank is fault.rank or (is_explained and rank.reported == fault.rank.reported)
    return False


def describe_fault(fault: Fault, ranks: Sequence[Rank], host: str, now: float) -> str:
    """Return what happened to which rank, and what that rank did last."""
    rank = fault.rank
    if rank is None:
        return fault.reason
    name = f"rank {rank.number} (host {host}, pid {rank.pid})"
    did: str = rank.beat.activity
    if rank.beat.step:
        did += f", {format_count(rank.beat.step, 'step')} begun"
    if fault.kind == "ended":
        if rank.code is None or rank.code >= 0:
            return f"{name} failed with exit code {rank.code}; it was {did}"
        why = ", as the system does when memory runs out" if rank.code == -signal.SIGKILL else ""
        return f"{name} was killed by {_name_signal(-rank.code)}{why}; it was {did}"
    ago = f"{now - rank.moved_at:.0f} s ago"
    state = f"; {_STATES[rank.state]}" if rank.state in _STATES else ""
    if fault.kind == "silent":
        return (
            f"{name} has shown no sign of life for {now - rank.heard_at:.0f} s{state}; it was last"
            f" {did}, {ago}"
        )
    furthest = max((other.beat.moves for other in ranks if other.code is None), default=0)
    others = "no other rank is further ahead"
    if furthest > rank.beat.moves:
        others = "other ranks are ahead of it"
    return (
        f"no rank has taken a batch for {now - fault.began_at:.0f} s; {name} was last {did}, {ago},"
        f" and {others}{state}"
    )


def _name_signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"
