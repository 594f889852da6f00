"""Images that a loader lends on a GPU, with the calls of CUDA recorded: none runs here."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from lockstep.backends.torch import inputs
from lockstep.backends.torch.inputs import Borrower


class Memory:
    """A tensor on a GPU."""

    def __init__(self, calls: list[str], name: str) -> None:
        self._calls = calls
        self._name = name

    def clone(self) -> "Memory":
        self._calls.append(f"copy {self._name}")
        return Memory(self._calls, f"copy of {self._name}")

    def record_stream(self, stream: Any) -> None:
        self._calls.append(f"{self._name} is read on {stream}")


class Event:
    is_done = False

    def query(self) -> bool:
        return self.is_done


class Stream:
    def __init__(self, calls: list[str], name: str) -> None:
        self._calls = calls
        self._name = name
        self.events: list[Event] = []

    def __str__(self) -> str:
        return self._name

    def record_event(self) -> Event:
        self.events.append(Event())
        return self.events[-1]

    def wait_stream(self, other: "Stream") -> None:
        self._calls.append(f"{self} waits for {other}")


class Images:
    def __init__(self, name: str) -> None:
        self.name = name

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0


def test_memory_is_held_until_copied_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    uploads = Stream(calls, "uploads")
    steps = Stream(calls, "steps")
    lent: list[weakref.ref[Memory]] = []

    @contextmanager
    def on(stream: Stream) -> Iterator[None]:
        calls.append(f"on {stream}")
        yield
        calls.append(f"off {stream}")

    def borrow(images: Images) -> Memory:
        memory = Memory(calls, images.name)
        lent.append(weakref.ref(memory))
        return memory

    monkeypatch.setattr(inputs, "from_dlpack", borrow)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: steps)
    borrower: Any = Borrower(torch.device("cuda"), uploads)  # type: ignore[arg-type]
    borrower.copy(Images("first"))
    assert calls == [
        "on uploads",
        "copy first",
        "off uploads",
        "steps waits for uploads",
        "copy of first is read on steps",
    ]
    borrower.copy(Images("second"))
    assert [memory() is not None for memory in lent] == [True, True]
    uploads.events[0].is_done = True
    borrower.copy(Images("third"))
    assert [memory() is not None for memory in lent] == [False, True, True]
