"""Images that a quarantine leaves out, and files that are not images."""

import json
import os
import warnings
from pathlib import Path

import pytest
from PIL import Image

from lockstep.data.index import open_index
from lockstep.data.listing import list_images
from lockstep.data.sources import find_source
from lockstep.system.errors import DataError
from tests.data.cases import image_folder, jpeg, sample, write


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return image_folder(
        tmp_path, {name: jpeg() for name in ("cat/a.jpg", "cat/b.jpg", "dog/c.jpg")}
    )


def records(folder: Path, labels: list[int]) -> Path:
    samples = [
        sample(i, label, name=f"{label}/{i}.jpg", class_name=str(label))
        for i, label in enumerate(labels)
    ]
    return write("recordio", folder / "train.rec", samples)


def leave_out(folder: Path, *places: str) -> None:
    (folder / "quarantine.json").write_text(
        json.dumps({"images": dict.fromkeys(places, "blurred")})
    )


def test_an_image_in_quarantine_is_left_out_and_named_with_the_reason(folder: Path) -> None:
    assert len(open_index(folder)) == 3
    leave_out(folder, "cat/b.jpg", "cat/not there.jpg")
    index = open_index(folder)
    assert [index.name(i) for i in range(len(index))] == ["cat/a.jpg", "dog/c.jpg"]
    result = [(bad.file, bad.reason) for bad in index.quarantined]
    assert result == [("cat/b.jpg", "left out by quarantine.json: blurred")]


def test_an_image_comes_back_when_it_is_taken_out_of_quarantine(folder: Path) -> None:
    leave_out(folder, "cat/b.jpg")
    assert len(open_index(folder)) == 2
    (folder / "quarantine.json").unlink()
    assert len(open_index(folder)) == 3


def test_a_label_in_quarantine_makes_no_class(tmp_path: Path) -> None:
    records(tmp_path, [0, 1, 900, 2])
    place = list_images(find_source(tmp_path)).place(2)
    assert len(open_index(tmp_path).classes) == 901
    leave_out(tmp_path, place)
    index = open_index(tmp_path)
    assert index.classes == ("0", "1", "2")
    assert index.rows["label"].tolist() == [0, 1, 2]


def test_a_label_in_quarantine_need_not_be_in_the_list_of_classes(tmp_path: Path) -> None:
    records(tmp_path, [0, 1, 900, 2])
    place = list_images(find_source(tmp_path)).place(2)
    (tmp_path / "classes.txt").write_text("ant\nbee\ncat\n")
    with pytest.raises(DataError, match="900"):
        open_index(tmp_path)
    leave_out(tmp_path, place)
    assert open_index(tmp_path).classes == ("ant", "bee", "cat")


@pytest.mark.parametrize("text", ["", "[]", '{"images": ["cat/b.jpg"]}', '{"files": {}}', "{"])
def test_another_kind_of_file_of_that_name_is_refused(text: str, folder: Path) -> None:
    (folder / "quarantine.json").write_text(text)
    with pytest.raises(DataError, match=r"quarantine.json is not a quarantine"):
        open_index(folder)


def test_a_pipe_among_the_images_is_not_waited_for(folder: Path) -> None:
    os.mkfifo(folder / "cat" / "pipe.jpg")
    index = open_index(folder)
    assert len(index) == 3
    result = [(bad.file, bad.reason) for bad in index.quarantined]
    assert result == [("cat/pipe.jpg", "it is a pipe, not a regular file")]


def test_warnings_do_not_reach_the_user(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Image.new("RGB", (16, 12)).save(folder / "cat" / "large.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 16 * 12 - 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(open_index(folder)) == 4
