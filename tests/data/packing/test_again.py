"""Pack again after changes, with a quarantine, and with damaged images that would be reduced."""

import os
from itertools import product
from pathlib import Path

import pytest
from PIL import Image

from lockstep.data.checking import examine
from lockstep.data.containers import Sample, tfrecord
from lockstep.data.index import open_index
from lockstep.data.packing import Packing, pack
from lockstep.data.sources import FORMATS, find_source
from lockstep.system.errors import DataError
from tests.data.cases import image_folder, jpeg
from tests.data.sets import files_of


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return image_folder(
        tmp_path / "source",
        {
            f"{name}/{i}.jpg": jpeg(20 + i, 30, 90 * (name == "b"))
            for name in "ab"
            for i in range(3)
        },
    )


@pytest.mark.parametrize("format", FORMATS)
def test_images_written_over_are_noticed(format: str, source: Path, tmp_path: Path) -> None:
    pack(source, tmp_path / "target", Packing(format))
    (source / "a" / "1.jpg").write_bytes(jpeg(60, 60))
    with pytest.raises(DataError, match="some images have changed since"):
        pack(source, tmp_path / "target", Packing(format))


@pytest.mark.parametrize("format", ["recordio", "tfrecord", "webdataset"])
def test_a_file_written_over_is_noticed(format: str, source: Path, tmp_path: Path) -> None:
    pack(source, tmp_path / "files", Packing(format))
    pack(tmp_path / "files", tmp_path / "target", Packing("folder"))
    [path] = [tmp_path / "files" / name for name in find_source(tmp_path / "files").files]
    os.utime(path, (1, 1))
    with pytest.raises(DataError, match="some images have changed since"):
        pack(tmp_path / "files", tmp_path / "target", Packing("folder"))


@pytest.mark.parametrize("format", FORMATS)
def test_ends_that_were_lost_are_written_again(format: str, source: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    pack(source, target, Packing(format, shards=2))
    whole = files_of(target)
    assert len(whole) == 1 + {"folder": 6, "recordio": 6, "tfrecord": 4, "webdataset": 2}[format]
    for name, length in product(whole, (None, 0, 0.5)):
        if length is None:
            (target / name).unlink()
        else:
            os.truncate(target / name, int(len(whole[name]) * length))
        pack(source, target, Packing(format, shards=2))
        assert files_of(target) == whole


@pytest.mark.parametrize("format", ["recordio", "tfrecord", "webdataset"])
def test_a_shortened_file_is_no_data_set(format: str, source: Path, tmp_path: Path) -> None:
    pack(source, tmp_path / "target", Packing(format, shards=2))
    [_, path] = [tmp_path / "target" / name for name in find_source(tmp_path / "target").files]
    os.truncate(path, 100)
    with pytest.raises(DataError, match=rf"{path.name} has only 100 of the \d+ bytes"):
        find_source(tmp_path / "target")

    def interrupted(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pack(source, tmp_path / "target", Packing(format, shards=2), interrupted)
    with pytest.raises(DataError, match="is not complete"):
        find_source(tmp_path / "target")
    pack(source, tmp_path / "target", Packing(format, shards=2))
    assert len(open_index(tmp_path / "target")) == 6


def test_an_empty_file_is_no_reduced_image(source: Path, tmp_path: Path) -> None:
    pack(source, tmp_path / "target", Packing("folder", resize=12))
    whole = files_of(tmp_path / "target")
    os.truncate(tmp_path / "target" / "a" / "1.jpg", 0)
    pack(source, tmp_path / "target", Packing("folder", resize=12))
    assert files_of(tmp_path / "target") == whole


def test_files_that_became_longer_since_are_left_alone(source: Path, tmp_path: Path) -> None:
    pack(source, tmp_path / "target", Packing("tfrecord"))
    [path] = [tmp_path / "target" / name for name in find_source(tmp_path / "target").files]
    data = path.read_bytes()
    path.write_bytes(2 * data)
    pack(source, tmp_path / "target", Packing("tfrecord"))
    assert path.read_bytes() == 2 * data
    (tmp_path / "target" / ".lockstep" / "pack.finished").unlink()
    with pytest.raises(DataError, match="holds 12 images, expected 6"):
        pack(source, tmp_path / "target", Packing("tfrecord"))


@pytest.mark.parametrize(
    ("name", "left"),
    [("pack.json", b""), ("pack.states.npy", b""), ("pack.states.npy", bytes(150))],
)
def test_a_changed_target_is_refused(name: str, left: bytes, source: Path, tmp_path: Path) -> None:
    pack(source, tmp_path / "target", Packing("recordio"))
    (tmp_path / "target" / ".lockstep" / name).write_bytes(left)
    with pytest.raises(DataError, match="lost the record"):
        pack(source, tmp_path / "target", Packing("recordio"))


@pytest.mark.parametrize(
    "noted",
    [b"", b'\n{"images-00000-of-00002.rec": 1', b"\xff" * 70],
    ids=["none", "torn", "no text"],
)
def test_files_without_noted_lengths_are_read(noted: bytes, source: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    pack(source, target, Packing("recordio", shards=2))
    whole = files_of(target)
    (target / ".lockstep" / "pack.finished").write_bytes(noted)
    os.truncate(target / "images-00001-of-00002.rec", 100)
    pack(source, target, Packing("recordio", shards=2))
    assert files_of(target) == whole
    times = {name: (target / name).stat().st_mtime_ns for name in whole}
    pack(source, target, Packing("recordio", shards=2))  # the pack before recorded the lengths
    assert {name: (target / name).stat().st_mtime_ns for name in whole} == times


def test_a_quarantine_does_not_stop_a_pack(source: Path, tmp_path: Path) -> None:
    pack(source, tmp_path / "files", Packing("tfrecord"))
    [path] = [tmp_path / "files" / name for name in find_source(tmp_path / "files").files]
    data = bytearray(path.read_bytes())
    data[data.index(jpeg(21, 30)) + 40] ^= 1
    path.write_bytes(data)
    with pytest.raises(DataError, match="lockstep data check lists all of them"):
        pack(tmp_path / "files", tmp_path / "target", Packing("recordio"))
    examine(tmp_path / "files").write_quarantine()
    assert pack(tmp_path / "files", tmp_path / "target", Packing("recordio")) == {"images": 5}
    assert len(open_index(tmp_path / "target")) == 5


def test_a_small_png_becomes_the_jpeg_that_its_name_says(tmp_path: Path) -> None:
    (tmp_path / "source" / "a").mkdir(parents=True)
    Image.new("RGB", (12, 10), "red").save(tmp_path / "source" / "a" / "small.png")
    pack(tmp_path / "source", tmp_path / "target", Packing("folder", resize=16))
    assert (tmp_path / "target" / "a" / "small.jpg").read_bytes().startswith(b"\xff\xd8")
    assert open_index(tmp_path / "target").sizes.tolist() == [[10, 12]]


def test_names_too_long_for_a_file_are_numbered(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    with tfrecord.Writer(tmp_path / "source" / "train-00000-of-00001") as writer:
        writer.extend([writer.record(Sample(0, "a" * 300 + ".jpg", 0, "cat", jpeg(), 16, 24))])
        writer.finish()
    pack(tmp_path / "source", tmp_path / "target", Packing("folder"))
    result = [path.name for path in (tmp_path / "target" / "train" / "cat").iterdir()]
    assert result == ["00000000.jpg"]
