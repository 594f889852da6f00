"""Folders as people have them: what is no image of a class is left out, counted, and named."""

from collections.abc import Callable
from pathlib import Path

import pytest

from lockstep.data.checking import examine
from lockstep.data.images import Progress
from lockstep.data.index import list_skipped, open_index
from lockstep.data.split import open_sets
from lockstep.system.errors import DataError
from tests.data.cases import image_folder, jpeg

CLEAN = {
    "cat/a.jpg": jpeg(colour=1),
    "cat/no ending": jpeg(colour=2),
    "dog/other ending.dat": jpeg(colour=3),
}
MESS = {
    "README": b"about",
    "photos.zip": b"PK",
    "c.jpg": jpeg(colour=5),
    "IMG_7": jpeg(colour=6),
    ".DS_Store": b"\0",
    "cat/.DS_Store": b"\0",
    "cat/Thumbs.db": b"\xd0\xcf\x11\xe0",
    "cat/2023/b.jpg": jpeg(colour=4),
    "empty/.keep": b"",
    "__MACOSX/._a.jpg": b"\0\5\x16\7",
    "notes/notes.txt": b"no images",
}
SKIPPED = {
    ("stray-file", "README"),
    ("stray-file", "photos.zip"),
    ("loose-image", "c.jpg"),
    ("loose-image", "IMG_7"),
    ("hidden", ".DS_Store"),
    ("hidden", "cat/.DS_Store"),
    ("stray-file", "cat/Thumbs.db"),
    ("nested-folder", "cat/2023"),
    ("empty-class", "empty"),
    ("hidden", "empty/.keep"),
    ("empty-class", "__MACOSX"),
    ("hidden", "__MACOSX/._a.jpg"),
    ("empty-class", "notes"),
    ("stray-file", "notes/notes.txt"),
}


def silent(what: str) -> Progress:
    return lambda done, total: None


def test_what_is_no_image_of_a_class_changes_nothing(tmp_path: Path) -> None:
    clean = open_index(image_folder(tmp_path / "clean", CLEAN))
    for _ in range(2):  # built, and read again
        messy = open_index(image_folder(tmp_path / "messy", CLEAN | MESS))
        assert messy.digest == clean.digest
        assert messy.classes == ("cat", "dog")
        assert messy.quarantined == ()
        assert {item[:2] for item in list_skipped(messy)} == SKIPPED


def test_the_check_lists_everything_that_is_left_out(tmp_path: Path) -> None:
    report = examine(image_folder(tmp_path / "messy", CLEAN | MESS), smallest=1)
    findings = [
        (finding.kind, finding.place) for finding in report.findings if finding.kind != "blank"
    ]
    assert set(findings) == SKIPPED
    assert len(findings) == len(SKIPPED)


def test_an_image_that_comes_to_an_empty_class_is_noticed(tmp_path: Path) -> None:
    data = image_folder(tmp_path / "messy", CLEAN | MESS)
    open_index(data)
    (data / "empty" / "a.jpg").write_bytes(jpeg())
    assert open_index(data).classes == ("cat", "dog", "empty")


def split(folder: Path) -> Path:
    image_folder(folder / "train", CLEAN | MESS)
    image_folder(folder / "val", CLEAN | {"bird/.keep": b""})
    return folder


def test_one_note_counts_what_is_left_out_of_both_splits(tmp_path: Path) -> None:
    data = split(tmp_path / "my photos")
    [note] = open_sets(data, 0.0, silent).notes
    assert note == (
        f"left out of {data}: 4 empty class folders (train/__MACOSX, train/empty, train/notes,"
        " val/bird), 1 folder inside a class folder (train/cat/2023), 5 hidden files"
        " (train/.DS_Store, train/__MACOSX/._a.jpg, train/cat/.DS_Store, train/empty/.keep,"
        " val/bird/.keep), 2 images outside the class folders (train/IMG_7, train/c.jpg), 4 files"
        " that are not images (train/README, train/photos.zip,"
        f" train/cat/Thumbs.db, train/notes/notes.txt); lockstep data check '{data}' lists all"
    )
    hidden = CLEAN | {"cat/b.jpg": b"", ".DS_Store": b"", "cat/.DS_Store": b""}
    result = open_sets(image_folder(tmp_path / "clean", hidden), 0.5, silent)[3]
    assert result == []


@pytest.mark.parametrize("is_indexed", [False, True])
def test_a_strict_reader_refuses_all_of_it_in_one_message(is_indexed: bool, tmp_path: Path) -> None:
    data = split(tmp_path)
    if is_indexed:
        open_sets(data, 0.0, silent)
    with pytest.raises(DataError, match="5 folders would be left out") as error:
        open_sets(data, 0.0, silent, is_strict=True)
    lines = str(error.value).splitlines()[1:-1]
    assert lines == [
        f"  {data}/train/__MACOSX: empty class folder",
        f"  {data}/train/cat/2023: folder inside a class folder",
        f"  {data}/train/empty: empty class folder",
        f"  {data}/train/notes: empty class folder",
        f"  {data}/val/bird: empty class folder",
    ]
    assert is_indexed or not (data / "train" / ".lockstep").exists()


def test_a_link_to_a_class_folder_that_is_missing_is_an_empty_class(tmp_path: Path) -> None:
    for split in ("train", "val"):
        image_folder(tmp_path / split, {"cat/1.jpg": jpeg(), "dog/1.jpg": jpeg()})
        (tmp_path / split / "ant").symlink_to(tmp_path / "unmounted")
        (tmp_path / split / "notes.md").symlink_to(tmp_path / "unmounted")
    with pytest.raises(DataError, match="train/ant: empty class folder") as refusal:
        open_sets(tmp_path, 0.0, silent, is_strict=True)
    assert "notes.md" not in str(refusal.value)
    index = open_index(tmp_path / "train")
    kinds = {item.place: item.kind for item in list_skipped(index)}
    assert kinds == {"ant": "empty-class", "notes.md": "stray-file"}


@pytest.mark.parametrize("open_it", [open_index, lambda data: open_sets(data, 0.5, silent)])
def test_a_folder_around_them_is_named(open_it: Callable[[Path], object], tmp_path: Path) -> None:
    image_folder(tmp_path, {"photos/cat/a.jpg": jpeg(), "photos/dog/b.jpg": jpeg()})
    message = r"no images in .*/<class>/<image>.* if the classes are the folders in"
    with pytest.raises(DataError, match=message) as error:
        open_it(tmp_path)
    assert str(error.value).endswith(f"{tmp_path}/photos, name that folder instead")
