"""The processes that train together through `paddle.distributed`, or a single process."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import paddle
import paddle.distributed as dist

from lockstep.backends import HostQuestions
from lockstep.backends.paddle import framework_import
from lockstep.backends.shared.bound_sockets import confine_sockets, refuse_open_sockets
from lockstep.backends.shared.device import choose_gpu
from lockstep.backends.shared.import_side_effects import silence_output
from lockstep.launch.nodes import find_interface
from lockstep.recipes import Execution
from lockstep.system.errors import BackendError
from lockstep.system.ranks import count_ranks, make_rank_error
from lockstep.system.text import format_count

Tensor = Any
"""A `paddle.Tensor`, or a `Value` of a program: Paddle's annotations do not tell them apart."""


class PaddleWorld(HostQuestions):
    """This process: one of those of `lockstep launch` or `python -m paddle.distributed.launch`, or
    a single one."""

    def __init__(self, execution: Execution) -> None:
        self.rank = int(os.environ.get("RANK", "0"))
        self.ranks = count_ranks()
        self.on_gpu = _choose_device(execution, int(os.environ.get("LOCAL_RANK", "0")))
        self.device = _device_name(paddle.get_device())
        self._host_group: Any = None
        if self.ranks > 1:
            if "PADDLE_TRAINER_ENDPOINTS" not in os.environ:
                raise BackendError(
                    "several ranks need PADDLE_TRAINER_ENDPOINTS with their addresses; start them"
                    " with `lockstep launch` or `python -m paddle.distributed.launch`"
                )
            if not self.on_gpu:
                os.environ["PADDLE_DISTRI_BACKEND"] = "gloo"
            _choose_interface()
            # Paddle's store binds to all interfaces, even if PADDLE_MASTER names one
            confine_sockets()
            with self.explain_errors(), silence_output():
                dist.init_parallel_env()
                # Exchanges between hosts must not wait for the work of a GPU.
                self._host_group = dist.new_group(backend="gloo") if self.on_gpu else None
            refuse_open_sockets()

    @contextmanager
    def explain_errors(self) -> Iterator[None]:
        """Turn the error of a failed exchange into one that says that another rank has ended."""
        try:
            yield
        except (RuntimeError, ValueError, OSError) as error:  # errors of gloo and the store
            if self.ranks == 1:
                raise
            reason = (str(error).strip() or type(error).__name__).splitlines()[-1]
            raise make_rank_error(reason) from error

    def sum(self, tensor: Tensor, megabytes: int = 0) -> Tensor:
        """Add up a tensor of one axis over all ranks, in place, and return it.

        Each exchange has this many `megabytes`; 0: one exchange for the whole tensor.
        """
        if self.ranks > 1:
            length = len(tensor)
            size = megabytes * 2**20 // tensor.element_size() or length
            with self.explain_errors():
                for start in range(0, length, size):
                    dist.all_reduce(tensor if size >= length else tensor[start : start + size])
        return tensor

    def share(self, tensor: Tensor) -> Tensor:
        """Copy the tensor of rank 0 to every rank, in place, and return it."""
        if self.ranks > 1:
            with self.explain_errors():
                dist.broadcast(tensor, src=0)
        return tensor

    def _largest(self, values: list[int]) -> list[int]:
        if self.ranks == 1:
            return values
        tensor = paddle.to_tensor(values, dtype="int64", place=paddle.CPUPlace())
        with self.explain_errors():
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self._host_group)
        return [int(value) for value in tensor.numpy()]

    def close(self) -> None:
        """Leave the process group."""
        if self.ranks > 1:
            dist.destroy_process_group()


def _choose_interface() -> None:
    """Make gloo use the network interface between the ranks, unless the user has chosen one.

    By default gloo takes the address of the host's name, which is loopback in /etc/hosts of many
    systems.
    """
    name = "GLOO_SOCKET_IFNAME"
    places = os.environ["PADDLE_TRAINER_ENDPOINTS"].split(",")
    interface = find_interface(place.rpartition(":")[0] for place in places)
    if name not in os.environ and interface is not None:
        os.environ[name] = interface


def _choose_device(execution: Execution, local_rank: int) -> bool:
    """Choose a GPU or the CPU for this process; return whether it is a GPU."""
    count = paddle.device.cuda.device_count() if paddle.is_compiled_with_cuda() else 0
    advice = "For GPUs, install the package paddlepaddle-gpu"
    gpu = choose_gpu(execution, "Paddle", gpus=count, local_rank=local_rank, advice=advice)
    paddle.set_device("cpu" if gpu is None else f"gpu:{gpu}")
    return gpu is not None


def devices() -> list[str]:
    """Return the devices that Paddle sees."""
    gpus = paddle.device.cuda.device_count() if paddle.is_compiled_with_cuda() else 0
    return [*(_device_name(f"gpu:{index}") for index in range(gpus)), _device_name("cpu")]


def _device_name(device: str) -> str:
    if device == "cpu":
        return f"CPU, {format_count(framework_import.threads, 'thread')}"
    return paddle.device.cuda.get_device_name(int(device.removeprefix("gpu:")))
