"""The host loader, compared with separate decoding, cropping and resizing; its order, its limits
and its end."""

import dataclasses
import os
import threading
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import simplejpeg
from PIL import Image

from lockstep.data import Batch
from lockstep.data.index import Index, open_index
from lockstep.data.loading import host
from lockstep.data.loading.host import HostLoader
from lockstep.recipes import Recipe
from lockstep.recipes.order import BatchPlan, evaluation_plans, training_plans
from lockstep.system.errors import DataError

SIZE = 32


@pytest.fixture(scope="module")
def index(textures: Path) -> Index:
    return open_index(textures / "train")


@pytest.fixture(scope="module")
def plans(tiny_recipe: Recipe, index: Index) -> list[BatchPlan]:
    """Two training steps with MixUp, one with crops that reach beyond the image, and the last two
    batches of an evaluation of 60 images in batches of 16."""
    mixed = tiny_recipe.replace(mixup_alpha=0.2, vertical_flip_probability=0.5)
    padded = mixed.replace(crop="random", crop_padding=9, training_interpolation="random")
    training = [*islice(training_plans(mixed, index.sizes, 0), 2)]
    training.append(next(training_plans(padded, index.sizes, 2)))
    return [*training, *list(evaluation_plans(tiny_recipe, index.sizes, 16))[-2:]]


@pytest.fixture
def few(tmp_path: Path) -> Index:
    """Four images in different greys, in four classes."""
    for i in range(4):
        (tmp_path / str(i)).mkdir()
        Image.new("RGB", (40, 40), (50 * i + 20,) * 3).save(
            tmp_path / str(i) / "image.jpg", quality=95
        )
    return open_index(tmp_path)


def whole(*samples: int) -> BatchPlan:
    """Return a plan of whole images of 40 x 40 pixels, reduced to `SIZE`."""
    count = len(samples)
    return BatchPlan(
        samples=np.array(samples),
        windows=np.tile(np.int32([0, 0, 40, 40]), (count, 1)),
        resized=np.full((count, 2), SIZE, np.int32),
        offsets=np.zeros((count, 2), np.int32),
        flips=np.zeros(count, bool),
        size=SIZE,
    )


def loader(index: Index, *, threads: int = 2, ahead: int = 2, **how: Any) -> HostLoader:
    return HostLoader(index, threads=threads, ahead=ahead, **{"antialias": False} | how)


def load_batches(index: Index, plans: Iterable[BatchPlan], **settings: Any) -> list[Batch]:
    with loader(index, **settings) as one:
        return list(one.batches(plans))


def load_by_hand(
    index: Index, plan: BatchPlan, antialias: bool, interpolation: str = "bilinear"
) -> np.ndarray:
    filters = {
        "bilinear": (Image.Resampling.BILINEAR, cv2.INTER_LINEAR),
        "bicubic": (Image.Resampling.BICUBIC, cv2.INTER_CUBIC),
    }
    margin = SIZE - 1
    squares = []
    for i, sample in enumerate(plan.samples.tolist()):
        if sample < 0:
            squares.append(np.zeros((SIZE, SIZE, 3), np.uint8))
            continue
        if plan.is_bicubic is not None:
            interpolation = "bicubic" if plan.is_bicubic[i] else "bilinear"
        filtering, sampling = filters[interpolation]
        top, left, height, width = plan.windows[i].tolist()
        rows, columns = plan.resized[i].tolist()
        down, along = plan.offsets[i].tolist()
        window = (
            Image.open(index.path(sample))
            .convert("RGB")
            .crop((left, top, left + width, top + height))
        )
        if antialias:
            pixels = np.asarray(window.resize((columns, rows), filtering))
        else:
            pixels = cv2.resize(np.asarray(window), (columns, rows), interpolation=sampling)
        framed = np.pad(pixels, [(margin, margin), (margin, margin), (0, 0)], mode="reflect")
        down += margin
        along += margin
        square = framed[down : down + SIZE, along : along + SIZE]
        square = square[:, ::-1] if plan.flips[i] else square
        is_turned = plan.vertical_flips is not None and plan.vertical_flips[i]
        squares.append(square[::-1] if is_turned else square)
    return np.stack(squares)


def threads_of_loaders() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("lockstep-loader")]


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("antialias", [False, True])
def test_a_batch_is_what_its_plan_says_done_by_hand(
    index: Index, plans: list[BatchPlan], antialias: bool, interpolation: str
) -> None:
    assert any(plan.flips.any() for plan in plans)
    assert any((plan.offsets < 0).any() for plan in plans)
    made = load_batches(index, plans, antialias=antialias, interpolation=interpolation)
    for batch, plan in zip(made, plans, strict=True):
        np.testing.assert_array_equal(
            batch.images, load_by_hand(index, plan, antialias, interpolation)
        )


@pytest.mark.parametrize(("threads", "ahead"), [(1, 1), (1, 7), (2, 2), (5, 2), (5, 7)])
def test_batches_do_not_depend_on_threads_or_on_how_far_ahead(
    index: Index, plans: list[BatchPlan], threads: int, ahead: int
) -> None:
    for batch, plan in zip(
        load_batches(index, plans, threads=threads, ahead=ahead), plans, strict=True
    ):
        np.testing.assert_array_equal(batch.images, load_by_hand(index, plan, False))


def test_images_and_labels_have_their_types(index: Index, plans: list[BatchPlan]) -> None:
    batch = load_batches(index, plans[:1])[0]
    assert (batch.images.dtype, batch.images.shape) == (np.uint8, (8, SIZE, SIZE, 3))
    assert (batch.labels.dtype, batch.labels.shape) == (np.int64, (8,))


def test_labels_are_those_of_the_class_folders(index: Index, plans: list[BatchPlan]) -> None:
    batch = load_batches(index, plans[:1])[0]
    folders = [Path(index.path(sample)).parent.name for sample in plans[0].samples.tolist()]
    assert [index.classes[label] for label in batch.labels] == folders


def test_padding_is_black_and_labelled_minus_one(few: Index) -> None:
    batch = load_batches(few, [whole(2, -1, 3, -1)])[0]
    assert batch.labels.tolist() == [2, -1, 3, -1]
    assert not batch.images[[1, 3]].any()
    assert batch.images[[0, 2]].all()


def test_the_last_batch_of_an_evaluation_is_padded(index: Index, plans: list[BatchPlan]) -> None:
    assert (load_batches(index, plans)[-1].labels == -1).tolist() == [False] * 12 + [True] * 4


def test_batches_come_in_the_order_of_the_plans(few: Index) -> None:
    order = np.random.default_rng(0).integers(0, 4, 40).tolist()
    batches = load_batches(few, [whole(sample) for sample in order], threads=5, ahead=7)
    assert [batch.labels.tolist() for batch in batches] == [[sample] for sample in order]


def test_every_batch_has_pixels_of_its_own(few: Index) -> None:
    batches = load_batches(few, [whole(0), whole(3), whole(0)])
    assert [batch.images[0, 0, 0, 0] // 50 for batch in batches] == [0, 3, 0]


def test_no_plans_give_no_batches(few: Index) -> None:
    assert load_batches(few, []) == []


@pytest.mark.parametrize("ahead", [1, 2, 5])
def test_only_batches_ahead_and_the_one_handed_out_are_held(few: Index, ahead: int) -> None:
    planned = 0

    def lazily() -> Iterator[BatchPlan]:
        nonlocal planned
        for _ in range(20):
            planned += 1
            yield whole(0, 1)

    with loader(few, ahead=ahead) as one:
        for handed_out, _ in enumerate(one.batches(lazily()), start=1):
            assert planned == min(handed_out + ahead, 20)


def test_training_may_stop_early_and_no_thread_stays(few: Index) -> None:
    assert threads_of_loaders() == []
    with loader(few, threads=3, ahead=2) as one:
        next(one.batches(whole(0, 1, 2, 3) for _ in range(1000)))
        assert len(threads_of_loaders()) == 3
    assert threads_of_loaders() == []


@pytest.fixture
def slowly(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The files that are decoded during the test. Each takes 50 ms."""
    decoded: list[bytes] = []

    def slow(data: bytes, *how: object, **more: object) -> None:
        decoded.append(data)
        threading.Event().wait(0.05)
        decode_into(data, *how, **more)

    decode_into = host.decode_into
    monkeypatch.setattr(host, "decode_into", slow)
    return decoded


def test_closing_a_loader_decodes_no_further_images(few: Index, slowly: list[bytes]) -> None:
    with loader(few, threads=1, ahead=1) as one:
        batches = one.batches([whole(0), whole(*[1] * 40)])
        next(batches)
    assert 1 <= len(slowly) < 41


def test_leaving_plans_decodes_no_further_images(few: Index, slowly: list[bytes]) -> None:
    with loader(few, threads=1, ahead=1) as one:
        batches = one.batches([whole(0), whole(*[1] * 40)])
        next(batches)
        batches.close()
        assert next(one.batches([whole(2)])).labels.tolist() == [2]
    assert 2 <= len(slowly) < 42


def test_a_loader_makes_batches_of_several_lists_of_plans(few: Index) -> None:
    with loader(few) as one:
        assert [batch.labels.tolist() for batch in one.batches([whole(0), whole(1)])] == [[0], [1]]
        assert [batch.labels.tolist() for batch in one.batches([whole(2)])] == [[2]]


def other_bytes(path: Path) -> bytes:
    return b"not an image".ljust(path.stat().st_size)


def other_length(path: Path) -> bytes:
    return path.read_bytes() + b"\0"


def other_pixels(path: Path) -> bytes:
    return simplejpeg.encode_jpeg(np.zeros((8, 16, 3), np.uint8)).ljust(path.stat().st_size, b"\0")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (other_bytes, "not an image in a known format"),
        (other_length, r"it has \d+ bytes instead of \d+"),
        (other_pixels, "it has 16 x 8 pixels"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_a_changed_image_is_named_with_the_reason(change, reason: str, few: Index) -> None:
    path = Path(few.path(2))
    before = path.stat()
    path.write_bytes(change(path))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    old = dataclasses.replace(few, checksums=few.checksums[:0])
    with pytest.raises(DataError, match=rf"2/image\.jpg is not the image.*: {reason}"):
        load_batches(old, [whole(0), whole(1), whole(2), whole(3)])
    with pytest.raises(DataError, match=r"2/image\.jpg is not .*: (its bytes were|it has \d+ byt)"):
        load_batches(few, [whole(0), whole(1), whole(2), whole(3)])


def test_batches_before_a_bad_image_are_handed_out(few: Index) -> None:
    Path(few.path(2)).unlink()
    labels = []
    with loader(few, ahead=3) as one, pytest.raises(DataError):
        labels.extend(
            batch.labels.tolist() for batch in one.batches([whole(0), whole(1), whole(2), whole(3)])
        )
    assert labels == [[0], [1]]


def test_a_bad_image_leaves_no_thread_behind(few: Index) -> None:
    Path(few.path(2)).unlink()
    with pytest.raises(DataError):
        load_batches(few, [whole(0, 1, 2, 3)] * 50, threads=3)
    assert threads_of_loaders() == []


def test_a_grey_and_a_cmyk_image_make_a_batch_with_others(few: Index) -> None:
    Image.new("L", (40, 40), 99).save(few.root / "0" / "grey.jpg")
    Image.new("CMYK", (40, 40), (0, 255, 255, 0)).save(few.root / "0" / "ink.jpg")
    index = open_index(few.root)
    images = load_batches(index, [whole(0, 1, 2)])[0].images
    np.testing.assert_allclose(images[0], 99, atol=1)
    np.testing.assert_allclose(images[1], np.broadcast_to(20, images[1].shape), atol=1)
    np.testing.assert_allclose(images[2], np.broadcast_to([254, 0, 0], images[2].shape), atol=3)


def test_all_cores_are_used_by_default(few: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "share_of_cores", lambda: 3)
    with loader(few, threads=0) as one:
        list(one.batches([whole(0, 1, 2, 3)] * 5))
        assert len(threads_of_loaders()) == 3


def test_an_augmentation_may_change_what_the_one_before_it_returned(
    index: Index, tiny_recipe: Recipe
) -> None:
    # An image of Pillow, which is read-only as an array, and rectangles that are written into it
    entries = (
        {"name": "gaussian_blur", "probability": 1},
        {"name": "random_erasing", "probability": 1},
    )
    recipe = tiny_recipe.replace(augmentations=entries)
    plan = next(training_plans(recipe, index.sizes, 0))
    [batch] = load_batches(index, [plan], augmentations=recipe.augmentations)
    for i, square in enumerate(load_by_hand(index, plan, False)):
        blur, erasing = recipe.augmentations
        pixels = np.array(blur.apply(square, plan.augmentations[i, 0]))
        expected = erasing.apply(pixels, plan.augmentations[i, 1])
        np.testing.assert_array_equal(batch.images[i], expected)
