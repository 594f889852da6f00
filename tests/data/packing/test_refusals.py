"""What a pack refuses, and what it leaves alone then."""

import io
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image, features
from typer.testing import CliRunner

from lockstep.cli import app
from lockstep.data.index import open_index
from lockstep.data.packing import Packing, pack
from lockstep.data.packing.splits import find_kind
from lockstep.data.sources import find_split
from lockstep.system.errors import DataError
from tests.data.cases import image_folder, jpeg
from tests.data.sets import (
    FORMATS,
    SPLITS,
    TRAIN,
    files_of,
    listings,
    pack_as,
    read_all,
    sort_images,
)


def test_a_second_pack_is_refused_while_the_first_one_runs(folder: Path, tmp_path: Path) -> None:
    refused = []

    def again(done: int, total: int) -> None:
        with pytest.raises(DataError, match=r"another process is writing to .*target"):
            pack_as(folder, tmp_path / "target", "recordio")
        refused.append(done)

    pack(folder, tmp_path / "target", Packing("recordio"), again)
    assert refused
    assert read_all(listings(tmp_path / "target")["train"]) == sort_images(TRAIN)


def another_image(source: Path) -> dict[str, int]:
    image_folder(source, {"train/a/new.jpg": jpeg()})
    return {}


def another_name(source: Path) -> dict[str, int]:
    (source / "train/a/1.jpg").rename(source / "train/a/0.jpg")
    return {}


@pytest.mark.parametrize(
    "change",
    [
        another_image,
        another_name,
        lambda _: {"shards": 3},
        lambda _: {"resize": 20},
        lambda _: {"quality": 50},
    ],
    ids=["image", "name", "shards", "resize", "quality"],
)
def test_a_target_that_holds_another_pack_is_refused_and_left_alone(
    change: Callable[[Path], dict[str, int]], folder: Path, tmp_path: Path
) -> None:
    target = pack_as(folder, tmp_path / "target", "tfrecord")
    before = files_of(target)
    how = change(folder)
    with pytest.raises(DataError, match=r"target holds other images, or .*options"):
        pack_as(folder, target, "tfrecord", **how)
    assert files_of(target) == before
    assert find_split(target, "train")


def test_a_target_of_other_things_is_left_alone(folder: Path, tmp_path: Path) -> None:
    image_folder(tmp_path / "target", {"thesis.tex": b"..."})
    with pytest.raises(DataError, match=r"target holds other files \(thesis.tex\)"):
        pack_as(folder, tmp_path / "target", "recordio")
    assert [path.name for path in (tmp_path / "target").iterdir()] == ["thesis.tex"]


def test_a_data_set_is_not_packed_into_its_own_images(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"packed is inside .*train"):
        pack_as(folder / "train", folder / "train" / "packed", "recordio")
    assert not (folder / "train" / "packed").exists()
    images = pack_as(folder / "train", tmp_path / "images", "recordio")
    with pytest.raises(DataError, match=r"packed is inside .*images"):
        pack_as(images, images / "packed", "folder")
    result = read_all(listings(pack_as(folder, folder / "packed", "recordio"))["val"])
    assert result == sort_images(SPLITS["val"])


SOURCES: dict[str, tuple[dict[str, bytes], str]] = {
    "none": ({}, "there is no folder .*source"),
    "flat": ({"a.jpg": jpeg(), "b.jpg": jpeg()}, "holds 2 files and no folders.*sort-val"),
    "too deep": ({"train/a/b/c.jpg": jpeg()}, "train/a/b: folder inside a class folder"),
    "damaged": ({"train.rec": b"no record"}, "1 damaged parts of files hold no usable image"),
    "empty": ({"train.rec": b""}, "source has no images"),
    "lines": ({"two\nlines/c.jpg": jpeg()}, r"'two\\nlines', which cannot be a line of classes"),
    "space": ({"space /c.jpg": jpeg()}, "named 'space ', which cannot be a line of classes"),
}


@pytest.mark.parametrize(("files", "message"), SOURCES.values(), ids=SOURCES)
def test_a_source_that_cannot_be_packed_is_refused(
    files: dict[str, bytes], message: str, tmp_path: Path
) -> None:
    image_folder(tmp_path / "source", files)
    with pytest.raises(DataError, match=message):
        pack_as(tmp_path / "source", tmp_path / "target", "webdataset")
    assert not (tmp_path / "target").exists()


def test_an_unknown_format_is_refused_with_those_there_are(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="folder, recordio, tfrecord, webdataset"):
        pack_as(folder, tmp_path / "target", "zip")


def test_an_incomplete_split_is_an_error(sets: dict[str, Path], tmp_path: Path) -> None:
    source = pack_as(sets["folder"], tmp_path / "source", "tfrecord", shards=2)
    (source / "validation-00001-of-00002").unlink()
    with pytest.raises(DataError, match=r"1 of 2 files: validation-00001-of-00002"):
        pack_as(source, tmp_path / "target", "recordio")


@pytest.mark.parametrize("format", FORMATS)
def test_an_unreadable_file_is_named(format: str, folder: Path, tmp_path: Path) -> None:
    (folder / "val" / "a" / "gone.jpg").symlink_to("nowhere.jpg")
    target = tmp_path / "target"
    with pytest.raises(DataError, match=r"val/a/gone.jpg .*No such file"):
        pack_as(folder, target, format)
    with pytest.raises(DataError, match=r"target is not complete: .*same command"):
        find_split(target, "train")
    (folder / "val" / "a" / "nowhere.jpg").write_bytes(jpeg())
    (folder / "val" / "a" / "gone.jpg").unlink()
    (folder / "val" / "a" / "nowhere.jpg").rename(folder / "val" / "a" / "gone.jpg")
    pack_as(folder, target, format)
    assert files_of(target) == files_of(pack_as(folder, tmp_path / "at once", format))


@pytest.mark.parametrize("format", ["folder", "webdataset"])
def test_images_changed_since_are_not_packed(format: str, folder: Path, tmp_path: Path) -> None:
    source = tmp_path / "own"
    pack_as(folder, source, format)
    training = open_index(find_split(source, "train"))
    middle = len(training) // 2
    path = Path(training.path(middle))
    offset = int(training.rows["offset"][middle]) if training.source.files else 0
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(offset + int(training.rows["length"][middle]) // 2)
        file.write(bytes(40))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    place = re.escape(training.place(middle))
    with pytest.raises(DataError, match=rf"{place}.* is not the image that was indexed: its bytes"):
        pack_as(source, tmp_path / "target", "recordio")
    open_index(find_split(source, "train"), anew=True)
    pack_as(source, tmp_path / "another", "recordio")


def refuse(source: Path, target: Path) -> str:
    """Return what the command prints, which refuses a source."""
    result = CliRunner().invoke(app, ["data", "pack", str(source), str(target)])
    assert result.exit_code
    return result.output + str(result.exception)


@pytest.mark.parametrize(
    "name",
    ["a.parquet", "train.csv", "train.tar", "train.tar.gz", "a.tfrecord", "a.rec", "a/1.jpg"],
)
def test_a_pointer_of_git_lfs_is_named(name: str, tmp_path: Path) -> None:
    path = tmp_path / "in" / name
    path.parent.mkdir(parents=True)
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12345\n")
    output = refuse(tmp_path / "in", tmp_path / "out")
    assert "a Git LFS pointer, not the file; fetch all files in its repository: git lfs pull" in (
        output
    )


def test_a_list_that_is_one_value_of_json_is_answered_with_a_command(tmp_path: Path) -> None:
    rows = [{"path": "1.jpg", "label": "a"}, {"path": "2.jpg", "label": "b"}]
    path = tmp_path / "my list.json"
    path.write_text(json.dumps(rows))
    output = refuse(path, tmp_path / "out")
    command = output.partition("To convert a JSON array: python ")[2].strip()
    subprocess.run([shlex.quote(sys.executable) + " " + command], shell=True, check=True)
    lines = path.with_suffix(".jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == rows


@pytest.mark.parametrize("kind", ["webp", "tif", "gif", "bmp", "pnm", "avif", "png", "jpg"])
def test_an_image_keeps_the_ending_of_its_format(kind: str, tmp_path: Path) -> None:
    name = {"tif": "TIFF", "jpg": "JPEG", "pnm": "PPM"}.get(kind, kind.upper())
    if kind == "avif" and not features.check("avif"):
        pytest.skip("this Pillow has no AVIF")
    memory = io.BytesIO()
    Image.new("RGB", (8, 8)).save(memory, name)
    assert find_kind(memory.getvalue()) == kind
