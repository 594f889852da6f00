"""Write a data set in another storage format: nothing is lost, changed, half written or written
elsewhere."""

import json
import os
import threading
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from lockstep.data.containers import Bytes, Sample, tfrecord
from lockstep.data.images import Quarantined
from lockstep.data.index import open_index
from lockstep.data.listing import list_images
from lockstep.data.packing import Packing, pack, pack_writer, samples
from lockstep.data.packing.splits import shard_name
from lockstep.data.sources import find_source, find_split
from lockstep.system.errors import DataError
from tests.data.cases import image_folder, jpeg, sample, write
from tests.data.checking.cases import STORED
from tests.data.sets import (
    CLASSES,
    CONTAINERS,
    FORMATS,
    SPLITS,
    TRAIN,
    encode_blank,
    files_of,
    listings,
    pack_as,
    read_all,
    sort_images,
)
from tests.soak import SOAK

PAIRS = list(product(FORMATS, FORMATS))
"""`make soak` packs from any format to any, `make test` from each and to each."""


@pytest.mark.parametrize(("source", "format"), PAIRS[:: 1 if SOAK else 3])
def test_images_names_classes_and_order_survive_from_any_format_to_any(
    source: str, format: str, sets: dict[str, Path], tmp_path: Path
) -> None:
    target = pack_as(sets[source], tmp_path / "target", format, shards=2)
    splits = listings(target)
    for split, files in SPLITS.items():
        assert read_all(splits[split]) == sort_images(files)
        assert splits[split].classes == CLASSES
        assert splits[split].source.format == format
        expected = open_index(find_split(sets["folder"], split), classes=CLASSES)
        index = open_index(splits[split].source, classes=CLASSES)
        assert index.digest == expected.digest
        assert len(index) + len(index.quarantined) == len(files)
    assert {name: data for name, data in files_of(target).items() if name != "classes.txt"} == {
        name: data for name, data in files_of(sets[format]).items() if name != "classes.txt"
    }


@pytest.mark.parametrize("source", ["folder", "recordio"])
@pytest.mark.parametrize("format", FORMATS)
def test_images_larger_than_what_is_read_at_once_are_packed_too(
    source: str, format: str, sets: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lockstep.data.packing.pack_writer.TASK_BYTES", 700)
    monkeypatch.setattr("lockstep.data.packing.samples.TASK_BYTES", 700)
    assert {len(data) > 700 for data in TRAIN.values()} == {True, False}
    target = pack_as(sets[source], tmp_path / "target", format, shards=2)
    result = files_of(target)
    assert result == files_of(pack_as(sets["folder"], tmp_path / "expected", format, shards=2))


@pytest.mark.parametrize("source", ["folder", "recordio"])
def test_a_task_holds_no_more_than_its_bytes(
    source: str, sets: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks: list[list[int]] = []
    append = pack_writer._append

    def noted(split: Any, packing: Any, writer: Any, numbers: Any, before: Any) -> int:
        tasks.append([len(split.listing.read_encoded(number)) for number in numbers])
        return append(split, packing, writer, numbers, before)

    monkeypatch.setattr(pack_writer, "TASK_BYTES", 2000)
    monkeypatch.setattr(pack_writer, "_append", noted)
    pack_as(sets[source], tmp_path / "target", "tfrecord", shards=1)
    assert sum(map(len, tasks)) == sum(map(len, SPLITS.values()))
    assert any(len(task) > 1 for task in tasks)
    assert all(sum(task) <= 2000 for task in tasks if len(task) > 1)


def test_images_stand_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = image_folder(tmp_path / "source", {f"a/{i}.jpg": jpeg(8, 8, i) for i in range(4)})
    pack(source, tmp_path / "one", Packing("tfrecord", workers=1))
    second_is_read = threading.Event()
    record = tfrecord.Writer.record

    def later(sample: Sample) -> list[Bytes]:
        if sample.number == 0:
            assert second_is_read.wait(30)
        elif sample.number == 1:
            second_is_read.set()
        return record(sample)

    monkeypatch.setattr(pack_writer, "_TASK_IMAGES", 1)
    monkeypatch.setattr(tfrecord.Writer, "record", staticmethod(later))
    pack(source, tmp_path / "two", Packing("tfrecord", workers=2))
    assert files_of(tmp_path / "two") == files_of(tmp_path / "one")


def test_a_slow_image_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = image_folder(tmp_path / "source", {f"a/{i:02d}.jpg": jpeg(8, 8, i) for i in range(40)})
    others_read = threading.Event()
    reads = []
    waits = []
    encoded = samples.read_images
    wait = pack_writer.wait

    def slow_at_first(split: Any, numbers: Any) -> Any:
        if 0 in numbers:
            assert others_read.wait(30)
        reads.append(numbers)
        if len(reads) >= 7:  # two threads may have added at once
            threading.Timer(0.2, others_read.set).start()
        return encoded(split, numbers)

    monkeypatch.setattr(pack_writer, "_TASK_IMAGES", 1)
    monkeypatch.setattr(samples, "read_images", slow_at_first)
    monkeypatch.setattr(pack_writer, "wait", lambda tasks: waits.append(tasks) or wait(tasks))
    assert pack(source, tmp_path / "target", Packing("folder", workers=4)) == {"images": 40}
    assert len(waits) < 200


def test_a_split_without_images_leaves_no_folder(tmp_path: Path) -> None:
    source = image_folder(tmp_path / "source" / "train", {"a/1.jpg": jpeg(8, 8, 1)}).parent
    pack(source, tmp_path / "files", Packing("recordio"))
    (tmp_path / "files" / "val.rec").touch()
    result = pack(tmp_path / "files", tmp_path / "folder", Packing("folder"))
    assert result == {"train": 1, "val": 0}
    assert pack(tmp_path / "folder", tmp_path / "again", Packing("recordio")) == {"train": 1}


@pytest.mark.parametrize("format", CONTAINERS)
def test_what_the_system_writes_in_part_is_written_to_the_end(
    format: str, sets: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linux writes only a part if there are more than 2 GiB."""
    monkeypatch.setattr("os.writev", lambda file, pieces: os.write(file, b"".join(pieces)[:100]))
    target = pack_as(sets["folder"], tmp_path / "target", format, shards=2)
    assert files_of(target) == files_of(sets[format])


@pytest.mark.parametrize("format", CONTAINERS)
def test_images_are_divided_evenly_among_files(format: str, folder: Path, tmp_path: Path) -> None:
    target = pack_as(folder, tmp_path / "target", format, shards=4)
    names = [shard_name(format, "train", i, 4) for i in range(4)]
    assert list(find_split(target, "train").files) == names
    assert [len(list(STORED[format](target / name))) for name in names] == [3, 4, 4, 4]


def test_there_are_no_more_files_than_images(folder: Path, tmp_path: Path) -> None:
    assert (
        len(find_split(pack_as(folder, tmp_path / "target", "tfrecord", shards=1000), "val").files)
        == 3
    )


def test_recordio_is_one_file_and_the_other_formats_as_many_as_their_size_asks_for(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lockstep.data.packing.splits.SHARD_BYTES", 1000)
    total = sum(map(len, TRAIN.values()))
    for format, files in (
        ("recordio", 1),
        ("tfrecord", -(-total // 1000)),
        ("webdataset", -(-total // 1000)),
    ):
        assert len(find_split(pack_as(folder, tmp_path / format, format), "train").files) == files


@pytest.mark.parametrize("format", FORMATS)
def test_a_list_of_classes_that_is_not_sorted_keeps_its_order(format: str, tmp_path: Path) -> None:
    files = {
        "newt/b.jpg": jpeg(9, 9),
        "owl/a.jpg": jpeg(10, 10),
        "ant/c.jpg": jpeg(11, 11),
        "owl/b.jpg": jpeg(12, 12),
    }
    source = image_folder(tmp_path / "source", files)
    classes = ("owl", "newt", "none of these", "ant")
    (source / "classes.txt").write_text("".join(f"{name}\n" for name in classes))
    target = pack_as(source, tmp_path / "target", format)
    listing = list_images(find_source(target))
    assert listing.classes == classes
    assert read_all(listing) == sort_images(files, classes)
    assert open_index(target).digest == open_index(source).digest


@pytest.mark.parametrize("format", FORMATS)
def test_images_whose_names_lose_their_order_are_numbered(format: str, tmp_path: Path) -> None:
    """Test a RecordIO file without names, and one whose numbers and names have different orders."""
    images = [jpeg(8 + i, 9) for i in range(12)]
    for case, names in {
        "no names": [""] * 12,
        "falling": [f"{11 - i:02d}.jpg" for i in range(12)],
    }.items():
        source = tmp_path / case
        stored = [sample(i, i // 4, image, names[i]) for i, image in enumerate(images)]
        write("recordio", source / "x.rec", stored)
        target = pack_as(source, tmp_path / f"{case} packed", format)
        splits = read_all(list_images(find_source(target)))
        assert [data for _, _, data in splits] == images
        if format != "recordio" or case == "no names":
            assert [name for _, name, _ in splits] == [f"{i:08d}.jpg" for i in range(12)]
        assert open_index(target).digest == open_index(source).digest


@pytest.mark.parametrize("format", FORMATS)
def test_a_name_may_be_as_long_as_the_file_system_allows(format: str, tmp_path: Path) -> None:
    files = {f"a/{'x' * 251}.jpg": jpeg()}
    target = pack_as(image_folder(tmp_path / "source", files), tmp_path / "target", format)
    assert read_all(list_images(find_source(target))) == sort_images(files, ("a",))


@pytest.mark.parametrize("format", FORMATS)
def test_no_splits_give_one_part(format: str, folder: Path, tmp_path: Path) -> None:
    counts = pack(folder / "train", tmp_path / "target", Packing(format))
    assert counts == {"images": len(TRAIN)}
    source = find_source(tmp_path / "target")
    assert all(name.startswith("images") for name in source.files)
    assert bool(source.files) == (format != "folder")
    assert read_all(list_images(source)) == sort_images(TRAIN)


@pytest.mark.parametrize("format", FORMATS)
def test_images_in_quarantine_are_left_behind(format: str, folder: Path, tmp_path: Path) -> None:
    out = {"a/1.jpg": "double", "a-b/tail.jpg": "no image", "a/not there.jpg": "?"}
    (folder / "train" / "quarantine.json").write_text(json.dumps({"images": out}))
    target = tmp_path / "target"
    assert pack(folder, target, Packing(format)) == {"train": len(TRAIN) - 2, "val": 3}
    kept = {name: data for name, data in TRAIN.items() if name not in out}
    assert read_all(listings(target)["train"]) == sort_images(kept)


def test_the_quarantine_of_a_file_names_first_bytes(sets: dict[str, Path], tmp_path: Path) -> None:
    source = pack_as(sets["folder"], tmp_path / "source", "recordio")
    place = list_images(find_split(source, "train")).place(2)
    (source / "quarantine.json").write_text(json.dumps({"images": {place: "bad"}}))
    target = pack_as(source, tmp_path / "target", "folder")
    result = read_all(listings(target)["train"])
    assert result == [image for i, image in enumerate(sort_images(TRAIN)) if i != 2]


def test_labels_that_begin_with_one_are_counted_from_nought_when_it_is_said(tmp_path: Path) -> None:
    write("recordio", tmp_path / "source" / "train.rec", [sample(i, i + 1) for i in range(3)])
    (tmp_path / "source" / "classes.txt").write_text("ant\nnewt\nowl\n")
    with pytest.raises(DataError, match=r"class 3, but .* lists 3 .*--first-label 1"):
        pack_as(tmp_path / "source", tmp_path / "target", "tfrecord")
    listing = list_images(
        find_split(
            pack_as(tmp_path / "source", tmp_path / "target", "tfrecord", first_label=1), "train"
        )
    )
    assert [name for name, _, _ in read_all(listing)] == ["ant", "newt", "owl"]


@pytest.mark.parametrize("resize", [0, 12])
@pytest.mark.parametrize("format", FORMATS)
def test_a_finished_pack_started_again_changes_no_file(
    format: str, resize: int, sets: dict[str, Path], tmp_path: Path
) -> None:
    """Test a source whose images keep their names, and one whose images are numbered."""
    nameless = tmp_path / "nameless"
    images = [jpeg(), encode_blank("PNG"), encode_blank("BMP")]
    write("recordio", nameless / "x.rec", [sample(i, 0, data) for i, data in enumerate(images)])
    for number, source in enumerate((sets["folder"], nameless)):
        target = tmp_path / str(number)
        pack(source, target, Packing(format, resize=resize))
        paths = [path for path in target.rglob("*") if path.name != "pack.lock"]
        before = {path: path.stat().st_mtime_ns for path in paths}
        done: list[int] = []
        counts = pack(
            source,
            target,
            Packing(format, resize=resize),
            lambda count, _, done=done: done.append(count),
        )
        assert {
            path: path.stat().st_mtime_ns for path in target.rglob("*") if path.name != "pack.lock"
        } == before
        assert done[-1] == sum(counts.values())


@pytest.mark.parametrize("format", FORMATS)
def test_progress_reaches_all_images(format: str, folder: Path, tmp_path: Path) -> None:
    image_folder(folder / "train", {f"a/more {i:03d}.jpg": jpeg(8, 8, i) for i in range(100)})
    seen: list[tuple[int, int]] = []
    pack(
        folder,
        tmp_path / "target",
        Packing(format, shards=3),
        lambda done, total: seen.append((done, total)),
    )
    done = [done for done, _ in seen]
    assert {total for _, total in seen} == {100 + len(TRAIN) + 3}
    assert done == sorted(done)
    assert done[-1] == 100 + len(TRAIN) + 3
    assert len(set(done)) > 4


@pytest.mark.parametrize("format", FORMATS)
def test_progress_resumes_with_what_is_written(format: str, tmp_path: Path) -> None:
    source = image_folder(
        tmp_path / "source", {f"a/{i:03d}.jpg": jpeg(8, 8, i) for i in range(100)}
    )

    def interrupted(done: int, total: int) -> None:
        if done == 64:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pack(source, tmp_path / "target", Packing(format), interrupted)
    seen: list[int] = []
    pack(source, tmp_path / "target", Packing(format), lambda done, _: seen.append(done))
    assert seen[0] >= 64  # threads may have written more than was reported
    assert seen == sorted(seen)
    assert seen[-1] == 100


@pytest.mark.parametrize("format", FORMATS)
def test_a_looping_link_is_named_and_left_out(format: str, folder: Path, tmp_path: Path) -> None:
    (folder / "val" / "a" / "loop.jpg").symlink_to("loop.jpg")
    left_out: list[tuple[str, Quarantined]] = []
    pack(
        folder,
        tmp_path / "target",
        Packing(format),
        left_out=lambda split, bad: left_out.append((split, bad)),
    )
    assert left_out == [("val", Quarantined("a/loop.jpg", "Too many levels of symbolic links"))]
    (folder / "val" / "a" / "loop.jpg").unlink()
    assert files_of(tmp_path / "target") == files_of(pack_as(folder, tmp_path / "without", format))
