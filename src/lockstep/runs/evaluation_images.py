"""All images of an index in batches, as evaluation prepares them, while a listener sees how far the
work is."""

from collections.abc import Iterator

from lockstep.data import Batch
from lockstep.data.index import Index
from lockstep.data.loading.loaders import open_evaluation
from lockstep.recipes import Execution, Recipe
from lockstep.runs.recorder import Recorder
from lockstep.system import heartbeat


def watch_images(
    recorder: Recorder,
    what: str,
    index: Index,
    recipe: Recipe,
    execution: Execution,
    batch_images: int,
) -> Iterator[Batch]:
    """Yield the images of an index. The last batch may be padded with images of label -1.

    `what` names the work in the progress that the recorder passes on.
    """
    count = -(-len(index) // batch_images)
    with open_evaluation(index, recipe, execution, batch_images) as batches:
        for number, batch in enumerate(recorder.watch(what, batches, count)):
            heartbeat.note("evaluating" if number else "compiling", moved=True)
            yield batch
