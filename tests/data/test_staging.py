"""Copies of data sets on local disks: the same files, times and index, whatever the format is."""

import filecmp
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import BinaryIO

import pytest

from lockstep.data import staged_copy
from lockstep.data.index import open_index
from lockstep.data.packing import Packing, pack
from lockstep.data.sources import find_sources, find_split
from lockstep.data.staged_copy import Staged, stage
from lockstep.system.errors import DataError
from tests.data.cases import image_folder, jpeg
from tests.data.sets import CONTAINERS, NOT_UTF8


@pytest.fixture
def data(tmp_path: Path) -> Path:
    for split in ("train", "val"):
        files = {
            f"{label}/{i}.jpg": jpeg(20, 30, i) for label in ("a b", NOT_UTF8[1]) for i in range(4)
        }
        image_folder(tmp_path / "data" / split, files)
    return tmp_path / "data"


def index_splits(data: Path) -> dict[str, tuple[str, list[str]]]:
    staged = {split: open_index(source) for split, source in find_sources(data).items()}
    return {
        split: (index.digest, [index.name(i) for i in range(len(index))])
        for split, index in staged.items()
    }


def files(folder: Path) -> list[str]:
    return sorted(
        str(file.relative_to(folder))
        for file in folder.rglob("*")
        if file.is_file() and file.suffix != ".lock"
    )


@pytest.mark.parametrize("format", ["folder", *CONTAINERS])
def test_a_copy_has_the_files_and_the_index_of_the_data_set(
    format: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "source"
    target = tmp_path / "local disk" / "copy"
    pack(data, source, Packing(format), None, None)
    staged = stage(source, target)
    assert (staged.files, staged.copied) == (len(files(source)),) * 2
    assert staged.copied_bytes == sum((source / name).stat().st_size for name in files(source))
    assert files(target) == files(source)
    assert filecmp.cmpfiles(source, target, files(source), shallow=False)[0] == files(source)
    monkeypatch.setattr(
        "lockstep.data.inspection.check", lambda data: pytest.fail("an image is decoded again")
    )
    assert index_splits(target) == index_splits(source)


def test_only_what_differs_is_copied_again(data: Path, tmp_path: Path) -> None:
    target = tmp_path / "copy"
    count = stage(data, target).files
    assert stage(data, target) == Staged(count, 0, 0)
    (target / "train/a b/1.jpg").unlink()
    (target / "train/a b/2.jpg").write_bytes(b"cut off")
    again = stage(data, target)
    assert (again.files, again.copied) == (count, 2)
    assert filecmp.cmpfiles(data, target, files(data), shallow=False)[0] == files(data)


def test_only_an_empty_file_is_missing(data: Path, tmp_path: Path) -> None:
    stage(data, tmp_path / "copy")
    (data / "train" / "a b" / "empty.txt").touch()
    seen: list[tuple[int, int]] = []
    stage(data, tmp_path / "copy", lambda done, total: seen.append((done, total)))
    assert all(total > 0 for _, total in seen)


def test_a_link_that_leads_nowhere_is_an_error(data: Path, tmp_path: Path) -> None:
    (data / "notes").symlink_to(data / "nothing")
    with pytest.raises(DataError, match=r"cannot be copied .*No such file.*notes"):
        stage(data, tmp_path / "copy")


def test_a_killed_copy_is_completed(data: Path, tmp_path: Path) -> None:
    # Killed before the tenth file: the caller's progress says nothing of what the thread that
    # copies has done since.
    code = """
import itertools, os, sys
from pathlib import Path
from typing import BinaryIO
from lockstep.data import staged_copy
staged_copy._THREADS = 1
copy, count = staged_copy._copy, itertools.count(1)
staged_copy._copy = lambda *file: os.kill(os.getpid(), 9) if next(count) == 10 else copy(*file)
staged_copy.stage(Path(sys.argv[1]), Path(sys.argv[2]))
"""
    done = subprocess.run([sys.executable, "-c", code, str(data), str(tmp_path / "copy")])
    assert done.returncode == -signal.SIGKILL
    assert stage(data, tmp_path / "copy").copied == len(files(data)) - 9
    assert index_splits(tmp_path / "copy") == index_splits(data)


def test_of_two_processes_one_copies_and_the_other_waits(data: Path, tmp_path: Path) -> None:
    code = """
import sys
from pathlib import Path
from typing import BinaryIO
from lockstep.data.staged_copy import stage
print(stage(*map(Path, sys.argv[1:])).copied)
"""
    command = [sys.executable, "-c", code, str(data), str(tmp_path / "copy")]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    result = sorted(int(process.communicate(timeout=300)[0]) for process in both)
    assert result == [0, len(files(data))]


def test_links_are_copied_as_what_they_lead_to(data: Path, tmp_path: Path) -> None:
    linked = tmp_path / "linked"
    linked.mkdir()
    for split in ("train", "val"):
        (linked / split).symlink_to(data / split)
    stage(linked, tmp_path / "copy")
    assert not (tmp_path / "copy/train").is_symlink()
    assert index_splits(tmp_path / "copy") == index_splits(data)


def test_the_copy_is_of_the_moment_when_it_began(data: Path, tmp_path: Path) -> None:
    before = index_splits(data)

    def add_file(done: int, total: int) -> None:
        path = data / "train/a b/new.jpg"
        if done == total and not path.exists():
            path.write_bytes(jpeg(8, 8))
            os.utime(path.parent, ns=(time.time_ns() + 10**9,) * 2)

    stage(data, tmp_path / "copy", add_file)
    assert index_splits(tmp_path / "copy") == before != index_splits(data)
    assert stage(data, tmp_path / "copy").copied == 8  # the image, and the seven files of the index


def test_a_file_that_changes_while_it_is_copied_is_an_error(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = staged_copy.shutil.copyfileobj

    def copy_file(source: BinaryIO, target: BinaryIO, part: int) -> None:
        real(source, target, part)
        target.write(b"more")  # as if the source had grown

    monkeypatch.setattr(staged_copy.shutil, "copyfileobj", copy_file)
    with pytest.raises(DataError, match=r"has changed while it was copied"):
        stage(data, tmp_path / "copy")


def test_what_cannot_be_copied_is_an_error(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for target in (data, data / "train" / "copy", data.parent):
        with pytest.raises(DataError, match="choose another --to"):
            stage(data, target)
    other = tmp_path / "other"
    image_folder(other / "train", {"c/1.jpg": jpeg(8, 8)})
    with pytest.raises(DataError, match=r"holds train/c/1.jpg"):
        stage(data, other)
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="Not a directory"):
        stage(data, tmp_path / "file" / "copy")
    monkeypatch.setattr(
        staged_copy.shutil, "disk_usage", lambda path: staged_copy.shutil._ntuple_diskusage(9, 8, 1)
    )
    with pytest.raises(DataError, match=r"0.0 GB free, but the copy needs 0.0 GB"):
        stage(data, tmp_path / "copy")
    with pytest.raises(DataError, match="no folder"):
        find_split(tmp_path / "nothing", "train")
