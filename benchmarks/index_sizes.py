"""Seconds and memory of a rank for an index of 14 million images (ImageNet-21k) on the disk, and
for the order of 1 billion, whose rows are simulated."""

import argparse
import json
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from lockstep.data import index as indexing
from lockstep.data.images import ROW, Names
from lockstep.data.loading.loaders import plan_training
from lockstep.data.sources import find_split
from lockstep.recipes import Recipe
from lockstep.recipes.epoch_order import order_samples
from lockstep.recipes.order import training_plans
from measuring import describe_load, median, record, take_turns

INDEXED = 14_197_122
"""The images of ImageNet-21k, by image-net.org."""
SIMULATED = 10**9
CLASSES = 21_841
SHARDS = 1400
COUNTED = 10**7
"""Of a permutation this many positions are computed; the seconds of all are in proportion."""
AT_ONCE = 2**16
TURNS = 3
CONTENDERS = ("shuffled", "permuted", "windowed", "simulated")


class Sizes:
    """Heights and widths of simulated images."""

    def __len__(self) -> int:
        return SIMULATED

    def __getitem__(self, samples: np.ndarray) -> np.ndarray:
        return np.stack([300 + samples % 200, 400 + samples % 300], axis=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turn", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.turn:
        print(json.dumps(take_turn(arguments.turn[0], arguments.work)))
        return
    with tempfile.TemporaryDirectory() as name:
        write_index(Path(name))
        turns = take_turns(CONTENDERS, TURNS, "--work", name)
    result = {
        who: {figure: round(median([turn[figure] for turn in own]), 3) for figure in own[0]}
        for who, own in turns.items()
    }
    what = f"{INDEXED} images in {SHARDS} tars, or {SIMULATED} simulated; medians of {TURNS} turns"
    record("index_sizes", {"what": what, **describe_load(), **result})


def write_index(root: Path) -> None:
    """Write the index of tars that hold nothing but have the lengths that it says."""
    for shard in range(SHARDS):
        path = root / f"train-{shard:06d}.tar"
        path.touch()
        os.truncate(path, 110_000 * (INDEXED // SHARDS + 1))
    source = find_split(root, "train")
    i = np.arange(INDEXED)
    rows = np.zeros(INDEXED, ROW)
    rows["file"] = i % SHARDS
    rows["offset"] = 110_000 * (i // SHARDS)
    rows["length"] = 110_000 - i % 7
    rows["label"] = i * CLASSES // INDEXED
    rows["height"] = 300 + i % 200
    rows["width"] = 400 + i % 300
    text = np.tile(np.frombuffer(b"n01440764/n01440764_10026.JPEG", np.uint8), INDEXED)
    classes = tuple(f"n{label:08d}" for label in range(CLASSES))
    index = indexing.Index(
        source,
        rows,
        Names(text, (30 * (i + 1)).astype(np.uint32)),
        classes,
        False,
        times=np.zeros(0, np.uint32),
        orientations=np.ones(INDEXED, np.uint8),
        states=tuple(indexing._state(root / name) for name in source.files),
        quarantined=(),
        skipped=(),
        digest=indexing._digest(rows, classes),
        checksums=i.astype(np.uint32),
    )
    indexing._store(index, indexing.find_cache_folder(source), indexing._stamp(source))


def take_turn(who: str, root: Path) -> dict[str, float]:
    """Open the index and plan the first step, then compute the order of an epoch."""
    recipe = Recipe(
        global_batch_images=256,
        order="permuted" if who == "simulated" else who,
        logits=CLASSES,
    )
    with watching_memory() as peak:
        started = read_clocks()
        if who == "simulated":
            images = SIMULATED
            shards = None
            next(training_plans(recipe, Sizes(), 0))
        else:
            index = indexing.open_index(find_split(root, "train"))
            images = len(index)
            shards = index.shards
            next(plan_training(index, recipe, 0))
        figures = dict(zip(("start_sec", "start_cpu_sec"), read_clocks() - started, strict=True))
        figures["start_mb"] = peak[0] / 1e6
        started = read_clocks()
        order = order_samples(recipe, 1, images, shards=shards)
        if recipe.order == "permuted":
            for first in range(0, COUNTED, AT_ONCE):
                order[np.arange(first, min(first + AT_ONCE, COUNTED))]
            scale = images / COUNTED
        else:
            scale = 1.0
        spent = (read_clocks() - started) * scale
        figures |= dict(zip(("order_sec", "order_cpu_sec"), spent, strict=True))
    return figures | {"peak_mb": peak[0] / 1e6}


def read_clocks() -> np.ndarray:
    """Return seconds that passed, and those of the processor in this process, which other programs
    do not lengthen."""
    return np.array([time.perf_counter(), time.process_time()])


@contextmanager
def watching_memory() -> Iterator[list[int]]:
    """Give the largest number of resident bytes so far, without those of mapped files, which the
    system drops when it needs them; the process' own at the beginning are not counted."""
    before = read_anonymous()
    peak = [0]
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(0.02):
            peak[0] = max(peak[0], read_anonymous() - before)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield peak
    finally:
        ended.set()
        thread.join()


def read_anonymous() -> int:
    """Return the resident bytes of this process that are not of mapped files."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return 1024 * int(line.split()[1])
    raise AssertionError("Linux names RssAnon in /proc/self/status")


if __name__ == "__main__":
    main()
