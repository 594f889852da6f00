"""MXNet, which is retired and needs a separate environment. The functions of
`lockstep.backends.Backend`."""

from lockstep.backends.mxnet import framework_import  # before all modules that import the framework

# isort: split
import os

from lockstep.backends.mxnet.engine import MxnetEngine as engine
from lockstep.backends.mxnet.instruments import libraries, products, profile
from lockstep.backends.mxnet.model import load_module
from lockstep.backends.mxnet.rank_setup import prepare_ranks
from lockstep.backends.mxnet.world import MxnetWorld, Workers, devices
from lockstep.recipes import Execution


def world(execution: Execution) -> MxnetWorld:
    """Join the process group and choose the device."""
    if execution.distributed == "horovod":
        from lockstep.backends.mxnet.horovod_world import HorovodWorld

        return HorovodWorld(execution)
    return MxnetWorld(execution) if os.environ.get("WORLD_SIZE", "1") == "1" else Workers(execution)
