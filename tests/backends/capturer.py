"""Capturers of steps that note what is called: of CUDA graphs, and for CPUs one that is as strict
as they are."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from lockstep.backends.torch.step_graph import CudaCapturer


class Tape(TorchDispatchMode):
    """The operators that are called within it, with the memory and the numbers that they are called
    with."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Any, Any, Any, Any]] = []
        self._own: dict[int, Any] = {}
        """Storages that were made within it. They are kept, so that no other one gets the same
        number."""
        self._before: dict[int, tuple[Any, Any]] = {}
        """Storages that were there before, with copies of what they held."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        for storage in storages((args, kwargs)):
            if storage._cdata not in self._own and storage._cdata not in self._before:
                self._before[storage._cdata] = storage, storage.clone()
        # The kernels of the update change memory that is no argument. Nothing of it is needed while
        # a step is captured.
        is_update = function.namespace == "lockstep" and not function._schema.returns
        result = None if is_update else function(*args, **kwargs)
        self._own |= {
            storage._cdata: storage
            for storage in storages(result)
            if storage._cdata not in self._before
        }
        self._calls.append((function, args, kwargs, result))
        return result

    def undo(self) -> None:
        """Put back what was there before: capturing computes nothing."""
        for storage, before in self._before.values():
            storage.copy_(before)

    @torch.no_grad()
    def replay(self) -> None:
        """Call the same operators on the same memory, and put their results where they were."""
        with _disable_current_modes():
            for function, args, kwargs, result in self._calls:
                repeated = function(*args, **kwargs)
                for kept, new in zip(tree_leaves(result), tree_leaves(repeated), strict=True):
                    if (
                        isinstance(kept, Tensor)
                        and kept.untyped_storage()._cdata != new.untyped_storage()._cdata
                    ):
                        kept.copy_(new)


def storages(values: Any) -> list[Any]:
    return [value.untyped_storage() for value in tree_leaves(values) if isinstance(value, Tensor)]


class TapeCapturer:
    """Captures on tapes. It implements `lockstep.backends.torch.step_graph.Capturer`."""

    def __init__(self) -> None:
        self.events: list[str] = []
        """What was called, in order: "warm-up", "capture", "replay" or "wait"."""

    @contextmanager
    def warming_up(self) -> Iterator[None]:
        self.events.append("warm-up")
        yield

    def capture(self, work: Callable[[], Tensor]) -> tuple[Callable[[], object], Tensor]:
        self.events.append("capture")
        with Tape() as tape:
            result = work()
        tape.undo()

        def replay() -> None:
            self.events.append("replay")
            tape.replay()

        return replay, result

    def wait(self) -> None:
        self.events.append("wait")


class CudaEvents(CudaCapturer):
    """Captures CUDA graphs, and notes what was called."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.events: list[str] = []

    @contextmanager
    def warming_up(self) -> Iterator[None]:
        self.events.append("warm-up")
        with super().warming_up():
            yield

    def capture(self, work: Callable[[], Tensor]) -> tuple[Callable[[], object], Tensor]:
        self.events.append("capture")
        replay, result = super().capture(work)
        return lambda: (self.events.append("replay"), replay()), result

    def wait(self) -> None:
        self.events.append("wait")
        super().wait()


def capturer_on(world: Any) -> Any:
    """Return a capturer for the device of a world. It has `events`."""
    return CudaEvents(world.torch_device) if world.on_gpu else TapeCapturer()
