"""Write a stream of samples, from tables, lists and programs, as WebDataset's tars. Memory does not
grow with the number. An interrupted pack resumes after the last whole image."""

import io
import operator
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from lockstep.data.containers import Appended, Damage, Sample, unfinish
from lockstep.data.containers.places import Places
from lockstep.data.containers.webdataset import Writer
from lockstep.data.decoding.decode import check_ends
from lockstep.data.images import Quarantined, read_file
from lockstep.data.packing.faults import Faults
from lockstep.data.packing.pack_writer import is_whole, note_lengths
from lockstep.data.packing.splits import SHARD_BYTES, check_class_names, find_kind, shard_name
from lockstep.data.packing.target import write_classes
from lockstep.data.sources import CACHE, CLASSES, UNFINISHED, read_lengths
from lockstep.system.errors import DataError
from lockstep.system.regular_files import explain_failure

_FORMATS = dict.fromkeys(("1", "L", "LA", "P", "RGB", "RGBA", "I;16"), "PNG")
_FORMATS |= dict.fromkeys(("CMYK", "YCbCr", "LAB", "I"), "TIFF")
"""The format that holds an image without loss, by Pillow's mode."""
LeftOut = Callable[[str, Quarantined], None]


class Row(NamedTuple):
    """A sample to write."""

    split: str
    """`train`, `val`, `test`, or empty if there are no splits."""
    label: Any
    """Its class; before classes are numbered, its name; None for an image that is not written."""
    image: Any
    """What `encode_image` takes."""
    place: str
    """How messages name it."""


def encode_image(image: Any) -> bytes:
    """Return encoded bytes, or the bytes of a file, unchanged; an array or a Pillow image
    without loss. Raises `ValueError` with the reason if it is none of them."""
    if isinstance(image, bytes | bytearray | memoryview):
        return bytes(image)
    if isinstance(image, str | os.PathLike):
        try:
            return read_file(os.fspath(image))[0]
        except OSError as error:
            raise ValueError(f"{image} cannot be read: {explain_failure(error)}") from None
    if not isinstance(image, Image.Image):
        image = Image.fromarray(_check_array(image))
    format = _FORMATS.get(image.mode)
    if format is None:
        raise ValueError(f"an image of mode {image.mode} cannot be stored; convert it to RGB")
    memory = io.BytesIO()
    # Without the orientation in its EXIF data, a photo would lie on its side.
    image.save(memory, format, exif=image.getexif())
    return memory.getvalue()


def _check_array(image: Any) -> np.ndarray:
    if not hasattr(image, "__array__"):
        raise ValueError(
            f"an image is of type {type(image).__name__}; expected bytes, a path, a uint8"
            " array, or a Pillow image"
        )
    array = np.asarray(image)
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[:, :, 0]
    if array.dtype != np.uint8 or array.shape[2:] not in ((), (3,)) or array.ndim < 2:
        raise ValueError(
            f"an array has the shape {array.shape} and type {array.dtype}; expected uint8 [height,"
            " width, 3] or [height, width]. Leave out a transform that makes tensors"
        )
    return np.ascontiguousarray(array)


def read_label(label: Any) -> str | int:
    """Return a label as a name or a number. Raises `ValueError` if it is missing or neither."""
    if isinstance(label, str) and label.strip():
        return label.strip()
    if isinstance(label, float | np.floating) and label == label // 1:
        label = int(label)
    with suppress(TypeError):
        if not isinstance(label, bool) and operator.index(label) >= 0:
            return operator.index(label)
    raise ValueError(f"the label is {label!r:.50}; expected a name, or a number of at least 0")


def number_label(label: str | int, positions: Mapping[str, int]) -> int:
    """Return the class of a label: the position of a name, or the number itself. Raises
    `ValueError` if there is no such class."""
    number = positions.get(label, len(positions)) if isinstance(label, str) else label
    if number < len(positions):
        return number
    raise ValueError(
        f"the label is {label!r:.100}, which is not one of the {len(positions)} classes"
    )


def write_rows(
    rows: Iterable[Row],
    target: Path,
    classes: Sequence[str],
    advance: Callable[[int], None],
    left_out: LeftOut,
) -> dict[str, int]:
    """Write samples to a folder that `lock_target` holds, and the list of classes; return counts of
    images by split. What an interrupted call has written of the same samples stays. `left_out` is
    called with each image that cannot be used. `classes` may grow with the samples.
    """
    (target / UNFINISHED).touch()
    writers: dict[str, _SplitWriter] = {}
    with ExitStack() as stack:
        for row in rows:
            if row.label is None:
                continue
            if row.split not in writers:
                writers[row.split] = _SplitWriter(target, row.split, stack)
            reason = writers[row.split].add(row, classes)
            if reason is not None:
                left_out(row.split, Quarantined(row.place, reason))
            advance(1)
        for writer in writers.values():
            writer.finish()
    counts = {name or "images": writer.count for name, writer in writers.items()}
    if not sum(counts.values()):
        raise DataError(f"no image can be used, so {target} holds none")
    check_class_names(classes, "webdataset")
    for folder in {target, *(writer.folder for writer in writers.values())}:
        write_classes(folder / CLASSES, classes)
    return counts


class _SplitWriter:
    """Writes the samples of a split to one tar after another."""

    def __init__(self, target: Path, split: str, stack: ExitStack) -> None:
        self.folder = target / {"test": split}.get(split, "")
        self.count = 0
        """The number of images that are written."""
        self._target = target
        self._stack = stack
        self._prefix = split.removeprefix("test")
        self._seen = 0
        self._shards = 0
        self._tar: Appended | None = None
        self._skipped = 0
        """This many of the next images are in the tar already."""
        self._faults = Faults(target / CACHE / f"pack.{split or 'images'}.faults")
        self._faults.load()
        self.folder.mkdir(exist_ok=True)

    def add(self, row: Row, classes: Sequence[str]) -> str | None:
        """Write a sample, unless it was written before; return why it cannot be used, or None."""
        number = self._seen
        self._seen += 1
        reason = self._faults.find(number)
        if reason is None and self._skipped:
            self._skipped -= 1
        elif reason is None:
            reason = self._write(number, row, classes)
        self.count += reason is None
        return reason

    def _write(self, number: int, row: Row, classes: Sequence[str]) -> str | None:
        try:
            data = encode_image(row.image)
            check_ends(data)
        except ValueError as error:
            self._faults.add(number, str(error))
            return str(error)
        if self._tar is not None and self._tar.length >= SHARD_BYTES:
            self.finish()
        if self._tar is None:
            self._open()
        if self._tar is None or self._skipped:  # it was written before
            self._skipped -= 1
            return None
        name = f"{number:08d}.{find_kind(data)}"
        sample = Sample(number, name, row.label, classes[row.label], data, 0, 0)
        self._tar.extend([self._tar.record(sample)])
        return None

    def _open(self) -> None:
        """Open the next tar, and count what an interrupted call has written to it."""
        path = self.folder / shard_name("webdataset", self._prefix, self._shards, 0)
        self._shards += 1
        notes = read_lengths(self._target).get(str(path.relative_to(self._target)))
        if is_whole(self._target, notes):
            ends = list(Writer.scan_ends(Places(path)))
            if not any(isinstance(end, Damage) for end in ends):
                self._skipped = len(ends)
                return
        if path.exists():
            unfinish(path)
        self._tar = self._stack.enter_context(Writer(path))
        self._skipped = self._tar.written

    def finish(self) -> None:
        """Finish the tar that is being written."""
        if self._tar is not None:
            note_lengths(self._target, {self._tar.path: self._tar.length})
            self._tar.finish()
            self._tar = None
