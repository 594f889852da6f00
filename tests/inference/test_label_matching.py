"""Which output of a model is the class of an image: weights of torchvision's, timm's and Keras'
orders of folders, ImageNet's classes by number, and what evaluations report on it."""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import lockstep
from lockstep.data.class_order import list_orders
from lockstep.data.packing import Packing, pack
from lockstep.recipes import Recipe
from lockstep.system.errors import DataError
from lockstep.weights.class_names import find_imagenet, imagenet_names, imagenet_synsets
from tests.inference.cases import random_tensors, save_tensors

SaveWeights = Callable[..., Path]
NAMES = tuple(map(str, range(12)))


def sort_as_torchvision(names: tuple[str, ...]) -> list[str]:
    """`ImageFolder.find_classes`: `sorted(entry.name for entry in os.scandir(folder))`. Keras sorts
    the same names by `sorted(tf.io.gfile.listdir(folder))`."""
    return sorted(names)


def sort_as_timm(names: tuple[str, ...]) -> list[str]:
    """`find_images_and_targets` sorts by `natural_key`; of numbers, that is their order."""
    return sorted(names, key=int)


@pytest.fixture(scope="module")
def reds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four images of each class, whose red level is 20 times its number."""
    root = tmp_path_factory.mktemp("reds")
    for name in NAMES:
        (root / "val" / name).mkdir(parents=True)
        for image in range(4):
            colour = (20 * int(name), 0, 0)
            Image.new("RGB", (40, 40), colour).save(root / "val" / name / f"{image}.png")
    return root


def train(order: list[str], reds: Path, recipe: Recipe, folder: Path) -> Path:
    """Return weights without names of classes that are right on all images. Output n is the n-th
    class of `order`: the classifier solves the linear equations of one image of each class."""
    recipe = recipe.replace(logits=12, precision="fp32")
    tensors = random_tensors(recipe, 1)
    bare = save_tensors(folder / "bare", recipe, tensors, classes=())
    photos = [reds / "val" / name / "0.png" for name in order]
    with lockstep.load(bare) as predictor:
        predictions = list(predictor.predict(photos, features=True))
    features = np.array([row.features for row in predictions], np.float64)
    rows = np.column_stack([features, np.ones(12)])
    solution = np.linalg.lstsq(rows, 20 * np.eye(12), rcond=None)[0].astype(np.float32)
    tensors |= {"fc.weight": np.ascontiguousarray(solution[:-1].T), "fc.bias": solution[-1]}
    return save_tensors(folder / "fitted", recipe, tensors, classes=())


@pytest.mark.parametrize(
    ("sort", "top1", "other", "remark"),
    [
        (sort_as_timm, 100, 16.67, "the class order fits the images: top-1 is 100.00 %"),
        (sort_as_torchvision, 16.67, 100, "WARNING: the class order is probably wrong"),
    ],
)
def test_accuracy_is_reported_in_the_orders_of_other_programs(
    sort: Callable[[tuple[str, ...]], list[str]],
    top1: float,
    other: float,
    remark: str,
    reds: Path,
    tiny_recipe: Recipe,
    tmp_path: Path,
) -> None:
    """Folders 0 and 1 have the same label in both orders: 2 of 12 are right in any case."""
    order = sort(NAMES)
    weights = train(order, reds, tiny_recipe, tmp_path)
    result = lockstep.load(weights).evaluate(reds).to_json()
    assert result["top1_percent"] == pytest.approx(top1, abs=0.01)
    accuracies = {row["counts"]: row["top1_percent"] for row in result["class_orders"]}
    assert accuracies == pytest.approx({True: top1, False: other}, abs=0.01)
    assert any(text.startswith(remark) for text in result["remarks"])
    assert any("matched by position" in text for text in result["remarks"])
    named = lockstep.load(weights, classes=order).evaluate(reds).to_json()
    assert (named["top1_percent"], named["class_orders"]) == (100, [])
    assert not any("position" in text for text in named["remarks"])


def test_numbers_of_some_outputs_are_these(reds: Path, tiny_recipe: Recipe, tmp_path: Path) -> None:
    (tmp_path / "val").mkdir()
    for name in ("2", "10"):
        (tmp_path / "val" / name).symlink_to(reds / "val" / name)
    weights = train(sort_as_timm(NAMES), reds, tiny_recipe, tmp_path)
    result = lockstep.load(weights).evaluate(tmp_path / "val")
    assert result.top1 == result.top5 == 100
    assert any(remark.startswith("labels are matched by number") for remark in result.remarks)
    named = lockstep.load(weights, classes=[f"c{n}" for n in NAMES])
    with pytest.raises(DataError, match=r"""--labels FILE, such as \{"2": "c2"\}"""):
        named.evaluate(tmp_path / "val")


@pytest.mark.parametrize(
    ("classes", "digits"), [((), 1), (imagenet_synsets(), 3), (imagenet_names(), 1)]
)
def test_numbers_of_imagenet_are_its_outputs(
    classes: tuple[str, ...], digits: int, save_weights: SaveWeights, reds: Path, tmp_path: Path
) -> None:
    for name in ("2", "10", "11"):
        (tmp_path / "val").mkdir(exist_ok=True)
        (tmp_path / "val" / name.zfill(digits)).symlink_to(reds / "val" / name)
    source = save_weights(classes=classes, logits=1000, favourite=10)
    result = lockstep.load(source).evaluate(tmp_path / "val").to_json()
    counts = {label: n for label, n in enumerate(result["per_class"]["images"]) if n}
    assert counts == {2: 4, 10: 4, 11: 4}
    assert result["per_class"]["top1"][10] == 4
    assert any("ImageNet's ids, words or numbers" in remark for remark in result["remarks"])


def test_words_and_ids_of_imagenet_are_found_and_others_are_not() -> None:
    tench = imagenet_synsets()[0]
    assert find_imagenet([tench, imagenet_synsets()[7]])[7] == imagenet_synsets()[7]
    assert find_imagenet(["great_white_shark"])[2] == "great_white_shark"
    for names in (["1000"], ["1", "01"], [tench, "1"], ["-1"], ["1.0"]):
        assert find_imagenet(names) is None


def test_the_order_is_named(save_weights: SaveWeights, reds: Path, tmp_path: Path) -> None:
    source = save_weights(classes=(), logits=12)
    events: list[object] = []
    lockstep.load(source).on(listener=events.append).predict(reds / "val/3/0.png")
    assert "sort class folders as text" in str(events)
    result = lockstep.load(source).save(tmp_path / "w.pth", to="torchvision", certificate=False)
    assert any("sort class folders as text" in remark for remark in result["remarks"])
    for seed, names, order in ((2, NAMES, "natural order"), (3, sorted(NAMES), "text order")):
        target = tmp_path / f"{order}.pth"
        source = save_weights(seed, tuple(names), logits=12)
        result = lockstep.load(source).save(target, to="torchvision", certificate=False)
        assert any(f"the outputs are in {order}" in remark for remark in result["remarks"])


@pytest.mark.parametrize(
    "natural",
    [NAMES, ("class1", "class2", "class10"), ("a", "B"), ("x1y9", "x1y10"), ("a9", "A10")],
)
def test_the_orders_are_those_of_torchvision_and_timm(natural: tuple[str, ...]) -> None:
    """As `timm.utils.misc.natural_key` of timm 1.0.31 sorts these names."""
    assert list(list_orders(natural[::-1]).values()) == [tuple(sorted(natural)), natural]


@pytest.mark.parametrize("form", ["folder", "webdataset", "recordio"])
def test_images_of_unknown_classes_are_left_out(
    form: str, save_weights: SaveWeights, reds: Path, tmp_path: Path
) -> None:
    """The result is that of the same folders without them; outputs without images can win."""
    for name in ("2", "10", "owl", "newt"):
        place = tmp_path / "data/val" / f"class {name}"
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(reds / "val" / name.replace("owl", "3").replace("newt", "4"), place)
    names = tuple(f"class {name}" for name in ("7", "10", "2"))
    source = lockstep.load(save_weights(classes=names, logits=3, favourite=0))
    data = tmp_path / "data"
    if form != "folder":
        data = tmp_path / "packed"
        pack(tmp_path / "data", data, Packing(form))
    grown = source.evaluate(data).to_json()
    for name in ("owl", "newt"):
        shutil.rmtree(tmp_path / "data/val" / f"class {name}")
    alone = source.evaluate(tmp_path / "data").to_json()
    for field in ("top1_percent", "loss", "images", "per_class", "class_summary"):
        assert grown[field] == alone[field]
    assert grown["per_class"]["images"] == [0, 4, 4]
    assert grown["per_class"]["predicted"] == [8, 0, 0]
    (remark,) = [text for text in grown["remarks"] if "left out" in text]
    assert "8 images" in remark
    assert "(class newt, class owl)" in remark
    assert f" --data {data} --out " in remark
    assert not any("left out" in text for text in alone["remarks"])
    assert any("no images of class 7, which the weights know" in text for text in alone["remarks"])


def test_images_of_imagenets_classes_are_taken_from_others(
    save_weights: SaveWeights, reds: Path, tmp_path: Path
) -> None:
    """By words, where the weights have ids."""
    for name in ("tench", "goldfish", "my dog"):
        shutil.copytree(reds / "val/3", tmp_path / "val" / name)
    source = lockstep.load(save_weights(classes=imagenet_synsets(), logits=1000, favourite=1))
    result = source.evaluate(tmp_path).to_json()
    assert (result["images"], result["top1_percent"]) == (8, 50)
    assert any("4 images" in text and "(my dog)" in text for text in result["remarks"])
    for name in ("tench", "goldfish"):
        shutil.rmtree(tmp_path / "val" / name)
    with pytest.raises(DataError, match=r"no image of a class .*my dog.*--weights"):
        source.evaluate(tmp_path)
