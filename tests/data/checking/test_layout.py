"""Folders and files whose layout no loader accepts."""

import gzip
import os
from pathlib import Path

import pytest

from lockstep.data.checking import KINDS, examine, split_files
from lockstep.data.containers import Sample
from lockstep.data.index import open_index
from lockstep.data.sources import UNFINISHED, find_split
from lockstep.data.split import open_sets
from lockstep.system.errors import DataError
from tests.data.cases import image_folder
from tests.data.checking.cases import (
    CLASSES,
    FORMATS,
    SOUND,
    kinds,
    map_kinds,
    only,
    picture,
    samples_of,
    write,
    write_file,
    write_labelled,
)


def test_a_flat_folder_of_validation_images_is_found_and_examined(tmp_path: Path) -> None:
    train = {name: data for name, data in SOUND.items() if name.startswith("train")}
    image_folder(
        tmp_path,
        train
        | {"val/a.jpg": picture(90), "val/b.jpg": b"", "val/c.jpg": SOUND["train/cat/train1.jpg"]},
    )
    report = examine(tmp_path)
    assert map_kinds(report) == {
        "val flat": "3 files and no class folders",
        "val empty": "empty file",
        "train in-train-and-val": "val/c.jpg",
    }
    assert "lockstep data sort-val" in KINDS["flat"].remedy
    assert report.splits[1].format == "flat"


def test_no_quarantine_is_written_where_it_would_pass_for_an_image(tmp_path: Path) -> None:
    lists = {"quarantine.json": b'{"images": {}}', "classes.txt": b"ant"}
    image_folder(tmp_path, {"a.jpg": picture(1), "b.jpg": b""} | lists)
    report = examine(tmp_path)
    assert kinds(report) == ["flat", "empty"]
    assert report.write_quarantine() == []
    assert {name: (tmp_path / name).read_bytes() for name in lists} == lists


def test_empty_and_nested_class_folders_are_found_and_the_rest_examined(tmp_path: Path) -> None:
    image_folder(
        tmp_path,
        SOUND
        | {"train/bee/more/x.jpg": picture(90), "train/cat/x.jpg": b"", "train/dog/.keep": b""},
    )
    image_folder(tmp_path, {"train/cat/y.jpg": SOUND["train/bee/train0.jpg"]})
    problems = [(finding.kind, finding.place) for finding in examine(tmp_path).findings]
    assert problems == [
        ("nested-folder", "bee/more"),
        ("empty-class", "dog"),
        ("hidden", "dog/.keep"),
        ("empty", "cat/x.jpg"),
        ("duplicate-other-label", "cat/y.jpg"),
    ]


def test_a_list_of_classes_is_not_for_folders_that_are_not_in_it(tmp_path: Path) -> None:
    image_folder(
        tmp_path,
        {
            "0/a.jpg": picture(1),
            "1/b.jpg": picture(2),
            "1/more/c.jpg": b"",
            "classes.txt": b"ant\n",
        },
    )
    findings = examine(tmp_path).findings
    result = [(finding.kind, finding.place) for finding in findings]
    assert result == [("nested-folder", "1/more"), ("class-list", "classes.txt without 0")]


def test_an_empty_split_is_found(tmp_path: Path) -> None:
    image_folder(tmp_path, {name: data for name, data in SOUND.items() if name.startswith("train")})
    (tmp_path / "val").mkdir()
    finding = only(examine(tmp_path), "no-images")
    assert (finding.split, finding.place) == ("val", ".")


@pytest.mark.parametrize("format", FORMATS)
def test_a_split_of_which_nothing_can_be_used_is_found(format: str, tmp_path: Path) -> None:
    """Test before and after the quarantine is written; with it, nothing is left for the index."""
    validation = [data for name, data in SOUND.items() if name.startswith("val")]
    copies = {
        f"train/{name}/{i}.jpg": validation[2 * label + i]
        for label, name in enumerate(CLASSES)
        for i in range(2)
    }
    write(
        format,
        tmp_path,
        {name: data for name, data in SOUND.items() if name.startswith("val")} | copies,
    )
    report = examine(tmp_path)
    assert report.count_kinds() == {"no-images": 1, "in-train-and-val": 6}
    report.write_quarantine()
    finding = only(examine(tmp_path), "no-images")
    assert (finding.split, finding.place, finding.detail) == (
        "train",
        ".",
        "0 of 6 can be used",
    )
    with pytest.raises(DataError, match="no image can be read"):
        open_index(find_split(tmp_path, "train"))


def test_an_unreadable_class_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> object:
        if Path(path).name == "bee":
            raise PermissionError(13, "Permission denied")
        return scandir(path)

    scandir = os.scandir
    image_folder(tmp_path, SOUND)
    monkeypatch.setattr(os, "scandir", refuse)
    problems = [
        (finding.kind, finding.split, finding.place) for finding in examine(tmp_path).findings
    ]
    assert problems == [("unreadable-file", "train", "bee"), ("unreadable-file", "val", "bee")]


def shards(data: Path, format: str, split: str, counts: list[int], pattern: str) -> Path:
    """Write files with these numbers of images."""
    number = 0
    for i, count in enumerate(counts):
        samples = [
            Sample(n, f"c/{n}.jpg", 0, "c", picture(n), 40, 48)
            for n in range(number, number + count)
        ]
        write_file(format, data / pattern.format(split=split, i=i, n=len(counts)), samples)
        number += count
    return data


@pytest.mark.parametrize("within", ["", "train"])
def test_a_missing_shard_is_found_and_the_others_examined(within: str, tmp_path: Path) -> None:
    shards(tmp_path / within, "tfrecord", "train", [2, 2, 2], "{split}-{i:05d}-of-{n:05d}")
    (tmp_path / within / "train-00001-of-00003").unlink()
    report = examine(tmp_path)
    finding = only(report, "missing-shard")
    assert (finding.split, finding.place) == ("train", ".")
    assert "lacks 1 of 3 files: train-00001-of-00003" in finding.detail
    assert [(split.format, split.images) for split in report.splits] == [("tfrecord", 4)]


def test_a_gap_in_the_numbers_of_tars_is_a_missing_shard(tmp_path: Path) -> None:
    shards(tmp_path, "webdataset", "train", [1, 1, 1, 1], "{split}-{i:06d}.tar")
    for i in (1, 2):
        (tmp_path / f"train-00000{i}.tar").unlink()
    finding = only(examine(tmp_path), "missing-shard")
    assert (finding.place, finding.detail) == (
        "train-000001.tar",
        "2 missing: train-000001.tar, train-000002.tar",
    )


def test_files_of_the_same_length_but_one_image_are_equal(tmp_path: Path) -> None:
    shards(tmp_path, "tfrecord", "train", [3, 2, 2, 2, 3, 2], "{split}-{i:05d}-of-{n:05d}")
    assert examine(tmp_path).findings == ()


def test_files_of_unequal_length_are_found(tmp_path: Path) -> None:
    shards(tmp_path, "tfrecord", "train", [9, 1, 2, 1], "{split}-{i:05d}-of-{n:05d}")
    result = only(examine(tmp_path), "unequal-shards").detail
    assert result == "13 images; the reader would count 28"


def test_a_file_without_images_is_found(tmp_path: Path) -> None:
    shards(tmp_path, "webdataset", "train", [1, 1], "{split}-{i:06d}.tar")
    (tmp_path / "train-000001.tar").write_bytes(b"")
    finding = only(examine(tmp_path), "no-images")
    assert (finding.place, finding.detail) == ("train-000001.tar", "no image in it")


def test_a_file_of_damage_alone_is_not_empty_too(tmp_path: Path) -> None:
    shards(tmp_path, "tfrecord", "train", [2, 1], "{split}-{i:05d}-of-{n:05d}")
    path = tmp_path / "train-00001-of-00002"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    only(examine(tmp_path), "bad-record")


def test_two_formats_in_a_folder_are_found(tmp_path: Path) -> None:
    write("recordio", tmp_path, SOUND)
    write_file("webdataset", tmp_path / "val-000000.tar", samples_of(SOUND, "val"))
    # Its image may be in a file that is not listed.
    (tmp_path / "quarantine.json").write_text('{"images": {"val.rec@0": "blurred"}}')
    report = examine(tmp_path)
    finding = only(report, "two-formats")
    assert (finding.split, finding.place) == ("val", ".")
    assert "val.rec (recordio), val-000000.tar (webdataset)" in finding.detail
    assert [(split.format, split.images) for split in report.splits] == [("recordio", 9), ("", 0)]


@pytest.mark.parametrize("format", FORMATS)
def test_a_data_set_that_is_being_written_is_not_examined(format: str, tmp_path: Path) -> None:
    write(format, tmp_path, SOUND)
    (tmp_path / UNFINISHED).parent.mkdir()
    (tmp_path / UNFINISHED).touch()
    report = examine(tmp_path)
    result = [(finding.kind, finding.split, finding.place) for finding in report.findings]
    assert result == [("unfinished", "train", "."), ("unfinished", "val", ".")]
    assert [split.images for split in report.splits] == [0, 0]


def test_a_compressed_tar_is_found_and_the_others_examined(tmp_path: Path) -> None:
    shards(tmp_path, "webdataset", "train", [1, 1, 2], "{split}-{i:06d}.tar")
    path = tmp_path / "train-000001.tar"
    path.write_bytes(gzip.compress(path.read_bytes()))
    report = examine(tmp_path)
    assert only(report, "compressed").place == "train-000001.tar"
    assert report.splits[0].images == 3


def test_an_unreadable_file_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, *arguments: int) -> int:
        if Path(path).name == "train-000000.tar":
            raise PermissionError(13, "Permission denied")
        return system(path, *arguments)

    system = os.open
    shards(tmp_path, "webdataset", "train", [1, 2], "{split}-{i:06d}.tar")
    monkeypatch.setattr(os, "open", refuse)
    report = examine(tmp_path)
    assert only(report, "unreadable-file").place == "train-000000.tar"
    assert report.splits[0].images == 2


def test_other_refusals_are_in_their_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(source: object) -> None:
        raise DataError("the names of 9 images take too many bytes")

    monkeypatch.setattr(split_files, "list_images", refuse)
    assert only(
        examine(write_labelled("recordio", tmp_path, {"train": [0, 1]})), "refused"
    ).detail.startswith("the names of 9")


def test_what_lies_next_to_the_images_that_are_read_is_named(tmp_path: Path) -> None:
    more = {"validation/cat/1.jpg": picture(91), "train-0.tar": b"", "val.rec": b"", "b.rec": b""}
    image_folder(tmp_path, SOUND | more)
    sets = open_sets(tmp_path, 0.0, lambda _: lambda done, total: None)
    note = "3 items next to the images that are read (train-0.tar, validation, val.rec)"
    assert any(note in text for text in sets.notes)
    places = [(finding.split, finding.place) for finding in examine(tmp_path).findings]
    assert places == [("train", "train-0.tar"), ("val", "validation"), ("val", "val.rec")]


def test_images_next_to_files_of_a_format_are_named(tmp_path: Path) -> None:
    write("webdataset", tmp_path, SOUND)
    image_folder(tmp_path, {"a.jpg": picture(1), "notes.txt": b""})
    assert only(examine(tmp_path), "neighbour").place == "a.jpg"
