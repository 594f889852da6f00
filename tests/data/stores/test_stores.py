"""Data sets in an object store: a real S3 server, whose network can fail."""

import os
import shutil
import threading
from dataclasses import replace
from datetime import timedelta
from itertools import chain, repeat
from pathlib import Path

import numpy as np
import pytest

from lockstep.data import listing, stored_files
from lockstep.data.containers import recordio
from lockstep.data.index import open_index
from lockstep.data.listing import list_images
from lockstep.data.loading.loaders import plan_training
from lockstep.data.sources import find_split, name_data
from lockstep.data.stores import mirror, objects, places
from lockstep.data.stores.cached_object import BLOCK_BYTES, CachedObject
from lockstep.data.stores.mirror import find_folder
from lockstep.data.stores.objects import ObjectStore, StoredObject
from lockstep.recipes.next_steps import NEVER
from lockstep.system.errors import DataError
from tests.data.stores.cases import RECIPE, Store, forget_parts, forget_stores, load_batches
from tests.processes import wait_until


@pytest.mark.parametrize("format", ["webdataset", "tfrecord", "recordio"])
def test_images_of_a_store_are_those_of_the_files(store: Store, packed: Path, format: str) -> None:
    shutil.copytree(packed / format, store.folder)
    there = store.open()
    here = open_index(find_split(packed / format, "train"))
    assert there.digest == here.digest
    assert name_data(there.root) == store.url
    for batch, other in zip(load_batches(there), load_batches(here), strict=True):
        assert np.array_equal(batch, other)


@pytest.mark.parametrize("format", ["webdataset", "tfrecord", "recordio"])
def test_an_index_needs_a_request_for_a_piece(store: Store, packed: Path, format: str) -> None:
    shutil.copytree(packed / format, store.folder)
    store.open()
    names = [name for name, _ in store.server.requests if not name.endswith((".txt", ".lst"))]
    assert sorted(names) == sorted(set(names)), store.server.requests
    assert len(names) in (1, 4)


def test_no_bytes_are_left_out_between_pieces(
    store: Store, packed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(places, "_PIECE_BYTES", 2 * BLOCK_BYTES)
    shutil.copytree(packed / "recordio", store.folder)
    images = list_images(find_split(find_folder(store.url), "train"))
    opened = mirror._open_mirror(images.source.root)
    for file, name in enumerate(images.source.files):
        item = opened.find_item(images.source.root / name)
        last = int(images.rows["offset"][images.rows["file"] == file].max())
        assert opened.transfer._open(item).find_missing(0, last) == []


def test_every_byte_is_fetched_once(store: Store, packed: Path) -> None:
    shutil.copytree(packed / "webdataset", store.folder)
    load_batches(store.open())
    size = sum(path.stat().st_size for path in (packed / "webdataset").glob("train*.tar"))
    place = find_split(find_folder(store.url), "train").root
    first = mirror._open_mirror(place)
    assert first.transfer.fetched_bytes <= size
    os.close(first.lock)
    store.server.requests.clear()
    forget_stores()
    load_batches(store.open())  # as the next run does
    assert store.server.requests == []


@pytest.mark.parametrize("format", ["webdataset", "tfrecord", "recordio"])
def test_an_index_of_more_than_the_cache_holds_fetches_once(
    store: Store, packed: Path, monkeypatch: pytest.MonkeyPatch, format: str
) -> None:
    monkeypatch.setattr(mirror, "_LIMIT_BYTES", 40 * BLOCK_BYTES)
    monkeypatch.setattr(places, "_PIECE_BYTES", 2 * BLOCK_BYTES)
    monkeypatch.setattr(stored_files, "_AT_ONCE", 2)
    monkeypatch.setattr(recordio, "_AT_ONCE", 2)
    # The cache holds what one thread is about to read. Of two, one may wait for the processor until
    # the other has filled it.
    monkeypatch.setattr(listing, "cores", lambda: 1)
    shutil.copytree(packed / format, store.folder)
    there = store.open()
    here = open_index(find_split(packed / format, "train"))
    assert there.digest == here.digest
    assert np.array_equal(there.orientations, here.orientations)
    size = sum((store.folder / name).stat().st_size for name in there.source.files)
    assert mirror._open_mirror(there.root).transfer.fetched_bytes == size


def test_a_bad_image_of_a_store_is_named(store: Store, packed: Path) -> None:
    shutil.copytree(packed / "webdataset", store.folder)
    index = open_index(find_split(packed / "webdataset", "train"))
    row = index.rows[5]
    path = store.folder / index.source.files[row["file"]]
    data = bytearray(path.read_bytes())
    data[row["offset"] : row["offset"] + row["length"]] = bytes(row["length"])
    path.write_bytes(data)
    there = store.open()
    assert [bad.file for bad in there.quarantined] == [index.place(5)]
    others = np.delete(index.rows, 5)
    for column in ("offset", "file", "length", "height", "width", "label"):
        assert np.array_equal(there.rows[column], others[column])


@pytest.mark.parametrize("failure", ["503", "drop", "cut"])
def test_a_request_that_fails_is_made_again(store: Store, packed: Path, failure: str) -> None:
    shutil.copytree(packed / "webdataset", store.folder)
    failed = []

    def fail(name: str, wanted: str) -> str | None:
        if (name, wanted) in failed or len(failed) == 4:
            return None
        failed.append((name, wanted))
        return failure

    store.server.fail = fail
    assert store.open().digest == open_index(find_split(packed / "webdataset", "train")).digest
    assert len(failed) == 4


@pytest.mark.parametrize("failure", ["hang", "stall"])
def test_a_store_that_is_silent_is_asked_again(
    store: Store, packed: Path, monkeypatch: pytest.MonkeyPatch, failure: str
) -> None:
    shutil.copytree(packed / "webdataset", store.folder)
    batches = load_batches(store.open())
    monkeypatch.setattr(objects, "_SILENT_SEC", 0.6)
    # The other tries are for a busy machine, on which an answer may come too late.
    monkeypatch.setattr(objects, "_RETRY", objects._RETRY | {"max_retries": 8})
    failures = chain([failure], repeat(None))
    store.server.fail = lambda name, wanted: next(failures)
    for batch, other in zip(load_batches(forget_parts(store)), batches, strict=True):
        assert np.array_equal(batch, other)


@pytest.mark.parametrize(("failure", "most"), [("hang", 3), ("stall", 9)])
def test_a_store_that_stays_silent_is_asked_a_few_times(
    store: Store, monkeypatch: pytest.MonkeyPatch, failure: str, most: int
) -> None:
    store.folder.mkdir()
    (store.folder / "a.tar").write_bytes(bytes(9000))
    [item] = ObjectStore(store.url).list_objects()
    monkeypatch.setattr(objects, "_SILENT_SEC", 0.2)
    objects.connect.cache_clear()
    store.server.fail = lambda name, wanted: failure
    with pytest.raises(DataError, match=f"{store.url}/a.tar cannot be read: .*time-out"):
        ObjectStore(store.url).read_range(item, 0, 4096)
    wait_until(lambda: len(store.server.requests) >= 3)  # the last may not be read yet
    # A busy machine may be too slow for headers, too.
    assert 3 <= len(store.server.requests) <= most


def test_a_store_that_does_not_recover_ends_in_one_error(store: Store, packed: Path) -> None:
    shutil.copytree(packed / "webdataset", store.folder)
    store.open()
    index = forget_parts(store)
    store.server.fail = lambda name, wanted: "503"
    with pytest.raises(DataError, match=f"{store.url}/train-.*cannot be read: .*503"):
        load_batches(index)


def test_an_object_that_changes_in_a_run_is_refused(store: Store, packed: Path) -> None:
    shutil.copytree(packed / "webdataset", store.folder)
    store.open()
    index = forget_parts(store)
    for path in store.folder.glob("train-*.tar"):
        data = bytearray(path.read_bytes())
        data[-1] = 1
        path.write_bytes(data)
        os.utime(path, (1, 1))
    with pytest.raises(DataError, match="was written again after it was listed"):
        load_batches(index)


def test_a_weak_etag_is_no_condition(store: Store) -> None:
    opened = ObjectStore(store.url)
    item = StoredObject("a.tar", 5, opened._find_version({"e_tag": 'W/"1"'}), 0)
    assert opened._require_version(item) == {}
    assert opened._require_version(replace(item, version="1")) == {"if_match": '"1"'}


def test_a_deleted_object_is_no_bad_image(store: Store, packed: Path) -> None:
    shutil.copytree(packed / "webdataset", store.folder)
    source = find_split(find_folder(store.url), "train")
    (store.folder / "train-000002.tar").unlink()
    with pytest.raises(DataError, match=f"{store.url}/train-000002.tar cannot be read"):
        open_index(source)


def test_an_address_with_a_password_is_refused_and_not_printed() -> None:
    with pytest.raises(DataError, match="Credentials come from the environment") as raised:
        find_folder("s3://key:hidden@bucket/images")
    assert "hidden" not in str(raised.value)


def test_what_is_dropped_early_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cached = CachedObject(tmp_path / "object", 3 * BLOCK_BYTES)
    pwrite = os.pwrite
    dropping: list[threading.Thread] = []

    def write_while_dropping(file: int, data: memoryview, offset: int) -> int:
        written = pwrite(file, data, offset)
        if not dropping:
            dropping.append(threading.Thread(target=cached.drop, args=(np.array([0]),)))
            dropping[0].start()
            dropping[0].join(0.2)  # without the lock it ends here
        return written

    monkeypatch.setattr(os, "pwrite", write_while_dropping)
    cached.write(0, memoryview(b"x" * BLOCK_BYTES))
    dropping[0].join()
    assert cached.read(0, 100) in (None, b"x" * 100)
    assert cached.read(BLOCK_BYTES, BLOCK_BYTES + 1) is None


def test_an_object_that_changes_between_runs_is_indexed_again(store: Store, packed: Path) -> None:
    shutil.copytree(packed / "webdataset", store.folder)
    before = store.open()
    (store.folder / "train-000001.tar").write_bytes(
        (packed / "webdataset" / "train-000000.tar").read_bytes()
    )
    forget_stores()
    after = store.open()
    assert after.digest != before.digest


def test_what_was_read_is_kept_within_the_limit(
    store: Store, packed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(packed / "webdataset", store.folder)
    monkeypatch.setattr(mirror, "_LIMIT_BYTES", 60_000)
    there = store.open()
    here = open_index(find_split(packed / "webdataset", "train"))
    for batch, other in zip(load_batches(there), load_batches(here), strict=True):
        assert np.array_equal(batch, other)

    def measure() -> int:
        files = (there.root / ".parts").rglob("*")
        return sum(path.stat().st_blocks * 512 for path in files if path.suffix == "")

    wait_until(lambda: measure() < 150_000)  # threads give the rest up


def test_the_cache_knows_the_plan(store: Store, packed: Path) -> None:
    shutil.copytree(packed / "webdataset", store.folder)
    index = store.open()
    transfer = mirror._open_mirror(index.root).transfer
    reads = {}
    for plan in plan_training(index, RECIPE, 0):
        reads = {
            (images.name, begin, end): step
            for images in transfer.list_reads()
            for begin, end, step in zip(*(column.tolist() for column in images[1:]), strict=True)
        }
        assert len(reads) == len(index) == 48
        now = min(reads.values())
        assert now in (0, 1, 2)
        for sample in plan.samples.tolist():
            row = index.rows[sample]
            name = index.source.files[row["file"]]
            assert reads[name, row["offset"], row["offset"] + row["length"]] == now
    assert now == 2
    assert list(reads.values()).count(NEVER) == 32  # what the run has read
    assert list(transfer.list_reads()) == []


def test_stores_are_named_in_errors(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match=f"{store.url} holds no images"):
        find_folder(store.url)
    forget_stores()
    with monkeypatch.context() as patch:
        patch.setenv("AWS_SECRET_ACCESS_KEY", "other")
        with pytest.raises(DataError, match=r"403 Forbidden \(SignatureDoesNotMatch\)\. Check"):
            find_folder(store.url)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setattr(objects, "_RETRY", {"max_retries": 0, "retry_timeout": timedelta(0)})
    forget_stores()
    with pytest.raises(DataError, match=rf"{store.url} cannot be read: .* \(Connection refused\)"):
        find_folder(store.url)
