"""The order of class folders that are numbers: new indexes, indexes of earlier versions, runs."""

from pathlib import Path

import numpy as np
import pytest

from lockstep.data import listing
from lockstep.data.index import Index, open_index
from lockstep.data.sources import find_split
from lockstep.data.split import arrange_classes, open_sets
from tests.data.cases import image_folder, jpeg, sample, write

NUMBERS = ("0", "1", "2", "9", "10", "11", "100")
"""In the order of numbers. Text order is that of Python's `sorted`."""
TEXT = tuple(sorted(NUMBERS))


def write_numbers(root: Path) -> Path:
    """Write two images of each class, 16 pixels plus the class high."""
    files = {}
    for name in NUMBERS:
        for image in range(2):
            data = jpeg(height=16 + int(name))
            files |= {f"{split}/{name}/{image}.jpg": data for split in ("train", "val")}
    return image_folder(root, files)


def list_heights(index: Index) -> list[int]:
    """Return the names of the classes of images as their pixels show them."""
    return (index.sizes[:, 0] - 16).tolist()


def index_as_before(root: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Index a data set as versions did that sort all names as text; return the digests."""
    with monkeypatch.context() as patch:
        patch.setattr(listing, "sort_classes", lambda names: tuple(sorted(names)))
        training = open_index(root / "train")
        assert training.classes == TEXT
        return [training.digest, open_index(root / "val", classes=TEXT).digest]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (NUMBERS, NUMBERS),
        (("001", "010", "100"), ("001", "010", "100")),
        (("1", "01", "10", "2", "002"), ("01", "1", "002", "2", "10")),
        (("1", "10", "2", "x"), ("1", "10", "2", "x")),
        (("-1", "10", "2"), ("-1", "10", "2")),
        (("1.5", "10", "2"), ("1.5", "10", "2")),
        (("\u0661", "10", "2"), ("10", "2", "\u0661")),
    ],
)
def test_folders_that_are_all_numbers_sort_as_numbers(
    names: tuple[str, ...], expected: tuple[str, ...], tmp_path: Path
) -> None:
    image_folder(tmp_path, {f"{name}/0.jpg": jpeg() for name in names})
    assert open_index(tmp_path).classes == expected


def test_an_index_in_text_order_keeps_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = write_numbers(tmp_path)
    before = index_as_before(root, monkeypatch)
    sets = open_sets(root, 0.0, lambda name: lambda done, total: None)
    assert [sets.training.digest, sets.validation.digest] == before


@pytest.mark.parametrize(
    ("setting", "is_old"),
    [
        (("text", ()), (True, False)),
        (("text", ()), (False, False)),
        (("index", TEXT), (False, True)),
        (("index", TEXT), (False, False)),
    ],
)
def test_a_run_in_text_order_sees_the_same_images_in_the_same_order(
    setting: tuple[str, tuple[str, ...]],
    is_old: tuple[bool, bool],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By its setting, or by its own classes; whichever indexes were built again."""
    digests = index_as_before(write_numbers(tmp_path / "before"), monkeypatch)
    root = write_numbers(tmp_path / "after")
    with monkeypatch.context() as patch:
        patch.setattr(listing, "sort_classes", lambda names: tuple(sorted(names)))
        for split, old in zip(("train", "val"), is_old, strict=True):
            if old:
                open_index(root / split)
    order, own = setting
    sets = open_sets(
        root, 0.0, lambda name: lambda done, total: None, class_order=order, own_classes=own
    )
    assert [sets.training.digest, sets.validation.digest] == digests
    assert list_heights(sets.validation) == np.repeat(list(map(int, TEXT)), 2).tolist()


def write_records(folder: Path, *, with_names: bool) -> Path:
    """Write TFRecords with and without names of classes, of which 0 has the last name."""
    for split in ("train", "val"):
        names = ("eel", "dog", "cat") if with_names else ("", "", "")
        samples = [sample(i, i % 3, class_name=names[i % 3]) for i in range(6)]
        write("tfrecord", folder / f"{split}-00000-of-00001", samples)
    return folder


def test_a_run_whose_classes_were_numbers_resumes_when_their_names_are_read(tmp_path: Path) -> None:
    own = ("0", "1", "2")
    sets = [
        open_sets(folder, 0.0, lambda name: lambda done, total: None, own_classes=own)
        for folder in (
            write_records(tmp_path / "before", with_names=False),
            write_records(tmp_path / "after", with_names=True),
        )
    ]
    named = open_index(find_split(tmp_path / "after", "val"))
    for others in ((), ("a", "b", "c")):
        assert arrange_classes(named, "index", others).classes == ("eel", "dog", "cat")
    digests = [[part.training.digest, part.validation.digest] for part in sets]
    assert digests[0] == digests[1]


def test_a_run_keeps_the_order_of_a_list_that_does_not_count_any_more(tmp_path: Path) -> None:
    """Earlier versions read a `classes.txt` above any folder."""
    files = {f"{name}/{i}.jpg": jpeg(8 + i) for name in ("ape", "bee", "cat") for i in range(2)}
    own = ("cat", "bee", "ape")
    before = image_folder(tmp_path / "before", files)
    (before / "classes.txt").write_text("cat\nbee\nape\n")
    arranged = arrange_classes(open_index(image_folder(tmp_path / "after", files)), "index", own)
    assert arranged.digest == open_index(before).digest


def test_an_index_is_read_by_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = write_numbers(tmp_path / "before")
    index_as_before(root, monkeypatch)
    arranged = arrange_classes(open_index(root / "train"), "number")
    assert arranged.digest == open_index(write_numbers(tmp_path / "after") / "train").digest
    assert list_heights(arranged) == np.repeat(list(map(int, NUMBERS)), 2).tolist()
    assert arranged.labels(np.arange(14)).tolist() == np.repeat(range(7), 2).tolist()


def test_a_class_that_has_several_names_is_called_by_its_number(tmp_path: Path) -> None:
    """Texts of images are not names of classes."""
    captions = ("a cat", "a dog", "a tabby", "a dog", "a cat", "a dog")
    for number, some in enumerate((range(3), range(3, 6))):
        samples = [sample(i, i % 2, class_name=captions[i]) for i in some]
        write("tfrecord", tmp_path / f"train-{number:05d}-of-00002", samples)
    assert open_index(tmp_path).classes == ("0", "a dog")
