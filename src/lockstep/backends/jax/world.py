"""The processes that train together: a single process with one device, the base of the others."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np

from lockstep.backends import HostQuestions
from lockstep.backends.jax.compile_cache import keep_compiled
from lockstep.backends.shared.device import choose_gpu
from lockstep.recipes import Execution
from lockstep.system.machine import cores
from lockstep.system.text import format_count

THREADS = "NPROC"
"""Environment variable: the number of XLA's threads on a CPU."""


class JaxWorld(HostQuestions):
    """A single process, and the base of worlds with several processes."""

    rank = 0
    ranks = 1

    def __init__(self, execution: Execution) -> None:
        self.jax_devices = _choose_devices(execution, int(os.environ.get("LOCAL_RANK", "0")))
        """The devices of this process."""
        self.on_gpu = self.jax_devices[0].platform != "cpu"
        self.device = _name_device(self.jax_devices[0])
        if len(self.jax_devices) > 1:
            self.device = f"{len(self.jax_devices)} devices: {self.device}"
        keep_compiled()

    def jit(
        self,
        function: Callable[..., Any],
        donate_argnums: int | tuple[int, ...] = (),
        compiler_options: Mapping[str, Any] | None = None,
    ) -> Callable[..., Any]:
        """Return a compiled function in which `sum` and `gather` may be called. Every rank must
        call it. Its arguments are this rank's, from `place` or `replicate` or earlier results."""
        return jax.jit(
            function,
            donate_argnums=donate_argnums,
            compiler_options=None if compiler_options is None else dict(compiler_options),
        )

    def sum(self, arrays: Sequence[Any], sent: Any = None) -> list[Any]:
        """Return the sums over all ranks, within `jit`. They are sent between ranks in the dtype
        `sent`; None: as they are."""
        return list(arrays)

    def gather(self, table: Any) -> Any:
        """Return the rows of all ranks, in order of ranks, within `jit`. All ranks must have the
        same number of rows."""
        return table

    def place(self, arrays: Any) -> Any:
        """Return this rank's arrays on the device. They share no memory with those on the host."""
        return jax.device_put(jax.tree.map(np.array, arrays), self.jax_devices[0])

    def replicate(self, arrays: Any) -> Any:
        """Return arrays on the device, which are alike on all ranks. They share no memory with
        those on the host."""
        return self.place(arrays)

    def take_local(self, arrays: Any) -> Any:
        """Return arrays that `jit` took or returned for computations of this process alone."""
        return arrays

    @contextmanager
    def explain_errors(self) -> Iterator[None]:
        """Turn the error of a failed operation into one that says that another rank has ended, if
        there are other ranks."""
        yield

    def _largest(self, values: list[int]) -> list[int]:
        return values

    def close(self) -> None:
        """Do nothing."""


def _choose_devices(execution: Execution, local_rank: int) -> list[Any]:
    """Return the devices that this process computes on: one GPU, all TPUs of this process, or its
    CPU, which counts as several devices with `--xla_force_host_platform_device_count`."""
    gpus = _list_accelerators()
    is_tpu = any(device.platform == "tpu" for device in gpus)
    if is_tpu or jax.process_count() > 1:  # a rank sees only its own GPU
        local_rank = 0
    advice = "JAX computes on GPUs with the extra jax-cuda"
    gpu = choose_gpu(execution, "JAX", gpus=len(gpus), local_rank=local_rank, advice=advice)
    if gpu is None:
        return jax.local_devices(backend="cpu")
    return gpus if is_tpu else [gpus[gpu]]


def _list_accelerators() -> list[Any]:
    """Return the GPUs or TPUs of this process."""
    return [device for device in jax.local_devices() if device.platform != "cpu"]


def _name_device(device: Any) -> str:
    if device.platform != "cpu":
        return str(device.device_kind)
    return f"CPU, {format_count(int(os.environ.get(THREADS, cores())), 'thread')}"


def devices() -> list[str]:
    """Return the devices that JAX sees."""
    cpu = jax.local_devices(backend="cpu")[0]
    return [_name_device(device) for device in (*_list_accelerators(), cpu)]
