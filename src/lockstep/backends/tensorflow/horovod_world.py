"""Horovod, if it is installed: NVIDIA's code uses it for several GPUs."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from lockstep.backends.shared.horovod import join_horovod
from lockstep.backends.tensorflow.world import TensorflowWorld
from lockstep.recipes import Execution
from lockstep.system.errors import BackendError

try:
    import horovod.tensorflow as hvd
except ImportError as error:
    raise BackendError(
        f"distributed is horovod, which is not installed here: {error}. It needs an older"
        " TensorFlow: `make tensorflow-horovod` makes .venv-tensorflow-horovod for it"
    ) from None


class HorovodWorld(TensorflowWorld):
    """This process: one of those of `horovodrun` or `lockstep launch --distributed horovod`, or a
    single one."""

    def __init__(self, execution: Execution) -> None:
        join_horovod(hvd)
        super().__init__(execution)
        self.rank = hvd.rank()
        self.ranks = hvd.size()
        self._step = ""
        self._sums = 0

    def run(self, step: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function in which `sum` may be called."""
        # A sum must have the same name on all ranks, no matter how often each of them traces the
        # function.
        self._step = step.__name__
        self._sums = 0
        return step(*arguments)

    def sum(self, tensors: Sequence[Any]) -> list[Any]:
        """Return the sums over all ranks."""
        if self.ranks == 1:  # XLA may compile this
            return list(tensors)
        self._sums += 1
        return hvd.grouped_allreduce(
            list(tensors), op=hvd.Sum, name=f"sum.{self._step}.{self._sums}"
        )

    def _largest(self, values: list[int]) -> list[int]:
        with self.explain_errors(), tf.device("CPU:0"):
            largest = hvd.allreduce(
                tf.constant(values, tf.int64), op=hvd.Max, name=f"question.{len(values)}"
            )
            return largest.numpy().tolist()

    def close(self) -> None:
        """Leave the process group."""
        hvd.shutdown()
