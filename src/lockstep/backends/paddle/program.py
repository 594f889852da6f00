"""Functions of tensors as Paddle programs, run by its executor; on a CPU with oneDNN's kernels.

A program is Paddle's compiled form: built once for a shape of its inputs, and faster than the same operations one by one.
oneDNN is chosen for a whole program, when it is first run; operations outside of programs never use it.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import paddle
from paddle import static

from lockstep.backends.paddle.world import Tensor

Tensors = dict[str, Tensor]
Outputs = Sequence[Tensor]
Function = Callable[[Tensors], Outputs]


class Compiled:
    """A function of tensors by name, as programs: one for every set of shapes it is called with."""

    def __init__(self, function: Function, *, onednn: bool) -> None:
        self._function, self._onednn = function, onednn
        self._programs: dict[Any, Callable[[Any], list[Any]]] = {}

    def __call__(self, inputs: Mapping[str, Tensor]) -> list[Tensor]:
        """Return what the function returns. No gradient flows through; on a GPU it is only enqueued.

        The next call with the same shapes writes over it.
        """
        # A program takes a transposed tensor for what it was before.
        whole = {name: tensor.contiguous() for name, tensor in inputs.items()}
        fed = {name: tensor.value().get_tensor() for name, tensor in whole.items()}
        key = tuple((name, *tensor.shape()) for name, tensor in fed.items())
        is_new = key not in self._programs
        with static_mode():
            program = self._built(inputs) if is_new else self._programs[key]
            with _kernels_of_onednn(self._onednn and is_new):
                found = program(fed)
        # Not before: one whose first run fails may be built at its second, without oneDNN's kernels.
        self._programs[key] = program
        return [paddle.Tensor(each) for each in found]

    def _built(self, inputs: Mapping[str, Tensor]) -> Callable[[Any], list[Any]]:
        program = static.Program()
        with static.program_guard(program), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Tensor do not have 'place'")  # of Paddle's own gradients
            values = {}
            for name, tensor in inputs.items():
                values[name] = static.data(name, tensor.shape, tensor.dtype)
                values[name].stop_gradient = tensor.stop_gradient
            outputs = list(self._function(values))
        # With an executor of its own: one for all keeps eight, and would build the others again, without oneDNN's kernels.
        executor, scope = static.Executor(), static.Scope()
        return lambda fed: executor.run(program, feed=fed, fetch_list=outputs, scope=scope, return_numpy=False)


@contextmanager
def static_mode() -> Iterator[None]:
    """Have operations build programs instead of computing."""
    paddle.enable_static()
    try:
        yield
    finally:
        paddle.disable_static()


@contextmanager
def _kernels_of_onednn(wanted: bool) -> Iterator[None]:
    """Have a program that is run for the first time take oneDNN's kernels."""
    if not wanted:
        yield
        return
    before = paddle.get_flags("FLAGS_use_mkldnn")
    paddle.set_flags({"FLAGS_use_mkldnn": True})
    try:
        yield
    finally:
        paddle.set_flags(before)
