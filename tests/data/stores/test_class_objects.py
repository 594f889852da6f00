"""Class folders in an object store, where every image is an object."""

import os
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from lockstep.data.class_folders import NESTED_FOLDER, STRAY_FILE, Skipped
from lockstep.data.index import open_index
from lockstep.data.listing import list_images
from lockstep.data.sources import Source, find_source, find_split, name_data
from lockstep.data.split import note_skipped
from lockstep.data.stores import mirror, web
from lockstep.data.stores.mirror import find_folder
from lockstep.data.stores.objects import StoredObject
from lockstep.system.errors import DataError
from tests.data.stores.cases import Store, forget_parts, forget_stores, load_batches


def test_images_of_class_folders_are_those_of_the_files(store: Store, packed: Path) -> None:
    shutil.copytree(packed / "plain", store.folder)
    there = store.open()
    here = open_index(find_split(packed / "plain", "train"))
    assert there.digest == here.digest
    assert list(there.names) == list(here.names)
    assert there.classes == here.classes
    assert np.array_equal(there.orientations, here.orientations)
    assert there.shards is None
    assert name_data(mirror.find_folder(store.url)) == store.url
    for batch, other in zip(load_batches(there), load_batches(here), strict=True):
        assert np.array_equal(batch, other)


def test_every_image_is_fetched_once_as_a_whole(store: Store, packed: Path) -> None:
    shutil.copytree(packed / "plain", store.folder)
    load_batches(store.open())
    requests = Counter(store.server.requests)
    assert len(requests) == 48
    assert set(requests.values()) == {1}
    assert {wanted for _, wanted in requests} == {""}
    os.close(mirror._open_mirror(find_folder(store.url)).lock)
    store.server.requests.clear()
    forget_stores()
    load_batches(store.open())  # as the next run does
    assert store.server.requests == []


def test_what_is_no_image_of_a_class_is_left_out(store: Store, packed: Path) -> None:
    shutil.copytree(packed / "plain/val", store.folder)
    others = ("dots/notes.txt", "dots/deep/a.jpg", "dots/deep/b.jpg", "grid/empty.jpg", "list.csv")
    for name in others:
        path = store.folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"x" if "empty" not in name else b"")
    index = open_index(find_source(find_folder(store.url)))
    assert len(index) == 8
    assert index.source.title == store.url
    [note] = note_skipped(index.root, [index])
    assert note.startswith(f"left out of {store.url}: 1 folder inside a class folder (dots/deep)")
    assert note.endswith("(dots/notes.txt)")
    result = index.skipped
    assert result == (Skipped(NESTED_FOLDER, "dots/deep"), Skipped(STRAY_FILE, "dots/notes.txt"))
    assert [bad.file for bad in index.quarantined] == ["grid/empty.jpg"]


def test_changes_between_runs_are_noticed(store: Store, packed: Path) -> None:
    shutil.copytree(packed / "plain", store.folder)
    before = store.open()
    first, last = sorted((store.folder / "train/dots").iterdir())[::23]
    first.write_bytes(last.read_bytes())
    last.unlink()
    shutil.rmtree(store.folder / "train/grid")
    forget_stores()
    after = store.open()
    assert len(before) == 48
    assert after.classes == ("dots",)
    assert list(after.names) == list(before.names)[:23]
    assert after.read(0) == first.read_bytes()


@pytest.mark.parametrize("step", ["write_members", "_write_files"])
def test_a_list_that_was_written_half_way_gives_no_image_of_another_name(
    store: Store, packed: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    shutil.copytree(packed / "plain", store.folder)
    before = store.open()
    batches = load_batches(before)
    first = store.folder / "train" / before.name(0)
    moved = first.rename(store.server.root / "moved")
    forget_stores()
    with monkeypatch.context() as patch:
        patch.setattr(mirror, step, end_command)
        with pytest.raises(KeyboardInterrupt):
            find_folder(store.url)
    with pytest.raises(DataError, match=f"{store.url}/train/.* has changed: .* Start again"):
        read_lists(before.source)
    moved.rename(first)
    forget_stores()
    for batch, other in zip(load_batches(store.open()), batches, strict=True):
        assert np.array_equal(batch, other)


def end_command(*arguments: object) -> None:
    raise KeyboardInterrupt


def read_lists(source: Source) -> None:
    """Read the lists of objects as a command does that began before."""
    list_images(source)
    mirror._open_mirror(source.root.parent)


def test_an_image_that_changes_in_a_run_is_refused(store: Store, packed: Path) -> None:
    shutil.copytree(packed / "plain", store.folder)
    store.open()
    index = forget_parts(store)
    path = store.folder / "train" / index.name(7)
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    os.utime(path, (1, 1))
    with pytest.raises(DataError, match=f"{store.url}/train/{index.name(7)} was written again"):
        load_batches(index)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["c" * 241 + "/a.jpg"], "at most 240 bytes between slashes"),
        (["a\0b.tar"], r"has 'a\x00b.tar', which cannot be the name of a file"),
        (["train.tar", "train.tar/a.jpg"], "/train.tar is an object, and there are objects in a"),
    ],
)
def test_names_that_no_folder_can_have_are_refused(
    monkeypatch: pytest.MonkeyPatch, names: list[str], message: str
) -> None:
    store = NamedStore()
    store.names = names
    monkeypatch.setattr(web, "open_store", lambda url: store)
    with pytest.raises(DataError) as raised:
        find_folder(f"s3://bucket/{names[0]}")
    assert message in str(raised.value)


def test_names_that_lead_out_of_the_folder_are_left_out() -> None:
    names = ["../a.tar", "train/../../b.tar", "/c.tar", "c/../../d.jpg", "./e.tar", "f/./g.jpg"]
    items, classes = mirror._sort_objects(StoredObject(name, 5, "1", 0) for name in names)
    assert (items, classes) == ([], {})


def test_folders_that_have_gone_leave_nothing(tmp_path: Path) -> None:
    def write(*names: str) -> list[str]:
        items, classes = mirror._sort_objects(StoredObject(name, 5, "1", 0) for name in names)
        mirror._write_folder(tmp_path, NamedStore(), items, classes)
        return sorted(path.name for path in tmp_path.iterdir() if path.name != mirror.NOTE)

    assert write("train/cat/a.jpg", "train/dog/b.jpg", "val/cat/c.jpg") == ["train", "val"]
    assert write("train/dog/b.jpg", "train-0.tar", "train/sub/") == ["train", "train-0.tar"]
    assert [path.name for path in (tmp_path / "train").iterdir()] == ["dog"]
    assert write("train-0.tar") == ["train-0.tar"]


class NamedStore(mirror.ObjectStore):
    """A store of which only the address and the list are asked for."""

    def __init__(self) -> None:
        self.url = self.address = "s3://bucket/images"
        self.names: list[str] = []

    def list_objects(self) -> Iterator[StoredObject]:
        for name in self.names:
            yield StoredObject(name, 5, "1", 0)
