"""The loaders: what turns the plans of `order` into batches."""

from lockstep.data.dali import DaliLoader
from lockstep.data.host import HostLoader
from lockstep.data.index import Index
from lockstep.data.synthetic import SyntheticLoader
from lockstep.recipes import Execution, Recipe

Loader = HostLoader | DaliLoader | SyntheticLoader


def loader_of(index: Index, recipe: Recipe, execution: Execution, *, size: int) -> Loader:
    """Return a loader of an index for images of `size` pixels, resized as the recipe says and run as the execution says.

    Raises `BackendError` if the loader's library is not installed.
    """
    threads, ahead = execution.loader_threads, execution.loader_batches
    if execution.loader == "synthetic":
        return SyntheticLoader(index, size=size)
    if execution.loader == "host":
        return HostLoader(index, size=size, antialias=recipe.antialias, threads=threads, ahead=ahead)
    on_gpu = execution.loader == "dali-gpu"
    return DaliLoader(index, size=size, antialias=recipe.antialias, on_gpu=on_gpu, threads=threads, ahead=ahead)
