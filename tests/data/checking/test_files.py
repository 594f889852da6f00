"""Damage in files with many images, and the indexes and lists next to them."""

from pathlib import Path

import pytest

from lockstep.data.checking import examine, labels
from lockstep.data.containers import Damage, Sample, recordio
from tests.data.cases import WRITERS
from tests.data.checking.cases import (
    FILES,
    SOUND,
    STORED,
    only,
    picture,
    write,
    write_file,
    write_labelled,
)


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
    finding, _ = examine(tmp_path).findings
    assert finding.kind == "bad-record"
    assert (finding.split, finding.place) == ("train", f"{path.name}@{begin}")
    assert finding.detail == f"the checksum of the record at byte {begin} is wrong"


INDEX = "0\t{0}\n1\t{1}\n2\t{2}\n"


@pytest.mark.parametrize(
    ("text", "detail"),
    [
        ("0\t{0}\n1\t{1}\n", "2 lines, 3 records"),
        ("0\t{0}\n1\t{1}\n2\t{2}\n3\t99999\n", "4 lines, 3 records (2 problems in all)"),
        ("0\t{0}\n1\t7\n2\t{2}\n", "line 2: no record begins at byte 7"),
        (
            "5\t{0}\n1\t{1}\n7\t{2}\n",
            "line 1 has number 5, but the record at byte 0 has 0 (2 problems in all)",
        ),
        ("1\t{1}\n0\t{0}\n2\t{2}\n", "line 2: byte 0 comes after byte {1}"),
        (
            "0\t{0}\n1\n2\t{2}\n",
            "line 2 of train.idx is '1'; expected a number, a tab and an offset",
        ),
    ],
    ids=["too few", "too many", "no record", "other numbers", "not rising", "no offset"],
)
def test_an_index_of_other_records_is_found(text: str, detail: str, tmp_path: Path) -> None:
    write_labelled("recordio", tmp_path, {"train": [0, 1, 2]})
    offsets = [offset for _, offset in recordio.read_index(tmp_path / "train.idx")]
    assert (tmp_path / "train.idx").read_text() == INDEX.format(*offsets)
    (tmp_path / "train.idx").write_text(text.format(*offsets))
    finding = only(examine(tmp_path), "idx")
    assert (finding.split, finding.place, finding.detail) == (
        "train",
        "train.idx",
        detail.format(*offsets),
    )


def test_records_need_no_index_and_no_list(tmp_path: Path) -> None:
    write_labelled("recordio", tmp_path, {"train": [0, 1, 2]})
    for name in ("train.idx", "train.lst"):
        (tmp_path / name).unlink()
    assert examine(tmp_path).findings == ()


def test_an_index_is_not_blamed_for_damage_it_points_to(tmp_path: Path) -> None:
    write_labelled("recordio", tmp_path, {"train": [0, 1, 2, 0, 1, 2]})
    places = recordio.read_index(tmp_path / "train.idx")
    with (tmp_path / "train.rec").open("r+b") as file:
        file.seek(places[3][1])
        file.write(b"????")
    report = examine(tmp_path)
    assert report.count_kinds() == {"bad-record": len(report.findings)}


def test_a_list_of_another_length_is_found(tmp_path: Path) -> None:
    write_labelled("recordio", tmp_path, {"train": [0, 1, 2]})
    with (tmp_path / "train.lst").open("a") as file:
        file.write("3\t1.000000\tunreadable.jpg\n")
    finding = only(examine(tmp_path), "lst")
    assert (finding.place, finding.detail) == ("train.lst", "4 lines, 3 records")


def synsets(data: Path, count: int) -> Path:
    """Write a file of `count` classes, named as in ImageNet, with one image each; only their last
    bytes differ."""
    image = picture(1, size=(32, 32))
    names = [f"n{i:08d}" for i in range(count)]
    samples = [
        Sample(i, f"{n}/{i}.jpg", i, n, image + i.to_bytes(2), 32, 32) for i, n in enumerate(names)
    ]
    write_file("tfrecord", data / "validation-00000-of-00001", samples)
    return data


def test_other_than_imagenets_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert labels.IMAGENET == {"train": 1_281_167, "val": 50_000}
    synsets(tmp_path, 1000)
    assert only(examine(tmp_path), "image-count").detail == "1,000 images; ImageNet has 50,000"
    monkeypatch.setitem(labels.IMAGENET, "val", 1000)
    assert examine(tmp_path).findings == ()
    monkeypatch.setitem(labels.IMAGENET, "val", 1001)
    with (tmp_path / "validation-00000-of-00001").open("ab") as file:
        file.write(b"a torn record")
    only(examine(tmp_path), "bad-record")


def test_a_part_of_imagenets_classes_may_have_any_number_of_images(tmp_path: Path) -> None:
    assert examine(synsets(tmp_path, 999)).findings == ()
