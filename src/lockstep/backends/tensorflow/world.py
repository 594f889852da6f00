"""The processes that train together: MultiWorkerMirroredStrategy, Horovod, or a single process."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from lockstep.backends import HostQuestions
from lockstep.backends.shared.bound_sockets import confine_sockets, refuse_open_sockets
from lockstep.backends.shared.device import choose_gpu
from lockstep.backends.shared.import_side_effects import keep_sigterm
from lockstep.recipes import Execution
from lockstep.system.errors import BackendError
from lockstep.system.machine import cores
from lockstep.system.ranks import make_rank_error
from lockstep.system.text import format_count

_QUESTIONS = 1 << 20
"""Group key of exchanges between hosts. It is far from the keys of the strategy, which are counted
from 0."""


class TensorflowWorld(HostQuestions):
    """A single process, and the base of worlds with several processes."""

    rank = 0
    ranks = 1

    def __init__(self, execution: Execution) -> None:
        self.on_gpu = _choose_device(execution, int(os.environ.get("LOCAL_RANK", "0")))
        self.device = devices()[0]

    def run(self, step: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function in which `sum` may be called."""
        return step(*arguments)

    def sum(self, tensors: Sequence[Any]) -> list[Any]:
        """Return the sums over all ranks, which are differentiable. Every rank must call it, within
        `run`."""
        return list(tensors)

    @contextmanager
    def explain_errors(self) -> Iterator[None]:
        """Turn the error of a failed operation into one that says that another rank has ended, if
        there are other ranks."""
        try:
            yield
        except tf.errors.ResourceExhaustedError:
            raise
        except tf.errors.OpError as error:
            if self.ranks == 1:
                raise
            reason = str(error).splitlines()[0]
            raise make_rank_error(reason) from error

    def _largest(self, values: list[int]) -> list[int]:
        return values

    def close(self) -> None:
        """Do nothing: TensorFlow leaves the process group when the process ends."""


class Workers(TensorflowWorld):
    """This process as one of the workers in TF_CONFIG, with MultiWorkerMirroredStrategy."""

    def __init__(self, execution: Execution) -> None:
        super().__init__(execution)
        if not os.environ.get("TF_CONFIG"):
            raise BackendError(
                "several ranks need TF_CONFIG with their addresses; start them with `lockstep"
                " launch`"
            )
        self.rank = int(os.environ["RANK"])
        self.ranks = int(os.environ["WORLD_SIZE"])
        self._questions = 0
        kind = tf.distribute.experimental.CommunicationImplementation
        options = tf.distribute.experimental.CommunicationOptions(
            implementation=kind.NCCL if self.on_gpu else kind.RING
        )
        self._packs = tf.distribute.experimental.CommunicationOptions(
            bytes_per_pack=execution.all_reduce_mb * 2**20
        )
        # TensorFlow's server binds to all interfaces, even if TF_CONFIG names one
        confine_sockets()
        with keep_sigterm():  # workers replace the handler when they meet
            self._strategy = tf.distribute.MultiWorkerMirroredStrategy(
                communication_options=options
            )
        refuse_open_sockets()

    def run(self, step: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function in which `sum` may be called."""
        return self._strategy.run(step, arguments)

    def sum(self, tensors: Sequence[Any]) -> list[Any]:
        """Return the sums over all ranks."""
        # The strategy reads the device of its inputs. Tensors from outside of `run` do not have a
        # device yet.
        placed = [tf.identity(tensor) for tensor in tensors]
        # It does not pack tensors of unknown shape, and would warn about them.
        packs = self._packs if all(tensor.shape.is_fully_defined() for tensor in placed) else None
        return tf.distribute.get_replica_context().all_reduce(
            tf.distribute.ReduceOp.SUM, placed, packs
        )

    def _largest(self, values: list[int]) -> list[int]:
        self._questions += 1
        with self.explain_errors(), tf.device(f"/job:worker/task:{self.rank}/device:CPU:0"):
            largest = tf.raw_ops.CollectiveReduceV2(
                input=tf.constant(values, tf.int64),
                group_size=self.ranks,
                group_key=_QUESTIONS,
                instance_key=self._questions,
                ordering_token=[],
                merge_op="Max",
                final_op="Id",
                communication_hint="RING",
            )
            return largest.numpy().tolist()


def _choose_device(execution: Execution, local_rank: int) -> bool:
    """Make one GPU or none visible to TensorFlow; return whether it is one."""
    gpus = tf.config.list_physical_devices("GPU")
    advice = "With TF_CPP_MIN_LOG_LEVEL=0 TensorFlow prints which library is missing"
    gpu = choose_gpu(execution, "TensorFlow", gpus=len(gpus), local_rank=local_rank, advice=advice)
    if not gpus:
        return False
    try:
        tf.config.set_visible_devices([] if gpu is None else [gpus[gpu]], "GPU")
    except RuntimeError:
        raise BackendError(
            "TensorFlow already uses other devices in this process; use the same devices, or a"
            " separate process"
        ) from None
    return gpu is not None


def devices() -> list[str]:
    """Return the devices that TensorFlow sees."""
    details = tf.config.experimental.get_device_details
    gpus = [
        details(gpu).get("device_name", gpu.name) for gpu in tf.config.get_visible_devices("GPU")
    ]
    threads = int(os.environ.get("TF_NUM_INTRAOP_THREADS", cores()))
    return [*gpus, f"CPU, {format_count(threads, 'thread')}"]
