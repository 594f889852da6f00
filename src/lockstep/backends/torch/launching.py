"""Starting PyTorch's ranks on this machine."""

import os
import tempfile
from pathlib import Path

from lockstep.backends import refuse_horovod
from lockstep.backends.torch.world import STORE
from lockstep.system.machine import cores
from lockstep.system.ranks import launch_ranks


def launch(processes: int, arguments: list[str], distributed: str) -> int:
    """Run this Python with these arguments in this many processes that find each other; return the exit code.

    torchrun is not used: its rendezvous listens on all interfaces and unpickles what it receives.
    """
    refuse_horovod(distributed)
    with tempfile.TemporaryDirectory() as folder:  # only this user can open it
        shared = {
            STORE: str(Path(folder) / "store"),
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(cores() // processes, 1))),
        }
        return launch_ranks(processes, arguments, lambda rank: shared)
