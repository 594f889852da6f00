"""Horovod, one of the two ways in which NVIDIA's original ran on several GPUs, where it is installed."""

import os
import secrets

import mxnet as mx

from lockstep.backends.mxnet.hosts import Hosts
from lockstep.backends.mxnet.world import Array, Ranks
from lockstep.errors import BackendError
from lockstep.launched import free_ports
from lockstep.recipes import Execution

try:
    import horovod.mxnet as hvd
except ImportError as error:
    raise BackendError(
        f"distributed is horovod, which this environment has not: {error}. `make mxnet-horovod` builds it in .venv-mxnet"
    ) from None


class HorovodWorld(Ranks):
    """This process among those of `horovodrun` or `lockstep launch --distributed horovod`, or alone."""

    def __init__(self, execution: Execution) -> None:
        hvd.init()
        # Under MPI Horovod alone knows them.
        told = {"RANK": hvd.rank(), "WORLD_SIZE": hvd.size(), "LOCAL_RANK": hvd.local_rank()}
        os.environ.update({name: str(value) for name, value in told.items()})
        # Questions do not go through Horovod: it answers behind all that MXNet has enqueued.
        host = os.environ.get("HOROVOD_HOSTNAME", "localhost")
        address, key = hvd.broadcast_object((f"{host}:{free_ports(1)[0]}", secrets.token_hex()))
        super().__init__(execution, Hosts(hvd.rank(), hvd.size(), address, key))

    def _exchange(self, key: str, array: Array) -> None:
        hvd.allreduce_(array, op=hvd.Sum, name=key)

    def close(self) -> None:
        """Leave the process group."""
        super().close()
        if not self.lost:
            mx.nd.waitall()
            hvd.shutdown()
