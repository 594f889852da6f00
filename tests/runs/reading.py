"""Ranks that read the batches of a run and note every image."""

import hashlib
import multiprocessing
import os
import signal
from collections.abc import Sequence
from pathlib import Path

from lockstep.data.index import open_index
from lockstep.data.loading.loaders import make_loader, plan_training
from lockstep.data.sources import find_split
from lockstep.data.stores.mirror import find_folder
from lockstep.recipes import Execution, Recipe


def read_batches(
    data: str,
    recipe: Recipe,
    notes: Path,
    *,
    first: int = 0,
    killed: int | None = None,
    rank: int = 0,
    ranks: int = 1,
) -> None:
    """Read the batches of a rank from the step `first` on, and write a line for each image: step,
    label and a hash of its pixels. The process kills itself before it notes the step `killed`."""
    index = open_index(find_split(find_folder(data), "train"))
    plans = plan_training(index, recipe, first, rank=rank, ranks=ranks)
    with make_loader(index, recipe, Execution(loader_threads=2)) as loader, notes.open("w") as file:
        for step, batch in enumerate(loader.batches(plans), first):
            if step == killed:
                os.kill(os.getpid(), signal.SIGKILL)
            for image, label in zip(batch.pixels, batch.labels.tolist(), strict=True):
                print(step, label, hashlib.sha256(image.tobytes()).hexdigest(), file=file)
            file.flush()


def run_ranks(notes: Sequence[Path], data: str, recipe: Recipe, *, killed: int) -> list[int | None]:
    """Let ranks read batches as `read_batches` does, each in a process that notes them in a file;
    return their exit codes."""
    processes = []
    for rank, file in enumerate(notes):
        share = {"killed": killed, "rank": rank, "ranks": len(notes)}
        spawn = multiprocessing.get_context("spawn").Process
        processes.append(spawn(target=read_batches, args=(data, recipe, file), kwargs=share))
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        process.kill()
        process.join()
    return [process.exitcode for process in processes]
