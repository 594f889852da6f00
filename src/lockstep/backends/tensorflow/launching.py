"""Starting TensorFlow's ranks."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager

from lockstep.backends.shared.horovod import rendezvous
from lockstep.launch.nodes import Start, Table
from lockstep.system.machine import share_of_cores


@contextmanager
def prepare_ranks(table: Table, distributed: str) -> Iterator[Start]:
    """Yield how this machine's ranks are started. TensorFlow has no launcher: a worker finds the
    others in TF_CONFIG."""
    if distributed == "horovod":
        from lockstep.backends.tensorflow import horovod_world  # noqa: F401 - fails once here instead of in every rank

        threads = threads_of_a_rank(table.own.processes)
        with rendezvous(table) as environment:
            yield Start(table, lambda local_rank: environment(local_rank) | threads)
    else:
        yield Start(table, lambda local_rank: worker(table, local_rank))


def worker(table: Table, local_rank: int) -> dict[str, str]:
    """Return the environment variables that make a rank of this machine one of TensorFlow's
    workers."""
    config = {
        "cluster": {"worker": table.places},
        "task": {"type": "worker", "index": table.first + local_rank},
    }
    return {"TF_CONFIG": json.dumps(config, allow_nan=False)} | threads_of_a_rank(
        table.own.processes
    )


def threads_of_a_rank(ranks: int) -> dict[str, str]:
    """Return the environment variable that gives a rank its share of this machine's cores, unless
    the user has set it."""
    name = "TF_NUM_INTRAOP_THREADS"
    return {} if name in os.environ else {name: str(share_of_cores(ranks))}
