"""Part: the host loader with 1 to 16 threads, and training from JPEGs against training on a held
batch."""

import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu.engines import Lockstep, recipe_of
from benchmarks.gpu.photos import draw_photos
from benchmarks.gpu.timing import Contender, Ground, Say, Turns, in_turns, interval, ratio_row
from lockstep.benchmark.loader import Work, compare
from lockstep.data import Batch
from lockstep.data.decoding import jpeg
from lockstep.data.index import Index, open_index
from lockstep.data.loading.host import HostLoader
from lockstep.data.sources import find_source
from lockstep.recipes import Recipe
from lockstep.recipes.order import training_plans
from lockstep.system.machine import cores

PHOTOS = 200
THREADS = (1, 2, 4, 8, 16)
MOST_EPOCHS = 1000


def measure(ground: Ground, say: Say, precisions: Sequence[str] = ("bf16", "fp16")) -> None:
    """Write a row for every number of threads, and rows for training from JPEGs and from a held
    batch."""
    with tempfile.TemporaryDirectory() as folder:
        data = Path(ground.photos or folder)
        about = {}
        if not ground.photos:
            size = (96, 128) if ground.tiny else (375, 500)
            about = {
                "mean_bytes": draw_photos(data, 40 if ground.tiny else PHOTOS, *size),
                "pixels": list(size),
            }
        decoder = "C" if jpeg.is_there() else "libjpeg-turbo"
        say(
            {"what": "pictures", "drawn": not ground.photos, "decoder": decoder, "cores": cores()}
            | about
        )
        if not ground.tiny:
            for threads in (threads for threads in THREADS if threads <= cores()):
                say({"what": "loader", "threads": threads} | _loader(data, threads))
        for precision in precisions:
            _training(ground, say, open_index(find_source(data)), precision)


def _loader(data: Path, threads: int) -> dict[str, Any]:
    """Return the rate of each loader that is installed: Lockstep's, DALI's, and a DataLoader with
    Pillow."""
    names = ["host"] if threads < min(max(THREADS), cores()) else ["host", "dali", "torch-pillow"]
    return {"results": compare(names, Work(str(data), threads, 64, 224, 3.0), 1)["results"]}


class FromJpegs:
    """An engine as a contender that trains from JPEGs: the held batch's own engine, with the
    loader's batches."""

    def __init__(self, held: Lockstep, batches: Iterator[Batch]) -> None:
        self.name = "from JPEGs"
        self.images = held.images
        self._held = held
        self._batches = batches

    def prepare(self) -> None:
        """Set the process's switches."""
        self._held.prepare()

    def run(self, steps: int) -> None:
        """Take steps on batches of the loader."""
        handle = self._held.engine.train(itertools.islice(self._batches, steps), self._held.step)
        self._held.step += steps
        self._held.engine.fetch(handle)


def _training(ground: Ground, say: Say, index: Index, precision: str) -> None:
    recipe = recipe_of(ground, "resnet50", precision, 256)
    held = Lockstep(recipe, ground, name="held batch", deterministic=False)
    with HostLoader(index, size=recipe.image_size, antialias=recipe.antialias) as loader:
        contenders: list[Contender] = [held, FromJpegs(held, loader.batches(_plans(recipe, index)))]
        for contender in contenders:
            contender.run(1 if ground.tiny else 3)
        turns = Turns(most=2, seconds=0.05) if ground.tiny else Turns(seconds=2.0)
        rates = in_turns(contenders, ground, turns)
        alone = _loader_alone(loader, recipe, index, 2 if ground.tiny else 10)
    same = {"model": "resnet50", "precision": precision, "batch": recipe.global_batch_images}
    for name, found in rates.items():
        say(
            {
                "what": "jpegs",
                "contender": name,
                "images_per_sec": statistics.fmean(found),
                "interval": interval(found),
            }
            | same
        )
    say(ratio_row(rates, "from JPEGs", "held batch") | same)
    say(
        {
            "what": "loader alone",
            "images_per_sec": alone,
            "threads": os.cpu_count(),
            "a_core": alone / cores(),
        }
        | same
    )


def _plans(recipe: Recipe, index: Index) -> Iterator[Any]:
    """Yield plans whose images are those of the index, again and again, also if a batch is larger
    than the index."""
    repeats = -(-2 * recipe.global_batch_images // len(index))
    sizes = np.tile(index.sizes, (repeats, 1))
    for plan in training_plans(recipe.replace(epochs=MOST_EPOCHS), sizes, 0):
        yield replace(plan, samples=plan.samples % len(index))


def _loader_alone(loader: HostLoader, recipe: Recipe, index: Index, batches: int) -> float:
    """Return images per second of the loader when nothing else runs. The first batches are not
    counted."""
    loaded = loader.batches(_plans(recipe, index))
    for _ in range(2):
        next(loaded)
    began = time.perf_counter()
    for _ in range(batches):
        next(loaded)
    return batches * recipe.global_batch_images / (time.perf_counter() - began)
