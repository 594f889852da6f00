"""How a framework is made to use one thread, for those whose number of threads tests must set."""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from lockstep import backends


@contextmanager
def _limit_jax() -> Iterator[None]:
    os.environ["NPROC"] = "1"  # read when JAX first computes
    yield


@contextmanager
def _limit_paddle() -> Iterator[None]:
    backends.load("paddle")
    import paddle

    paddle.base.core.set_num_threads(1)
    yield


@contextmanager
def _limit_tensorflow() -> Iterator[None]:
    os.environ["TF_NUM_INTRAOP_THREADS"] = "1"  # read when TensorFlow first computes
    yield


@contextmanager
def _limit_torch() -> Iterator[None]:
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


ONE_THREAD: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "jax": _limit_jax,
    "paddle": _limit_paddle,
    "tensorflow": _limit_tensorflow,
    "torch": _limit_torch,
}
