"""Write samples that come one after another, from tables, lists and programs, as WebDataset's tars.
Memory does not grow with their number. An interrupted pack resumes after the last finished tar."""

import io
import operator
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from lockstep.data.containers import Sample
from lockstep.data.containers.webdataset import Writer
from lockstep.data.decoding.decode import check_ends
from lockstep.data.images import Quarantined, read_file
from lockstep.data.packing.faults import Faults
from lockstep.data.packing.pack_writer import note_lengths
from lockstep.data.packing.splits import SHARD_BYTES, check_class_names, find_kind, shard_name
from lockstep.data.packing.target import write_classes
from lockstep.data.sources import CACHE, CLASSES, UNFINISHED, read_lengths
from lockstep.system.errors import DataError
from lockstep.system.files import write_json
from lockstep.system.regular_files import TEXT, explain_failure, read_regular
from lockstep.system.strict_json import is_count, is_list_of, parsed

_STATE = "pack.stream.json"
_FORMATS = dict.fromkeys(("1", "L", "LA", "P", "RGB", "RGBA", "I;16"), "PNG")
_FORMATS |= dict.fromkeys(("CMYK", "YCbCr", "LAB", "I"), "TIFF")
"""The format that holds an image without loss, by Pillow's mode."""
LeftOut = Callable[[str, Quarantined], None]


class Row(NamedTuple):
    """A sample to write."""

    split: str
    """`train`, `val`, `test`, or empty if there are no splits."""
    label: int
    image: Any
    """What `encode_image` takes."""
    place: str
    """How messages name it."""


def encode_image(image: Any) -> bytes:
    """Return encoded bytes, or the bytes of a file, unchanged; an array or an image of Pillow
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
            f"an image is of type {type(image).__name__}; expected bytes, a path, an array of"
            " uint8, or an image of Pillow"
        )
    array = np.asarray(image)
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[:, :, 0]
    if array.dtype != np.uint8 or array.shape[2:] not in ((), (3,)) or array.ndim < 2:
        raise ValueError(
            f"an array has the shape {array.shape} and type {array.dtype}; expected uint8 [height,"
            " width, 3] or [height, width], with the channels last"
        )
    return np.ascontiguousarray(array)


def read_label(label: Any) -> str | int:
    """Return a label as a name or a number. Raises `ValueError` if it is missing or neither."""
    if isinstance(label, str) and label.strip():
        return label.strip()
    if isinstance(label, float | np.floating) and label == label // 1:
        label = int(label)
    with suppress(TypeError):
        if not isinstance(label, bool):
            return operator.index(label)
    raise ValueError(f"the label is {label!r:.50}; expected a name or a number")


def number_label(label: str | int, positions: dict[str, int]) -> int:
    """Return the class of a label: the position of a name, or the number itself. Raises
    `ValueError` if there is no such class."""
    number = positions.get(label, -1) if isinstance(label, str) else label
    if 0 <= number < len(positions):
        return number
    raise ValueError(f"the label is {label!r:.100}, which is none of {len(positions)} classes")


def write_rows(
    rows: Iterable[Row],
    target: Path,
    classes: Sequence[str],
    advance: Callable[[int], None],
    left_out: LeftOut,
    *,
    resumes: bool = True,
) -> dict[str, int]:
    """Write samples to a folder that `lock_target` holds, and the list of classes; return counts of
    images by split. `left_out` is called with each image that cannot be used.

    `classes` may grow with the samples. With `resumes`, the samples that
    an interrupted call has written are skipped.
    """
    states = _load_states(target) if resumes else {}
    if not states:
        _clear(target)
    (target / UNFINISHED).touch()
    writers: dict[str, _SplitWriter] = {}
    try:
        for row in rows:
            if row.split not in writers:
                writers[row.split] = _SplitWriter(target, row.split, classes, states)
            reason = writers[row.split].add(row)
            if reason is not None:
                left_out(row.split, Quarantined(row.place, reason))
            advance(1)
        for writer in writers.values():
            writer.finish()
    finally:
        for writer in writers.values():
            writer.close()
    counts = {name or "images": writer.count for name, writer in writers.items()}
    if not sum(counts.values()):
        raise DataError(f"no image can be used, so {target} holds none")
    check_class_names(classes, "webdataset")
    for folder in {target, *(writer.folder for writer in writers.values())}:
        write_classes(folder / CLASSES, classes)
    return counts


def _load_states(target: Path) -> dict[str, list[int]]:
    """Return, by split, the numbers of finished tars and of samples that were in them or left out;
    nothing if a finished tar is missing or shorter."""
    with suppress(FileNotFoundError, ValueError):
        for notes in read_lengths(target).values():
            for name, length in notes.items():
                if (target / name).stat().st_size < length:
                    return {}
        states = parsed(read_regular(target / CACHE / _STATE, TEXT))
        if isinstance(states, dict) and all(map(is_list_of(is_count), states.values())):
            return states
    return {}


def _clear(target: Path) -> None:
    """Remove the files of an interrupted pack, which begins again."""
    for pattern in ("*.tar*", "test/*.tar*", f"{CACHE}/*.faults", f"{CACHE}/pack.finished"):
        for path in target.glob(pattern):
            path.unlink()


class _SplitWriter:
    """Writes the samples of a split to one tar after another."""

    def __init__(
        self, target: Path, split: str, classes: Sequence[str], states: dict[str, list[int]]
    ) -> None:
        self.folder = target / split if split == "test" else target
        self._target = target
        self._split = split
        self._classes = classes
        self._states = states
        self._shards, self._written = (*states.get(split, ()), 0, 0)[:2]
        self._seen = 0
        self._tar: Writer | None = None
        self._faults = Faults(target / CACHE / f"pack.{split or 'images'}.faults")
        self._faults.load()
        self.folder.mkdir(exist_ok=True)

    @property
    def count(self) -> int:
        """The number of images that are written."""
        return self._seen - len(self._faults)

    def add(self, row: Row) -> str | None:
        """Write a sample, unless it was written before; return why it cannot be used, or None."""
        number = self._seen
        self._seen += 1
        if number < self._written:
            return self._faults.find(number)
        try:
            data = encode_image(row.image)
            check_ends(data)
        except ValueError as error:
            self._faults.add(number, str(error))
            return str(error)
        tar = self._tar or self._open()
        name = f"{number:08d}.{find_kind(data)}"
        sample = Sample(number, name, row.label, self._classes[row.label], data, 0, 0)
        tar.extend([tar.record(sample)])
        if tar.length >= SHARD_BYTES:
            self.finish()
        return None

    def _open(self) -> Writer:
        shared = "" if self._split == "test" else self._split
        path = self.folder / shard_name("webdataset", shared, self._shards, 0)
        with suppress(FileNotFoundError):
            path.with_name(f"{path.name}.partial").unlink()
        self._tar = Writer(path)
        return self._tar

    def finish(self) -> None:
        """Finish the tar that is being written, and note what is in finished ones."""
        if self._tar is not None:
            note_lengths(self._target, {self._tar.path: self._tar.length})
            self._tar.finish()
            self._tar = None
            self._shards += 1
        self._states[self._split] = [self._shards, self._seen]
        write_json(self._target / CACHE / _STATE, self._states)

    def close(self) -> None:
        """Close the tar that is being written."""
        if self._tar is not None:
            self._tar.__exit__()
