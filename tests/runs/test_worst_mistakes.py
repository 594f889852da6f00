"""The worst mistakes of an evaluation: which images they are, and that exactly these are shown."""

from dataclasses import fields
from pathlib import Path

import numpy as np

from lockstep.data.index import open_index
from lockstep.data.loading.host import HostLoader
from lockstep.models.metrics import Scores
from lockstep.recipes import Recipe
from lockstep.recipes.order import evaluation_plans
from lockstep.runs.image_results import find_worst, load_worst_mistakes


def scores(losses: list[float], ranks: list[int], predictions: list[int] | None = None) -> Scores:
    none = np.zeros(len(losses), np.int32)
    known = {"losses": np.array(losses, np.float32), "ranks": np.array(ranks, np.int32)}
    known |= {"predictions": none if predictions is None else np.array(predictions, np.int32)}
    return Scores(**{field.name: known.get(field.name, none) for field in fields(Scores)})


def test_wrong_predictions_come_by_loss_and_right_ones_never() -> None:
    some = scores([0.5, 9.0, 3.0, 4.0, 3.5], [1, 0, 2, 0, 1])
    assert find_worst(some, 10).tolist() == [4, 2, 0]
    assert find_worst(some, 2).tolist() == [4, 2]


def test_the_pictures_are_those_of_the_mistakes(textures: Path, tiny_recipe: Recipe) -> None:
    index = open_index(textures / "val")
    losses = np.zeros(20)
    ranks = np.zeros(20, int)
    losses[[3, 11, 17]], ranks[[3, 11]] = (1.0, 2.0, 5.0), 1
    some = scores(losses.tolist(), ranks.tolist(), [7] * 20)
    pictures = load_worst_mistakes(index, tiny_recipe.replace(eval_antialias=True), some)
    (plan,) = evaluation_plans(tiny_recipe, index.sizes, 20)
    with HostLoader(index, antialias=True) as loader:
        (batch,) = loader.batches([plan])
    assert [picture.name for picture in pictures] == ["mistakes/01", "mistakes/02"]
    caption = f"{index.classes[0]} predicted as {index.classes[7]}"
    assert [picture.caption for picture in pictures] == [caption, caption]
    assert np.array_equal(pictures[0].pixels, batch.images[11])
    assert np.array_equal(pictures[1].pixels, batch.images[3])


def test_a_class_without_a_name_is_numbered(textures: Path, tiny_recipe: Recipe) -> None:
    index = open_index(textures / "val")
    some = scores([1.0] * 20, [1] + [0] * 19, [1000] * 20)
    (picture,) = load_worst_mistakes(index, tiny_recipe, some)
    assert picture.caption == f"{index.classes[0]} predicted as 1000"


def test_without_mistakes_there_are_no_pictures(textures: Path, tiny_recipe: Recipe) -> None:
    index = open_index(textures / "val")
    assert load_worst_mistakes(index, tiny_recipe, scores([1.0] * 20, [0] * 20)) == []
