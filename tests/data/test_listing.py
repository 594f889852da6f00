"""The listing and index of files with many images: labels, order, classes, and when an index is
built again."""

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from lockstep.data import stored_files
from lockstep.data.class_folders import Skipped
from lockstep.data.containers import Sample, tfrecord
from lockstep.data.index import Index, list_skipped, open_index
from lockstep.data.packing.splits import shard_name
from lockstep.data.sources import find_split
from lockstep.system.errors import DataError
from tests.data.cases import image_folder, jpeg, sample, write, write_tar
from tests.data.indexes import both, labels
from tests.data.sets import CONTAINERS, MAGIC


def heights(index: Index) -> list[int]:
    """Return the heights minus 8; for images drawn by `sample`, these are their numbers."""
    return (index.sizes[:, 0] - 8).tolist()


SYNSETS = ("n01440764", "n01443537", "n01484850")


@pytest.mark.parametrize("format", ["tfrecord", "webdataset"])
def test_classes_are_named_by_the_synsets_in_the_files(format: str, tmp_path: Path) -> None:
    train = [sample(i, i % 3, name=f"{i}.jpg", class_name=SYNSETS[i % 3]) for i in range(6)]
    training, validation = both(format, tmp_path, train, train[1:3])
    assert training.classes == validation.classes == SYNSETS
    assert (labels(training), labels(validation)) == ([0, 1, 2, 0, 1, 2], [1, 2])


@pytest.mark.parametrize("format", CONTAINERS)
def test_classes_are_named_by_a_list_beside_or_above(format: str, tmp_path: Path) -> None:
    for place in ("train/classes.txt", "classes.txt"):
        write(
            format,
            tmp_path / "train" / shard_name(format, "", 0, 1),
            [sample(i, i % 3) for i in range(5)],
        )
        path = tmp_path / place
        path.write_text("zebra\n\n  ape  \r\nnew line\u2028sign\nunused\n", encoding="utf-8")
        index = open_index(find_split(tmp_path, "train"))
        assert index.classes == ("zebra", "ape", "new line\u2028sign", "unused")
        assert labels(index) == [0, 1, 2, 0, 1]
        path.unlink()


@pytest.mark.parametrize("format", CONTAINERS)
def test_classes_without_names_are_numbers(format: str, tmp_path: Path) -> None:
    training, validation = both(
        format, tmp_path, [sample(i, 2 * i) for i in range(3)], [sample(0, 1)]
    )
    assert training.classes == validation.classes == ("0", "1", "2", "3", "4")
    assert (labels(training), labels(validation)) == ([0, 2, 4], [1])


def test_classes_of_tensorflow_datasets_have_the_names_in_its_list(tmp_path: Path) -> None:
    path = tmp_path / "beans-train.tfrecord-00000-of-00001"
    write("tfrecord", path, [sample(i, i % 3) for i in range(4)])
    (tmp_path / "label.labels.txt").write_text("rust\nleaf spot\nhealthy\n")
    index = open_index(find_split(tmp_path, "train"))
    assert (index.classes, labels(index)) == (("rust", "leaf spot", "healthy"), [0, 1, 2, 0])


def test_a_list_that_names_a_class_twice_is_refused(tmp_path: Path) -> None:
    write("recordio", tmp_path / "train.rec", [sample(0, 0)])
    (tmp_path / "classes.txt").write_text("crane\nowl\ncrane\n")
    with pytest.raises(DataError, match=r"classes.txt lists crane twice"):
        open_index(tmp_path)


def test_a_list_one_folder_above_is_that_of_train_and_val_alone(tmp_path: Path) -> None:
    names = ("ape", "cat", "dog")
    image_folder(tmp_path, {f"{place}/cat/0.jpg": jpeg() for place in ("train", "photos")})
    (tmp_path / "classes.txt").write_bytes(b"\xef\xbb\xbfape\r\n\r\ncat\r\ndog")
    assert open_index(tmp_path / "train").classes == names
    assert open_index(tmp_path / "photos").classes == ("cat",)
    (tmp_path / "photos/classes.txt").write_text("ape\ncat\ndog\n")
    assert open_index(tmp_path / "photos").classes == names


def test_a_list_that_lacks_a_folder_is_left_out_by_name(tmp_path: Path) -> None:
    image_folder(tmp_path, {f"{name}/0.jpg": jpeg() for name in ("cat", "dog")})
    (tmp_path / "classes.txt").write_text("dgo\ncat\n")
    index = open_index(tmp_path)
    assert index.classes == ("cat", "dog")
    assert list_skipped(index) == (Skipped("class-list", "classes.txt without dog"),)


def test_folders_in_tars_are_classes_over_all_files(tmp_path: Path) -> None:
    write_tar(tmp_path / "train-000000.tar", {"./owl/b.jpg": jpeg(8, 8), "./cat/z.jpg": jpeg(9, 8)})
    write_tar(
        tmp_path / "train-000001.tar",
        {"train/ant/q.jpg": jpeg(10, 8), "train/owl/a.jpg": jpeg(11, 8)},
    )
    index = open_index(tmp_path)
    assert index.classes == ("ant", "cat", "owl")
    result = sorted(zip(heights(index), labels(index), strict=True))
    assert result == [(0, 2), (1, 1), (2, 0), (3, 2)]


def test_a_tar_of_an_image_folder_has_the_digest_of_the_folder(tmp_path: Path) -> None:
    files = {
        f"{folder}/{i}.jpg": jpeg(8 + i, 9) for folder in ("a", "a b", "a-b", "Ä") for i in range(3)
    }
    folder = image_folder(tmp_path / "folder", files)
    write_tar(tmp_path / "tar/x.tar", dict(reversed(files.items())))
    assert open_index(tmp_path / "tar").digest == open_index(folder).digest


def test_folders_called_by_numbers_are_names_in_a_tar_and_in_a_folder(tmp_path: Path) -> None:
    """They sort as numbers. A split without some of them shows that they are names."""
    train = [f"{name}/x.jpg" for name in ("0", "1", "10", "2")]
    val = [f"{name}/x.jpg" for name in ("0", "2", "10")]
    image_folder(
        tmp_path / "folder",
        {f"train/{name}": jpeg() for name in train} | {f"val/{name}": jpeg() for name in val},
    )
    write_tar(tmp_path / "tar/train-0.tar", {name: jpeg() for name in train})
    write_tar(tmp_path / "tar/val-0.tar", {name: jpeg() for name in val})
    for root in (tmp_path / "folder", tmp_path / "tar"):
        training = open_index(find_split(root, "train"))
        assert training.classes == ("0", "1", "2", "10")
        assert labels(open_index(find_split(root, "val"), classes=training.classes)) == [0, 2, 3]


def test_a_tar_with_numbers_and_folders_as_classes_is_refused(tmp_path: Path) -> None:
    write_tar(tmp_path / "x.tar", {"0.jpg": jpeg(), "0.cls": b"3", "cat/1.jpg": jpeg()})
    with pytest.raises(DataError, match=r"a number as their class, others a folder"):
        open_index(tmp_path)


@pytest.mark.parametrize("format", ["tfrecord", "webdataset"])
def test_validation_labels_follow_trainings_names(format: str, tmp_path: Path) -> None:
    """Validation has one class less, so its numbers stand for other names."""
    train = [sample(i, i, name=f"{i}.jpg", class_name=SYNSETS[i]) for i in range(3)]
    val = [
        sample(0, 1, name="0.jpg", class_name=SYNSETS[2]),
        sample(1, 0, name="1.jpg", class_name=SYNSETS[1]),
    ]
    assert labels(both(format, tmp_path, train, val)[1]) == [2, 1]


@pytest.mark.parametrize("format", ["tfrecord", "webdataset"])
def test_a_class_that_training_has_not_is_named(format: str, tmp_path: Path) -> None:
    train = [sample(0, 0, name="0.jpg", class_name="cat")]
    with pytest.raises(DataError, match=r"val.* do not have: dog"):
        both(format, tmp_path, train, [sample(0, 0, name="0.jpg", class_name="dog")])


@pytest.mark.parametrize("format", CONTAINERS)
def test_a_number_beyond_trainings_classes_is_refused(format: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="class 3; training has 3 classes"):
        both(format, tmp_path, [sample(i, i) for i in range(3)], [sample(0, 3)])


def test_a_shuffled_recordio_file_comes_in_the_order_of_its_numbers(tmp_path: Path) -> None:
    order = np.random.default_rng(0).permutation(50).tolist()
    write("recordio", tmp_path / "train.rec", [sample(i, i // 10) for i in order])
    index = open_index(tmp_path)
    assert heights(index) == list(range(50))
    assert labels(index) == [i // 10 for i in range(50)]


def test_numbers_count_over_all_files(tmp_path: Path) -> None:
    write("recordio", tmp_path / "a.rec", [sample(i, 0) for i in (5, 0, 3)])
    write("recordio", tmp_path / "b.rec", [sample(i, 0) for i in (2, 4, 1)])
    index = open_index(tmp_path)
    assert heights(index) == list(range(6))
    result = [Path(index.path(i)).name for i in range(6)]
    assert result == ["a.rec", "b.rec", "b.rec", "a.rec", "b.rec", "a.rec"]


def test_numbers_that_come_twice_leave_the_order_of_the_files(tmp_path: Path) -> None:
    write(
        "recordio",
        tmp_path / "train.rec",
        [Sample(number, "", 0, "", jpeg(8 + i, 8), 0, 0) for i, number in enumerate([2, 0, 2, 1])],
    )
    assert heights(open_index(tmp_path)) == [0, 1, 2, 3]


@pytest.mark.parametrize("format", ["tfrecord", "webdataset"])
def test_shuffled_files_come_in_the_order_of_their_names(format: str, tmp_path: Path) -> None:
    order = np.random.default_rng(0).permutation(50).tolist()
    write(
        format,
        tmp_path / shard_name(format, "", 0, 1),
        [sample(i, 0, name=f"{i:03d}.jpg") for i in order],
    )
    assert heights(open_index(tmp_path)) == list(range(50))


@pytest.mark.parametrize("names", [["c", "a", "c"], ["c", "", "a"]], ids=["twice", "missing"])
def test_incomplete_names_leave_the_order(names: list[str], tmp_path: Path) -> None:
    write(
        "tfrecord",
        tmp_path / "x.tfrecord",
        [sample(i, 0, name=name) for i, name in enumerate(names)],
    )
    assert heights(open_index(tmp_path)) == [0, 1, 2]


def test_an_image_in_several_parts_of_a_record_is_read_as_one(tmp_path: Path) -> None:
    data = jpeg() + bytes(-len(jpeg()) % 4) + MAGIC * 3 + b"tail"
    write("recordio", tmp_path / "train.rec", [sample(0, 0), sample(1, 0, data), sample(2, 0)])
    for _ in ("built", "cached"):
        index = open_index(tmp_path)
        assert index.rows["offset"][1] < 0
        assert index.read(1) == data


def test_damaged_images_and_damaged_records_are_listed_and_the_rest_is_kept(tmp_path: Path) -> None:
    images = [jpeg(8 + i, 8) for i in range(6)]
    images[1] = b"<html>"
    path = write(
        "recordio", tmp_path / "train.rec", [sample(i, 0, data) for i, data in enumerate(images)]
    )
    data = bytearray(path.read_bytes())
    frame = 32  # bytes before every image
    data[data.find(images[3]) - frame] ^= 1
    path.write_bytes(data)
    index = open_index(tmp_path)
    # The record before the damage is not trusted either: its length may be wrong.
    assert heights(index) == [0, 4, 5]
    write_list = {bad.file: bad.reason for bad in index.quarantined}
    expected = {f"train.rec@{data.find(images[1])}", f"train.rec@{data.find(images[2]) - frame}"}
    assert write_list.keys() == expected
    assert [index.read(i) for i in range(3)] == [images[i] for i in heights(index)]


def tfrecord_of(names: dict[str, int], path: Path) -> Path:
    """Write images with these names and labels in this order, shuffled as by NVIDIA's scripts."""
    return write(
        "tfrecord",
        path,
        [sample(i, label, name=name) for i, (name, label) in enumerate(names.items())],
    )


def test_tfrecords_named_by_files_alone_come_in_the_order_of_a_folder(tmp_path: Path) -> None:
    """The names do not have the classes, as for ImageNet's validation images."""
    names = {"val_3.JPEG": 0, "val_1.JPEG": 2, "val_2.JPEG": 0, "val_4.JPEG": 1}
    tfrecord_of(names, tmp_path / "validation-00000-of-00001")
    index = open_index(tmp_path)
    result = [index.name(i) for i in range(4)]
    assert result == ["val_2.JPEG", "val_3.JPEG", "val_4.JPEG", "val_1.JPEG"]
    assert labels(index) == [0, 0, 1, 2]


def test_names_that_are_numbers_decide_alone(tmp_path: Path) -> None:
    tfrecord_of({"0003.jpg": 0, "0001.jpg": 2, "0002.jpg": 0}, tmp_path / "train-00000-of-00001")
    assert labels(open_index(tmp_path)) == [2, 0, 0]


def test_listing_tells_progress_and_stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write("tfrecord", tmp_path / "train-00000-of-00001", [sample(i, 0) for i in range(20)])
    slow = tfrecord.scan_images
    waiting = threading.Event()
    write_list = []

    def slowly(path: Path, stopped: threading.Event) -> Iterator[object]:
        for number in slow(path, stopped):
            waiting.wait(0.1)
            write_list.append(number)
            yield number

    monkeypatch.setattr(tfrecord, "scan_images", slowly)
    monkeypatch.setattr(stored_files, "_AT_ONCE", 1)

    def stop(done: int, total: int) -> None:
        assert 0 <= done <= total
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        open_index(tmp_path, progress=stop)
    assert len(write_list) < 20
