"""The index of files that hold many images: when it is built again, and what is refused."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from lockstep.data.index import Index, open_index
from lockstep.data.packing.splits import shard_name
from lockstep.data.sources import find_split
from lockstep.system.errors import DataError
from tests.data.cases import jpeg, sample, write
from tests.data.indexes import both, labels
from tests.data.sets import CONTAINERS


def longer(path: Path) -> None:
    write("webdataset", path.with_name("more.tar"), [sample(3, 1)])
    path.with_name("more.tar").replace(path)


def later(path: Path) -> None:
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))


def one_more(path: Path) -> None:
    write("webdataset", path.with_name("train-000002.tar"), [sample(9, 0)])


def one_less(path: Path) -> None:
    path.unlink()


def rename(path: Path) -> None:
    path.rename(path.with_name("train-000005.tar"))


def write_list(path: Path) -> None:
    path.with_name("classes.txt").write_text("a\nb\nc\n")


def left_out(path: Path) -> None:
    path.with_name("quarantine.json").write_text('{"images": {}}')


@pytest.mark.parametrize(
    "change",
    [longer, later, one_more, one_less, rename, write_list, left_out],
    ids=lambda change: change.__name__,
)
def test_a_change_of_the_files_is_noticed_and_only_that_split_is_indexed_again(
    change: Callable[[Path], None], tmp_path: Path, decodings: list[bytes]
) -> None:
    for i in range(2):
        write(
            "webdataset", tmp_path / f"train-00000{i}.tar", [sample(2 * i + j, j) for j in range(2)]
        )
    write("webdataset", tmp_path / "val-000000.tar", [sample(0, 1)])

    def open_both() -> list[Index]:
        training = open_index(find_split(tmp_path, "train"))
        return [training, open_index(find_split(tmp_path, "val"), classes=training.classes)]

    open_both()
    assert len(decodings) == 5
    decodings.clear()
    open_both()
    assert decodings == []
    change(tmp_path / "train-000000.tar")
    training, _ = open_both()
    of_val = 1 if change in (write_list, left_out) else 0
    assert len(decodings) == len(training) + of_val
    decodings.clear()
    open_both()
    assert decodings == []


def test_both_splits_keep_an_index_beside_their_files(tmp_path: Path) -> None:
    both("recordio", tmp_path, [sample(i, i) for i in range(3)], [sample(0, 2)])
    for split, images in (("train", 3), ("val", 1)):
        assert (tmp_path / ".lockstep" / split / "rows").stat().st_size == images * 24


def test_more_files_are_read_than_are_kept_open(tmp_path: Path) -> None:
    for i in range(100):
        write("webdataset", tmp_path / f"train-{i:06d}.tar", [sample(i, 0, name=f"{i:03d}.jpg")])
    open_before = len(list(Path("/proc/self/fd").iterdir()))
    index = open_index(tmp_path)
    for i in [*range(100), *reversed(range(100))]:
        assert index.read(i) == jpeg(8 + i, 8)
    assert len(list(Path("/proc/self/fd").iterdir())) <= open_before + 64


@pytest.mark.parametrize("format", CONTAINERS)
def test_a_file_cut_after_indexing_is_named(format: str, tmp_path: Path) -> None:
    path = write(
        format, tmp_path / shard_name(format, "train", 0, 1), [sample(i, 0) for i in range(3)]
    )
    index = open_index(tmp_path)
    assert index.read(0) == jpeg(8, 8)
    os.truncate(path, int(index.rows["offset"][2]) + 5)
    assert index.read(0) == jpeg(8, 8)  # the bytes are whole
    with pytest.raises(DataError, match=rf"{path.name}@\d+ .*is not the image.*the file ends at"):
        index.read(2)
    old = replace(index, checksums=index.checksums[:0])
    with pytest.raises(DataError, match="it was written after indexing"):
        old.read(0)


@pytest.mark.parametrize("format", CONTAINERS)
def test_a_file_of_the_same_layout_is_noticed(format: str, tmp_path: Path) -> None:
    name = shard_name(format, "train", 0, 1)
    for folder, colour in (("a", 10), ("b", 200)):
        images = [sample(i, 0, jpeg(8, 8, colour).ljust(900, b"\0")) for i in range(3)]
        write(format, tmp_path / folder / name, images)
    index = open_index(tmp_path / "a")
    assert index.read(1).startswith(jpeg(8, 8, 10))
    (tmp_path / "a" / name).write_bytes((tmp_path / "b" / name).read_bytes())
    with pytest.raises(DataError, match="its bytes were changed after indexing"):
        index.read(1)


@pytest.mark.parametrize("format", CONTAINERS)
def test_an_index_takes_less_than_64_bytes_an_image(format: str, tmp_path: Path) -> None:
    name = "n01440764/n01440764_{:05d}.JPEG"
    samples = [sample(i, 0, jpeg(8, 8), name.format(i), "n01440764") for i in range(100)]
    write(format, tmp_path / shard_name(format, "train", 0, 1), samples)
    for _ in ("built", "cached"):
        index = open_index(tmp_path)
        assert index.name(99) == name.format(99)
        assert (
            sum(
                array.nbytes
                for array in (index.rows, index.names.text, index.names.ends, index.times)
            )
            <= 6400
        )


def test_another_list_of_classes_decodes_nothing(tmp_path: Path, decodings: list[bytes]) -> None:
    write(
        "webdataset",
        tmp_path / "val-000000.tar",
        [sample(i, 0, class_name="", name=f"{'ab'[i]}/x.jpg") for i in range(2)],
    )
    (tmp_path / "classes.txt").write_text("b\n")
    own = open_index(tmp_path)
    count = len(decodings)
    among = open_index(tmp_path, classes=("a", "b"))
    assert (labels(own), labels(among), among.classes) == ([0, 0], [1, 1], ("a", "b"))
    assert among.digest != own.digest
    assert open_index(tmp_path).digest == own.digest
    assert len(decodings) == count == 2


def test_an_index_beside_images_that_are_read_only_now_is_used(
    tmp_path: Path, decodings: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    write("recordio", tmp_path / "x.rec", [sample(i, 0) for i in range(3)])
    open_index(tmp_path)
    decodings.clear()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another user's"))
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert len(open_index(tmp_path)) == 3
    assert decodings == []
    assert not (tmp_path / "another user's").exists()
