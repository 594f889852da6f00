"""Run a module in two processes: python -m tests.backends.workers mxnet|paddle|tensorflow|torch native|horovod MODULE ..."""

import sys

from lockstep import backends

if __name__ == "__main__":
    name, distributed, *arguments = sys.argv[1:]
    sys.exit(backends.load(name).launch(2, ["-m", *arguments], distributed))
