"""Measure loaders: the same images, cores and output. Loaders alternate; each turn is a separate
process.

All yield batches of uint8 RGB [N, size, size, 3]. From every image they take a random window of 8
to 100 % of its area, resize it bilinearly without antialiasing and mirror it half the time.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from lockstep.data.index import Index, open_index
from lockstep.data.loading.dali import DaliLoader
from lockstep.data.loading.host import HostLoader
from lockstep.data.loading.loaders import plan_training
from lockstep.data.sources import find_source, find_split, holds_split
from lockstep.recipes import Recipe
from lockstep.system.errors import DataError, nearest
from lockstep.system.machine import cores

AREA = (0.08, 1.0)
ASPECT = (3 / 4, 4 / 3)
WARMUP_BATCHES = 3
MOST_IMAGES = 4096
"""At most this many images are taken from a data set, which then stay in the system's memory."""


@dataclass(frozen=True)
class Work:
    """The task of every loader."""

    data: str
    threads: int
    batch: int
    size: int
    seconds: float
    """Length of a turn after the first batches, in seconds."""


@dataclass(frozen=True)
class Turn:
    """The result of one turn."""

    images_per_sec: float
    cpu_ms: float
    """Processor time of an image on all cores together. Other work on the machine hardly changes
    it."""
    peak_mb: float
    """Peak use of main memory."""


def run_loader(
    kind: type[HostLoader] | type[DaliLoader], work: Work, index: Index
) -> Iterator[int]:
    """Run a loader of Lockstep; yield the number of images of each batch."""
    with kind(index, antialias=False, threads=work.threads) as loader:
        for batch in loader.batches(plan_training(index, make_recipe(work), 0)):
            yield len(batch.images)


Loader = Callable[[Work, Index], Iterator[int]]
LOADERS: Mapping[str, Loader] = {
    "host": partial(run_loader, HostLoader),
    "dali": partial(run_loader, DaliLoader),
}
PROGRAM = ("-P", "-m", __name__)
"""Python's arguments for a process that measures one of `LOADERS`."""


def make_recipe(work: Work) -> Recipe:
    """Return a recipe of the crops that every loader makes."""
    return Recipe(
        global_batch_images=work.batch,
        epochs=100_000,
        crop_area=AREA,
        crop_aspect=ASPECT,
        image_size=work.size,
    )


def open_images(work: Work) -> Index:
    """Return the index of the images that every loader decodes: at most `MOST_IMAGES` and at least
    a batch."""
    data = Path(work.data)
    has_split = holds_split(data, "train")
    index = open_index(find_split(data, "train") if has_split else find_source(data))
    index = replace(index, rows=index.rows[:MOST_IMAGES])
    if len(index) < work.batch:
        raise DataError(
            f"{data} has {len(index)} images, fewer than a batch; use --batch {len(index)}"
        )
    return index


def measure(loader: Loader, work: Work) -> Turn:
    """Measure one turn of a loader in this process."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: work.threads])
    batches = loader(work, open_images(work))
    for _ in range(WARMUP_BATCHES):
        next(batches)
    began = time.perf_counter()
    cpu_began = _cpu_sec()
    images = 0
    while time.perf_counter() - began < work.seconds:
        images += next(batches)
    wall = time.perf_counter() - began
    cpu = _cpu_sec() - cpu_began
    return Turn(images / wall, 1000 * cpu / images, _peak_mb())


def _list_children() -> Iterator[Path]:
    """Yield the folders in /proc of running processes that this process has started."""
    for children in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):  # the thread has ended in the meantime
            yield from [Path("/proc") / child for child in children.read_text().split()]


def _cpu_sec() -> float:
    """Return the processor time of this process and of those it has started, in seconds."""
    own = time.process_time()
    tick = os.sysconf("SC_CLK_TCK")
    for child in _list_children():
        fields = (child / "stat").read_text().rpartition(")")[2].split()
        own += (int(fields[11]) + int(fields[12])) / tick
    return own


def _peak_mb() -> float:
    """Return the sum of the peak memory of this process and of those it has started."""
    kilobytes = 0
    for folder in (Path("/proc/self"), *_list_children()):
        text = (folder / "status").read_text()
        kilobytes += int(text.partition("VmHWM:")[2].split()[0])
    return kilobytes / 1024


def compare(
    names: Sequence[str],
    work: Work,
    turns: int,
    progress: Callable[[int, int], None] | None = None,
    *,
    loaders: Mapping[str, Loader] = LOADERS,
    program: Sequence[str] = PROGRAM,
) -> dict[str, Any]:
    """Return the turns of every named loader and their median, or why it cannot run.

    `program` measures a turn of one of `loaders`: it calls `print_turn`. Raises `DataError` for an
    unknown name, or fewer images than a batch.
    """
    for name in names:
        if name not in loaders:
            raise DataError(f"there is no loader {name!r} to measure. {nearest(name, loaders)}")
    if work.threads > cores():
        raise DataError(f"{work.threads} threads are more than the {cores()} cores of this machine")
    images = len(open_images(work))
    done: dict[str, list[Turn]] = {name: [] for name in names}
    missing: dict[str, str] = {}
    for number in range(turns * len(names)):
        name = names[number % len(names)]
        if name not in missing:
            result = _measure_in_process(program, name, work)
            if isinstance(result, str):
                missing[name] = result
            else:
                done[name].append(result)
        if progress is not None:
            progress(number + 1, turns * len(names))
    results: dict[str, Any] = {}
    for name in names:
        results[name] = {"missing": missing[name]} if name in missing else _summarise(done[name])
    return {"work": asdict(work), "images": images, "results": results}


def _summarise(turns: list[Turn]) -> dict[str, Any]:
    """Return the medians of turns, and their speeds."""
    speeds = [turn.images_per_sec for turn in turns]
    return {
        "images_per_sec": round(median(speeds), 3),
        "cpu_ms": round(median(turn.cpu_ms for turn in turns), 3),
        "peak_mb": round(median(turn.peak_mb for turn in turns), 3),
        "turns": [round(speed, 1) for speed in speeds],
    }


def _measure_in_process(program: Sequence[str], name: str, work: Work) -> Turn | str:
    command = [sys.executable, *program, name, json.dumps(asdict(work), allow_nan=False)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        return (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    return Turn(**json.loads(done.stdout.splitlines()[-1]))


def print_turn(loaders: Mapping[str, Loader]) -> None:
    """Measure a turn of the loader that the command line of this process names, and end it."""
    turn = measure(loaders[sys.argv[1]], Work(**json.loads(sys.argv[2])))
    print(json.dumps(asdict(turn), allow_nan=False))
    sys.stdout.flush()
    os._exit(0)  # do not wait for the loaders' own threads and workers


if __name__ == "__main__":
    print_turn(LOADERS)
