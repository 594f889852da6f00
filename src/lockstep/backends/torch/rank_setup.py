"""Starting PyTorch's ranks."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.backends.torch.world import STORE

if TYPE_CHECKING:
    from lockstep.launch.nodes import Start, Table


@contextmanager
def prepare_ranks(table: "Table", distributed: str) -> "Iterator[Start]":
    """Yield how this machine's ranks are started. On one machine they meet through a file, on
    several at rank 0.

    torchrun is not used: its rendezvous listens on all interfaces and unpickles what it receives.
    """
    from lockstep.launch.nodes import Start, share_cores

    threads = share_cores("OMP_NUM_THREADS", table)
    if len(table.nodes) > 1:
        meeting = {"MASTER_ADDR": table.nodes[0].address, "MASTER_PORT": str(table.shared_ports[0])}
        yield Start(table, lambda local_rank: threads | meeting)
        return
    with tempfile.TemporaryDirectory() as folder:  # only this user can open it
        shared = threads | {STORE: str(Path(folder) / "store")}
        yield Start(table, lambda local_rank: shared)
