"""Predict with known weights and load them; compare with pixels and sums computed by hand."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import lockstep
from lockstep.inference.images import Encoded, list_images, read_square
from lockstep.recipes import Recipe
from lockstep.system.errors import DataError, UserError
from lockstep.weights import checkpoint
from tests.data.pictures import progressive_jpeg
from tests.edges import softmax
from tests.inference.cases import CLASSES, image_file, prepare_photo, random_tensors

SaveWeights = Callable[..., Path]


def likelihoods(source: Path, path: Path, recipe: Recipe, *, ema: bool = False) -> np.ndarray:
    """Return the probabilities of one image: float64 [logits]."""
    with torch.inference_mode():
        module = lockstep.load(source, ema=ema).module()
        logits = module(torch.from_numpy(prepare_photo(path, recipe))).double().numpy()
    return softmax(logits)[0]


@pytest.mark.parametrize(
    "shape", [(96, 96), (70, 133), (131, 70), (36, 36), (37, 36), (20, 31)], ids=str
)
@pytest.mark.parametrize(
    "resize", [(False, "bilinear"), (True, "bilinear"), (True, "bicubic")], ids=str
)
def test_a_prediction_is_the_softmax_of_the_module_on_the_preprocessed_image(
    shape: tuple[int, int],
    resize: tuple[bool, str],
    save_weights: SaveWeights,
    tiny_recipe: Recipe,
    tmp_path: Path,
) -> None:
    changes = {
        "antialias": resize[0],
        "interpolation": resize[1],
        "mean": (100.0, 110.0, 120.0),
        "std": (50.0, 60.0, 70.0),
    }
    source = save_weights(**changes)
    path = image_file(tmp_path, *shape)
    expected = likelihoods(source, path, tiny_recipe.replace(**changes))
    [prediction] = list(lockstep.load(source).predict([path], top=10))
    order = np.argsort(-expected)
    assert prediction.path == path
    assert prediction.classes == tuple(CLASSES[i] for i in order)
    np.testing.assert_allclose(prediction.probabilities, expected[order], rtol=1e-4, atol=1e-6)


def test_probabilities_fall_and_sum_to_one(save_weights: SaveWeights, textures: Path) -> None:
    images = sorted((textures / "val").rglob("*.jpg"))
    for prediction in lockstep.load(save_weights()).predict(images, top=10):
        assert list(prediction.probabilities) == sorted(prediction.probabilities, reverse=True)
        assert sum(prediction.probabilities) == pytest.approx(1, abs=1e-12)
        assert sorted(prediction.classes) == sorted(CLASSES)


def test_images_are_predicted_in_the_order_given_whatever_their_size_and_format(
    save_weights: SaveWeights, tiny_recipe: Recipe, tmp_path: Path
) -> None:
    source = save_weights()
    sizes = ((40, 50, ".png"), (90, 60, ".jpg"), (33, 33, ".bmp"))
    paths = [image_file(tmp_path, height, width, suffix) for height, width, suffix in sizes]
    predictions = list(lockstep.load(source).predict(paths, top=1))
    assert [prediction.path for prediction in predictions] == paths
    for prediction, path in zip(predictions, paths, strict=True):
        # Two JPEG decoders may round a pixel differently.
        assert prediction.probabilities[0] == pytest.approx(
            likelihoods(source, path, tiny_recipe).max(), rel=0.02
        )


@pytest.mark.parametrize(("top", "count"), [(1, 1), (5, 5), (99, 10)])
def test_no_more_classes_are_given_than_asked_for_or_there_are(
    top: int, count: int, save_weights: SaveWeights, tmp_path: Path
) -> None:
    prediction = lockstep.load(save_weights()).predict(image_file(tmp_path, 50, 50), top=top)
    assert len(prediction.classes) == len(prediction.probabilities) == count


def test_unnamed_outputs_are_numbers(save_weights: SaveWeights, tmp_path: Path) -> None:
    model = lockstep.load(save_weights(logits=13))
    prediction = model.predict(image_file(tmp_path, 50, 50), top=99)
    assert sorted(prediction.classes) == sorted([*CLASSES, "10", "11", "12"])
    assert sum(prediction.probabilities) == pytest.approx(1)


@pytest.mark.parametrize(
    ("changes", "number", "name"),
    [
        ({"logits": 1000}, 281, "tabby"),
        ({"logits": 1000}, 999, "toilet tissue"),
        ({"logits": 1001, "padding": "same"}, 0, "tench"),
        # NVIDIA's model never trains its last output.
        ({"logits": 1001, "padding": "same"}, 1000, "1000"),
        ({"logits": 1001}, 281, "281"),
        ({"logits": 999}, 281, "281"),
    ],
)
def test_outputs_without_names_have_those_of_imagenet_where_they_may_be_its_classes(
    changes: dict[str, Any], number: int, name: str, save_weights: SaveWeights, tmp_path: Path
) -> None:
    source = save_weights(classes=(), favourite=number, **changes)
    [prediction] = list(lockstep.load(source).predict([image_file(tmp_path, 50, 50)], top=1))
    assert prediction.classes == (name,)


@pytest.mark.parametrize(
    ("changes", "which"),
    [
        ({"logits": 1000}, "1000 outputs"),
        (
            {"logits": 1001, "padding": "same"},
            "1001 outputs, the last unused, like NVIDIA's TensorFlow model",
        ),
    ],
)
def test_names_that_are_assumed_are_noted(
    changes: dict[str, Any], which: str, save_weights: SaveWeights, tmp_path: Path
) -> None:
    heard: list[Any] = []
    model = lockstep.load(save_weights(classes=(), **changes)).on(listener=heard.append)
    for features in (False, True, False):  # once, whatever is asked for
        model.predict(image_file(tmp_path, 50, 50), features=features)
    message = f"the weights name no classes and have {which}; showing ImageNet's names."
    message += " If these are wrong: --classes FILE"
    assert heard == [{"kind": "note", "message": message}]


def test_1000_classes_of_a_user_keep_their_names(save_weights: SaveWeights, tmp_path: Path) -> None:
    source = save_weights(classes=tuple(map(str, range(1000))), favourite=281, logits=1000)
    heard = []
    model = lockstep.load(source).on(listener=heard.append)
    prediction = model.predict(image_file(tmp_path, 50, 50), top=1)
    assert (prediction.classes, heard) == (("281",), [])


def test_given_names_replace_own_names(save_weights: SaveWeights, tmp_path: Path) -> None:
    image = image_file(tmp_path, 50, 50)
    names = [name.upper() for name in CLASSES]
    source = save_weights(favourite=3)
    [prediction] = list(lockstep.load(source, classes=names).predict([image], top=1))
    assert prediction.classes == ("DOTS",)
    with pytest.raises(DataError, match=r"9 names.* 10 outputs"):
        list(lockstep.load(source, classes=names[1:]).predict([image]))


def test_given_names_replace_imagenets(save_weights: SaveWeights, tmp_path: Path) -> None:
    source = save_weights(classes=(), favourite=281, logits=1000)
    heard = []
    names = [f"product {i}" for i in range(1000)]
    model = lockstep.load(source, classes=names).on(listener=heard.append)
    prediction = model.predict(image_file(tmp_path, 50, 50), top=1)
    assert (prediction.classes, heard) == (("product 281",), [])


def test_the_moving_average_predicts_when_asked_for(
    save_weights: SaveWeights, tiny_recipe: Recipe, tmp_path: Path
) -> None:
    source = save_weights(ema_decay=0.9)
    path = image_file(tmp_path, 50, 50)
    [trained], [average] = (
        list(lockstep.load(source, ema=ema).predict([path], top=1)) for ema in (False, True)
    )
    for prediction, ema in ((trained, False), (average, True)):
        expected = likelihoods(source, path, tiny_recipe, ema=ema).max()
        assert prediction.probabilities[0] == pytest.approx(expected, rel=1e-4)
    assert trained.probabilities != average.probabilities


def test_a_loaded_model_is_a_module_in_evaluation_mode(save_weights: SaveWeights) -> None:
    source = save_weights()
    module = lockstep.load(source).module()
    assert isinstance(module, torch.nn.Module)
    assert not module.training
    expected, _ = checkpoint.read_weights(source / "model.safetensors")
    state = {
        name: value
        for name, value in module.state_dict().items()
        if not name.endswith("num_batches_tracked")
    }
    assert {name: value.numpy().tobytes() for name, value in state.items()} == {
        n: v.tobytes() for n, v in expected.items()
    }


def test_a_run_is_loaded_at_any_step(save_weights: SaveWeights, tiny_recipe: Recipe) -> None:
    for seed in (1, 2, 3):
        run = save_weights(seed=seed).parents[1]
    for name, seed in (("newest", 3), ("2", 2)):
        kernel = lockstep.load(run, checkpoint=name).module().conv1.weight.detach().numpy()
        np.testing.assert_array_equal(kernel, random_tensors(tiny_recipe, seed)["conv1.weight"])


BAD_IMAGES = {
    **{"missing.jpg": None, "empty.jpg": b"", "text.jpg": b"hello, this is no image"},
    **{"cut off.jpg": "half", "cut off.png": "half"},
}


@pytest.mark.parametrize("name", BAD_IMAGES)
def test_a_broken_image_is_named(name: str, save_weights: SaveWeights, tmp_path: Path) -> None:
    good = image_file(tmp_path, 40, 40)
    bad = tmp_path / name
    content = BAD_IMAGES[name]
    if content == "half":
        whole = image_file(tmp_path, 80, 80, bad.suffix).read_bytes()
        bad.write_bytes(whole[: len(whole) // 2])
    elif isinstance(content, bytes):
        bad.write_bytes(content)
    with pytest.raises(DataError, match=name):
        list(lockstep.load(save_weights()).predict([good, bad]))


KINDS: dict[str, Callable[[Path], Any]] = {
    "text": str,
    "path": Path,
    "bytes": Path.read_bytes,
    "memory": lambda path: memoryview(path.read_bytes()),
    "array": lambda path: np.asarray(Image.open(path)),
    "array from right to left": lambda path: np.asarray(Image.open(path))[:, ::-1].copy()[:, ::-1],
    "floats": lambda path: np.asarray(Image.open(path), np.float32) / 255,
    "tensor": lambda path: torch.from_numpy(np.array(Image.open(path))),
    "ToTensor": lambda path: (
        torch.from_numpy(np.array(Image.open(path))).permute(2, 0, 1).div(255).requires_grad_()
    ),
    "Pillow": Image.open,
    "Pillow with alpha": lambda path: Image.open(path).convert("RGBA"),
}


def test_images_of_any_kind_are_predicted(save_weights: SaveWeights, tmp_path: Path) -> None:
    path = image_file(tmp_path, 50, 60)
    source = save_weights()
    [expected] = list(lockstep.load(source).predict([path], top=10))
    with lockstep.load(source) as predictor:
        for kind, convert in KINDS.items():
            several = predictor.predict([convert(path)], top=10)
            for prediction in (predictor.predict(convert(path), top=10), next(several)):
                assert (prediction.classes, prediction.probabilities) == (
                    expected.classes,
                    expected.probabilities,
                ), kind
                assert prediction.path == (path if kind in ("text", "path") else None)
        batch = np.stack([np.asarray(Image.open(path))] * 3)
        colours_first = torch.from_numpy(batch).permute(0, 3, 1, 2)
        for images in (batch, colours_first, [colours_first[:1], colours_first[1:]]):
            assert [prediction.classes for prediction in predictor.predict(images, top=10)] == [
                expected.classes
            ] * 3


@pytest.mark.parametrize("dct_scaling", [False, True])
@pytest.mark.parametrize("turns", [False, True])
def test_a_photo_is_turned_by_its_exif_orientation_if_the_recipe_says_so(
    turns: bool, dct_scaling: bool, tiny_recipe: Recipe, tmp_path: Path
) -> None:
    recipe = tiny_recipe.replace(
        exif_orientation=turns, dct_scaling=dct_scaling, eval_antialias=True
    )
    squares = np.zeros((6, recipe.eval_crop, recipe.eval_crop, 3), np.uint8)
    pixels = np.random.default_rng(2).integers(0, 256, (50, 60, 3), np.uint8)
    exif = Image.Exif()
    exif[0x0112] = 6
    path = tmp_path / "photo.jpg"
    Image.fromarray(pixels).save(path, exif=exif)
    image = Image.open(path)
    expected = np.rot90(np.asarray(image), -1) if turns else np.asarray(image)
    data = path.read_bytes()
    images = (expected, path, data, memoryview(data), Encoded(path, path.read_bytes), image)
    for square, source in zip(squares, images, strict=True):
        read_square(source, recipe, square)
    assert not (squares != squares[0]).any()


@pytest.mark.parametrize(
    ("image", "kind"),
    [
        (7, "int"),
        (None, "NoneType"),
        ([b"", 3.5], "float"),
        (np.full((4, 4, 3), 7, np.float32), r"float32 array \[4, 4, 3\] with values from 7 to 7"),
        (np.full((4, 4, 3), np.nan), r"float64 array \[4, 4, 3\] with values from nan to nan"),
        (np.full((4, 4, 3), -1.0), r"float64 .* values from -1 to -1, probably normalised"),
        (torch.zeros(4, 4, 3, dtype=torch.int32), r"int32 array \[4, 4, 3\]"),
        (torch.zeros(4, 4, 3, dtype=torch.bfloat16), r"torch.bfloat16 tensor \[4, 4, 3\]"),
        (torch.zeros(2, 2, 4, 4, dtype=torch.uint8), r"uint8 array \[2, 2, 4, 4\]"),
        (np.zeros((4, 4), np.uint8), r"uint8 array \[4, 4\]"),
        (np.zeros((0, 4, 3), np.uint8), r"uint8 array \[0, 4, 3\]"),
    ],
)
def test_what_is_not_an_image_is_answered_with_what_is_taken(image: Any, kind: str) -> None:
    with pytest.raises(DataError, match=rf"given as {kind}; expected"):
        list_images(image)


@pytest.mark.parametrize("method", ["predict", "logits", "preprocess"])
@pytest.mark.parametrize(
    ("images", "advice"),
    [
        (
            [torch.zeros(2, 3, 4, 4), torch.zeros(2)],
            "From a batch with labels, pass only the images",
        ),
        ({"image": "photo.jpg"}, "given as dict; .* pass only the images"),
        (
            [np.zeros((4, 4), np.uint8)],
            r"as ndarray \[4, 4\]; .*Convert a grey image: PIL\.Image\.fromarray",
        ),
        (torch.nn.Linear(1, 1), "given as Linear; expected"),
    ],
)
def test_a_call_checks_its_images(
    method: str, images: Any, advice: str, save_weights: SaveWeights
) -> None:
    model = lockstep.load(save_weights())
    with pytest.raises(DataError, match=advice):
        getattr(model, method)(images)


def test_a_predictor_is_lazy(save_weights: SaveWeights, tmp_path: Path) -> None:
    path = image_file(tmp_path, 40, 40)
    consumed = []

    def endless() -> Iterator[Path]:
        while True:
            consumed.append(path)
            yield path

    with lockstep.load(save_weights()).on(batch=4) as predictor:
        results = predictor.predict(endless())
        assert [next(results).path for _ in range(5)] == [path] * 5
    assert len(consumed) <= 4 * 4


def test_a_predictor_gives_the_modules_logits(
    save_weights: SaveWeights, tiny_recipe: Recipe, tmp_path: Path
) -> None:
    paths = [image_file(tmp_path, 40, 30 + i) for i in range(5)]
    source = save_weights()
    with lockstep.load(source).on(batch=2) as predictor, torch.inference_mode():
        logits = np.stack(list(predictor.logits(paths)))
        expected = lockstep.load(source).module()(
            torch.from_numpy(np.concatenate([prepare_photo(path, tiny_recipe) for path in paths]))
        )
    assert logits.dtype == np.float32
    np.testing.assert_allclose(logits, expected.numpy(), rtol=1e-4, atol=1e-5)


def test_unreadable_images_are_reported(save_weights: SaveWeights, tmp_path: Path) -> None:
    good = [image_file(tmp_path, 40, 40 + i) for i in range(3)]
    problems: list[tuple[str, str]] = []
    (tmp_path / "scans.jpg").write_bytes(progressive_jpeg(repeated=1000))
    missing, scans = (tmp_path / name for name in ("missing.jpg", "scans.jpg"))
    images = [good[0], b"no image", good[1], missing, scans, good[2]]
    with lockstep.load(save_weights()).on(batch=2) as predictor:
        predictions = list(
            predictor.predict(images, on_error=lambda name, reason: problems.append((name, reason)))
        )
    assert [prediction.path for prediction in predictions] == good
    unreadable = "cannot be read"
    assert problems == [
        ("images[1]", f"{unreadable}: not an image in a known format"),
        (str(missing), "No such file or directory"),
        (str(scans), f"{unreadable}: more than 100 scans are too many; save the image again"),
    ]


def test_a_strip_that_would_become_a_huge_image_is_refused(save_weights: SaveWeights) -> None:
    strip = np.zeros((1, 13_000, 3), np.uint8)
    with pytest.raises(DataError, match="13000 x 1 pixels are too many on one side"):
        list(lockstep.load(save_weights()).predict(strip))


def test_a_batch_has_at_least_one_image(save_weights: SaveWeights, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="batch is 0; expected at least 1"):
        list(lockstep.load(save_weights()).on(batch=0).predict(image_file(tmp_path, 40, 40)))


def test_a_folder_in_place_of_an_image_is_named(save_weights: SaveWeights, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="it is a folder; name its files"):
        list(lockstep.load(save_weights()).predict([tmp_path]))
