"""The index of an image folder: what it holds, what it leaves out and reports, and when it is built
again."""

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from lockstep.data import index as module
from lockstep.data.index import Index, find_index, open_index
from lockstep.data.sources import find_source
from lockstep.system.errors import DataError
from tests.data.cases import COUNTED, image_folder, jpeg
from tests.data.pictures import progressive_jpeg

FILES = {
    "owl/b.jpg": jpeg(20, 30),
    "owl/a.jpg": jpeg(16, 24),
    "cat/z.jpg": jpeg(40, 10),
    "newt/i.jpg": jpeg(11, 12),
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return image_folder(tmp_path / "images", FILES)


def paths(index: Index) -> list[str]:
    return [Path(index.path(i)).relative_to(index.root).as_posix() for i in range(len(index))]


def key_by_path(index: Index, column: str) -> dict[str, int]:
    return dict(zip(paths(index), index.rows[column].tolist(), strict=True))


def test_images_come_in_the_order_of_their_classes_and_names(root: Path) -> None:
    assert paths(open_index(root)) == ["cat/z.jpg", "newt/i.jpg", "owl/a.jpg", "owl/b.jpg"]


def test_classes_are_the_sorted_folders(root: Path) -> None:
    assert open_index(root).classes == ("cat", "newt", "owl")


def test_labels_are_positions_in_the_list_of_classes(root: Path) -> None:
    assert key_by_path(open_index(root), "label") == {
        "cat/z.jpg": 0,
        "newt/i.jpg": 1,
        "owl/a.jpg": 2,
        "owl/b.jpg": 2,
    }


def test_labels_follow_the_classes_of_training_where_some_are_missing(root: Path) -> None:
    index = open_index(root, classes=("ant", "cat", "dog", "newt", "owl"))
    assert key_by_path(index, "label") == {
        "cat/z.jpg": 1,
        "newt/i.jpg": 3,
        "owl/a.jpg": 4,
        "owl/b.jpg": 4,
    }
    assert index.classes == ("ant", "cat", "dog", "newt", "owl")


def test_a_class_that_training_has_not_is_an_error(root: Path) -> None:
    with pytest.raises(DataError, match="the training images do not have: newt, owl"):
        open_index(root, classes=("cat", "dog"))


def test_sizes_are_height_and_width(root: Path) -> None:
    sizes = open_index(root).sizes
    assert sizes.dtype == np.int64
    assert sizes.tolist() == [[40, 10], [11, 12], [16, 24], [20, 30]]


def test_the_encoded_image_is_read_from_its_file(root: Path) -> None:
    index = open_index(root)
    assert [index.read(i) for i in range(len(index))] == [FILES[path] for path in paths(index)]


def test_a_row_is_24_bytes() -> None:
    assert module.ROW.itemsize == 24


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


BAD = {
    "cat/empty.jpg": (b"", "empty file"),
    "cat/half.jpg": (jpeg()[:400], "Truncated"),
    "newt/tail.jpg": (jpeg()[:-2], "Premature end"),
    "owl/notes.txt": (b"todo: sort these\n", "not an image"),
    "owl/scans.jpg": (
        progressive_jpeg(repeated=1000),
        "more than 100 scans are too many; save the image again",
    ),
    "owl/page.jpg": (b"<html>404</html>", "not an image"),
}


@pytest.fixture
def partly_bad(root: Path) -> Path:
    image_folder(root, {name: data for name, (data, _) in BAD.items()})
    (root / "owl" / "gone.jpg").symlink_to("nowhere.jpg")
    (root / "owl" / "loop.jpg").symlink_to("loop.jpg")
    os.utime(root / "owl", (1, 1))
    return root


def test_bad_files_are_left_out_of_the_rows(partly_bad: Path) -> None:
    assert paths(open_index(partly_bad)) == ["cat/z.jpg", "newt/i.jpg", "owl/a.jpg", "owl/b.jpg"]


def test_every_bad_file_is_listed_with_its_reason(partly_bad: Path) -> None:
    listed = {bad.file: bad.reason for bad in open_index(partly_bad).quarantined}
    expected = {name: reason for name, (_, reason) in BAD.items()} | {
        "owl/gone.jpg": "No such file or directory",
        "owl/loop.jpg": "Too many levels of symbolic links",
    }
    assert listed.keys() == expected.keys()
    for name, reason in expected.items():
        assert reason in listed[name]


def test_bad_files_are_listed_from_the_cache_too(partly_bad: Path) -> None:
    assert open_index(partly_bad).quarantined == open_index(partly_bad).quarantined


def test_a_bad_file_does_not_shift_the_rows_after_it(partly_bad: Path) -> None:
    index = open_index(partly_bad)
    assert [index.read(i) for i in range(len(index))] == [FILES[path] for path in paths(index)]


def test_an_image_too_wide_for_a_row_is_quarantined(root: Path) -> None:
    file = io.BytesIO()
    Image.new("1", (65536, 1)).save(file, "PNG")
    image_folder(root, {"cat/wide.png": file.getvalue()})
    assert [(bad.file, bad.reason) for bad in open_index(root).quarantined] == [
        ("cat/wide.png", "65536 x 1 pixels are too many")
    ]


def test_hidden_files_and_folders_are_ignored(root: Path) -> None:
    hidden = [".DS_Store", "cat/.a.jpg.tmp", "cat/.thumbnails/z.jpg", ".git/config"]
    index = open_index(image_folder(root, dict.fromkeys(hidden, b"no image")))
    assert index.classes == ("cat", "newt", "owl")
    assert len(index) == 4
    assert index.quarantined == ()


def test_a_looping_link_among_the_class_folders_is_no_class(root: Path) -> None:
    (root / "loop").symlink_to("loop")
    assert open_index(root).classes == ("cat", "newt", "owl")


def test_files_beside_the_class_folders_are_ignored(root: Path) -> None:
    (root / "README.txt").write_text("about these images")
    assert len(open_index(root)) == 4


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


def a_folder_in_a_class(root: Path) -> None:
    image_folder(root, {"cat/a.jpg": jpeg(), "cat/images/b.jpg": jpeg()})


def an_empty_class(root: Path) -> None:
    image_folder(root, {"cat/a.jpg": jpeg(), "dog/.keep": b""})


def no_good_image(root: Path) -> None:
    image_folder(root, {"cat/a.jpg": b"", "dog/b.jpg": b"text"})


@pytest.mark.parametrize(
    ("arrange", "message"),
    [
        (no_folder, r"there is no folder .*; expected images in .*/<class>/<image>"),
        (a_file, "there is no folder"),
        (nothing, "holds nothing; expected one folder for each class"),
        (images_without_folders, "holds 3 files and no folders.*lockstep data sort-val"),
        (a_folder_in_a_class, "cat holds a folder, images; expected images in .*/<class>/<image>"),
        (an_empty_class, "dog is empty; expected the images of a class"),
        (no_good_image, "none of 2 images can be read"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_a_folder_laid_out_otherwise_is_refused(
    arrange: Callable[[Path], None], message: str, tmp_path: Path
) -> None:
    arrange(tmp_path / "images")
    with pytest.raises(DataError, match=message):
        open_index(tmp_path / "images")


def list_arrays(index: Index) -> tuple[np.ndarray, ...]:
    return index.rows, index.names.text, index.names.ends, index.times, index.orientations


def same(a: Index, b: Index) -> bool:
    arrays = zip(list_arrays(a), list_arrays(b), strict=True)
    about = [(index.classes, index.quarantined, index.digest) for index in (a, b)]
    return all(np.array_equal(x, y) for x, y in arrays) and about[0] == about[1]


def test_a_second_open_decodes_nothing_and_finds_the_same(
    partly_bad: Path, checked: list[bytes]
) -> None:
    built = open_index(partly_bad)
    checked.clear()
    cached = open_index(partly_bad)
    assert checked == []
    assert same(built, cached)


def test_a_stored_index_is_the_one_that_was_built_and_is_never_built(
    root: Path, checked: list[bytes]
) -> None:
    classes = ("ant", "cat", "newt", "owl")
    assert find_index(find_source(root), classes=classes) is None
    assert checked == []
    assert not (root / ".lockstep").exists()
    built = open_index(root, classes=classes)
    stored = find_index(find_source(root), classes=classes)
    assert stored is not None
    assert (stored.digest, stored.rows.tolist()) == (built.digest, built.rows.tolist())


def test_a_stored_index_of_images_that_changed_is_none(root: Path) -> None:
    classes = open_index(root).classes
    (root / "cat" / "z.jpg").unlink()
    (root / "cat" / "new.jpg").write_bytes(b"")
    assert find_index(find_source(root), classes=classes) is None


def test_the_rows_of_a_cached_index_are_mapped_not_read(root: Path) -> None:
    open_index(root)
    assert isinstance(open_index(root).rows, np.memmap)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            lambda root: (root / "cat/new.jpg").write_bytes(jpeg()),
            "cat/new.jpg cat/z.jpg newt/i.jpg owl/a.jpg owl/b.jpg",
        ),
        (lambda root: (root / "owl/a.jpg").unlink(), "cat/z.jpg newt/i.jpg owl/b.jpg"),
        (
            lambda root: (root / "owl/a.jpg").rename(root / "owl/c.jpg"),
            "cat/z.jpg newt/i.jpg owl/b.jpg owl/c.jpg",
        ),
        (
            lambda root: (root / "owl/a.jpg").rename(root / "cat/a.jpg"),
            "cat/a.jpg cat/z.jpg newt/i.jpg owl/b.jpg",
        ),
        (
            lambda root: (root / "newt").rename(root / "eft"),
            "cat/z.jpg eft/i.jpg owl/a.jpg owl/b.jpg",
        ),
        (
            lambda root: image_folder(root, {"ape/a.jpg": jpeg()}),
            "ape/a.jpg cat/z.jpg newt/i.jpg owl/a.jpg owl/b.jpg",
        ),
    ],
    ids=["added", "removed", "renamed", "moved", "class renamed", "class added"],
)
def test_a_changed_folder_is_noticed(
    change: Callable[[Path], object], expected: str, root: Path
) -> None:
    before = open_index(root)
    change(root)
    after = open_index(root)
    assert paths(after) == expected.split()
    assert after.digest != before.digest


def test_the_index_is_built_for_one_list_of_classes(root: Path) -> None:
    alone = open_index(root)
    among = open_index(root, classes=("ant", "cat", "newt", "owl"))
    assert among.rows["label"].tolist() == (alone.rows["label"] + 1).tolist()
    assert among.digest != alone.digest


def test_the_digest_does_not_depend_on_the_place(root: Path, tmp_path: Path) -> None:
    assert open_index(image_folder(tmp_path / "copy", FILES)).digest == open_index(root).digest


def test_the_digest_changes_with_a_class_without_images(root: Path) -> None:
    assert open_index(root, classes=("cat", "newt", "owl", "yak")).digest != open_index(root).digest


def test_the_digest_changes_with_the_length_of_an_image(root: Path, tmp_path: Path) -> None:
    copy = image_folder(tmp_path / "copy", FILES | {"cat/z.jpg": FILES["cat/z.jpg"] + b"\0"})
    assert open_index(copy).digest != open_index(root).digest


def test_an_image_of_another_length_is_refused_when_it_is_read(root: Path) -> None:
    index = open_index(root)
    length = len(FILES["cat/z.jpg"])
    with (root / "cat/z.jpg").open("ab") as file:
        file.write(b"more")
    with pytest.raises(
        DataError, match=rf"cat/z.jpg .* it has {length + 4} bytes instead of {length}"
    ):
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


def test_an_image_overwritten_by_another_of_the_same_length_is_refused_when_it_is_read(
    root: Path,
) -> None:
    index = open_index(root)
    (root / "cat/z.jpg").write_bytes(FILES["cat/z.jpg"][:-2] + b"\0\0")
    with pytest.raises(DataError, match=r"cat/z.jpg .* it was written after indexing"):
        index.read(0)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-5])


def empty(file: Path) -> None:
    file.write_bytes(b"")


def zero(file: Path) -> None:
    file.write_bytes(bytes(file.stat().st_size))


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


DAMAGES = [
    *product(["index.json", "rows"], [cut, empty, zero, flip, Path.unlink]),
    *product(["names", "name_ends", "times", "orientations"], [flip, Path.unlink]),
]


@pytest.mark.parametrize(
    ("name", "damage"),
    DAMAGES,
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_a_damaged_index_is_built_again(
    name: str, damage: Callable[[Path], None], root: Path, checked: list[bytes]
) -> None:
    built = open_index(root)
    checked.clear()
    damage(root / ".lockstep" / name)
    assert same(open_index(root), built)
    assert len(checked) == len(FILES)
    checked.clear()
    open_index(root)
    assert checked == []


def test_an_index_half_replaced_by_another_is_built_again(root: Path) -> None:
    cache = root / ".lockstep"
    classes = ("ant", "cat", "newt", "owl")
    first = open_index(root)
    about = (cache / "index.json").read_bytes()
    open_index(root, classes=classes)
    (cache / "index.json").write_bytes(about)
    assert same(open_index(root), first)


def test_the_index_of_an_older_version_is_built_again(
    root: Path, checked: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    open_index(root)
    checked.clear()
    monkeypatch.setattr(module, "VERSION", module.VERSION + 1)
    open_index(root)
    assert len(checked) == len(FILES)


def refuse_new_folders(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (root / ".lockstep").write_text("a file where the folder would be")


def refuse_writing(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    access = os.access
    monkeypatch.setattr(
        os, "access", lambda path, mode: Path(path).parent != root and access(path, mode)
    )


@pytest.mark.parametrize(
    "refuse", [refuse_new_folders, refuse_writing], ids=lambda refuse: refuse.__name__
)
def test_the_index_of_a_read_only_folder_is_kept_in_the_users_cache(
    refuse: Callable[[Path, pytest.MonkeyPatch], None],
    root: Path,
    tmp_path: Path,
    checked: list[bytes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    refuse(root, monkeypatch)
    other = image_folder(tmp_path / "other", {"cat/a.jpg": jpeg()})
    refuse(other, monkeypatch)
    built = open_index(root)
    open_index(other)
    assert len(list((tmp_path / "cache" / "lockstep").iterdir())) == 2
    checked.clear()
    assert same(open_index(root), built)
    assert checked == []


def test_a_relative_path_finds_the_index_in_the_users_cache(
    root: Path, tmp_path: Path, checked: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    refuse_new_folders(root, monkeypatch)
    built = open_index(root)
    checked.clear()
    monkeypatch.chdir(tmp_path)
    assert same(open_index(root.name), built)
    assert checked == []


def test_the_users_cache_is_in_the_home_folder_without_a_setting(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    refuse_new_folders(root, monkeypatch)
    open_index(root)
    assert len(list((tmp_path / ".cache" / "lockstep").iterdir())) == 1


def test_where_no_index_can_be_kept_the_error_names_both_places(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cache").write_text("a file where the folder would be")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    refuse_new_folders(root, monkeypatch)
    with pytest.raises(DataError, match=r"images/\.lockstep.*cache/lockstep.*Set XDG_CACHE_HOME"):
        open_index(root)


def test_an_index_that_is_open_survives_another_build(root: Path) -> None:
    open_index(root)
    cached = open_index(root)
    digest = cached.digest
    names = paths(cached)
    (root / "cat/a.jpg").write_bytes(jpeg())
    open_index(root)
    assert (cached.digest, paths(cached)) == (digest, names)


def test_of_two_processes_at_once_one_builds_and_the_other_waits(tmp_path: Path) -> None:
    root = image_folder(
        tmp_path / "images", {f"{i % 3}/{i}.jpg": jpeg(200, 300, i) for i in range(150)}
    )
    command = [sys.executable, "-c", COUNTED, str(root), str(tmp_path / "log")]
    both = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    assert [process.stdout.readline() for process in both] == ["ready\n"] * 2
    for process in both:
        process.stdin.write("go\n")
        process.stdin.flush()
    digests = [process.communicate(timeout=60)[0] for process in both]
    assert digests[0] == digests[1] != ""
    assert (tmp_path / "log").stat().st_size == 150


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


def test_what_is_cached_about_an_index_can_be_read_by_people(partly_bad: Path) -> None:
    open_index(partly_bad)
    about = json.loads((partly_bad / ".lockstep" / "index.json").read_text())
    assert about["classes"] == ["cat", "newt", "owl"]
    assert ["cat/empty.jpg", "empty file"] in about["quarantined"]
