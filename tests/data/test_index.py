"""The index of an image folder: what it holds, what it leaves out and reports, and when it is built
again."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from lockstep.data.index import open_index
from lockstep.system.errors import DataError
from tests.data.cases import image_folder, jpeg
from tests.data.indexes import BAD, FILES, list_arrays, paths


def test_images_come_in_the_order_of_their_classes_and_names(root: Path) -> None:
    index = open_index(root)
    assert index.classes == ("cat", "newt", "owl")
    assert paths(index) == ["cat/z.jpg", "newt/i.jpg", "owl/a.jpg", "owl/b.jpg"]
    assert index.rows["label"].tolist() == [0, 1, 2, 2]
    assert index.sizes.dtype == np.int64
    assert index.sizes.tolist() == [[40, 10], [11, 12], [16, 24], [20, 30]]
    assert [index.read(i) for i in range(len(index))] == [FILES[path] for path in paths(index)]


def test_labels_follow_the_classes_of_training_where_some_are_missing(root: Path) -> None:
    alone = open_index(root)
    classes = ("ant", "cat", "dog", "newt", "owl")
    index = open_index(root, classes=classes)
    assert index.rows["label"].tolist() == [1, 3, 4, 4]
    assert index.classes == classes
    assert index.digest != alone.digest


def test_a_class_that_training_has_not_is_an_error(root: Path) -> None:
    with pytest.raises(DataError, match="do not have: newt, owl"):
        open_index(root, classes=("cat", "dog"))


@pytest.mark.parametrize(
    "name",
    [
        "two words.jpg",
        "Käuzchen Nº 3.jpg",
        "フクロウ.jpg",
        "no extension",
        os.fsdecode(b"\xe9t\xe9.jpg"),
    ],
    ids=ascii,
)
def test_a_file_may_have_any_name(name: str, tmp_path: Path) -> None:
    image_folder(
        tmp_path, {"Vögel/ä.jpg": jpeg(8, 8), f"büho owl/{name}": jpeg(), "x/y.jpg": jpeg(8, 8)}
    )
    for opened in ("built", "cached"):
        index = open_index(tmp_path)
        assert paths(index) == ["Vögel/ä.jpg", f"büho owl/{name}", "x/y.jpg"], opened
        assert index.read(1) == jpeg()


def test_every_bad_file_is_left_out_and_listed_with_its_reason(partly_bad: Path) -> None:
    index = open_index(partly_bad)
    assert paths(index) == ["cat/z.jpg", "newt/i.jpg", "owl/a.jpg", "owl/b.jpg"]
    assert [index.read(i) for i in range(len(index))] == [FILES[path] for path in paths(index)]
    listed = {bad.file: bad.reason for bad in index.quarantined}
    expected = {name: reason for name, (_, reason) in BAD.items()} | {
        "owl/gone.jpg": "No such file or directory",
        "owl/loop.jpg": "Too many levels of symbolic links",
    }
    assert listed.keys() == expected.keys()
    for name, reason in expected.items():
        assert reason in listed[name]


def test_hidden_files_and_folders_are_ignored(root: Path) -> None:
    hidden = [".DS_Store", "cat/.a.jpg.tmp", "cat/.thumbnails/z.jpg", ".git/config"]
    index = open_index(image_folder(root, dict.fromkeys(hidden, b"no image")))
    assert index.classes == ("cat", "newt", "owl")
    assert len(index) == 4
    assert index.quarantined == ()


def test_a_looping_link_among_the_class_folders_is_no_class(root: Path) -> None:
    (root / "loop").symlink_to("loop")
    assert open_index(root).classes == ("cat", "newt", "owl")


def test_links_to_files_and_folders_are_followed(root: Path, tmp_path: Path) -> None:
    linked = tmp_path / "linked"
    (linked / "cat").mkdir(parents=True)
    (linked / "cat" / "link.jpg").symlink_to(root / "cat" / "z.jpg")
    (linked / "owl").symlink_to(root / "owl", target_is_directory=True)
    assert paths(open_index(linked)) == ["cat/link.jpg", "owl/a.jpg", "owl/b.jpg"]


def nothing(root: Path) -> None:
    root.mkdir()


def no_folder(root: Path) -> None:
    pass


def a_file(root: Path) -> None:
    root.write_bytes(jpeg())


def images_without_folders(root: Path) -> None:
    image_folder(root, {f"{i}.jpg": jpeg() for i in range(3)})


def empty_classes(root: Path) -> None:
    image_folder(root, {"cat/images/a.jpg": jpeg(), "dog/.keep": b""})


def no_good_image(root: Path) -> None:
    image_folder(root, {"cat/a.jpg": b"", "dog/b.jpg": b"text"})


@pytest.mark.parametrize(
    ("arrange", "message"),
    [
        (no_folder, r"there is no folder .*; expected images in .*/<class>/<image>"),
        (a_file, "is a file; expected a folder. Give its folder, or unpack an archive first$"),
        (nothing, "holds nothing; expected one folder for each class"),
        (images_without_folders, "holds 3 files and no folders.*lockstep data sort-val"),
        (empty_classes, r"no images in .*/<class>/<image>.* 2 empty class folders \(cat, dog\)"),
        (no_good_image, "no image can be read"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_a_folder_laid_out_otherwise_is_refused(
    arrange: Callable[[Path], None], message: str, tmp_path: Path
) -> None:
    arrange(tmp_path / "images")
    with pytest.raises(DataError, match=message):
        open_index(tmp_path / "images")


def test_the_digest_is_of_classes_and_lengths_not_of_places(root: Path, tmp_path: Path) -> None:
    digest = open_index(root).digest
    copy = image_folder(tmp_path / "copy", FILES)
    assert open_index(copy).digest == digest
    assert open_index(copy, classes=("cat", "newt", "owl", "yak")).digest != digest
    image_folder(copy, {"cat/z.jpg": FILES["cat/z.jpg"] + b"\0"})
    assert open_index(copy, anew=True).digest != digest


def test_an_image_of_another_length_is_refused_when_it_is_read(root: Path) -> None:
    index = open_index(root)
    length = len(FILES["cat/z.jpg"])
    with (root / "cat/z.jpg").open("ab") as file:
        file.write(b"more")
    message = rf"cat/z.jpg .* it has {length + 4} bytes instead of {length}"
    with pytest.raises(DataError, match=message):
        open_index(root).read(0)
    assert index.read(1) == FILES["newt/i.jpg"]


def test_an_image_that_is_gone_is_named_when_it_is_read(root: Path) -> None:
    index = open_index(root)
    (root / "cat/z.jpg").unlink()
    with pytest.raises(DataError, match=r"cat/z.jpg .* No such file"):
        index.read(0)


def test_a_changed_image_is_indexed_again_when_asked(root: Path) -> None:
    index = open_index(root)
    image_folder(root, {"cat/z.jpg": jpeg(50, 60)})
    with pytest.raises(DataError, match="lockstep data index"):
        index.read(0)
    assert open_index(root, anew=True).sizes[0].tolist() == [50, 60]


def test_an_image_overwritten_by_one_of_its_length_is_refused(root: Path) -> None:
    index = open_index(root)
    (root / "cat/z.jpg").write_bytes(FILES["cat/z.jpg"][:-2] + b"\0\0")
    with pytest.raises(DataError, match=r"cat/z.jpg .* after indexing"):
        index.read(0)


def test_progress_rises_to_all_the_files(tmp_path: Path) -> None:
    files = {f"{i % 3}/{i}.jpg": jpeg(8, 8) for i in range(150)} | {"0/bad.jpg": b""}
    seen: list[tuple[int, int]] = []
    open_index(
        image_folder(tmp_path, files), progress=lambda done, total: seen.append((done, total))
    )
    assert [total for _, total in seen] == [151] * len(seen)
    done = [done for done, _ in seen]
    assert len(done) > 1
    assert done == sorted(set(done))
    assert done[-1] == 151


def test_an_index_of_imagenets_names_takes_less_than_64_bytes_an_image(tmp_path: Path) -> None:
    longest = "n01440764/n01440764_10026.JPEG"  # one of ImageNet's longest
    index = open_index(
        image_folder(tmp_path, {f"{longest[:14]}{i:011d}.JPEG": jpeg(8, 8) for i in range(100)})
    )
    assert len(index.name(0)) == len(longest)
    assert sum(array.nbytes for array in list_arrays(index)) <= 100 * 64


def test_a_cached_index_is_readable_and_beside_the_class_folders(partly_bad: Path) -> None:
    """torchvision and Keras take every folder among them for a class."""
    open_index(partly_bad)
    assert not [path for path in partly_bad.iterdir() if path.name.startswith(".")]
    cache = partly_bad.parent / ".lockstep" / partly_bad.name
    about = json.loads((cache / "index.json").read_text())
    assert about["classes"] == ["cat", "newt", "owl"]
    assert ["cat/empty.jpg", "empty file"] in about["quarantined"]
