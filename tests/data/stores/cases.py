"""What the tests of stores share: a data set in a store, and what a loader makes of it."""

import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lockstep.data.index import Index, open_index
from lockstep.data.loading.loaders import make_loader, plan_training
from lockstep.data.sources import find_split
from lockstep.data.stores import mirror, objects
from lockstep.data.stores.mirror import find_folder
from lockstep.recipes import Execution, Recipe
from tests.data.stores.servers import Server

RECIPE = Recipe(epochs=1, image_size=32, global_batch_images=16, seed=3, order="windowed")


@dataclass
class Store:
    """A folder of the server, where no other test has been: rclone remembers what it listed."""

    server: Server
    name: str

    @property
    def url(self) -> str:
        return f"s3://bucket/{self.name}"

    @property
    def folder(self) -> Path:
        return self.server.root / "bucket" / self.name

    def open(self) -> Index:
        return open_index(find_split(find_folder(self.url), "train"))


def forget_stores() -> None:
    """Forget what was listed, connected and fetched before, as the next command does."""
    for cached in (objects.connect, mirror._open_folder, mirror._open_mirror):
        cached.cache_clear()


def forget_parts(store: Store) -> Index:
    """Forget what was connected and fetched, but not what was listed, and return the index."""
    shutil.rmtree(find_folder(store.url) / ".parts")
    for cached in (objects.connect, mirror._open_mirror):
        cached.cache_clear()
    return store.open()


def load_batches(index: Index) -> list[np.ndarray]:
    """Return the pixels of every batch of an epoch."""
    recipe = RECIPE.replace(order="permuted") if index.shards is None else RECIPE
    with make_loader(index, recipe, Execution(loader_threads=2)) as loader:
        return [batch.pixels for batch in loader.batches(plan_training(index, recipe, 0))]
