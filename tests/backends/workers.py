"""Run a module in two processes: python -m tests.backends.workers mxnet|paddle|tensorflow|torch native|horovod MODULE ..."""

import sys
from importlib import import_module

if __name__ == "__main__":
    name, distributed, *arguments = sys.argv[1:]
    world = import_module(f"lockstep.backends.{name}.world")
    sys.exit(world.launch_python(2, ["-m", *arguments], distributed))
