"""The images of a run: a share held out for validation, and other ways to give a data set."""

import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest

from lockstep.data.images import Progress
from lockstep.data.index import Index, open_index
from lockstep.data.split import choose_share, divide_index, find_validation_index, open_sets
from lockstep.recipes.folds import Fold
from lockstep.system.errors import DataError
from tests.data.cases import image_folder, jpeg
from tests.data.sets import FORMATS, pack_as

IMAGE = jpeg(8, 9)
SHARE = 0.3


def silent(what: str) -> Progress:
    return lambda done, total: None


def images(*counts: int, first: int = 0) -> dict[str, bytes]:
    """Return images of the classes a, b, ..., this many of each."""
    return {
        f"{chr(97 + i)}/{n:03d}.jpg": IMAGE
        for i, count in enumerate(counts)
        for n in range(first, first + count)
    }


def names(index: Index) -> set[str]:
    return {index.name(i) for i in range(len(index))}


def within_the_share(name: str) -> bool:
    return int(hashlib.sha256(name.encode()).hexdigest()[:16], 16) / 16**16 < SHARE


def test_images_are_held_out_by_the_hash_of_class_and_name(tmp_path: Path) -> None:
    files = images(40, 30)
    training, validation = divide_index(open_index(image_folder(tmp_path / "all", files)), SHARE)
    assert names(validation) == set(filter(within_the_share, files))
    assert 10 < len(validation) < 32
    assert names(training) == set(files) - names(validation)
    assert training.classes == validation.classes == ("a", "b")
    assert [training.read(0), validation.read(3)] == [IMAGE, IMAGE]
    assert training.digest != validation.digest


def test_images_keep_their_part_when_others_are_added(tmp_path: Path) -> None:
    few = divide_index(open_index(image_folder(tmp_path / "few", images(20, 20))), SHARE)
    more = divide_index(open_index(image_folder(tmp_path / "more", images(50, 20, 30))), SHARE)
    assert [names(a) <= names(b) for a, b in zip(few, more, strict=True)] == [True, True]


@pytest.mark.parametrize("count", [2, 3, 11])
@pytest.mark.parametrize("share", [0.001, 0.999])
def test_every_class_is_on_both_sides(count: int, share: float, tmp_path: Path) -> None:
    files = {f"{name}/{i}.jpg": IMAGE for name in "abc" for i in range(count)}
    training, validation = divide_index(open_index(image_folder(tmp_path, files)), share)
    smaller = validation if share < 0.5 else training
    assert [smaller.rows["label"].tolist().count(label) for label in range(3)] == [1, 1, 1]


def test_the_only_image_of_a_class_is_trained_on(tmp_path: Path) -> None:
    training, validation = divide_index(
        open_index(image_folder(tmp_path, images(*[1] * 20, 2))), 0.5
    )
    assert len(training) == 21
    assert len(validation) == 1
    with pytest.raises(DataError, match="3 images of 3 classes, one of each"):
        divide_index(open_index(image_folder(tmp_path / "ones", images(1, 1, 1))), 0.5)


@pytest.mark.parametrize("format", FORMATS)
def test_every_format_of_the_same_images_is_split_alike(format: str, tmp_path: Path) -> None:
    files = {name: jpeg(8, 9 + seed) for seed, name in enumerate(images(20, 20))}
    image_folder(tmp_path / "source" / "train", files)
    data = (
        tmp_path / "source"
        if format == "folder"
        else pack_as(tmp_path / "source", tmp_path / format, format)
    )
    training, validation, _, _ = open_sets(data, SHARE, silent)
    parts = [{index.read(i) for i in range(len(index))} for index in (training, validation)]
    assert parts[1] == {data for name, data in files.items() if within_the_share(name)}
    assert parts[0] == set(files.values()) - parts[1]


@pytest.mark.parametrize("folder", ["", "train"])
def test_folders_and_training_images_are_split_alike(folder: str, tmp_path: Path) -> None:
    files = images(20, 20)
    image_folder(tmp_path / folder, files)
    sets = open_sets(tmp_path, SHARE, silent)
    assert names(sets.validation) == set(filter(within_the_share, files))
    stored = find_validation_index(tmp_path, SHARE, ("a", "b"))
    assert stored is not None
    assert stored.digest == sets.validation.digest


def test_a_share_is_refused_where_validation_images_exist(tmp_path: Path) -> None:
    image_folder(tmp_path / "train", images(20, 20))
    image_folder(tmp_path / "val", images(2, 2))
    with pytest.raises(DataError, match=f"--split, or use --data {tmp_path}/train"):
        open_sets(tmp_path, SHARE, silent)
    of_train = open_sets(tmp_path / "train", SHARE, silent)
    assert names(of_train.validation) == set(filter(within_the_share, images(20, 20)))


@pytest.mark.parametrize("part", ["train", "val"])
def test_a_part_of_a_data_set_stands_for_the_data_set(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image_folder(tmp_path / "train", images(4, 4))
    image_folder(tmp_path / "val", images(2, 2))
    sets = open_sets(tmp_path / part, 0.0, silent)
    assert (len(sets.training), len(sets.validation), sets.data) == (8, 4, tmp_path)
    assert sets.notes == [
        f"{tmp_path / part} is part of {tmp_path}; the run uses the whole: --data {tmp_path}"
    ]
    monkeypatch.chdir(tmp_path / part)
    assert open_sets(Path(), 0.0, silent).data == tmp_path


@pytest.mark.parametrize(
    ("folder", "part"),
    [("", ""), ("train", ""), ("train", "train")],
    ids=["classes", "no val", "train alone"],
)
def test_missing_validation_images_are_told(folder: str, part: str, tmp_path: Path) -> None:
    image_folder(tmp_path / folder, images(4, 4))
    with pytest.raises(DataError, match=r"for validation, use --split 0\.1, or 0\.3 with"):
        open_sets(tmp_path / part, 0.0, silent)


@pytest.mark.parametrize(
    ("names", "data", "share"),
    [
        (["a/0.jpg", "b/0.jpg"], "", 0.3),
        (["train/a/0.jpg"], "", 0.3),
        (["train/a/0.jpg"], "train", 0.3),
        (["train/a/0.jpg", "test/a/0.jpg"], "", 0.3),
        (["train-000000.tar"], "", 0.3),
        (["photos-000000.tar"], "", 0.3),
        (["train/a/0.jpg", "val/a/0.jpg"], "", 0.0),
        (["train/a/0.jpg", "val/a/0.jpg"], "train", 0.0),
        (["train.rec", "validation-00000-of-00001"], "", 0.0),
        (["train/a/0.jpg", "valid/a/0.jpg"], "", 0.0),
        (["0.jpg", "1.jpg"], "", 0.0),
        (["a/0.jpg"], "elsewhere", 0.0),
    ],
)
def test_a_share_is_held_out_by_default_only_without_validation_images(
    names: list[str], data: str, share: float, tmp_path: Path
) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(IMAGE)
    assert choose_share(tmp_path / data) == share


def test_a_folder_of_validation_images_with_another_name_is_not_split_over(
    tmp_path: Path,
) -> None:
    image_folder(tmp_path / "train", images(4, 4))
    image_folder(tmp_path / "valid", images(4, 4))
    with pytest.raises(DataError, match=r"If .*/valid holds them, rename it to .*/val; to hold"):
        open_sets(tmp_path, 0.0, silent)


@pytest.mark.parametrize("folder", ["nothing", "a"])
def test_a_folder_without_classes_is_no_reason_to_split(folder: str, tmp_path: Path) -> None:
    image_folder(tmp_path, images(4))
    with pytest.raises(DataError) as error:
        open_sets(tmp_path / folder, 0.0, silent)
    assert "--split" not in str(error.value)


def test_nameless_images_are_not_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = open_index(image_folder(tmp_path, images(4, 4)))
    nameless: Callable[..., object] = lambda names: iter([b""] * 8)  # noqa: E731
    monkeypatch.setattr(type(index.names), "__iter__", nameless)
    with pytest.raises(DataError, match="has no image names"):
        divide_index(index, SHARE)


def test_folds_are_equal_parts_of_every_class_by_names_and_seed_alone(tmp_path: Path) -> None:
    whole = open_index(image_folder(tmp_path, images(11, 7, 2)))
    for seed in (0, 1):
        parts = []
        for number in (1, 2, 3):
            training, validation = divide_index(whole, Fold(number, 3, seed))
            assert names(training) == names(whole) - names(validation)
            parts.append(names(validation))
        assert sorted(map(len, parts)) == [6, 7, 7]
        assert len(set.union(*parts)) == 20
        for letter in "ab":
            counts = [sum(name.startswith(letter) for name in part) for part in parts]
            assert max(counts) - min(counts) <= 1
        assert names(divide_index(whole, Fold(1, 3, seed))[1]) == parts[0]
    assert names(divide_index(whole, Fold(1, 3, 0))[1]) != parts[0]
    with pytest.raises(DataError, match="20 images, too few for 21 folds"):
        divide_index(whole, Fold(1, 21, 0))
