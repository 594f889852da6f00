"""Functions of tensors as Paddle programs, run by its executor; on a CPU with oneDNN's kernels.

A program is Paddle's compiled form. It is built once for each shape of its inputs, and is faster
than single operations. oneDNN is chosen for a whole program when it first runs. Operations outside
of programs never use oneDNN.
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
    """A function of named tensors, as programs: one program for every set of shapes that it is
    called with.

    With `keeps_one`, the program of other shapes is forgotten, and built again when it is needed.
    """

    def __init__(self, function: Function, *, onednn: bool, keeps_one: bool = False) -> None:
        self._function = function
        self._onednn = onednn
        self._keeps_one = keeps_one
        self._programs: dict[Any, Callable[[Any], list[Any]]] = {}
        self._results: dict[Any, list[Tensor]] = {}

    def __call__(self, inputs: Mapping[str, Tensor]) -> list[Tensor]:
        """Return the result of the function. It has no gradient. On a GPU the work is only
        enqueued.

        The next call with the same shapes overwrites the result.
        """
        # A program would read a transposed tensor as it was before the transpose.
        whole = {name: tensor.contiguous() for name, tensor in inputs.items()}
        fed = {name: tensor.value().get_tensor() for name, tensor in whole.items()}
        key = tuple((name, *tensor.shape()) for name, tensor in fed.items())
        is_new = key not in self._programs
        if is_new and self._keeps_one:
            self._programs.clear()
            self._results.clear()
        with static_mode():
            program = self._built(inputs) if is_new else self._programs[key]
            with _kernels_of_onednn(self._onednn and is_new):
                results = program(fed)
        # Stored only after the first run. If that run fails, the program would otherwise be built
        # in its second run, without oneDNN's kernels.
        self._programs[key] = program
        return self._wrap_results(key, results)

    def _wrap_results(self, key: Any, results: list[Any]) -> list[Tensor]:
        """Return what a program computed. The tensors are made once: of each that is made, Paddle
        3.3.1 keeps 72 bytes."""
        if key not in self._results:
            self._results[key] = [paddle.Tensor(result) for result in results]
        else:
            for tensor, result in zip(self._results[key], results, strict=True):
                tensor.value().get_tensor()._share_data_with(result)
        return list(self._results[key])

    def _built(self, inputs: Mapping[str, Tensor]) -> Callable[[Any], list[Any]]:
        program = static.Program()
        with static.program_guard(program), warnings.catch_warnings():
            # From Paddle's own gradients.
            warnings.filterwarnings("ignore", "Tensor do not have 'place'")
            values = {}
            for name, tensor in inputs.items():
                values[name] = static.data(name, tensor.shape, tensor.dtype)
                values[name].stop_gradient = tensor.stop_gradient
            outputs = list(self._function(values))
        # With a separate executor: a common one keeps eight programs and would build others again,
        # without oneDNN's kernels.
        executor = static.Executor()
        scope = static.Scope()
        return lambda fed: executor.run(
            program, feed=fed, fetch_list=outputs, scope=scope, return_numpy=False
        )


@contextmanager
def static_mode() -> Iterator[None]:
    """Make operations build programs instead of computing."""
    paddle.enable_static()
    try:
        yield
    finally:
        paddle.disable_static()


@contextmanager
def _kernels_of_onednn(wanted: bool) -> Iterator[None]:
    """Make a program that runs for the first time use oneDNN's kernels."""
    if not wanted:
        yield
        return
    before = paddle.get_flags("FLAGS_use_mkldnn")
    paddle.set_flags({"FLAGS_use_mkldnn": True})
    try:
        yield
    finally:
        paddle.set_flags(before)
