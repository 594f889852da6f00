"""Where the images of a split are: every layout, and the messages for folders without one."""

import bz2
import gzip
import lzma
import shlex
import subprocess
import zlib
from pathlib import Path

import pytest

from lockstep.data.containers import tfrecord
from lockstep.data.listing import list_images
from lockstep.data.sources import find_source, find_split, holds_split, list_unread
from lockstep.system.errors import DataError


def touch_files(root: Path, *names: str) -> Path:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return root


LAYOUTS = {
    "train/cat/1.jpg": ("folder", "train", ()),
    "train.rec": ("recordio", "", ("train.rec",)),
    "train_480_q90.rec": ("recordio", "", ("train_480_q90.rec",)),
    "Train.rec": ("recordio", "", ("Train.rec",)),
    "train-00000-of-00001": ("tfrecord", "", ("train-00000-of-00001",)),
    "imagenet2012-train.tfrecord-00000-of-00001": (
        "tfrecord",
        "",
        ("imagenet2012-train.tfrecord-00000-of-00001",),
    ),
    "train.tfrecord": ("tfrecord", "", ("train.tfrecord",)),
    "train_0.tfrecords": ("tfrecord", "", ("train_0.tfrecords",)),
    "imagenet-train-000000.tar": ("webdataset", "", ("imagenet-train-000000.tar",)),
    "train/000000.tar": ("webdataset", "train", ("000000.tar",)),
    "TRAIN-0.TAR": ("webdataset", "", ("TRAIN-0.TAR",)),
    "train/x.TFRecord": ("tfrecord", "train", ("x.TFRecord",)),
    "train/IMAGES.REC": ("recordio", "train", ("IMAGES.REC",)),
    "train/images.rec": ("recordio", "train", ("images.rec",)),
    "train/00000-of-00001": ("folder", "train", ()),
}


@pytest.mark.parametrize("file", LAYOUTS)
def test_the_training_images_are_found_in_every_layout(file: str, tmp_path: Path) -> None:
    format, root, files = LAYOUTS[file]
    source = find_split(
        touch_files(tmp_path, file, "README.md", "classes.txt", ".hidden-train.rec"), "train"
    )
    assert (source.format, source.root, source.files) == (format, tmp_path / root, files)
    assert holds_split(tmp_path, "train")
    assert not holds_split(tmp_path, "val")


@pytest.mark.parametrize(
    "file",
    [
        "val/a/1.jpg",
        "validation/a/1.jpg",
        "val.rec",
        "validation-00000-of-00001",
        "imagenet-val-000000.tar",
        "ilsvrc_val.tar",
    ],
)
def test_validation_images_go_by_two_words(file: str, tmp_path: Path) -> None:
    source = find_split(touch_files(tmp_path, file, "train.rec"), "val")
    assert file in (f"{source.root.name}/a/1.jpg", *source.files)


@pytest.mark.parametrize(
    "file",
    [
        "constrain.rec",
        "trained.tar",
        "interval-00000-of-00001",
        "train.idx",
        "train.lst",
        "train.txt",
    ],
)
def test_other_words_and_other_files_are_no_split(file: str, tmp_path: Path) -> None:
    touch_files(tmp_path, file)
    assert not holds_split(tmp_path, "train")
    assert not holds_split(tmp_path, "val")


def test_files_come_in_the_order_of_names_without_the_other_split(tmp_path: Path) -> None:
    names = [f"train-{i:05d}-of-00012" for i in range(12)]
    touch_files(tmp_path, *reversed(names), "validation-00000-of-00001", "idx/train-00000-of-00012")
    assert find_split(tmp_path, "train").files == tuple(names)
    assert find_source(tmp_path).files == (*names, "validation-00000-of-00001")


def test_files_whose_names_tell_no_order_of_splits_are_found_as_a_whole(tmp_path: Path) -> None:
    source = find_source(touch_files(tmp_path, "b.tar", "a.tar"))
    assert (source.format, source.files) == ("webdataset", ("a.tar", "b.tar"))


def test_files_beside_class_folders_do_not_make_a_format(tmp_path: Path) -> None:
    assert find_source(touch_files(tmp_path, "cat/1.jpg", "old.tar", "old.rec")).format == "folder"


@pytest.mark.parametrize(
    "names", [("train.rec", "train-000000.tar"), ("train.tfrecord", "train.rec")]
)
def test_two_formats_for_one_split_are_refused(names: tuple[str, str], tmp_path: Path) -> None:
    touch_files(tmp_path, *names)
    with pytest.raises(DataError, match=r"more than one format: .*separate folder") as error:
        find_split(tmp_path, "train")
    assert all(name in str(error.value) for name in names)


def test_the_splits_may_have_different_formats(tmp_path: Path) -> None:
    touch_files(tmp_path, "train.rec", "val-000000.tar")
    result = [find_split(tmp_path, split).format for split in ("train", "val")]
    assert result == ["recordio", "webdataset"]


@pytest.mark.parametrize(
    ("pattern", "missing"),
    [
        ("train-{}-of-00006", (0,)),
        ("train-{}-of-00006", (5,)),
        ("x-train-{}-of-00006.tfrecord", (1, 2, 3, 4)),
        ("train-{}-of-00006.rec", (2, 3)),
    ],
)
def test_a_missing_file_is_named(pattern: str, missing: tuple[int, ...], tmp_path: Path) -> None:
    touch_files(tmp_path, *(pattern.format(f"{i:05d}") for i in range(6) if i not in missing))
    message = rf"lacks {len(missing)} of 6 files: .*Put them back"
    with pytest.raises(DataError, match=message) as error:
        find_split(tmp_path, "train")
    assert f"-{missing[0]:05d}-of-00006" in str(error.value)
    assert holds_split(tmp_path, "train")


def test_where_nothing_is_found_every_layout_is_named(tmp_path: Path) -> None:
    for root in (tmp_path, tmp_path / "none"):
        with pytest.raises(DataError) as error:
            find_split(root, "val")
        expected = ["val/<class>/<image>", "val.rec", "validation-00000-of-00001", "val-000000.tar"]
        assert all(f"{root}/{layout}" in str(error.value) for layout in expected)


def test_a_flat_folder_of_images_is_named_with_the_command_that_sorts_it(tmp_path: Path) -> None:
    touch_files(tmp_path, "val/ILSVRC2012_val_00000001.JPEG", "val/ILSVRC2012_val_00000002.JPEG")
    with pytest.raises(DataError, match=r"2 files and no folders.* data sort-val .*/val"):
        list_images(find_split(tmp_path, "val"))


def test_a_folder_that_is_being_written_is_no_data_set_yet(tmp_path: Path) -> None:
    touch_files(tmp_path, "train-000000.tar", "val/a/1.jpg", ".lockstep/pack.unfinished")
    for split in ("train", "val"):
        with pytest.raises(DataError, match=r"not complete: .* the same command again"):
            find_split(tmp_path, split)


RECORDS = b"".join(b"".join(tfrecord.frame_record(b"")) for _ in range(3))
COMPRESSED = {
    "train.tfrecord": ("gzip", gzip.compress),
    "train-00000-of-00001": ("zlib", zlib.compress),
    "train.rec.bz2": ("bzip2", bz2.compress),
    "train.rec.xz": ("xz", lzma.compress),
    "train.tar": ("gzip", gzip.compress),
    "train.tar.zst": ("Zstandard", lambda data: bytes.fromhex("28b52ffd") + data),
    "train.zip": ("ZIP", lambda data: b"PK\x03\x04" + data),
    "photos.zip": ("ZIP", lambda data: b"PK\x03\x04" + data),
}
"""By name: the compression, and what makes the bytes."""


@pytest.mark.parametrize("name", COMPRESSED)
def test_a_compressed_file_has_its_unpacking_command(name: str, tmp_path: Path) -> None:
    title, compress = COMPRESSED[name]
    (tmp_path / name).write_bytes(compress(RECORDS))
    with pytest.raises(DataError, match=f"{name}: it is compressed with {title}") as error:
        list_images(find_source(tmp_path))
    command = str(error.value).partition("remove it: ")[2]
    if title in ("gzip", "bzip2", "xz"):
        subprocess.run(command, shell=True, check=True, timeout=60)
        assert Path(shlex.split(command)[-1]).read_bytes() == RECORDS


def test_an_unpacked_file_next_to_its_archive_counts(tmp_path: Path) -> None:
    touch_files(tmp_path, "train.tar", "train.tar.gz", "val.zip")
    assert find_split(tmp_path, "train").files == ("train.tar",)
    assert not holds_split(tmp_path, "val")


def test_a_folder_that_begins_like_an_archive_is_not_one(tmp_path: Path) -> None:
    """A tar begins with the name of its first member."""
    (tmp_path / "BZhang").mkdir()
    (tmp_path / "BZhang/a.jpg").write_bytes(b"image")
    command = ["tar", "cf", "train.tar", "BZhang/a.jpg"]
    subprocess.run(command, check=True, cwd=tmp_path, timeout=60)
    (tmp_path / "BZhang/a.jpg").unlink()
    (tmp_path / "BZhang").rmdir()
    assert list_images(find_split(tmp_path, "train")).classes == ("BZhang",)


def test_class_folders_next_to_train_are_noticed(tmp_path: Path) -> None:
    names = ("train/cat/a.jpg", "owl/b.JPEG", "test/c.jpg", "val/cat/d.jpg", "docs/read.txt")
    touch_files(tmp_path, *names, "Val/cat/e.jpg")
    assert list_unread(tmp_path, find_split(tmp_path, "train")) == ["Val", "owl"]
    assert list_unread(tmp_path, find_split(tmp_path, "val")) == []
    (tmp_path / "train").rename(tmp_path / "Training")
    assert list_unread(tmp_path, find_split(tmp_path, "val")) == ["Training", "Val", "owl"]
    (tmp_path / "quarantine.json").write_text('{"images": {"cat/d.jpg": "blurred"}}')
    assert "quarantine.json" in list_unread(tmp_path, find_split(tmp_path, "val"))


def test_images_outside_of_class_folders_have_their_own_message(tmp_path: Path) -> None:
    touch_files(tmp_path, "a.jpg", "b.jpg")
    with pytest.raises(
        DataError, match=r"outside of class folders \(a.jpg, b.jpg\); expected .*/<cl"
    ):
        find_split(tmp_path, "train")
    with pytest.raises(DataError, match=r"expected .*/gone/<class>/<image>, .*/gone/train/<class>"):
        find_split(tmp_path / "gone", "train")
