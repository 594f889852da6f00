"""Run a module in two processes: python -m tests.backends.workers mxnet|paddle|tensorflow|torch
native|horovod MODULE ..."""

import sys

from lockstep import backends
from lockstep.launch.launcher import launch_ranks
from lockstep.launch.nodes import one_machine

if __name__ == "__main__":
    name, distributed, *arguments = sys.argv[1:]
    backend = backends.load(name)
    sys.exit(
        launch_ranks(["-m", *arguments], lambda: backend.prepare_ranks(one_machine(2), distributed))
    )
