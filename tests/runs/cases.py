"""Reading what a run wrote for TensorBoard."""

import struct
from collections.abc import Iterator
from pathlib import Path

from tensorboardX.proto.event_pb2 import Event


def events(folder: Path) -> Iterator[Event]:
    """Yield TensorBoard's events. A frame has a length, a checksum, an event and a checksum."""
    for file in sorted((folder / "tensorboard").iterdir()):
        data = file.read_bytes()
        while data:
            (length,) = struct.unpack_from("<Q", data)
            yield Event.FromString(data[12 : 12 + length])
            data = data[16 + length :]


def figures(folder: Path) -> dict[tuple[str, int], float]:
    """Return the values of a run's events, by tag and step."""
    found = [(event.step, value) for event in events(folder) for value in event.summary.value]
    return {(value.tag, step): value.simple_value for step, value in found}
