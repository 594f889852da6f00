"""Write the files of a pack: several at the same time, each in order."""

import json
import os
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import islice
from pathlib import Path

import numpy as np

from lockstep.data.containers import CONTAINERS, Appended, Bytes, Sample, unfinish, write_all
from lockstep.data.packing.samples import TASK_BYTES, read_samples
from lockstep.data.packing.splits import Packing, Split, count_shards, shard_name
from lockstep.data.sources import FINISHED, FOLDER, UNFINISHED, read_lengths
from lockstep.system.errors import DataError
from lockstep.system.files import naming
from lockstep.system.machine import cores

_TASK_IMAGES = 32
_AHEAD = 8
"""At most this many tasks wait to be done, or one for each thread if that is more."""
Tasks = Generator[Future[int], None, None]
"""Writes a file or folder; yields, for each task it begins, the future of the number of images
written."""


def write_split(
    split: Split,
    target: Path,
    packing: Packing,
    pool: ThreadPoolExecutor,
    advance: Callable[[int], None],
) -> None:
    """Write the images of a split; call `advance` with the number of images that are done."""
    if packing.format == FOLDER:
        files = iter([_write_folder(split, target / split.name, packing, pool)])
    else:
        # Each thread has its own file to write, because only one thread at a time can write a file.
        files = _write_files(split, target, packing, pool)
    _run(files, packing.workers or cores(), advance)


def _run(files: Iterator[Tasks], threads: int, advance: Callable[[int], None]) -> None:
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
                continue
            task = next(begun[0], None)
            if task is not None:
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


def _divide(split: Split, numbers: Sequence[int]) -> Iterator[list[int]]:
    """Yield the numbers in order, divided into tasks."""
    task: list[int] = []
    size = 0
    lengths = split.lengths
    for number in numbers:
        length = int(lengths[number])
        if len(task) == _TASK_IMAGES or (task and size + length > TASK_BYTES):
            yield task
            task = []
            size = 0
        task.append(number)
        size += length
    if task:
        yield task


def _write_files(
    split: Split, target: Path, packing: Packing, pool: ThreadPoolExecutor
) -> Iterator[Tasks]:
    shards = count_shards(split, packing)
    images = len(split.listing)
    notes = read_lengths(target)
    for shard in range(shards):
        path = target / shard_name(packing.format, split.name, shard, shards)
        if not is_whole(target, notes.get(path.name)):
            (target / UNFINISHED).touch()  # the pack may have been complete before
            if path.exists():
                unfinish(path)
        numbers = range(images * shard // shards, images * (shard + 1) // shards)
        yield _write_file(split, path, numbers, packing, pool)


def _write_file(
    split: Split, path: Path, numbers: range, packing: Packing, pool: ThreadPoolExecutor
) -> Tasks:
    if path.exists():
        yield _make_future(len(numbers))
        return
    with CONTAINERS[packing.format].load().Writer(path) as writer:
        if writer.written > len(numbers):
            raise DataError(
                f"{path} holds {writer.written} images, expected {len(numbers)}; choose an empty"
                " folder"
            )
        left = split.sound(numbers)[writer.written :]
        last = _make_future(len(numbers) - len(left))
        try:
            yield last
            for task in _divide(split, left):
                last = pool.submit(_append, split, packing, writer, task, last)
                yield last
            last = pool.submit(_finish, split, writer, numbers, last)
            yield last
            wait([last])
        finally:  # an interruption may have ended the wait above
            wait([last])


def _make_future(count: int) -> Future[int]:
    future: Future[int] = Future()
    future.set_result(count)
    return future


def _append(
    split: Split, packing: Packing, writer: Appended, numbers: Sequence[int], before: Future[int]
) -> int:
    """Write images to a file after the task `before` has written its images."""
    samples = list(read_samples(split, packing, numbers))
    try:
        records = writer.records(samples)
    except ValueError:  # `_make_record` names the image in its error
        records = [_make_record(split, writer, sample) for sample in samples]
    before.result()
    writer.extend(records)
    return len(numbers)


def _make_record(split: Split, writer: Appended, sample: Sample) -> list[Bytes]:
    try:
        return writer.record(sample)
    except ValueError as error:
        raise DataError(
            f"{split.listing.source.root}/{split.listing.place(sample.number)}: {error}"
        ) from None


def _finish(split: Split, writer: Appended, numbers: range, before: Future[int]) -> int:
    before.result()
    paths = writer.describe(split.rows(split.sound(numbers)))
    lengths = {writer.path: writer.length} | {path: path.stat().st_size for path in paths}
    note_lengths(writer.path.parent, lengths)
    writer.finish()
    return 0


def note_lengths(target: Path, lengths: dict[Path, int]) -> None:
    """Record the lengths of a file that is about to be finished and of the files that describe it.

    If the machine fails before these files are on the disk, a resumed pack finds them shorter than
    recorded.
    """
    names = {str(path.relative_to(target)): length for path, length in lengths.items()}
    path = target / FINISHED
    with naming(path), path.open("a", encoding="utf-8") as notes:
        notes.write(f"\n{json.dumps(names, allow_nan=False)}")


def is_whole(target: Path, lengths: Mapping[str, int] | None) -> bool:
    """Return whether a file, and those that describe it, have the noted lengths."""
    if lengths is None:
        return False
    try:
        return all((target / name).stat().st_size >= length for name, length in lengths.items())
    except FileNotFoundError:
        return False


def _write_folder(split: Split, target: Path, packing: Packing, pool: ThreadPoolExecutor) -> Tasks:
    written: dict[str, int] = {}
    for label in np.unique(split.listing.rows["label"]).tolist():
        written.update(_begin_class(target, split.listing.classes[label]))
    # After a machine failure an image may be shorter or empty. The length of a reduced image is not
    # known in advance.
    lengths_before = split.lengths.tolist()
    numbers = []
    for number in split.sound(range(len(split.listing))):
        lengths = [written.get(name) for name in split.possible_names(number)]
        if lengths_before[number] not in lengths and not (packing.resize and any(lengths)):
            numbers.append(number)
    yield _make_future(len(split.listing) - len(numbers))
    for task in _divide(split, numbers):
        yield pool.submit(_write_images, split, packing, target, task)


def _begin_class(target: Path, name: str) -> Iterator[tuple[str, int]]:
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
    for sample in read_samples(split, packing, numbers):
        path = f"{target}/{sample.name}"
        # This is never the name of an image, nor longer than a name may be.
        unfinished = f"{target}/{sample.class_name}/.{sample.number}.partial"
        with naming(path):
            # A Path for each image is slower.
            with open(unfinished, "wb", buffering=0) as file:  # noqa: PTH123
                write_all(file, sample.data)
            os.replace(unfinished, path)  # noqa: PTH105
    return len(numbers)
