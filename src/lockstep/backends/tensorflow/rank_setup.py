"""Starting TensorFlow's ranks."""

import json
from collections.abc import Iterator
from contextlib import contextmanager

from lockstep.backends.shared.horovod import rendezvous
from lockstep.launch.nodes import Start, Table, share_cores

THREADS = "TF_NUM_INTRAOP_THREADS"
"""Environment variable: the number of threads of a rank."""


@contextmanager
def prepare_ranks(table: Table, distributed: str) -> Iterator[Start]:
    """Yield how this machine's ranks are started. TensorFlow has no launcher: a worker finds the
    others in TF_CONFIG."""
    if distributed == "horovod":
        from lockstep.backends.tensorflow import horovod_world  # noqa: F401 - fails once here instead of in every rank

        threads = share_cores(THREADS, table)
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
    return {"TF_CONFIG": json.dumps(config, allow_nan=False)} | share_cores(THREADS, table)
