"""What the tests of runs share: stopping a run, and reading what it wrote."""

import os
import signal
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tensorboardX.proto.event_pb2 import Event as TensorBoardEvent

import lockstep
from lockstep.models.state import State
from lockstep.recipes import Execution, Recipe
from lockstep.system.errors import Interrupted
from lockstep.system.event_log import read_log
from lockstep.weights import checkpoint

Event = dict[str, Any]
EXECUTION = Execution(log_every_steps=2, save_every_steps=3)
STEPS = 14
"""The steps of the tiny recipe on the textures: 60 images, 8 per step, 2 epochs."""


def stop_when(
    condition: Callable[[Event], bool], number: signal.Signals = signal.SIGTERM
) -> Callable[[Event], None]:
    """Return a listener that sends this process a signal at the first matching event."""
    sent = []

    def listener(event: Event) -> None:
        if not sent and condition(event):
            sent.append(event)
            os.kill(os.getpid(), number)

    return listener


def stop_at(
    kind: str, step: int = 0, number: signal.Signals = signal.SIGTERM
) -> Callable[[Event], None]:
    """Return a listener that sends this process a signal at the first event of a kind, from a step
    on."""
    return stop_when(
        lambda event: event["kind"] == kind and event.get("step", step) >= step, number
    )


def is_evaluating(event: Event) -> bool:
    """Return whether an event reports the progress of an evaluation."""
    return bool(event["kind"] == "progress" and event["what"].startswith("evaluating"))


def train_until(
    listener: Callable[[Event], None], recipe: Recipe | None, data: Path, run: Path, **options: Any
) -> Interrupted:
    """Train until the listener stops the run, and return the error."""
    with pytest.raises(Interrupted) as stopped:
        lockstep.train(recipe, data, run, listener=listener, **options)
    return stopped.value


def read_entries(run: Path, kind: str) -> list[Event]:
    """Return the log's entries of a kind."""
    return [dict(entry) for entry in read_log(run / "log.jsonl") if entry["kind"] == kind]


def read_losses(run: Path) -> list[float]:
    """Return the losses of all logged steps."""
    losses = []
    for entry in read_entries(run, "train"):
        losses += entry["losses"]
    return losses


def list_evaluations(run: Path) -> list[int]:
    """Return the steps of the log's evaluations."""
    return [entry["step"] for entry in read_entries(run, "evaluate")]


def read_notes(events: list[Event]) -> list[str]:
    """Return the notes and details of the first start among events."""
    begun = next(event for event in events if event["kind"] == "start")
    return [*begun["notes"], *begun["details"]]


def newest_step(run: Path) -> int:
    """Return the step of a run's newest checkpoint."""
    return checkpoint.steps(run / "checkpoints")[-1]


def read_state(run: Path, step: int | None = None) -> State:
    """Return the state of a run's checkpoint, by default the newest one."""
    step = newest_step(run) if step is None else step
    return checkpoint.load(checkpoint.checkpoint_path(run / "checkpoints", step))[0]


def copy_bytes(arrays: Mapping[str, np.ndarray]) -> dict[str, bytes]:
    """Return the bytes of arrays, to compare them."""
    return {name: value.tobytes() for name, value in arrays.items()}


def find_same_parts(run: Path, other: Path) -> list[str]:
    """Return which parts of the newest states of two runs are the same, bit for bit."""
    states = (read_state(run), read_state(other))
    same = []
    for part in ("tensors", "momentum", "ema"):
        ours, theirs = (copy_bytes(getattr(state, part)) for state in states)
        if ours == theirs:
            same.append(part)
    return same


def assert_same_run(run: Path, other: Path) -> None:
    """Assert that two runs of the tiny recipe have the same losses and the same last state."""
    assert read_losses(run) == read_losses(other)
    assert len(read_losses(run)) == STEPS
    assert (newest_step(run), newest_step(other)) == (STEPS, STEPS)
    assert find_same_parts(run, other) == ["tensors", "momentum", "ema"]


def read_outcome(run: Path) -> tuple[list[list[Any]], dict[str, bytes]]:
    """Return every logged loss and score of a run, and its last weights."""
    scores = [
        [entry.get(key) for key in ("kind", "step", "loss", "top1_percent")]
        for entry in read_log(run / "log.jsonl")
    ]
    return scores, copy_bytes(read_state(run).tensors)


def tensorboard_events(folder: Path) -> Iterator[TensorBoardEvent]:
    """Yield TensorBoard's events. A frame has a length, a checksum, an event and a checksum."""
    for file in sorted((folder / "tensorboard").iterdir()):
        data = file.read_bytes()
        while data:
            (length,) = struct.unpack_from("<Q", data)
            yield TensorBoardEvent.FromString(data[12 : 12 + length])
            data = data[16 + length :]


def tensorboard_figures(folder: Path) -> dict[tuple[str, int], float]:
    """Return the values of TensorBoard's events, by tag and step."""
    figures = {}
    for event in tensorboard_events(folder):
        for value in event.summary.value:
            figures[value.tag, event.step] = value.simple_value
    return figures


def train_and_listen(
    recipe: str | Recipe | None, data: Path, run: Path, **options: Any
) -> list[Event]:
    """Train, and return the events."""
    events: list[Event] = []
    lockstep.train(recipe, data, run, listener=events.append, **options)
    return events
