"""The choice of the loader that turns the plans of `order` into batches."""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, Union

import numpy as np

from lockstep.data import Batch
from lockstep.data.decoding.augment import resampling
from lockstep.data.index import Index
from lockstep.data.loading.host import NEAR_BYTES, WINDOW_GAP_BYTES, HostLoader
from lockstep.recipes import Execution, Recipe
from lockstep.recipes.next_steps import foresee_steps
from lockstep.recipes.order import BatchPlan, evaluation_plans, training_plans
from lockstep.system.errors import RecipeError
from lockstep.system.ranks import count_ranks

if TYPE_CHECKING:
    from lockstep.data.loading.dali import DaliLoader

Loader = Union[HostLoader, "SyntheticLoader", "DaliLoader"]


class SyntheticLoader(AbstractContextManager["SyntheticLoader"]):
    """Turns plans into batches with their labels and mixing, and with images of noise, one array
    for each size, held on the device: to measure everything except the input."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self._images = np.zeros((0, 0, 0, 3), np.uint8)

    def __exit__(self, *error: object) -> None:
        pass

    def batches(self, plans: Iterable[BatchPlan]) -> Iterator[Batch]:
        """Yield a batch for every plan."""
        for plan in plans:
            shape = (len(plan.samples), plan.size, plan.size, 3)
            if self._images.shape != shape:
                self._images = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
            labels = self._index.labels(plan.samples)
            yield Batch(self._images, labels, **plan.batch_columns(), is_held=True)


def make_loader(
    index: Index, recipe: Recipe, execution: Execution, *, evaluation: bool = False
) -> Loader:
    """Return a loader of the images of an index.

    The recipe says how images are resized, in training or in an `evaluation`; the execution says
    which loader runs, and how. Raises `BackendError` if the loader's library is not installed,
    `RecipeError` if the loader cannot do what the recipe says.
    """
    if execution.loader == "synthetic":
        return SyntheticLoader(index)
    how: dict[str, Any] = {
        "threads": execution.loader_threads,
        "ahead": execution.loader_batches,
        "exif_orientation": recipe.exif_orientation,
        "augmentations": () if evaluation else recipe.augmentations,
        **resampling(recipe, evaluation=evaluation),
    }
    if execution.loader == "host":
        reads_windows = recipe.order == "windowed" and count_ranks() == 1 and not evaluation
        gap = WINDOW_GAP_BYTES if reads_windows else NEAR_BYTES
        return HostLoader(index, most_gap=gap, **how)
    if how.pop("dct_scaling"):
        raise RecipeError(
            "DALI decodes at full size only: leave out dct_scaling, or use the host loader"
        )
    if recipe.crop == "random" and recipe.crop_padding and not evaluation:
        raise RecipeError(
            "DALI cannot reflect an image at its border: set crop_padding: 0, or use the host"
            " loader"
        )
    from lockstep.data.loading.dali import DaliLoader  # needed by few

    on_gpu = execution.loader == "dali-gpu"
    return DaliLoader(index, on_gpu=on_gpu, lends=on_gpu, **how)


def plan_training(
    index: Index, recipe: Recipe, first: int, *, rank: int = 0, ranks: int = 1, parts: int = 1
) -> Iterator[BatchPlan]:
    """Yield one rank's plan of every step from `first` to the end of a run, as `training_plans`
    does, from the images of an index.

    While the plans are drawn, the cache of an object store knows them, too.
    """
    order: dict[str, Any] = {
        "labels": index.rows["label"],
        "shards": index.shards,
        "rank": rank,
        "ranks": ranks,
        "parts": parts,
    }
    plans = training_plans(recipe, index.sizes_for(recipe), first, **order)
    if not index.is_stored:
        yield from plans
        return
    list_next_steps = foresee_steps(recipe, len(index), **order)
    step = first
    with index.foreseeing(lambda: list_next_steps(step)):
        for plan in plans:
            yield plan
            step += 1


@contextmanager
def open_evaluation(
    index: Index,
    recipe: Recipe,
    execution: Execution,
    batch_images: int,
    *,
    rank: int = 0,
    ranks: int = 1,
) -> Iterator[Iterator[Batch]]:
    """Open a loader, and give a rank's share of all images in order, as evaluation prepares them.

    Raises what `make_loader` does.
    """
    sizes = index.sizes_for(recipe)
    plans = evaluation_plans(recipe, sizes, batch_images, rank=rank, ranks=ranks)
    with make_loader(index, recipe, execution, evaluation=True) as loader:
        yield loader.batches(plans)
