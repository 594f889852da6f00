"""Labels that are not classes, and classes that train or val lacks."""

from pathlib import Path

import numpy as np
import pytest

from lockstep.data.checking import KINDS, examine
from lockstep.data.containers import Sample
from lockstep.data.index import open_index
from lockstep.data.listing import list_images
from lockstep.data.sources import find_split
from lockstep.system.errors import DataError
from tests.data.cases import image_folder, write_tar
from tests.data.checking.cases import (
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


def test_classes_that_only_one_of_train_and_val_has_are_found(tmp_path: Path) -> None:
    image_folder(tmp_path, SOUND | {"train/dog/x.jpg": picture(90), "val/eel/x.jpg": picture(91)})
    assert map_kinds(examine(tmp_path)) == {
        "val unknown-classes": "1 class: eel",
        "val classes-without-val": "1 class: dog",
    }


def test_numbers_of_classes_are_compared_where_there_are_no_names(tmp_path: Path) -> None:
    report = examine(
        write_labelled("recordio", tmp_path, {"train": [0, 1, 2, 3], "val": [0, 1, 2, 5]})
    )
    expected = {"val unknown-classes": "1 class: 5", "val classes-without-val": "1 class: 3"}
    assert map_kinds(report) == expected


@pytest.mark.parametrize(
    ("format", "logits"),
    [("recordio", None), ("recordio", 4), ("webdataset", 4), ("tfrecord", None)],
)
def test_labels_from_1_are_one_finding(format: str, logits: int | None, tmp_path: Path) -> None:
    write_labelled(format, tmp_path, {"train": [1, 2, 3, 4, 4], "val": [2, 1, 4]})
    report = examine(tmp_path, logits=logits)
    result = [(finding.split, finding.kind) for finding in report.findings]
    assert result == [("train", "labels-from-1"), ("val", "labels-from-1")]
    assert report.findings[1].detail == "labels are 1 to 4; expected 0 to 3"
    assert "lockstep data pack --first-label 1" in KINDS["labels-from-1"].remedy
    assert report.write_quarantine() == []


def test_labels_from_1_are_found_in_val_alone(tmp_path: Path) -> None:
    assert (
        only(
            examine(
                write_labelled("recordio", tmp_path, {"train": [0, 1, 2, 3], "val": [1, 2, 4]})
            ),
            "labels-from-1",
        ).split
        == "val"
    )


def test_labels_from_1_are_found_by_the_list_of_classes(tmp_path: Path) -> None:
    write_labelled("recordio", tmp_path, {"train": [1, 3, 2], "val": [3, 2]})
    (tmp_path / "classes.txt").write_text("ant\nbee\ncat\n")
    with pytest.raises(DataError, match="--first-label 1"):
        open_index(find_split(tmp_path, "train"))
    assert examine(tmp_path).count_kinds() == {"labels-from-1": 2}


def test_the_models_outputs_count_before_the_classes_of_train(tmp_path: Path) -> None:
    write_labelled("recordio", tmp_path, {"train": [0, 1, 2], "val": [1, 2, 4]})
    assert only(examine(tmp_path, logits=4), "labels-from-1").split == "val"


def test_a_list_of_classes_says_that_the_first_one_has_no_images(tmp_path: Path) -> None:
    write_labelled("recordio", tmp_path, {"train": [1, 2]})
    assert only(examine(tmp_path), "labels-from-1").split == "train"
    (tmp_path / "classes.txt").write_text("ant\nbee\ncat\n")
    assert examine(tmp_path).findings == ()


def test_numbers_of_val_are_positions_in_the_named_classes_of_train(tmp_path: Path) -> None:
    write_file("webdataset", tmp_path / "train-000000.tar", samples_of(SOUND, "train"))
    write_labelled("recordio", tmp_path, {"val": [0, 1, 2]})
    assert examine(tmp_path).findings == ()


def test_the_words_for_the_splits_may_be_in_capitals(tmp_path: Path) -> None:
    write_labelled("recordio", tmp_path, {"TRAIN": [0, 1], "Val": [0, 1]})
    report = examine(tmp_path)
    assert report.findings == ()
    assert [split.name for split in report.splits] == ["train", "val"]


def test_a_class_without_images_is_no_sign_of_labels_from_1(tmp_path: Path) -> None:
    write_labelled("recordio", tmp_path, {"train": [0, 1, 2, 3], "val": [1, 2, 3]})
    assert only(examine(tmp_path, logits=4), "classes-without-val").detail == "1 class: 0"


@pytest.mark.parametrize("format", FORMATS)
def test_more_classes_than_outputs_are_one_finding_for_a_split(format: str, tmp_path: Path) -> None:
    report = examine(write(format, tmp_path, SOUND), logits=2)
    beyond = {"train": 3, "val": 2}
    assert map_kinds(report) == {
        f"{split} too-many-classes": f"3 classes, {count} images outside; the model has 2 outputs"
        for split, count in beyond.items()
    }


@pytest.mark.parametrize("format", ["recordio", "webdataset", "tfrecord"])
def test_labels_far_from_the_others_are_found_image_by_image(format: str, tmp_path: Path) -> None:
    write_labelled(format, tmp_path, {"train": [0, 1, 2, 77, 1, 50], "val": [0, 1, 2]})
    report = examine(tmp_path, logits=3)
    listing = list_images(find_split(tmp_path, "train"))
    places = {int(label): listing.place(i) for i, label in enumerate(listing.rows["label"])}
    assert [(finding.kind, finding.place, finding.detail) for finding in report.findings] == [
        ("label-out-of-range", places[77], "its label is 77; the model has 3 outputs"),
        ("label-out-of-range", places[50], "its label is 50; the model has 3 outputs"),
    ]


def test_more_lines_in_the_list_of_classes_than_outputs_are_found(tmp_path: Path) -> None:
    write_labelled("recordio", tmp_path, {"train": [0, 2]})
    (tmp_path / "classes.txt").write_text("a\nb\nc\nd\ne\n")
    detail = "5 classes, 0 images outside; the model has 3 outputs"
    assert only(examine(tmp_path, logits=3), "too-many-classes").detail == detail


def test_an_image_with_a_wrong_label_is_no_first_copy_and_is_left_out(tmp_path: Path) -> None:
    samples = [
        Sample(i, f"{i}.jpg", label, "", picture(min(i, 2)), 40, 48)
        for i, label in enumerate([0, 1, 9, 2])
    ]
    write_file("recordio", tmp_path / "train.rec", samples)
    report = examine(tmp_path, logits=3)
    assert only(report, "label-out-of-range").name == "2.jpg"
    report.write_quarantine()
    assert examine(tmp_path, logits=3).findings == ()


def test_absurd_labels_are_found_though_loaders_refuse_others(tmp_path: Path) -> None:
    write_labelled("recordio", tmp_path, {"train": [0, 1, 9, 2**21]})
    (tmp_path / "classes.txt").write_text("ant\nbee\ncat\n")
    details = [finding.detail for finding in examine(tmp_path).findings]
    assert details == ["its label is 2097152", "its label is 9; classes.txt has 3 lines"]


@pytest.mark.parametrize("lines", ["ant\nbee\ncat\n", "ant\n"])
def test_a_record_in_parts_is_read(lines: str, tmp_path: Path) -> None:
    """The magic number is after the image, where no decoder looks. In the second case, loaders
    refuse the labels."""
    magic = bytes.fromhex("0a23d7ce")
    images = [picture(i) + bytes(-len(picture(i)) % 4) + magic for i in range(3)]
    samples = [Sample(i, f"{i}.jpg", i, "", image, 40, 48) for i, image in enumerate(images)]
    write_file("recordio", tmp_path / "train.rec", samples)
    (tmp_path / "classes.txt").write_text(lines)
    report = examine(tmp_path)
    assert kinds(report) == ["too-many-classes"] * (lines == "ant\n")
    assert report.splits[0].total_bytes == sum(map(len, images))


def test_a_label_that_is_no_number_of_a_class_is_found(tmp_path: Path) -> None:
    write_labelled("recordio", tmp_path, {"train": [0, 0, 1, 2], "val": [0, 1, 2]})
    data = (tmp_path / "train.rec").read_bytes()
    (tmp_path / "train.rec").write_bytes(data[:12] + np.float32(0.5).tobytes() + data[16:])
    finding = only(examine(tmp_path), "label-out-of-range")
    assert (finding.split, finding.place) == ("train", "train.rec@0")
    assert "its label is 0.5" in finding.detail


def test_tar_members_without_a_class_are_found(tmp_path: Path) -> None:
    images = {"a.jpg": picture(1), "a.cls": b"dog", "b.jpg": picture(2), "c.jpg": picture(3)}
    write_tar(tmp_path / "val.tar", images | {"c.cls": b"0"})
    report = examine(tmp_path)
    assert report.count_kinds() == {"label-out-of-range": 1, "missing-label": 1}
    assert report.findings[0].place == "val.tar@0"


def test_folders_and_numbers_as_classes_are_found_and_the_images_examined(tmp_path: Path) -> None:
    images = {"ant/a.jpg": picture(1), "b.jpg": b"text", "b.cls": b"0"}
    write_tar(tmp_path / "val.tar", images)
    assert map_kinds(examine(tmp_path)) == {
        "val mixed-labels": "1 image with a number, 1 a folder",
        "val not-an-image": "not an image in a known format",
    }
