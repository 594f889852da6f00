"""The data-set doctor: a planted case of every kind, nothing where nothing is wrong, a quarantine that loaders keep to."""

import gzip
import io
import json
import os
import re
import tarfile
import threading
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from lockstep.data.doctor import KINDS, Finding, Report, examine, images, labels, parts
from lockstep.data.doctor.findings import ERROR
from lockstep.data.formats import Damage, Sample, recordio, tfrecord, webdataset
from lockstep.data.index import Index, open_index
from lockstep.data.listing import list_images
from lockstep.data.sources import ALIASES, UNFINISHED, find_split
from lockstep.errors import DataError

Images = dict[str, bytes]
WRITERS = {"recordio": recordio.Writer, "tfrecord": tfrecord.Writer, "webdataset": webdataset.Writer}
STORED = {"recordio": recordio.stored, "tfrecord": tfrecord.stored, "webdataset": webdataset.stored}
FILES = {"recordio": "{}.rec", "tfrecord": "{}-00000-of-00001", "webdataset": "{}-000000.tar"}
FORMATS = ["folder", *WRITERS]


def picture(
    seed: int, format: str = "JPEG", mode: str = "RGB", size: tuple[int, int] = (48, 40), **options: object
) -> bytes:
    """An image that no other seed gives."""
    image = Image.frombytes("RGB", size, np.random.default_rng(seed).bytes(size[0] * size[1] * 3))
    file = io.BytesIO()
    image.convert(mode).save(file, format, **options)
    return file.getvalue()


def rotated(orientation: int, format: str = "JPEG") -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return picture(50, format, exif=exif)


CLASSES = ("ant", "bee", "cat")
SOUND: Images = {
    f"{split}/{name}/{split}{i}.jpg": picture(10 * label + i + (5 if split == "val" else 0))
    for split, count in (("train", 3), ("val", 2))
    for label, name in enumerate(CLASSES)
    for i in range(count)
}


def write_folder(root: Path, images: Images) -> Path:
    for name, data in images.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return root


def write_file(format: str, path: Path, samples: list[Sample]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with WRITERS[format](path) as writer:
        for sample in samples:
            writer.add(sample)
        writer.describe([(sample.number, sample.label, sample.name) for sample in samples])
        writer.finish()
    return path


def samples_of(images: Images, split: str) -> list[Sample]:
    named = {name.partition("/")[2]: data for name, data in sorted(images.items()) if name.startswith(f"{split}/")}
    classes = sorted({name.split("/")[1] for name in images})
    return [
        Sample(i, name, classes.index(name.partition("/")[0]), name.partition("/")[0], data, 40, 48)
        for i, (name, data) in enumerate(named.items())
    ]


def write(format: str, data: Path, images: Images) -> Path:
    """Write a data set of files `split/class/image`."""
    if format == "folder":
        return write_folder(data, images)
    for split in sorted({name.partition("/")[0] for name in images}):
        write_file(format, data / FILES[format].format(split), samples_of(images, split))
    return data


def labelled(format: str, data: Path, labels: dict[str, list[int]]) -> Path:
    """Write a data set of images without class names, with these labels."""
    for split, of_split in labels.items():
        start = 1000 * len(split)
        samples = [Sample(i, f"{i}.jpg", label, "", picture(start + i), 40, 48) for i, label in enumerate(of_split)]
        write_file(format, data / FILES[format].format(split), samples)
    return data


def opened(data: Path) -> dict[str, Index]:
    indexes: dict[str, Index] = {}
    for split in ALIASES:
        classes = indexes["train"].classes if indexes else None
        indexes[split] = open_index(find_split(data, split), classes=classes)
    return indexes


def place_of(data: Path, name: str) -> str:
    """Where the index of a data set as it is keeps the image `split/class/image`, sound or not."""
    split, _, image = name.partition("/")
    source = find_split(data, split)
    listing = list_images(source)
    [place] = [listing.place(i) for i in range(len(listing)) if listing.name(i) == image]
    return place


def kinds(report: Report) -> list[str]:
    return [finding.kind for finding in report.findings]


def only(report: Report, kind: str) -> Finding:
    """The finding of this kind, which must be the only finding."""
    assert kinds(report) == [kind], report.findings
    return report.findings[0]


def named(report: Report) -> dict[str, str]:
    """Detail by split and kind."""
    return {f"{finding.split} {finding.kind}": finding.detail for finding in report.findings}


@pytest.mark.parametrize("logits", [None, 3, 1000])
@pytest.mark.parametrize("format", FORMATS)
def test_nothing_is_found_in_a_sound_data_set(format: str, logits: int | None, tmp_path: Path) -> None:
    report = examine(write(format, tmp_path, SOUND), logits=logits)
    assert report.findings == ()
    assert report.by_kind() == {}
    assert report.write_quarantine() == []
    assert not list(tmp_path.rglob("quarantine.json"))
    assert [(split.name, split.format, split.images, split.classes) for split in report.splits] == [
        ("train", format, 9, 3),
        ("val", format, 6, 3),
    ]
    sizes = [sum(len(data) for name, data in SOUND.items() if name.startswith(split)) for split in ("train", "val")]
    assert [split.total_bytes for split in report.splits] == sizes


@pytest.mark.parametrize("format", FORMATS)
def test_nothing_is_found_in_one_sound_folder(format: str, tmp_path: Path) -> None:
    data = write(format, tmp_path, {name.replace("train", "part"): data for name, data in SOUND.items() if "train" in name})
    report = examine(data / "part" if format == "folder" else data)
    assert report.findings == ()
    assert [(split.name, split.images) for split in report.splits] == [("", 9)]


def test_files_in_the_folders_of_the_splits_are_found_too(tmp_path: Path) -> None:
    for split in ("train", "validation"):
        write_file("tfrecord", tmp_path / split / "a.tfrecord", samples_of(SOUND, split[: 5 if split == "train" else 3]))
    report = examine(tmp_path)
    assert report.findings == ()
    assert [(split.name, split.root) for split in report.splits] == [
        ("train", tmp_path / "train"),
        ("val", tmp_path / "validation"),
    ]


def test_a_name_may_have_its_ending_in_capitals_or_none(tmp_path: Path) -> None:
    odd = {
        "a.JPEG": picture(1),
        "b": picture(2),
        "c.PNG": picture(3, "PNG", "L"),
        "d.jpg": rotated(1),
        "e.tif": rotated(6, "TIFF"),
    }
    assert examine(write_folder(tmp_path, {f"cat/{name}": data for name, data in odd.items()})).findings == ()


BAD: dict[str, tuple[str, bytes, str]] = {
    "empty": ("x.jpg", b"", "empty file"),
    "truncated": ("x.jpg", picture(50)[:-40], "Premature end of JPEG file"),
    "truncated header": ("x.jpg", picture(50)[:200], "Truncated File Read"),
    "truncated png": ("x.png", picture(50, "PNG")[:-500], "image file is truncated"),
    "truncated ppm": ("x.ppm", picture(50, "PPM")[:10], "not enough image data"),
    "truncated ppm header": ("x.ppm", picture(50, "PPM")[:2], "Reached EOF while reading header"),
    "damaged": ("x.png", picture(50, "PNG").replace(b"IDAT", b"IDAX"), ""),
    "damaged start": ("x.png", picture(50, "PNG")[:10], "not an image in a known format"),
    "not-an-image": ("x.jpg", b"<html>404</html>", "not an image in a known format"),
    "too-large": ("x.png", picture(1, "PNG", size=(65536, 1)), "65536 x 1 pixels are too many"),
    "cmyk": ("x.jpg", picture(50, mode="CMYK"), "CMYK"),
    "another-format": ("x.JPEG", picture(50, "PNG"), "PNG named .JPEG"),
    "rotated": ("x.jpg", rotated(6), "orientation 6"),
    "tiny": ("x.jpg", picture(50, size=(31, 80)), "31 x 80 pixels"),
}


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("what", BAD)
def test_a_bad_image_is_found_at_its_place(what: str, format: str, tmp_path: Path) -> None:
    name, data, detail = BAD[what]
    write(format, tmp_path, SOUND | {f"train/bee/{name}": data})
    finding = only(examine(tmp_path), next(kind for kind in KINDS if what.startswith(kind)))
    assert (finding.split, finding.place) == ("train", place_of(tmp_path, f"train/bee/{name}"))
    assert finding.name == f"bee/{name}"
    assert detail in finding.detail


@pytest.mark.parametrize("orientation", range(2, 9))
def test_every_orientation_but_the_upright_one_is_found(orientation: int, tmp_path: Path) -> None:
    write_folder(tmp_path, {"cat/a.jpg": rotated(orientation), "cat/b.webp": rotated(orientation, "WEBP")})
    assert examine(tmp_path).by_kind() == {"rotated": 2}


def test_a_jpeg_with_a_preview_behind_it_is_a_jpeg(tmp_path: Path) -> None:
    other = Image.open(io.BytesIO(picture(2)))
    write_folder(tmp_path, {"cat/a.jpg": picture(1, "MPO", save_all=True, append_images=[other])})
    assert Image.open(io.BytesIO((tmp_path / "cat/a.jpg").read_bytes())).format == "MPO"
    assert examine(tmp_path).findings == ()


def test_an_image_can_have_several_findings(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 3
    write_folder(tmp_path, {"cat/a.png": picture(1, mode="CMYK", size=(20, 20), exif=exif)})
    assert kinds(examine(tmp_path)) == ["cmyk", "another-format", "rotated", "tiny"]


def test_the_smallest_side_can_be_chosen(tmp_path: Path) -> None:
    write_folder(tmp_path, {"cat/a.jpg": picture(1)})
    assert examine(tmp_path, smallest=40).findings == ()
    assert only(examine(tmp_path, smallest=41), "tiny").detail == "48 x 40 pixels"


@pytest.mark.parametrize("pixels", [9_000, 4_000], ids=["warning", "error"])
def test_a_decompression_bomb_stays_inside(pixels: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", pixels)
    write_folder(tmp_path, {"cat/a.png": picture(1, "PNG", size=(100, 100)), "cat/b.png": picture(2, "PNG")})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = examine(tmp_path)
    assert kinds(report) == ["too-large"] * (pixels == 4_000)


def test_a_link_to_nothing_and_a_pipe_are_unreadable(tmp_path: Path) -> None:
    write(format="folder", data=tmp_path, images=SOUND)
    (tmp_path / "val/ant/gone.jpg").symlink_to("nowhere.jpg")
    os.mkfifo(tmp_path / "val/bee/pipe.jpg")
    found = [(finding.kind, finding.split, finding.place, finding.detail) for finding in examine(tmp_path).findings]
    assert found == [
        ("unreadable", "val", "ant/gone.jpg", "No such file or directory"),
        ("unreadable", "val", "bee/pipe.jpg", "it is no regular file"),
    ]


def test_a_file_too_long_for_an_image_is_not_read(tmp_path: Path) -> None:
    write_folder(tmp_path, {"cat/a.jpg": picture(1)})
    with (tmp_path / "cat/huge.jpg").open("wb") as file:
        file.truncate(2**32)
    finding = only(examine(tmp_path), "too-large")
    assert (finding.place, finding.detail) == ("cat/huge.jpg", "4294967296 bytes are too many")


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    ("copy", "kind", "place_of_first"),
    [
        ("train/bee/x.jpg", "duplicate", "train/bee/train0.jpg"),
        ("train/cat/x.jpg", "duplicate-other-label", "train/bee/train0.jpg"),
        ("val/cat/x.jpg", "in-train-and-val", "val/cat/x.jpg"),
    ],
)
def test_a_copy_is_found_and_names_the_first(copy: str, kind: str, place_of_first: str, format: str, tmp_path: Path) -> None:
    write(format, tmp_path, SOUND | {copy: SOUND["train/bee/train0.jpg"]})
    finding = only(examine(tmp_path), kind)
    at_fault = "train/bee/train0.jpg" if kind == "in-train-and-val" else copy
    assert (finding.split, finding.place) == ("train", place_of(tmp_path, at_fault))
    assert finding.detail == place_of(tmp_path, place_of_first)


def test_of_many_copies_all_but_the_first_are_found(tmp_path: Path) -> None:
    one, two = picture(100), picture(101)
    train = {
        "train/ant/a.jpg": one,
        "train/ant/b.jpg": one,
        "train/bee/c.jpg": one,
        "train/cat/d.jpg": two,
        "train/cat/e.jpg": two,
    }
    val = {"val/bee/x.jpg": one, "val/bee/y.jpg": one, "val/cat/z.jpg": one}
    write_folder(tmp_path, SOUND | train | val)
    found = [(finding.split, finding.kind, finding.place, finding.detail) for finding in examine(tmp_path).findings]
    assert found == [
        ("train", "in-train-and-val", "ant/a.jpg", "bee/x.jpg"),
        ("train", "in-train-and-val", "ant/b.jpg", "bee/x.jpg"),
        ("train", "in-train-and-val", "bee/c.jpg", "bee/x.jpg"),
        ("train", "duplicate", "cat/e.jpg", "cat/d.jpg"),
        ("val", "duplicate", "bee/y.jpg", "bee/x.jpg"),
        ("val", "duplicate-other-label", "cat/z.jpg", "bee/x.jpg"),
    ]


def test_bad_images_are_no_copies_of_each_other(tmp_path: Path) -> None:
    write_folder(tmp_path, SOUND | {"train/ant/x.jpg": b"", "train/bee/x.jpg": b"", "val/cat/x.jpg": b""})
    assert examine(tmp_path).by_kind() == {"empty": 3}


def test_a_flat_folder_of_validation_images_is_found_and_its_images_examined(tmp_path: Path) -> None:
    train = {name: data for name, data in SOUND.items() if name.startswith("train")}
    write_folder(tmp_path, train | {"val/a.jpg": picture(90), "val/b.jpg": b"", "val/c.jpg": SOUND["train/cat/train1.jpg"]})
    report = examine(tmp_path)
    assert named(report) == {
        "val flat": "3 files and no class folders",
        "val empty": "empty file",
        "train in-train-and-val": "c.jpg",
    }
    assert "lockstep data sort-val" in KINDS["flat"].remedy
    assert report.splits[1].format == "flat"


def test_no_quarantine_is_written_into_a_flat_folder_where_it_would_pass_for_an_image(tmp_path: Path) -> None:
    lists = {"quarantine.json": b'{"images": {}}', "classes.txt": b"ant"}
    write_folder(tmp_path, {"a.jpg": picture(1), "b.jpg": b""} | lists)
    report = examine(tmp_path)
    assert kinds(report) == ["flat", "empty"]
    assert report.write_quarantine() == []
    assert {name: (tmp_path / name).read_bytes() for name in lists} == lists


def test_empty_and_nested_class_folders_are_found_and_the_rest_examined(tmp_path: Path) -> None:
    write_folder(tmp_path, SOUND | {"train/bee/more/x.jpg": picture(90), "train/cat/x.jpg": b"", "train/dog/.keep": b""})
    write_folder(tmp_path, {"train/cat/y.jpg": SOUND["train/bee/train0.jpg"]})
    found = [(finding.kind, finding.place) for finding in examine(tmp_path).findings]
    assert found == [
        ("nested-folder", "bee/more"),
        ("empty-class", "dog"),
        ("empty", "cat/x.jpg"),
        ("duplicate-other-label", "cat/y.jpg"),
    ]


def test_a_list_of_classes_is_not_for_folders_that_are_not_in_it(tmp_path: Path) -> None:
    write_folder(tmp_path, {"0/a.jpg": picture(1), "1/b.jpg": picture(2), "1/more/c.jpg": b"", "classes.txt": b"ant\n"})
    assert only(examine(tmp_path), "nested-folder").place == "1/more"


def test_an_empty_split_is_found(tmp_path: Path) -> None:
    write_folder(tmp_path, {name: data for name, data in SOUND.items() if name.startswith("train")})
    (tmp_path / "val").mkdir()
    finding = only(examine(tmp_path), "no-images")
    assert (finding.split, finding.place) == ("val", ".")


@pytest.mark.parametrize("format", FORMATS)
def test_a_split_of_which_nothing_can_be_used_is_found(format: str, tmp_path: Path) -> None:
    """Before and behind the quarantine, which would leave nothing for the index."""
    validation = [data for name, data in SOUND.items() if name.startswith("val")]
    copies = {f"train/{name}/{i}.jpg": validation[2 * label + i] for label, name in enumerate(CLASSES) for i in range(2)}
    write(format, tmp_path, {name: data for name, data in SOUND.items() if name.startswith("val")} | copies)
    report = examine(tmp_path)
    assert report.by_kind() == {"no-images": 1, "in-train-and-val": 6}
    report.write_quarantine()
    finding = only(examine(tmp_path), "no-images")
    assert (finding.split, finding.place, finding.detail) == ("train", ".", "none of 6 images can be used")
    with pytest.raises(DataError, match="none of 6 images can be read"):
        open_index(find_split(tmp_path, "train"))


def test_a_class_folder_that_cannot_be_read_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> object:
        if Path(path).name == "bee":
            raise PermissionError(13, "Permission denied")
        return scandir(path)

    scandir = os.scandir
    write_folder(tmp_path, SOUND)
    monkeypatch.setattr(os, "scandir", refuse)
    found = [(finding.kind, finding.split, finding.place) for finding in examine(tmp_path).findings]
    assert found == [("unreadable-file", "train", "bee"), ("unreadable-file", "val", "bee")]


def test_classes_that_only_one_of_train_and_val_has_are_found(tmp_path: Path) -> None:
    write_folder(tmp_path, SOUND | {"train/dog/x.jpg": picture(90), "val/eel/x.jpg": picture(91)})
    assert named(examine(tmp_path)) == {"val unknown-classes": "1 classes: eel", "val classes-without-val": "1 classes: dog"}


def test_numbers_of_classes_are_compared_where_there_are_no_names(tmp_path: Path) -> None:
    report = examine(labelled("recordio", tmp_path, {"train": [0, 1, 2, 3], "val": [0, 1, 2, 5]}))
    assert named(report) == {"val unknown-classes": "1 classes: 5", "val classes-without-val": "1 classes: 3"}


@pytest.mark.parametrize("format", ["recordio", "webdataset", "tfrecord"])
@pytest.mark.parametrize("logits", [None, 4])
def test_labels_from_1_are_one_finding_for_a_split(format: str, logits: int | None, tmp_path: Path) -> None:
    labelled(format, tmp_path, {"train": [1, 2, 3, 4, 4], "val": [2, 1, 4]})
    report = examine(tmp_path, logits=logits)
    assert [(finding.split, finding.kind) for finding in report.findings] == [
        ("train", "labels-from-1"),
        ("val", "labels-from-1"),
    ]
    assert report.findings[1].detail == "labels are 1 to 4; expected 0 to 3"
    assert "lockstep data pack --first-label 1" in KINDS["labels-from-1"].remedy
    assert report.write_quarantine() == []


def test_labels_from_1_are_found_in_val_alone(tmp_path: Path) -> None:
    assert (
        only(examine(labelled("recordio", tmp_path, {"train": [0, 1, 2, 3], "val": [1, 2, 4]})), "labels-from-1").split
        == "val"
    )


def test_labels_from_1_are_found_by_the_list_of_classes(tmp_path: Path) -> None:
    labelled("recordio", tmp_path, {"train": [1, 3, 2], "val": [3, 2]})
    (tmp_path / "classes.txt").write_text("ant\nbee\ncat\n")
    with pytest.raises(DataError, match="--first-label 1"):
        open_index(find_split(tmp_path, "train"))
    assert examine(tmp_path).by_kind() == {"labels-from-1": 2}


def test_the_models_outputs_count_before_the_classes_of_train(tmp_path: Path) -> None:
    labelled("recordio", tmp_path, {"train": [0, 1, 2], "val": [1, 2, 4]})
    assert only(examine(tmp_path, logits=4), "labels-from-1").split == "val"


def test_a_list_of_classes_says_that_the_first_one_has_no_images(tmp_path: Path) -> None:
    labelled("recordio", tmp_path, {"train": [1, 2]})
    assert only(examine(tmp_path), "labels-from-1").split == "train"
    (tmp_path / "classes.txt").write_text("ant\nbee\ncat\n")
    assert examine(tmp_path).findings == ()


def test_numbers_of_val_are_positions_in_the_named_classes_of_train(tmp_path: Path) -> None:
    write_file("webdataset", tmp_path / "train-000000.tar", samples_of(SOUND, "train"))
    labelled("recordio", tmp_path, {"val": [0, 1, 2]})
    assert examine(tmp_path).findings == ()


def test_the_words_for_the_splits_may_be_in_capitals(tmp_path: Path) -> None:
    labelled("recordio", tmp_path, {"TRAIN": [0, 1], "Val": [0, 1]})
    report = examine(tmp_path)
    assert report.findings == ()
    assert [split.name for split in report.splits] == ["train", "val"]


def test_a_class_without_images_is_no_sign_of_labels_from_1(tmp_path: Path) -> None:
    labelled("recordio", tmp_path, {"train": [0, 1, 2, 3], "val": [1, 2, 3]})
    assert only(examine(tmp_path, logits=4), "classes-without-val").detail == "1 classes: 0"


@pytest.mark.parametrize("format", FORMATS)
def test_more_classes_than_outputs_are_one_finding_for_a_split(format: str, tmp_path: Path) -> None:
    report = examine(write(format, tmp_path, SOUND), logits=2)
    beyond = {"train": 3, "val": 2}
    assert named(report) == {
        f"{split} too-many-classes": f"3 classes, {count} images beyond; the model has 2 outputs"
        for split, count in beyond.items()
    }


def test_1001_classes_do_not_fit_1000_outputs(tmp_path: Path) -> None:
    image = picture(1, size=(32, 32))
    samples = [Sample(i, f"{i}.jpg", i, "", image + bytes([i % 256, i // 256]), 32, 32) for i in range(1001)]
    write_file("recordio", tmp_path / "train.rec", samples)
    detail = "1001 classes, 1 images beyond; the model has 1000 outputs"
    assert only(examine(tmp_path, logits=1000), "too-many-classes").detail == detail
    assert examine(tmp_path, logits=1001).findings == ()


@pytest.mark.parametrize("format", ["recordio", "webdataset", "tfrecord"])
def test_labels_far_from_the_others_are_found_image_by_image(format: str, tmp_path: Path) -> None:
    labelled(format, tmp_path, {"train": [0, 1, 2, 77, 1, 50], "val": [0, 1, 2]})
    report = examine(tmp_path, logits=3)
    listing = list_images(find_split(tmp_path, "train"))
    places = {int(label): listing.place(i) for i, label in enumerate(listing.rows["label"])}
    assert [(finding.kind, finding.place, finding.detail) for finding in report.findings] == [
        ("label-out-of-range", places[77], "its label is 77; the model has 3 outputs"),
        ("label-out-of-range", places[50], "its label is 50; the model has 3 outputs"),
    ]


def test_more_lines_in_the_list_of_classes_than_outputs_are_found(tmp_path: Path) -> None:
    labelled("recordio", tmp_path, {"train": [0, 2]})
    (tmp_path / "classes.txt").write_text("a\nb\nc\nd\ne\n")
    detail = "5 classes, 0 images beyond; the model has 3 outputs"
    assert only(examine(tmp_path, logits=3), "too-many-classes").detail == detail


def test_an_image_with_a_wrong_label_is_no_first_copy_and_is_left_out_by_a_quarantine(tmp_path: Path) -> None:
    samples = [Sample(i, f"{i}.jpg", label, "", picture(min(i, 2)), 40, 48) for i, label in enumerate([0, 1, 9, 2])]
    write_file("recordio", tmp_path / "train.rec", samples)
    report = examine(tmp_path, logits=3)
    assert only(report, "label-out-of-range").name == "2.jpg"
    report.write_quarantine()
    assert examine(tmp_path, logits=3).findings == ()


def test_absurd_labels_are_found_though_loaders_refuse_others(tmp_path: Path) -> None:
    labelled("recordio", tmp_path, {"train": [0, 1, 9, 2**21]})
    (tmp_path / "classes.txt").write_text("ant\nbee\ncat\n")
    details = [finding.detail for finding in examine(tmp_path).findings]
    assert details == ["its label is 2097152", "its label is 9; classes.txt has 3 lines"]


@pytest.mark.parametrize("lines", ["ant\nbee\ncat\n", "ant\n"])
def test_a_record_in_parts_is_read(lines: str, tmp_path: Path) -> None:
    """With the magic number behind the image, where no decoder looks; once where loaders refuse the labels."""
    magic = bytes.fromhex("0a23d7ce")
    images = [picture(i) + bytes(-len(picture(i)) % 4) + magic for i in range(3)]
    samples = [Sample(i, f"{i}.jpg", i, "", image, 40, 48) for i, image in enumerate(images)]
    write_file("recordio", tmp_path / "train.rec", samples)
    (tmp_path / "classes.txt").write_text(lines)
    report = examine(tmp_path)
    assert kinds(report) == ["too-many-classes"] * (lines == "ant\n")
    assert report.splits[0].total_bytes == sum(map(len, images))


def test_labels_beyond_the_list_of_classes_are_found_though_loaders_refuse_them(tmp_path: Path) -> None:
    labelled("recordio", tmp_path, {"train": [0, 1, 9]})
    (tmp_path / "classes.txt").write_text("ant\nbee\ncat\n")
    assert only(examine(tmp_path), "label-out-of-range").detail == "its label is 9; classes.txt has 3 lines"


def test_a_label_that_is_no_number_of_a_class_is_found(tmp_path: Path) -> None:
    labelled("recordio", tmp_path, {"train": [0, 0, 1, 2], "val": [0, 1, 2]})
    data = (tmp_path / "train.rec").read_bytes()
    (tmp_path / "train.rec").write_bytes(data[:12] + np.float32(0.5).tobytes() + data[16:])
    finding = only(examine(tmp_path), "label-out-of-range")
    assert (finding.split, finding.place) == ("train", "train.rec@0")
    assert "its label is 0.5" in finding.detail


def test_tar_members_without_a_class_are_found(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "val.tar", "w") as tar:
        for name, data in (
            ("a.jpg", picture(1)),
            ("a.cls", b"dog"),
            ("b.jpg", picture(2)),
            ("c.jpg", picture(3)),
            ("c.cls", b"0"),
        ):
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    report = examine(tmp_path)
    assert report.by_kind() == {"label-out-of-range": 2}
    assert report.findings[0].place == "val.tar@0"


def test_folders_and_numbers_as_classes_are_found_and_the_images_examined(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "val.tar", "w") as tar:
        for name, data in (("ant/a.jpg", picture(1)), ("b.jpg", b"text"), ("b.cls", b"0")):
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    assert named(examine(tmp_path)) == {
        "val mixed-labels": "1 images have a number as their class, 1 a folder",
        "val not-an-image": "not an image in a known format",
    }


@pytest.mark.parametrize("format", WRITERS)
def test_damage_in_a_file_is_found_where_the_format_says(format: str, tmp_path: Path) -> None:
    write(format, tmp_path, SOUND)
    path = tmp_path / FILES[format].format("val")
    data = bytearray(path.read_bytes())
    middle = data.index(SOUND["val/bee/val0.jpg"])
    data[middle - 1200 : middle] = bytes(1200)
    path.write_bytes(data)
    damaged = [item for item in STORED[format](path) if isinstance(item, Damage)]
    report = examine(tmp_path)
    assert [(finding.kind, finding.place, finding.detail) for finding in report.findings] == [
        ("bad-record", f"{path.name}@{damage.begin}", damage.reason) for damage in damaged
    ]
    assert damaged
    report.write_quarantine()
    assert examine(tmp_path).findings == ()


def test_a_broken_checksum_is_found_at_its_record(tmp_path: Path) -> None:
    write("tfrecord", tmp_path, SOUND)
    path = tmp_path / "train-00000-of-00001"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    begin = int((tmp_path / "idx" / path.name).read_text().split()[-2])
    (tmp_path / "quarantine.json").write_text('{"images": {"another": "reason"}}')
    finding = only(examine(tmp_path), "bad-record")
    assert (finding.split, finding.place) == ("train", f"{path.name}@{begin}")
    assert finding.detail == f"the checksum of the record at byte {begin} is wrong"


def shards(data: Path, format: str, split: str, counts: list[int], pattern: str) -> Path:
    """Write files of so many images each."""
    number = 0
    for i, count in enumerate(counts):
        samples = [Sample(n, f"c/{n}.jpg", 0, "c", picture(n), 40, 48) for n in range(number, number + count)]
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
    assert (finding.place, finding.detail) == ("train-000001.tar", "2 missing: train-000001.tar, train-000002.tar")


def test_files_of_the_same_length_but_one_image_are_equal(tmp_path: Path) -> None:
    shards(tmp_path, "tfrecord", "train", [3, 2, 2, 2, 3, 2], "{split}-{i:05d}-of-{n:05d}")
    assert examine(tmp_path).findings == ()


def test_files_of_unequal_length_are_found(tmp_path: Path) -> None:
    shards(tmp_path, "tfrecord", "train", [9, 1, 2, 1], "{split}-{i:05d}-of-{n:05d}")
    assert only(examine(tmp_path), "unequal-shards").detail == "13 images; it would count 28"


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
    assert [(finding.kind, finding.split, finding.place) for finding in report.findings] == [
        ("unfinished", "train", "."),
        ("unfinished", "val", "."),
    ]
    assert [split.images for split in report.splits] == [0, 0]


def test_a_compressed_tar_is_found_and_the_others_examined(tmp_path: Path) -> None:
    shards(tmp_path, "webdataset", "train", [1, 1, 2], "{split}-{i:06d}.tar")
    path = tmp_path / "train-000001.tar"
    path.write_bytes(gzip.compress(path.read_bytes()))
    report = examine(tmp_path)
    assert only(report, "compressed").place == "train-000001.tar"
    assert report.splits[0].images == 3


def test_a_file_that_cannot_be_read_is_found_and_the_others_examined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_what_loaders_refuse_for_another_reason_is_found_in_their_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(source: object) -> None:
        raise DataError("the names of 9 images take too many bytes")

    monkeypatch.setattr(parts, "list_images", refuse)
    assert only(examine(labelled("recordio", tmp_path, {"train": [0, 1]})), "refused").detail.startswith("the names of 9")


INDEX = "0\t{0}\n1\t{1}\n2\t{2}\n"


@pytest.mark.parametrize(
    ("text", "detail"),
    [
        ("0\t{0}\n1\t{1}\n", "2 lines, 3 records"),
        ("0\t{0}\n1\t{1}\n2\t{2}\n3\t99999\n", "4 lines, 3 records (2 such places)"),
        ("0\t{0}\n1\t7\n2\t{2}\n", "line 2: no record begins at byte 7"),
        ("5\t{0}\n1\t{1}\n7\t{2}\n", "line 1 says 5, the record at byte 0 0 (2 such places)"),
        ("1\t{1}\n0\t{0}\n2\t{2}\n", "line 2: byte 0 comes after {1}"),
        ("0\t{0}\n1\n2\t{2}\n", "line 2 of train.idx is '1'; expected a number, a tab and an offset"),
    ],
    ids=["too few", "too many", "no record", "other numbers", "not rising", "no offset"],
)
def test_an_index_that_does_not_match_its_records_is_found(text: str, detail: str, tmp_path: Path) -> None:
    labelled("recordio", tmp_path, {"train": [0, 1, 2]})
    offsets = [offset for _, offset in recordio.read_index(tmp_path / "train.idx")]
    assert (tmp_path / "train.idx").read_text() == INDEX.format(*offsets)
    (tmp_path / "train.idx").write_text(text.format(*offsets))
    finding = only(examine(tmp_path), "idx")
    assert (finding.split, finding.place, finding.detail) == ("train", "train.idx", detail.format(*offsets))


def test_records_need_no_index_and_no_list(tmp_path: Path) -> None:
    labelled("recordio", tmp_path, {"train": [0, 1, 2]})
    for name in ("train.idx", "train.lst"):
        (tmp_path / name).unlink()
    assert examine(tmp_path).findings == ()


def test_an_index_is_not_blamed_for_damage_it_points_to(tmp_path: Path) -> None:
    labelled("recordio", tmp_path, {"train": [0, 1, 2, 0, 1, 2]})
    places = recordio.read_index(tmp_path / "train.idx")
    with (tmp_path / "train.rec").open("r+b") as file:
        file.seek(places[3][1])
        file.write(b"????")
    report = examine(tmp_path)
    assert report.by_kind() == {"bad-record": len(report.findings)}


def test_a_list_of_another_length_is_found(tmp_path: Path) -> None:
    labelled("recordio", tmp_path, {"train": [0, 1, 2]})
    with (tmp_path / "train.lst").open("a") as file:
        file.write("3\t1.000000\tunreadable.jpg\n")
    finding = only(examine(tmp_path), "lst")
    assert (finding.place, finding.detail) == ("train.lst", "4 lines, 3 records")


def synsets(data: Path, count: int) -> Path:
    """Write a file of as many classes, named as ImageNet names them, with one image each but for the last."""
    image = picture(1, size=(32, 32))
    names = [f"n{i:08d}" for i in range(count)]
    samples = [Sample(i, f"{n}/{i}.jpg", i, n, image + i.to_bytes(2), 32, 32) for i, n in enumerate(names)]
    write_file("tfrecord", data / "validation-00000-of-00001", samples)
    return data


def test_another_number_of_images_than_imagenets_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert labels.IMAGENET == {"train": 1_281_167, "val": 50_000}
    synsets(tmp_path, 1000)
    assert only(examine(tmp_path), "image-count").detail == "1,000 images; ImageNet has 50,000"
    monkeypatch.setitem(labels.IMAGENET, "val", 1000)
    assert examine(tmp_path).findings == ()


def test_damage_counts_as_an_image_of_imagenet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(labels.IMAGENET, "val", 1001)
    synsets(tmp_path, 1000)
    with (tmp_path / "validation-00000-of-00001").open("ab") as file:
        file.write(b"a torn record")
    only(examine(tmp_path), "bad-record")


def test_a_part_of_imagenets_classes_may_have_any_number_of_images(tmp_path: Path) -> None:
    assert examine(synsets(tmp_path, 999)).findings == ()


ERRORS = {
    "train/ant/empty.jpg": b"",
    "train/bee/half.jpg": picture(60)[:-40],
    "train/cat/copy.jpg": SOUND["train/ant/train0.jpg"],
    "train/cat/val copy.jpg": SOUND["val/ant/val1.jpg"],
    "val/cat/text.jpg": b"text",
}
WARNINGS = {"train/ant/same.jpg": SOUND["train/ant/train1.jpg"], "val/bee/tiny.jpg": picture(61, size=(20, 20))}


@pytest.mark.parametrize("format", FORMATS)
def test_loaders_leave_out_exactly_what_the_quarantine_lists(format: str, tmp_path: Path) -> None:
    write(format, tmp_path, SOUND | ERRORS | WARNINGS)
    report = examine(tmp_path)
    errors = {(finding.split, finding.place) for finding in report.findings if finding.severity == ERROR}
    expected = {(name.partition("/")[0], place_of(tmp_path, name)) for name in ERRORS}
    assert errors == expected
    written = report.write_quarantine()
    assert written == (
        [tmp_path / "train/quarantine.json", tmp_path / "val/quarantine.json"]
        if format == "folder"
        else [tmp_path / "quarantine.json"]
    )
    listed = [json.loads(path.read_text())["images"] for path in written]
    assert {place for images in listed for place in images} == {place for _, place in expected}
    indexes = opened(tmp_path)
    left = {f"{split}/{index.name(i)}": index.read(i) for split, index in indexes.items() for i in range(len(index))}
    assert left == SOUND | WARNINGS
    assert {(split, bad.file) for split, index in indexes.items() for bad in index.quarantined} == expected


@pytest.mark.parametrize("format", FORMATS)
def test_what_the_quarantine_leaves_out_is_not_examined_again(format: str, tmp_path: Path) -> None:
    write(format, tmp_path, SOUND | ERRORS | WARNINGS)
    before = examine(tmp_path)
    before.write_quarantine()
    after = examine(tmp_path)
    assert after.by_kind() == {"duplicate": 1, "tiny": 1}
    assert after.write_quarantine() == []
    assert [(split.images, split.left_out) for split in after.splits] == [(10, 4), (7, 1)]
    assert [split.images for split in before.splits] == [14, 8]


def test_a_quarantine_keeps_what_it_listed_before(tmp_path: Path) -> None:
    write_folder(tmp_path, SOUND | {"train/ant/x.jpg": b"", "train/bee/x.jpg": b"text"})
    path = tmp_path / "train/quarantine.json"
    path.write_text('{"images": {"ant/x.jpg": "I do not like it"}}')
    assert examine(tmp_path).write_quarantine() == [path]
    assert json.loads(path.read_text()) == {
        "images": {"ant/x.jpg": "I do not like it", "bee/x.jpg": "not-an-image: not an image in a known format"}
    }
    assert sorted(entry.name for entry in path.parent.iterdir()) == ["ant", "bee", "cat", "quarantine.json"]


def test_a_quarantine_that_is_none_is_found_and_left_as_it_is(tmp_path: Path) -> None:
    write_folder(tmp_path, SOUND | {"val/ant/x.jpg": b"", "val/quarantine.json": b"[1]"})
    report = examine(tmp_path)
    assert {(finding.kind, finding.place) for finding in report.findings} == {
        ("bad-quarantine", "quarantine.json"),
        ("empty", "ant/x.jpg"),
    }
    with pytest.raises(DataError, match="is no quarantine"):
        report.write_quarantine()
    assert (tmp_path / "val/quarantine.json").read_bytes() == b"[1]"


def test_every_error_of_an_image_is_among_the_reasons(tmp_path: Path) -> None:
    labelled("recordio", tmp_path, {"train": [0, 1, 9, 2]})
    place = place_of(tmp_path, "train/2.jpg")
    offset = int(place.partition("@")[2])
    with (tmp_path / "train.rec").open("r+b") as file:
        file.seek(offset)
        file.write(b"????")
    [path] = examine(tmp_path, logits=3).write_quarantine()
    assert json.loads(path.read_text())["images"] == {
        place: "label-out-of-range: its label is 9; the model has 3 outputs; not-an-image: not an image in a known format"
    }


def test_names_that_are_not_utf_8_are_quarantined_and_reported(tmp_path: Path) -> None:
    name = os.fsdecode(b"\xe9.jpg")
    write_folder(tmp_path, {"train/cat/a.jpg": picture(1), f"train/cat/{name}": b""})
    report = examine(tmp_path)
    assert only(report, "empty").place == f"cat/{name}"
    [finding] = json.loads(json.dumps(report.as_json(), ensure_ascii=False).encode())["findings"]
    assert finding["place"] == "cat/\N{REPLACEMENT CHARACTER}.jpg"
    report.write_quarantine()
    assert [bad.file for bad in open_index(tmp_path / "train").quarantined] == [f"cat/{name}"]
    assert examine(tmp_path).findings == ()


def test_json_has_all_of_the_report(tmp_path: Path) -> None:
    write_folder(
        tmp_path,
        {
            "train/ant/a.jpg": picture(1),
            "train/ant/b.jpg": picture(1),
            "val/ant/c.jpg": b"text",
            "val/ant/d.jpg": picture(2),
        },
    )
    report = examine(tmp_path)
    about = json.loads(json.dumps(report.as_json()))
    duplicate, text = KINDS["duplicate"], KINDS["not-an-image"]
    assert about == {
        "data": str(tmp_path),
        "splits": [
            {
                "name": "train",
                "format": "folder",
                "root": f"{tmp_path}/train",
                "images": 2,
                "classes": 1,
                "bytes": 2 * len(picture(1)),
                "left_out": 0,
            },
            {
                "name": "val",
                "format": "folder",
                "root": f"{tmp_path}/val",
                "images": 2,
                "classes": 1,
                "bytes": 4 + len(picture(2)),
                "left_out": 0,
            },
        ],
        "kinds": {
            "not-an-image": {"count": 1, "severity": "error", "meaning": text.meaning, "remedy": text.remedy},
            "duplicate": {"count": 1, "severity": "warning", "meaning": duplicate.meaning, "remedy": duplicate.remedy},
        },
        "findings": [
            {
                "kind": "duplicate",
                "severity": "warning",
                "split": "train",
                "place": "ant/b.jpg",
                "name": "ant/b.jpg",
                "detail": "ant/a.jpg",
            },
            {
                "kind": "not-an-image",
                "severity": "error",
                "split": "val",
                "place": "ant/c.jpg",
                "name": "ant/c.jpg",
                "detail": "not an image in a known format",
            },
        ],
    }


def test_every_kind_says_what_it_means_and_what_to_do() -> None:
    for kind, about in KINDS.items():
        assert re.fullmatch(r"[a-z0-9-]+", kind)
        assert about.severity in ("error", "warning")
        assert about.meaning
        assert about.remedy


def many(tmp_path: Path) -> Path:
    """Several tasks for the threads, with something to find in each."""
    images = {f"train/{i % 3}/{i:03d}.jpg": picture(i % 120, size=(32, 32 - i % 2)) for i in range(150)}
    return write_folder(tmp_path, images | {f"val/{i}/x.jpg": picture(200 + i) for i in range(3)} | {"val/0/y.jpg": b""})


def test_findings_do_not_depend_on_the_timing_of_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = many(tmp_path)
    monkeypatch.setattr(images, "cores", lambda: 1)
    alone = examine(data)
    assert alone.by_kind() == {"empty": 1, "duplicate": 30, "tiny": 75}
    monkeypatch.setattr(images, "cores", lambda: 3)
    seen = threading.Event()

    def late(data: bytes) -> tuple[int, int]:
        """Decode the first image only when another thread came to the last one of its class."""
        if data == first:
            assert seen.wait(60)
        if data == last:
            seen.set()
        return check(data)

    check = images.check
    first, last = ((tmp_path / "train" / name).read_bytes() for name in ("0/000.jpg", "2/149.jpg"))
    monkeypatch.setattr(images, "check", late)
    assert examine(data) == alone


def test_progress_rises_to_the_images_of_all_splits(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    examine(many(tmp_path), progress=lambda done, total: seen.append((done, total)))
    assert [done for done, _ in seen] == [64, 128, 150, 154]
    assert {total for _, total in seen} == {154}


def test_an_interruption_ends_it_and_leaves_nothing(tmp_path: Path) -> None:
    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    before = threading.active_count()
    with pytest.raises(KeyboardInterrupt):
        examine(many(tmp_path), progress=interrupt)
    assert threading.active_count() == before


def test_nothing_is_written_while_a_data_set_is_examined(tmp_path: Path) -> None:
    data = many(tmp_path)
    before = sorted(data.rglob("*"))
    examine(data)
    assert sorted(data.rglob("*")) == before


def a_file(path: Path) -> None:
    path.write_bytes(picture(1))


def a_folder_of_texts(path: Path) -> None:
    write_folder(path, {"README.md": b"about", ".hidden/x.jpg": picture(1)})


@pytest.mark.parametrize("arrange", [lambda path: None, a_file, Path.mkdir, a_folder_of_texts])
def test_what_is_no_data_set_is_refused(arrange: Callable[[Path], None], tmp_path: Path) -> None:
    arrange(tmp_path / "data")
    with pytest.raises(DataError, match=r"there is no folder .*data|data holds no images; expected a data set with"):
        examine(tmp_path / "data")
