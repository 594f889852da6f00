"""Ranks that another program started without the addresses that a framework needs: tasks of srun,
processes of mpirun.

They meet each other as launchers on several machines do, each as a node of one rank.
"""

import atexit
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import TYPE_CHECKING, TypeAlias

from lockstep.backends.frameworks import name_rank
from lockstep.system.ranks import count_ranks, listen_address

if TYPE_CHECKING:
    from lockstep.launch.nodes import Start, Table

PrepareRanks: TypeAlias = "Callable[[Table, str], AbstractContextManager[Start]]"
"""The function `prepare_ranks` of a backend."""

_while_running = ExitStack()
atexit.register(_while_running.close)


def join(backend: str, prepare_ranks: PrepareRanks, distributed: str, addresses: str) -> None:
    """Name this rank. If it is one of several that do not know each other's addresses, let them
    meet and set the variables.

    `addresses` is the environment variable that tells addresses if another launcher has. Ranks meet
    at LOCKSTEP_RENDEZVOUS, in a Slurm step at its first host. Without a place nothing happens, and
    the framework reports what it lacks. Raises `UserError` or `LockstepError` if the ranks cannot
    meet.
    """
    name_rank(backend)
    if (
        {addresses, "HOROVOD_RANK"} & os.environ.keys()
        or listen_address() is not None
        or distributed != "native"
        or count_ranks() == 1
    ):
        return
    from lockstep.launch.meeting import find_rank_meeting
    from lockstep.launch.rendezvous import MEET_SEC, agree, meet

    meeting = find_rank_meeting(os.environ)
    if meeting is None:
        return
    with meet(meeting, MEET_SEC) as (link, address):
        table = agree(link, meeting, address, 1, [])
    start = _while_running.enter_context(prepare_ranks(table, distributed))
    os.environ.update(
        {name: value for name, value in table.variables(0).items() if name not in os.environ}
    )
    os.environ.update(start.environment(0))
