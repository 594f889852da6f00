"""The processes that train together: workers of MXNet's parameter server, Horovod, or a single
process."""

import atexit
import ctypes
import os
import sys
from typing import Any

import mxnet as mx
import numpy as np
from mxnet.base import _LIB, check_call

from lockstep.backends import HostQuestions
from lockstep.backends.mxnet import framework_import
from lockstep.backends.shared import rank_connections
from lockstep.backends.shared.bound_sockets import refuse_open_sockets
from lockstep.backends.shared.device import choose_gpu
from lockstep.backends.shared.rank_connections import RankConnections
from lockstep.recipes import Execution
from lockstep.system.errors import BackendError
from lockstep.system.text import format_count

Array = Any
"""An `mx.nd.NDArray`: MXNet has no annotations."""


class MxnetWorld(HostQuestions):
    """A single process, and the base of worlds with several processes."""

    rank = 0
    ranks = 1

    def __init__(self, execution: Execution) -> None:
        self.context = _context(execution, int(os.environ.get("LOCAL_RANK", "0")))
        self.on_gpu = self.context.device_type == "gpu"
        self.device = _name(self.context)

    @property
    def lost(self) -> bool:
        """Whether a rank is known to have ended. Then enqueued work may never be done."""
        return False

    def refuse_loss(self, reason: str = "") -> None:
        """Raise `LockstepError` if a rank has ended. `reason` is MXNet's error."""

    def prepare(self, array: Array, name: str) -> None:
        """Prepare sums of arrays like this one. It can wait for all ranks. All ranks must prepare
        in the same order."""

    def sum(self, array: Array, name: str) -> None:
        """Add up an array over all ranks, in place. Every rank must call it."""

    def share(self, array: Array) -> None:
        """Copy the array of rank 0 to every rank, in place."""
        if self.rank > 0:
            array[:] = 0
        self.sum(array, "shared")

    def gather(self, table: np.ndarray) -> np.ndarray:
        """Return the rows of all ranks, float64, in the order of ranks. Every rank must have the
        same number of rows."""
        if self.ranks == 1 or not len(table):  # MXNet has no empty arrays
            return table
        places = np.zeros((self.ranks, *table.shape), np.float64)
        places[self.rank] = table
        array = mx.nd.array(places, mx.cpu(), places.dtype)
        self.sum(array, "rows")
        return array.asnumpy().reshape(-1, table.shape[1])

    def _largest(self, values: list[int]) -> list[int]:
        return values

    def close(self) -> None:
        """Leave the process group."""


class Ranks(MxnetWorld):
    """This process as one of several, whose hosts communicate while MXNet computes."""

    def __init__(self, execution: Execution, connections: RankConnections) -> None:
        super().__init__(execution)
        self._connections = connections
        self.rank = connections.rank
        self.ranks = connections.ranks
        self._exchanged: dict[str, Array] = {}
        """The array that is sent and received under each key."""
        atexit.register(self._leave_at_once)

    @property
    def lost(self) -> bool:
        """Whether a rank is known to have ended. Then enqueued work may never be done."""
        return self._connections.lost

    def refuse_loss(self, reason: str = "") -> None:
        """Raise `LockstepError` if a rank has ended. `reason` is MXNet's error."""
        self._connections.refuse_loss()

    def _leave_at_once(self) -> None:
        """End this process without MXNet's shutdown if a rank has ended. The shutdown would wait
        for all enqueued work."""
        if self.lost:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)  # the launcher reads the exit code that `leave_exit_code` wrote

    def prepare(self, array: Array, name: str) -> None:
        """Prepare sums of arrays like this one."""
        if self.ranks > 1:
            self._place(array, name)

    def _place(self, array: Array, name: str) -> str:
        key = f"{name} {array.shape} {array.dtype}"
        if key not in self._exchanged:
            self._exchanged[key] = mx.nd.zeros(array.shape, array.context, array.dtype)
            self._introduce(key, self._exchanged[key])
        return key

    def sum(self, array: Array, name: str) -> None:
        """Add up an array over all ranks, in place. Every rank must call it."""
        if self.ranks == 1:  # a single rank of Horovod
            return
        # Through one array for each key. Parameter server and Horovod do not keep the order of
        # operations on a key, but MXNet keeps the order of operations on an array.
        key = self._place(array, name)
        exchanged = self._exchanged[key]
        exchanged[:] = array
        self._exchange(key, exchanged)
        array[:] = exchanged

    def _introduce(self, key: str, array: Array) -> None:
        """Announce a key."""

    def _exchange(self, key: str, array: Array) -> None:
        """Enqueue the sum over all ranks of the key's array, in place."""
        raise NotImplementedError

    def _largest(self, values: list[int]) -> list[int]:
        return self._connections.largest(values)

    def close(self) -> None:
        """Leave the process group."""
        self._connections.close()


class Workers(Ranks):
    """This process as one of the workers of a parameter server."""

    def __init__(self, execution: Execution) -> None:
        if (
            not {"DMLC_PS_ROOT_URI", rank_connections.ADDRESS, rank_connections.KEY}
            <= os.environ.keys()
        ):
            raise BackendError(
                f"several ranks need DMLC_PS_ROOT_URI and {rank_connections.ADDRESS}, the addresses"
                " of parameter server and rank 0; start them with `lockstep launch`"
            )
        rank = int(os.environ["RANK"])
        ranks = int(os.environ["WORLD_SIZE"])
        super().__init__(
            execution,
            rank_connections.meet_ranks(
                rank, ranks, os.environ[rank_connections.ADDRESS], os.environ[rank_connections.KEY]
            ),
        )
        self._store = mx.kv.create("dist_sync")
        refuse_open_sockets()
        # Otherwise a rank that fails would wait for the others before it ends.
        check_call(_LIB.MXKVStoreSetBarrierBeforeExit(self._store.handle, ctypes.c_int(0)))

    def _introduce(self, key: str, array: Array) -> None:
        self._store.init(key, array)
        # Once on every rank here, while no other thread uses the store: its tables of buffers are
        # not thread-safe.
        self._exchange(key, array)
        array.wait_to_read()

    def _exchange(self, key: str, array: Array) -> None:
        self._store.push(key, array)
        self._store.pull(key, out=array)


def _context(execution: Execution, local_rank: int) -> Any:
    advice = "For GPUs, install a package such as mxnet-cu112"
    gpus = mx.context.num_gpus()
    gpu = choose_gpu(execution, "MXNet", gpus=gpus, local_rank=local_rank, advice=advice)
    return mx.cpu() if gpu is None else mx.gpu(gpu)


def _name(context: Any) -> str:
    return (
        f"CPU, {format_count(int(framework_import.threads), 'thread')}"
        if context.device_type == "cpu"
        else f"GPU {context.device_id}"
    )


def devices() -> list[str]:
    """Return the devices that MXNet sees."""
    return [*(_name(mx.gpu(index)) for index in range(mx.context.num_gpus())), _name(mx.cpu())]
