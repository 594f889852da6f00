"""The worst mistakes of an evaluation, as pictures."""

import numpy as np

from lockstep.data.index import Index
from lockstep.data.loading.loaders import make_loader
from lockstep.models.metrics import Scores
from lockstep.recipes import Execution, Recipe
from lockstep.recipes.order import centre_plan
from lockstep.runs.loggers import Picture


def find_worst(scores: Scores, count: int) -> np.ndarray:
    """Return the rows of the wrong predictions with the highest losses, the worst first: int64 [at
    most count]."""
    wrong = np.flatnonzero(scores.ranks > 0)
    return wrong[np.argsort(-scores.losses[wrong], kind="stable")][:count]


def load_evaluated_images(index: Index, recipe: Recipe, samples: np.ndarray) -> np.ndarray:
    """Return images as an evaluation crops them: uint8 [samples, size, size, 3]. Raises `DataError`
    if one is unreadable."""
    plan = centre_plan(recipe, samples, index.sizes_for(recipe)[samples])
    with make_loader(index, recipe, Execution(), evaluation=True) as loader:
        return next(iter(loader.batches([plan]))).pixels


def load_worst_mistakes(
    index: Index, recipe: Recipe, scores: Scores, count: int = 16
) -> list[Picture]:
    """Return the worst mistakes as the model gets them, with class names. Row i of the scores is
    sample i."""
    samples = find_worst(scores, count)
    if not len(samples):
        return []
    images = load_evaluated_images(index, recipe, samples)
    names = dict(enumerate(index.classes))
    pictures = []
    for number, (sample, pixels) in enumerate(zip(samples, images, strict=True), start=1):
        label = int(scores.labels[sample])
        prediction = int(scores.predictions[sample])
        caption = f"{names[label]} taken for {names.get(prediction, str(prediction))}"
        pictures.append(Picture(f"mistakes/{number:02d}", caption, pixels))
    return pictures
