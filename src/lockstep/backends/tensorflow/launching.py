"""Starting TensorFlow's ranks on this machine."""

import json
import os
from collections.abc import Callable

from lockstep.backends.shared.horovod_rendezvous import rendezvous
from lockstep.system.machine import cores
from lockstep.system.ranks import LOOPBACK, free_ports, launch_ranks


def launch(processes: int, arguments: list[str], distributed: str) -> int:
    """Run this Python with these arguments in this many processes that find each other; return the exit code.

    TensorFlow has no launcher. A worker finds the others in TF_CONFIG.
    """
    if distributed == "horovod":
        from lockstep.backends.tensorflow import horovod_world  # noqa: F401 - fails once here instead of in every rank

        threads = threads_of_a_rank(processes)
        with rendezvous(processes) as environment:
            return launch_ranks(processes, arguments, lambda rank: environment(rank) | threads)
    return launch_ranks(processes, arguments, workers(processes))


def workers(count: int) -> Callable[[int], dict[str, str]]:
    """Return a function from a rank to the environment variables that make it one of `count` workers on this machine."""
    addresses = [f"{LOOPBACK}:{port}" for port in free_ports(count)]
    threads = threads_of_a_rank(count)

    def environment(rank: int) -> dict[str, str]:
        config = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": rank}}
        return {"TF_CONFIG": json.dumps(config, allow_nan=False)} | threads

    return environment


def threads_of_a_rank(ranks: int) -> dict[str, str]:
    """Return the environment variable that gives a rank its share of this machine's cores, unless the user has set it."""
    name = "TF_NUM_INTRAOP_THREADS"
    return {} if name in os.environ else {name: str(max(cores() // ranks, 1))}
