"""Write a data set in another storage format: the same images in the same order, byte for byte
unless they are resized.

Every file has a temporary name until it is complete. After an interruption, a pack with the same
arguments resumes after the last complete image.
"""

import errno
import hashlib
import json
import os
import re
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path, PurePosixPath

import cv2
import numpy as np
import simplejpeg

from lockstep.data.containers import (
    Bytes,
    Sample,
    recordio,
    tfrecord,
    unfinish,
    webdataset,
    write_all,
)
from lockstep.data.decoding.decode import check, decode, header_size
from lockstep.data.decoding.orientation import UPRIGHT, add_orientation, read_orientation
from lockstep.data.index import read_quarantine
from lockstep.data.listing import CLASSES, Listing, Progress, Quarantined, list_images
from lockstep.data.pack_target import lock_target, read_states
from lockstep.data.sources import (
    ALIASES,
    FINISHED,
    FOLDER,
    FORMATS,
    UNFINISHED,
    find_sources,
    read_lengths,
)
from lockstep.system.errors import DataError
from lockstep.system.files import lines, naming, written_text
from lockstep.system.machine import cores
from lockstep.system.regular_files import RECORDS, read_regular

SHARD_BYTES = 2**27
"""The approximate size of a TFRecord or WebDataset file, unless the number of files is given.
ImageNet: a thousand files."""
_TASK_IMAGES = 32
_TASK_BYTES = 2**21
"""The maximum that one task writes, unless a single image has more bytes."""
_AHEAD = 8
"""At most this many tasks wait to be done, or one for each thread if that is more."""
_LONGEST_NAME = 255
"""The maximum length of a file's name, in bytes."""
_NO_COLUMN = re.compile(rb"[\n\r\t\0]")
_JPEG = b"\xff\xd8"
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors of a full disk, a user's quota, and the largest size of a file."""
_KINDS = {_JPEG: "jpg", b"\x89PNG": "png", b"": "img"}
"""The first bytes of images, and the endings of their names."""
Writer = recordio.Writer | tfrecord.Writer | webdataset.Writer
_WRITERS: dict[str, Callable[[Path], Writer]] = {
    "recordio": recordio.Writer,
    "tfrecord": tfrecord.Writer,
    "webdataset": webdataset.Writer,
}


@dataclass(frozen=True)
class Packing:
    """How to write a data set."""

    format: str
    """One of `FORMATS`."""
    shards: int = 0
    """The number of files for each split; 0 means one for RecordIO, and one for each `SHARD_BYTES`
    for other formats."""
    resize: int = 0
    """Larger images are reduced to this length of the shorter side, in pixels; 0 copies the bytes.
    """
    quality: int = 95
    """JPEG quality of reduced images."""
    first_label: int = 0
    """The number of the first class in the source's files."""
    workers: int = 0
    """The number of threads that read, write and reduce images; 0 means one for each core."""


@dataclass(frozen=True)
class Split:
    """The images of a split, and how to write them."""

    name: str
    """"train", "val", or empty where the source has no splits."""
    listing: Listing
    names: tuple[str, ...] | None
    """`class/file` of every sample; None if samples are named by their numbers."""
    format: str
    """The format to write."""
    states: np.ndarray
    """Size and modification time of every file of the source: int64 [files, 2]."""

    def sample_name(self, number: int, data: Bytes) -> str:
        """Return the name of the sample that is written with this number."""
        if self.names is not None:
            return self.names[number]
        file = f"{number:08d}.{next(kind for begin, kind in _KINDS.items() if data[: len(begin)] == begin)}"
        # With a class in front, files listed by name would be ordered by class.
        return f"{self.class_of(number)}/{file}" if self.format == FOLDER else file

    def possible_names(self, number: int) -> set[str]:
        """Return all names that the sample can get, depending on its bytes."""
        return {self.sample_name(number, begin) for begin in _KINDS}

    def class_of(self, number: int) -> str:
        """Return the name of the class of a sample."""
        return self.listing.classes[int(self.listing.rows["label"][number])]


def pack(
    source: Path,
    target: Path,
    packing: Packing,
    progress: Progress | None = None,
    left_out: Callable[[str, Quarantined], None] | None = None,
) -> dict[str, int]:
    """Write the images of `source`, a data set or a folder of images, to the folder `target`;
    return counts of images.

    `classes.txt` is written next to the images. Images that a quarantine leaves out are not
    written. Damaged images are written unchanged. Links that loop are not written: `left_out` is
    called with the split and each of them. The order of images stays, except that an image folder
    sorts them by class. `progress` is called with the number of images done and of all images.
    Raises `DataError` if the target holds something else.
    """
    if packing.format not in FORMATS:
        raise DataError(
            f"{packing.format} is not a storage format; choose one of {', '.join(FORMATS)}"
        )
    splits = list(_splits(source, packing))
    if left_out is not None:
        for split in splits:
            for bad in split.listing.damaged:
                left_out(split.name, bad)
    total = sum(len(split.listing) for split in splits)
    if not total:
        raise DataError(f"{source} has no images")
    for split in splits:
        _check_classes(split)
        root = split.listing.source.root
        if (
            not split.name or split.listing.source.format == FOLDER
        ) and target.resolve().is_relative_to(root.resolve()):
            raise DataError(
                f"{target} is inside {root}, where its files would be taken for images; choose"
                " another folder"
            )
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        if progress is not None:
            progress(done, total)

    states = np.concatenate([split.states for split in splits])
    threads = packing.workers or cores()
    try:
        with (
            lock_target(target, _identity(splits, packing), states),
            ThreadPoolExecutor(threads) as pool,
        ):
            _write_classes(target / CLASSES, splits[0].listing.classes)
            for split in splits:
                if packing.format == FOLDER:
                    _write(
                        iter([_folder(split, target / split.name, packing, pool)]), threads, advance
                    )
                else:
                    # Each thread has its own file to write, because only one thread at a time can
                    # write a file.
                    _write(_files(split, target, packing, pool), threads, advance)
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        raise DataError(
            f"{error.filename or target}: {error.strerror}. What is written stays in {target}, in"
            " finished and unfinished files. Free space and run the same command again, which"
            " resumes; or remove the folder"
        ) from None
    return {split.name or "images": len(split.listing) for split in splits}


def _write_classes(path: Path, classes: Sequence[str]) -> None:
    text = lines(classes)
    if not path.exists() or read_regular(path, RECORDS) != text.encode("utf-8", "surrogateescape"):
        with written_text(path) as file:
            file.write(text)


def _splits(source: Path, packing: Packing) -> Iterator[Split]:
    classes: tuple[str, ...] | None = None
    for name, where in find_sources(source).items():
        listing = list_images(
            where, classes, first_label=packing.first_label, quarantine=read_quarantine(where)
        )
        if listing.damaged and where.format != FOLDER:
            bad = listing.damaged[0]
            raise DataError(
                f"{where.root}: {len(listing.damaged)} damaged parts of files hold no usable image;"
                f" the first is {bad.file}: {bad.reason}. Restore the file; lockstep data check"
                " lists all of them"
            )
        classes = listing.classes
        yield Split(
            name, listing, _kept_names(listing, packing), packing.format, read_states(listing)
        )


def _check_classes(split: Split) -> None:
    """Raise `DataError` if the name of a class cannot be a line of `classes.txt`, or of a folder to
    be written."""
    for label, name in enumerate(split.listing.classes):
        if not name or name != name.strip() or set(name) & set("\n\r\0"):
            raise DataError(
                f"class {label} is named {name!r}, which cannot be a line of {CLASSES}; rename it"
            )
        if split.format == FOLDER and (name.startswith(".") or "/" in name):
            raise DataError(
                f"class {label} is named {name!r}, which cannot be the name of a folder; rename it"
                f" in {CLASSES}"
            )


def _kept_names(listing: Listing, packing: Packing) -> tuple[str, ...] | None:
    """Return `class/file` of every sample, or None if these names would change the order of the
    samples."""
    names = []
    before = (0, b"")
    for name, label in zip(listing.names, listing.rows["label"].tolist(), strict=True):
        file = name.rpartition(b"/")[2]
        # The `.lst` of RecordIO has lines with columns.
        if (
            not file
            or file.startswith(b".")
            or _NO_COLUMN.search(file)
            or len(file) > _LONGEST_NAME
        ):
            return None
        if packing.resize and not file.lower().endswith((b".jpg", b".jpeg")):
            file = os.fsencode(f"{PurePosixPath(os.fsdecode(file)).stem}.jpg")
        # RecordIO is read by number, the other formats by class and then by name.
        if (label, file) <= before and packing.format != "recordio":
            return None
        before = label, file
        names.append(f"{listing.classes[label]}/{os.fsdecode(file)}")
    return tuple(names)


def _identity(splits: list[Split], packing: Packing) -> str:
    """Return a text that is equal for the same images, compared by their names, and the same
    packing."""
    digest = hashlib.sha256()
    for split in splits:
        listing = split.listing
        digest.update(
            json.dumps(
                [split.name, listing.source.format, listing.source.files, listing.classes],
                allow_nan=False,
            ).encode()
        )
        for array in (listing.rows, listing.names.text, listing.names.ends):
            digest.update(np.ascontiguousarray(array).data)
    shards = {split.name: _shards(split, packing) for split in splits}
    about = {
        "format": packing.format,
        "shards": shards,
        "resize": packing.resize,
        "quality": packing.quality,
    }
    return json.dumps({**about, "images": digest.hexdigest()}, allow_nan=False)


def _shards(split: Split, packing: Packing) -> int:
    """Return the number of files to write for a split."""
    shards = packing.shards or (
        1 if packing.format == "recordio" else -(-_bytes(split) // SHARD_BYTES)
    )
    return max(min(shards, len(split.listing)), 1)


class _Memory(threading.local):
    """A buffer for images in each thread. It is reused, because memory from the system costs more
    than reading."""

    def __init__(self) -> None:
        # Other data may lie between the images.
        self.bytes = memoryview(bytearray(2 * _TASK_BYTES))


_memory = _Memory()


def _samples(split: Split, packing: Packing, numbers: Sequence[int]) -> Iterator[Sample]:
    """Yield samples. They are valid until the same thread asks for others."""
    labels = split.listing.rows["label"][numbers].tolist()
    classes = split.listing.classes
    for number, label, data in zip(numbers, labels, _encoded(split, numbers), strict=True):
        if packing.resize:
            data = reduce_image(bytes(data), packing.resize, packing.quality)
        height, width = header_size(data) if packing.format == "tfrecord" else (0, 0)
        yield Sample(
            number, split.sample_name(number, data), label, classes[label], data, height, width
        )


def _encoded(split: Split, numbers: Sequence[int]) -> Iterable[Bytes]:
    with suppress(OSError, ValueError):  # `_read` reports which of them cannot be read
        if (images := split.listing.read_together(numbers, _memory.bytes)) is not None:
            return images
    return (_read(split, number) for number in numbers)


def _read(split: Split, number: int) -> bytes:
    try:
        return split.listing.read_bytes(number)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise DataError(
            f"{split.listing.source.root}/{split.listing.place(number)} cannot be read: {reason}. "
            "Put it back, or leave it out: lockstep data check --quarantine"
        ) from None


def reduce_image(data: bytes, shorter: int, quality: int) -> bytes:
    """Return an image as JPEG with its shorter side reduced to `shorter` pixels.

    A damaged image, and a JPEG that is not larger, is returned unchanged. EXIF data is left out but
    for the orientation.
    """
    try:
        height, width = check(
            data
        )  # `decode` does not refuse a truncated file, but fills the missing part with grey
        is_large = min(height, width) > shorter
        if data.startswith(_JPEG) and not is_large:
            return data
        image = decode(data)
    except ValueError:
        return data
    if is_large:
        size = (
            round(width * shorter / min(height, width)),
            round(height * shorter / min(height, width)),
        )
        image = cv2.resize(image, size, interpolation=cv2.INTER_AREA)
    encoded = simplejpeg.encode_jpeg(np.ascontiguousarray(image), quality, colorsubsampling="420")
    orientation = read_orientation(data)
    return encoded if orientation == UPRIGHT else add_orientation(encoded, orientation)


Tasks = Generator[Future[int], None, None]
"""Writes a file or folder; yields, for each task it begins, the future of the number of images
written."""


def _write(files: Iterator[Tasks], threads: int, advance: Callable[[int], None]) -> None:
    """Write files, one for each thread at a time. All writing has ended when this returns or
    raises."""
    begun = deque(islice(files, threads))
    waiting: deque[Future[int]] = deque()
    try:
        while begun or waiting:
            if not begun or len(waiting) > max(_AHEAD, threads):
                # Wait until several are done: a wake-up for each one would slow down the other
                # threads.
                wait([waiting[0], waiting[len(waiting) // 2]])
                while waiting and waiting[0].done():
                    count = waiting[0].result()
                    waiting.popleft()
                    advance(count)
            elif (task := next(begun[0], None)) is not None:
                waiting.append(task)
                begun.rotate()
            else:
                begun.popleft()
                begun.extend(islice(files, 1))
    finally:
        for task in waiting:
            task.cancel()
        wait(waiting)
        for file in begun:
            file.close()


def _tasks(split: Split, numbers: Sequence[int]) -> Iterator[list[int]]:
    """Yield the numbers in order, split into tasks."""
    task: list[int] = []
    size = 0
    lengths = _lengths(split)
    for number in numbers:
        length = int(lengths[number])
        if len(task) == _TASK_IMAGES or (task and size + length > _TASK_BYTES):
            yield task
            task = []
            size = 0
        task.append(number)
        size += length
    if task:
        yield task


def _files(
    split: Split, target: Path, packing: Packing, pool: ThreadPoolExecutor
) -> Iterator[Tasks]:
    shards = _shards(split, packing)
    noted = read_lengths(target)
    for shard in range(shards):
        numbers = range(
            len(split.listing) * shard // shards, len(split.listing) * (shard + 1) // shards
        )
        path = target / shard_name(packing.format, split.name, shard, shards)
        if not _is_whole(target, noted.get(path.name)):
            (target / UNFINISHED).touch()  # the pack may have been complete before
            if path.exists():
                unfinish(path)
        yield _file(split, path, numbers, packing, pool)


def _file(
    split: Split, path: Path, numbers: range, packing: Packing, pool: ThreadPoolExecutor
) -> Tasks:
    if path.exists():
        yield _done(len(numbers))
        return
    with _WRITERS[packing.format](path) as writer:
        if writer.written > len(numbers):
            raise DataError(
                f"{path} holds {writer.written} images, expected {len(numbers)}; choose an empty"
                " folder"
            )
        last = _done(writer.written)
        try:
            yield last
            for task in _tasks(split, numbers[writer.written :]):
                last = pool.submit(_append, split, packing, writer, task, last)
                yield last
            last = pool.submit(_finish, split, writer, numbers, last)
            yield last
            wait([last])
        finally:  # an interruption may have ended the wait above
            wait([last])


def _done(count: int) -> Future[int]:
    done: Future[int] = Future()
    done.set_result(count)
    return done


def _append(
    split: Split, packing: Packing, writer: Writer, numbers: Sequence[int], before: Future[int]
) -> int:
    """Write images to a file after the task `before` has written its images."""
    samples = list(_samples(split, packing, numbers))
    try:
        records = writer.records(samples)
    except ValueError:
        records = [
            _record(split, writer, sample) for sample in samples
        ]  # `_record` names the image in its error
    before.result()
    writer.extend(records)
    return len(numbers)


def _record(split: Split, writer: Writer, sample: Sample) -> list[Bytes]:
    try:
        return writer.record(sample)
    except ValueError as error:
        raise DataError(
            f"{split.listing.source.root}/{split.listing.place(sample.number)}: {error}"
        ) from None


def _finish(split: Split, writer: Writer, numbers: range, before: Future[int]) -> int:
    before.result()
    beside = writer.describe(_rows(split, numbers))
    _note(
        writer.path.parent,
        {writer.path: writer.length} | {path: path.stat().st_size for path in beside},
    )
    writer.finish()
    return 0


def _note(target: Path, lengths: dict[Path, int]) -> None:
    """Record the lengths of a file that is about to be finished and of the files that describe it.

    If the machine fails before these files are on the disk, a resumed pack finds them shorter than
    recorded.
    """
    named = {str(path.relative_to(target)): length for path, length in lengths.items()}
    path = target / FINISHED
    with naming(path), path.open("a", encoding="utf-8") as notes:
        notes.write(f"\n{json.dumps(named, allow_nan=False)}")


def _is_whole(target: Path, noted: Mapping[str, int] | None) -> bool:
    try:
        return noted is not None and all(
            (target / name).stat().st_size >= length for name, length in noted.items()
        )
    except FileNotFoundError:
        return False


def _rows(split: Split, numbers: range) -> Iterator[tuple[int, int, str]]:
    for number, label in zip(
        numbers, split.listing.rows["label"][numbers.start : numbers.stop].tolist(), strict=True
    ):
        yield number, label, split.sample_name(number, _JPEG)


def _lengths(split: Split) -> np.ndarray:
    """Return the size of every image in bytes; for an image folder, the size of its file."""
    return (
        split.states[:, 0]
        if split.listing.source.format == FOLDER
        else split.listing.rows["length"]
    )


def _bytes(split: Split) -> int:
    return int(_lengths(split).sum(dtype=np.int64))


def shard_name(format: str, split: str, shard: int, shards: int) -> str:
    """Return the name of a file of a split, as is usual for the format.

    >>> shard_name("recordio", "val", 0, 1), shard_name("tfrecord", "val", 7, 128), shard_name("webdataset", "train", 7, 128)
    ('val.rec', 'validation-00007-of-00128', 'train-000007.tar')
    """
    split = split or "images"
    if format == "tfrecord":
        return f"{ALIASES.get(split, (split,))[-1]}-{shard:05d}-of-{shards:05d}"
    if format == "webdataset":
        return f"{split}-{shard:06d}.tar"
    return f"{split}.rec" if shards == 1 else f"{split}-{shard:05d}-of-{shards:05d}.rec"


def _folder(split: Split, target: Path, packing: Packing, pool: ThreadPoolExecutor) -> Tasks:
    there: dict[str, int] = {}
    for label in np.unique(split.listing.rows["label"]).tolist():
        there.update(_begun_class(target, split.listing.classes[label]))
    # After a machine failure an image may be shorter or empty. The length of a reduced image is not
    # known in advance.
    numbers = [
        number
        for number, length in enumerate(_lengths(split).tolist())
        if not any(
            there[name] == length or (packing.resize and there[name])
            for name in there.keys() & split.possible_names(number)
        )
    ]
    yield _done(len(split.listing) - len(numbers))
    for task in _tasks(split, numbers):
        yield pool.submit(_write_images, split, packing, target, task)


def _begun_class(target: Path, name: str) -> Iterator[tuple[str, int]]:
    """Make the folder of a class. If it exists, yield `class/file` and length of its images, and
    remove unfinished files."""
    try:
        (target / name).mkdir(parents=True)
    except FileExistsError:
        for file in list(os.scandir(target / name)):
            if file.name.startswith(".") and file.name.endswith(".partial"):
                Path(file).unlink()
            else:
                yield f"{name}/{file.name}", file.stat().st_size


def _write_images(split: Split, packing: Packing, target: Path, numbers: Sequence[int]) -> int:
    """Write images to the folders of their classes."""
    for sample in _samples(split, packing, numbers):
        path = f"{target}/{sample.name}"
        # This is never the name of an image, nor longer than a name may be.
        unfinished = f"{target}/{sample.class_name}/.{sample.number}.partial"
        with naming(path):
            with open(unfinished, "wb", buffering=0) as file:  # noqa: PTH123 - a Path for each image is slower
                write_all(file, sample.data)
            os.replace(unfinished, path)  # noqa: PTH105
    return len(numbers)
