"""The processes that train together, through MXNet's parameter server, or one process alone."""

import atexit
import ctypes
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mxnet as mx
import numpy as np
from mxnet.base import _LIB, check_call

from lockstep.backends import HostQuestions, refuse_horovod, refuse_layout
from lockstep.backends.mxnet import hosts, loading
from lockstep.backends.mxnet.hosts import Hosts
from lockstep.errors import BackendError
from lockstep.launched import free_ports, launch_ranks
from lockstep.machine import cores
from lockstep.recipes import Execution

Array = Any
"""An `mx.nd.NDArray`: MXNet has no annotations."""


class MxnetWorld(HostQuestions):
    """This process among those of `lockstep launch`, or alone."""

    def __init__(self, execution: Execution) -> None:
        refuse_horovod(execution.distributed)
        self.rank = int(os.environ.get("RANK", "0"))
        self.ranks = int(os.environ.get("WORLD_SIZE", "1"))
        self.context = _context(execution, int(os.environ.get("LOCAL_RANK", "0")))
        self.on_gpu = self.context.device_type == "gpu"
        refuse_layout(execution.layout, "nhwc" if self.on_gpu else "nchw")
        self.device = _name(self.context)
        self._store: Any = None
        self._hosts: Hosts | None = None
        self._exchanged: dict[str, Array] = {}
        """By key: what is sent and received under it."""
        if self.ranks > 1:
            if not {"DMLC_PS_ROOT_URI", hosts.ADDRESS, hosts.KEY} <= os.environ.keys():
                raise BackendError(
                    f"several ranks, but no DMLC_PS_ROOT_URI and {hosts.ADDRESS} that say where parameter server and rank 0 "
                    "are; start them with `lockstep launch`"
                )
            self._hosts = Hosts(self.rank, self.ranks, os.environ[hosts.ADDRESS], os.environ[hosts.KEY])
            self._store = mx.kv.create("dist_sync")
            # Or a rank that fails would wait for the others before it ends.
            check_call(_LIB.MXKVStoreSetBarrierBeforeExit(self._store.handle, ctypes.c_int(0)))
            atexit.register(self._leave_at_once)

    @property
    def lost(self) -> bool:
        """Whether a rank is known to have gone: what is enqueued may never be done."""
        return self._hosts is not None and self._hosts.lost

    def refuse_loss(self) -> None:
        """Raise `LockstepError` if a rank has gone."""
        if self._hosts is not None:
            self._hosts.refuse_loss()

    def _leave_at_once(self) -> None:
        """End this process without MXNet's goodbye, which waits for all that is enqueued, if a rank has gone."""
        if self.lost:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)  # the launcher knows the code from `leave_exit_code`

    def prepare(self, array: Array, name: str) -> str:
        """Make ready to add up arrays like this one, which waits for all ranks; return the key. All prepare in one order."""
        key = f"{name} {array.shape} {array.dtype}"
        if self._store is not None and key not in self._exchanged:
            self._exchanged[key] = mx.nd.zeros(array.shape, self.context, array.dtype)
            self._store.init(key, self._exchanged[key])
            # Once on every rank here, where it is alone: its tables of buffers are not made for two threads.
            self._store.push(key, self._exchanged[key])
            self._store.pull(key, out=self._exchanged[key])
            self._exchanged[key].wait_to_read()
        return key

    def sum(self, array: Array, name: str) -> None:
        """Add up an array over all ranks, in place; every rank must ask."""
        if self._store is None:
            return
        key = self.prepare(array, name)
        # Through one array for each key: MXNet does not keep the order of what is sent and received under a key, but that
        # of what happens to an array.
        exchanged = self._exchanged[key]
        exchanged[:] = array
        self._store.push(key, exchanged)
        self._store.pull(key, out=exchanged)
        array[:] = exchanged

    def share(self, array: Array) -> None:
        """Give every rank what rank 0 has, in place."""
        if self.rank > 0:
            array[:] = 0
        self.sum(array, "shared")

    def gathered(self, table: np.ndarray) -> np.ndarray:
        """Return the rows of all ranks, float64, in the order of ranks; every rank must have as many."""
        if self._store is None or not len(table):  # MXNet has no empty arrays
            return table
        places = np.zeros((self.ranks, *table.shape), np.float64)
        places[self.rank] = table
        array = mx.nd.array(places, mx.cpu(), places.dtype)
        self.sum(array, "rows")
        return array.asnumpy().reshape(-1, table.shape[1])

    def _largest(self, values: list[int]) -> list[int]:
        return values if self._hosts is None else self._hosts.largest(values)

    def close(self) -> None:
        """Leave the process group."""
        if self._hosts is not None:
            self._hosts.close()


def _context(execution: Execution, local_rank: int) -> Any:
    count = mx.context.num_gpus()
    if not count and execution.device == "cuda":
        raise BackendError(
            "device is cuda, but MXNet finds no GPU here; use --set device=cpu or see `lockstep doctor`. "
            "GPUs need a package such as mxnet-cu112"
        )
    if not count or execution.device == "cpu":
        return mx.cpu()
    if local_rank >= count:
        raise BackendError(f"local rank {local_rank} has no GPU: there are {count}; launch fewer processes")
    return mx.gpu(local_rank)


def _name(context: Any) -> str:
    return f"CPU, {loading.threads} threads" if context.device_type == "cpu" else f"GPU {context.device_id}"


def devices() -> list[str]:
    """Return the devices MXNet sees."""
    return [*(_name(mx.gpu(index)) for index in range(mx.context.num_gpus())), _name(mx.cpu())]


def launch(processes: int, arguments: list[str], distributed: str) -> int:
    """Run `lockstep <arguments>` in so many processes on this machine; return the exit code."""
    return launch_python(processes, ["-m", "lockstep", *arguments], distributed)


def launch_python(processes: int, arguments: list[str], distributed: str) -> int:
    """Run this Python with these arguments in so many processes that find each other; return the exit code."""
    refuse_horovod(distributed)
    with parameter_server(processes) as (environment, held):
        return launch_ranks(processes, arguments, lambda rank: environment, inherited=[held])


@contextmanager
def parameter_server(workers: int) -> Iterator[tuple[dict[str, str], int]]:
    """Run a scheduler and a server for so many workers of this machine; yield the environment of a worker, and a file
    descriptor that every worker must inherit: scheduler and server end when nobody has it any more.
    """
    port, port_of_hosts = free_ports(2)
    shared = {
        hosts.ADDRESS: f"127.0.0.1:{port_of_hosts}",
        hosts.KEY: secrets.token_hex(),
        "DMLC_PS_ROOT_URI": "127.0.0.1",
        "DMLC_PS_ROOT_PORT": str(port),
        "DMLC_NODE_HOST": "127.0.0.1",  # not on the network: a server carries out what it is sent
        "DMLC_NUM_WORKER": str(workers),
        "DMLC_NUM_SERVER": "1",
        "OMP_NUM_THREADS": loading.chosen or str(max(cores() // workers, 1)),
    }
    heard, held = os.pipe()
    helpers: list[subprocess.Popen[bytes]] = []
    try:
        for role in ("scheduler", "server"):
            environment = os.environ | shared | {"DMLC_ROLE": role}
            command = [sys.executable, "-c", _HELPER, str(heard)]
            helpers.append(subprocess.Popen(command, env=environment, pass_fds=[heard], start_new_session=True))
        os.close(heard)
        yield shared | {"DMLC_ROLE": "worker"}, held
    finally:
        os.close(held)
        for helper in helpers:
            helper.terminate()
        for helper in helpers:
            helper.wait()


_HELPER = """
import os, sys, threading
threading.Thread(target=lambda: (os.read(int(sys.argv[1]), 1), os._exit(0)), daemon=True).start()
import mxnet
"""
"""What schedulers and servers run: MXNet is one of them when it is imported, and does not come back from it."""
