"""Starting Paddle's ranks on this machine."""

import os
from collections.abc import Callable

from lockstep.backends import refuse_horovod
from lockstep.system.machine import cores
from lockstep.system.ranks import LOOPBACK, free_ports, launch_ranks


def launch(processes: int, arguments: list[str], distributed: str) -> int:
    """Run this Python with these arguments in this many processes that find each other; return the exit code.

    Paddle's own launcher is not used: it writes the ranks' output to files and passes on only SIGTERM.
    """
    refuse_horovod(distributed)
    return launch_ranks(processes, arguments, trainers(processes))


def trainers(count: int) -> Callable[[int], dict[str, str]]:
    """Return a function from a rank to the environment variables that make it one of `count` trainers on this machine."""
    addresses = [f"{LOOPBACK}:{port}" for port in free_ports(count + 1)]
    # Each rank gets an equal share of the cores, unless the user has chosen a number.
    threads = os.environ.get("OMP_NUM_THREADS", str(max(cores() // count, 1)))

    def environment(rank: int) -> dict[str, str]:
        return {
            "PADDLE_MASTER": addresses[-1],
            "PADDLE_TRAINER_ENDPOINTS": ",".join(addresses[:-1]),
            "PADDLE_CURRENT_ENDPOINT": addresses[rank],
            "PADDLE_TRAINERS_NUM": str(count),
            "PADDLE_TRAINER_ID": str(rank),
            "OMP_NUM_THREADS": threads,
        }

    return environment
