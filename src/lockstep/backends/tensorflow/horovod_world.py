"""Horovod, the engine of NVIDIA's original, where it is installed."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from lockstep.backends.tensorflow.world import TensorflowWorld, threads_of_a_rank
from lockstep.errors import BackendError
from lockstep.recipes import Execution

try:
    import horovod.tensorflow as hvd
except ImportError as error:
    raise BackendError(
        f"distributed is horovod, which this environment has not: {error}. It needs an older TensorFlow: "
        "`make tensorflow-horovod` makes .venv-tensorflow-horovod for it"
    ) from None


class HorovodWorld(TensorflowWorld):
    """This process among those of `horovodrun` or `lockstep launch --distributed horovod`, or alone."""

    def __init__(self, execution: Execution) -> None:
        hvd.init()
        # Under MPI Horovod alone knows them.
        told = {"RANK": hvd.rank(), "WORLD_SIZE": hvd.size(), "LOCAL_RANK": hvd.local_rank()}
        os.environ.update({name: str(value) for name, value in told.items()})
        super().__init__(execution)
        self.rank, self.ranks = hvd.rank(), hvd.size()
        self._step, self._sums = "", 0

    def run(self, step: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function in which `sum` may be called."""
        # Ranks must name a sum alike, however often each of them traces the function.
        self._step, self._sums = step.__name__, 0
        return step(*arguments)

    def sum(self, tensors: Sequence[Any]) -> list[Any]:
        """Return the sums over all ranks."""
        if self.ranks == 1:  # XLA may compile this
            return list(tensors)
        self._sums += 1
        return hvd.grouped_allreduce(list(tensors), op=hvd.Sum, name=f"sum.{self._step}.{self._sums}")

    def _largest(self, values: list[int]) -> list[int]:
        with self.watched(), tf.device("CPU:0"):
            largest = hvd.allreduce(tf.constant(values, tf.int64), op=hvd.Max, name=f"question.{len(values)}")
            return largest.numpy().tolist()

    def close(self) -> None:
        """Leave the process group."""
        hvd.shutdown()


@contextmanager
def rendezvous(processes: int) -> Iterator[Callable[[int], dict[str, str]]]:
    """Serve the place where so many processes of this machine find each other; yield the environment of a rank."""
    from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
    from horovod.runner.gloo_run import create_run_env_vars, create_slot_env_vars
    from horovod.runner.http.http_server import RendezvousServer

    slots = get_host_assignments(parse_hosts(f"localhost:{processes}"), processes)
    server = RendezvousServer(0)
    port = server.start()
    server.init(slots)
    shared = create_run_env_vars("127.0.0.1", ["lo"], port) | threads_of_a_rank(processes)
    try:
        yield lambda rank: {name: str(value) for name, value in (shared | create_slot_env_vars(slots[rank])).items()}
    finally:
        server.stop()
