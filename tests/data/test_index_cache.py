"""Where an index is kept, and when it is built again."""

import os
from collections.abc import Callable
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from lockstep.data import index as module
from lockstep.data.index import Index, find_index, open_index
from lockstep.data.sources import CACHE, find_source
from lockstep.system.errors import DataError
from tests.data.cases import check_two_processes, image_folder, jpeg
from tests.data.indexes import FILES, list_arrays, paths


def same(a: Index, b: Index) -> bool:
    arrays = zip(list_arrays(a), list_arrays(b), strict=True)
    about = [(index.classes, index.quarantined, index.digest) for index in (a, b)]
    return all(np.array_equal(x, y) for x, y in arrays) and about[0] == about[1]


def test_a_second_open_decodes_damaged_images(partly_bad: Path, decodings: list[bytes]) -> None:
    built = open_index(partly_bad)
    decodings.clear()
    cached = open_index(partly_bad)
    assert len(decodings) <= len(built.quarantined)
    assert same(built, cached)


def test_a_stored_index_is_used_and_never_built(root: Path, decodings: list[bytes]) -> None:
    classes = ("ant", "cat", "newt", "owl")
    assert find_index(find_source(root), classes=classes) is None
    assert decodings == []
    assert not (root.parent / ".lockstep").exists()
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


def move(old: str, new: str) -> Callable[[Path], object]:
    return lambda root: (root / old).rename(root / new)


CHANGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "added": (
        lambda root: (root / "cat/a.jpg").write_bytes(jpeg()),
        "cat/a cat/z newt/i owl/a owl/b",
    ),
    "removed": (lambda root: (root / "owl/a.jpg").unlink(), "cat/z newt/i owl/b"),
    "renamed": (move("owl/a.jpg", "owl/c.jpg"), "cat/z newt/i owl/b owl/c"),
    "moved": (move("owl/a.jpg", "cat/a.jpg"), "cat/a cat/z newt/i owl/b"),
    "class renamed": (move("newt", "eft"), "cat/z eft/i owl/a owl/b"),
    "class added": (
        lambda root: image_folder(root, {"ape/a.jpg": jpeg()}),
        "ape/a cat/z newt/i owl/a owl/b",
    ),
}


@pytest.mark.parametrize(("change", "expected"), CHANGES.values(), ids=CHANGES)
def test_a_changed_folder_is_noticed(
    change: Callable[[Path], object], expected: str, root: Path
) -> None:
    before = open_index(root)
    change(root)
    after = open_index(root)
    assert paths(after) == [f"{name}.jpg" for name in expected.split()]
    assert after.digest != before.digest


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
    name: str, damage: Callable[[Path], None], root: Path, decodings: list[bytes]
) -> None:
    built = open_index(root)
    decodings.clear()
    damage(root.parent / ".lockstep" / root.name / name)
    assert same(open_index(root), built)
    assert len(decodings) == len(FILES)
    decodings.clear()
    open_index(root)
    assert decodings == []


def test_an_index_half_replaced_by_another_is_built_again(root: Path) -> None:
    cache = root.parent / ".lockstep" / root.name
    classes = ("ant", "cat", "newt", "owl")
    first = open_index(root)
    about = (cache / "index.json").read_bytes()
    open_index(root, classes=classes)
    (cache / "index.json").write_bytes(about)
    assert same(open_index(root), first)


def test_the_index_of_an_older_version_is_built_again(
    root: Path, decodings: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    open_index(root)
    decodings.clear()
    monkeypatch.setattr(module, "VERSION", module.VERSION + 1)
    open_index(root)
    assert len(decodings) == len(FILES)


def refuse_new_folders(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (root.parent / ".lockstep").write_text("a file where the folder would be")


def refuse_writing(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    access = os.access
    monkeypatch.setattr(
        os, "access", lambda path, mode: CACHE not in Path(path).parts and access(path, mode)
    )


@pytest.mark.parametrize(
    "refuse", [refuse_new_folders, refuse_writing], ids=lambda refuse: refuse.__name__
)
def test_the_index_of_a_read_only_folder_is_kept_in_the_users_cache(
    refuse: Callable[[Path, pytest.MonkeyPatch], None],
    root: Path,
    tmp_path: Path,
    decodings: list[bytes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    refuse(root, monkeypatch)
    other = image_folder(tmp_path / "other", {"cat/a.jpg": jpeg()})
    refuse(other, monkeypatch)
    built = open_index(root)
    open_index(other)
    assert len(list((tmp_path / "cache" / "lockstep").iterdir())) == 2
    decodings.clear()
    assert same(open_index(root), built)
    assert decodings == []


def test_a_relative_path_finds_the_index_in_the_users_cache(
    root: Path, tmp_path: Path, decodings: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    refuse_new_folders(root, monkeypatch)
    built = open_index(root)
    decodings.clear()
    monkeypatch.chdir(tmp_path)
    assert same(open_index(root.name), built)
    assert decodings == []


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
    with pytest.raises(DataError, match=r"\.lockstep.*cache/lockstep.*XDG_CACHE_HOME"):
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
    check_two_processes(root, tmp_path / "log")
