"""The report as a whole: good data sets, the quarantine, JSON, progress."""

import json
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from lockstep.data.checking import KINDS, examine, images
from lockstep.data.checking.findings import ERROR
from lockstep.data.index import open_index
from lockstep.system.errors import DataError
from tests.data.cases import image_folder
from tests.data.checking.cases import (
    FORMATS,
    SOUND,
    count_openings,
    only,
    picture,
    place_of,
    samples_of,
    write,
    write_file,
    write_labelled,
    write_rotated,
)


@pytest.mark.parametrize("format", FORMATS)
def test_nothing_is_found_in_a_sound_data_set(format: str, tmp_path: Path) -> None:
    report = examine(write(format, tmp_path, SOUND))
    for logits in (3, 1000):
        assert examine(tmp_path, logits=logits) == report
    assert report.findings == ()
    assert report.count_kinds() == {}
    assert report.write_quarantine() == []
    assert not list(tmp_path.rglob("quarantine.json"))
    result = [(split.name, split.format, split.images, split.classes) for split in report.splits]
    assert result == [("train", format, 9, 3), ("val", format, 6, 3)]
    sizes = [
        sum(len(data) for name, data in SOUND.items() if name.startswith(split))
        for split in ("train", "val")
    ]
    assert [split.total_bytes for split in report.splits] == sizes


@pytest.mark.parametrize("format", FORMATS)
def test_nothing_is_found_in_one_sound_folder(format: str, tmp_path: Path) -> None:
    data = write(
        format,
        tmp_path,
        {name.replace("train", "part"): data for name, data in SOUND.items() if "train" in name},
    )
    report = examine(data / "part" if format == "folder" else data)
    assert report.findings == ()
    assert [(split.name, split.images) for split in report.splits] == [("", 9)]


def test_files_in_the_folders_of_the_splits_are_found_too(tmp_path: Path) -> None:
    for split in ("train", "validation"):
        write_file(
            "tfrecord",
            tmp_path / split / "a.tfrecord",
            samples_of(SOUND, split[: 5 if split == "train" else 3]),
        )
    report = examine(tmp_path)
    assert report.findings == ()
    result = [(split.name, split.root) for split in report.splits]
    assert result == [("train", tmp_path / "train"), ("val", tmp_path / "validation")]


def test_a_name_may_have_its_ending_in_capitals_or_none(tmp_path: Path) -> None:
    odd = {
        "a.JPEG": picture(1),
        "b": picture(2),
        "c.PNG": picture(3, "PNG", "L"),
        "d.jpg": write_rotated(1),
        "e.tif": write_rotated(6, "TIFF"),
    }
    assert (
        examine(
            image_folder(tmp_path, {f"cat/{name}": data for name, data in odd.items()})
        ).findings
        == ()
    )


ERRORS = {
    "train/ant/empty.jpg": b"",
    "train/bee/half.jpg": picture(60)[:-40],
    "train/ant/val copy.jpg": SOUND["val/ant/val1.jpg"],
    "val/cat/text.jpg": b"text",
}
WARNINGS = {
    "train/ant/same.jpg": SOUND["train/ant/train1.jpg"],
    "val/bee/tiny.jpg": picture(61, size=(20, 20)),
}


@pytest.mark.parametrize("format", FORMATS)
def test_loaders_leave_out_exactly_what_the_quarantine_lists(format: str, tmp_path: Path) -> None:
    write(format, tmp_path, SOUND | ERRORS | WARNINGS)
    report = examine(tmp_path)
    errors = {
        (finding.split, finding.place) for finding in report.findings if finding.severity == ERROR
    }
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
    indexes = count_openings(tmp_path)
    left = {
        f"{split}/{index.name(i)}": index.read(i)
        for split, index in indexes.items()
        for i in range(len(index))
    }
    assert left == SOUND | WARNINGS
    result = {(split, bad.file) for split, index in indexes.items() for bad in index.quarantined}
    assert result == expected


@pytest.mark.parametrize("format", FORMATS)
def test_what_the_quarantine_leaves_out_is_not_examined_again(format: str, tmp_path: Path) -> None:
    write(format, tmp_path, SOUND | ERRORS | WARNINGS)
    before = examine(tmp_path)
    before.write_quarantine()
    after = examine(tmp_path)
    assert after.count_kinds() == {"duplicate": 1, "tiny": 1}
    assert after.write_quarantine() == []
    assert [(split.images, split.left_out) for split in after.splits] == [(10, 3), (7, 1)]
    assert [split.images for split in before.splits] == [13, 8]


@pytest.mark.parametrize("format", FORMATS)
def test_an_entry_that_matches_no_image_is_shown(format: str, tmp_path: Path) -> None:
    write(format, tmp_path, SOUND)
    place = place_of(tmp_path, "train/ant/train0.jpg")
    root = next(split.root for split in examine(tmp_path).splits if split.name == "train")
    (root / "quarantine.json").write_text(
        json.dumps({"images": {place: "blurred", "ant/O.jpg": ""}})
    )
    report = examine(tmp_path)
    assert [split.left_out for split in report.splits] == [1, 0]
    [finding] = [f for f in report.findings if f.kind == "not-left-out"]
    assert (finding.split, finding.place) == ("train", "ant/O.jpg")


def test_a_quarantine_keeps_what_it_listed_before(tmp_path: Path) -> None:
    image_folder(tmp_path, SOUND | {"train/ant/x.jpg": b"", "train/bee/x.jpg": b"text"})
    path = tmp_path / "train/quarantine.json"
    path.write_text('{"images": {"ant/x.jpg": "I do not like it"}}')
    assert examine(tmp_path).write_quarantine() == [path]
    assert json.loads(path.read_text()) == {
        "images": {
            "ant/x.jpg": "I do not like it",
            "bee/x.jpg": "not-an-image: not an image in a known format",
        }
    }
    result = sorted(entry.name for entry in path.parent.iterdir())
    assert result == ["ant", "bee", "cat", "quarantine.json"]


def test_a_quarantine_that_is_none_is_found_and_left_as_it_is(tmp_path: Path) -> None:
    image_folder(tmp_path, SOUND | {"val/ant/x.jpg": b"", "val/quarantine.json": b"[1]"})
    report = examine(tmp_path)
    result = {(finding.kind, finding.place) for finding in report.findings}
    assert result == {("bad-quarantine", "quarantine.json"), ("empty", "ant/x.jpg")}
    with pytest.raises(DataError, match="is not a quarantine"):
        report.write_quarantine()
    assert (tmp_path / "val/quarantine.json").read_bytes() == b"[1]"


def test_every_error_of_an_image_is_among_the_reasons(tmp_path: Path) -> None:
    write_labelled("recordio", tmp_path, {"train": [0, 1, 9, 2]})
    place = place_of(tmp_path, "train/2.jpg")
    offset = int(place.partition("@")[2])
    with (tmp_path / "train.rec").open("r+b") as file:
        file.seek(offset)
        file.write(b"????")
    [path] = examine(tmp_path, logits=3).write_quarantine()
    assert json.loads(path.read_text())["images"] == {
        place: (
            "label-out-of-range: its label is 9; the model has 3 outputs; not-an-image: not an"
            " image in a known format"
        )
    }


def test_names_that_are_not_utf_8_are_quarantined_and_reported(tmp_path: Path) -> None:
    name = os.fsdecode(b"\xe9.jpg")
    image_folder(tmp_path, {"train/cat/a.jpg": picture(1), f"train/cat/{name}": b""})
    report = examine(tmp_path)
    assert only(report, "empty").place == f"cat/{name}"
    [finding] = json.loads(json.dumps(report.describe(), ensure_ascii=False).encode())["findings"]
    assert finding["place"] == "cat/\N{REPLACEMENT CHARACTER}.jpg"
    report.write_quarantine()
    assert [bad.file for bad in open_index(tmp_path / "train").quarantined] == [f"cat/{name}"]
    assert examine(tmp_path).findings == ()


def test_json_has_all_of_the_report(tmp_path: Path) -> None:
    image_folder(
        tmp_path,
        {
            "train/ant/a.jpg": picture(1),
            "train/ant/b.jpg": picture(1),
            "val/ant/c.jpg": b"text",
            "val/ant/d.jpg": picture(2),
        },
    )
    report = examine(tmp_path)
    about = json.loads(json.dumps(report.describe()))
    kinds = {}
    for kind in ("not-an-image", "duplicate"):
        kinds[kind] = {
            "count": 1,
            "severity": KINDS[kind].severity,
            "meaning": KINDS[kind].meaning,
            "remedy": KINDS[kind].remedy,
        }
    both = {"format": "folder", "images": 2, "classes": 1, "left_out": 0}
    train_bytes = 2 * len(picture(1))
    val_bytes = 4 + len(picture(2))
    assert about == {
        "data": str(tmp_path),
        "splits": [
            both | {"name": "train", "root": f"{tmp_path}/train", "bytes": train_bytes},
            both | {"name": "val", "root": f"{tmp_path}/val", "bytes": val_bytes},
        ],
        "kinds": kinds,
        "findings": [
            {
                "kind": "duplicate",
                "severity": "warning",
                "split": "train",
                "place": "ant/b.jpg",
                "name": "ant/b.jpg",
                "detail": "train/ant/a.jpg",
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
    """Write a data set of several tasks for the threads, with findings in each task."""
    images = {
        f"train/{i % 3}/{i:03d}.jpg": picture(i % 120, size=(32, 32 - i % 2)) for i in range(150)
    }
    return image_folder(
        tmp_path,
        images | {f"val/{i}/x.jpg": picture(200 + i) for i in range(3)} | {"val/0/y.jpg": b""},
    )


def test_threads_change_no_findings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = many(tmp_path)
    monkeypatch.setattr("lockstep.data.inspection.cores", lambda: 1)
    alone = examine(data)
    assert alone.count_kinds() == {"empty": 1, "duplicate": 30, "tiny": 75}
    monkeypatch.setattr("lockstep.data.inspection.cores", lambda: 3)
    seen = threading.Event()

    def late(data: bytes) -> tuple[int, int]:
        """Decode the first image only after another thread reached the last image of the split."""
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
    image_folder(path, {"README.md": b"about", ".hidden/x.jpg": picture(1)})


@pytest.mark.parametrize("arrange", [lambda path: None, a_file, Path.mkdir, a_folder_of_texts])
def test_what_is_no_data_set_is_refused(arrange: Callable[[Path], None], tmp_path: Path) -> None:
    arrange(tmp_path / "data")
    message = r"there is no folder .*data|is a file; expected a folder|data holds no images"
    with pytest.raises(DataError, match=message):
        examine(tmp_path / "data")
