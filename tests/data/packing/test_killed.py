"""A pack that is killed resumes with the same result."""

import re
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import pytest

from lockstep.data.containers import recordio
from lockstep.data.sources import find_split
from lockstep.system.errors import DataError
from tests.data.cases import image_folder, jpeg
from tests.data.sets import FORMATS, files_of, pack_as
from tests.soak import SOAK

PackWhole = Callable[[str], dict[str, bytes]]

# Killed processes

KILLED = """
import os, resource, signal, sys
from pathlib import Path
from lockstep.data.packing import Packing, pack

source, target, format, how, when = sys.argv[1:]

def die():
    os.kill(os.getpid(), signal.SIGKILL)

if how == "bytes":  # in the middle of a write, by the kernel, as soon as a file has so many
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(when), int(when)))
if how == "names":  # instead of giving the so-manieth file its name
    left, replace = int(when), os.replace

    def counted(path, target):
        global left
        left -= 1
        if left <= 0:  # several threads may count
            die()
        return replace(path, target)

    os.replace = counted  # Path.replace too calls it by this name

def advance(done, total):
    if how == "images" and done >= int(when):
        die()

pack(Path(source), Path(target), Packing(format, 2), advance)
"""
MANY = {f"{i % 3}/{i:03d}.jpg": jpeg(8 + i, 30, i) for i in range(90)} | {
    "1/large.jpg": jpeg() + bytes(5000)
}
_OFTEN = [("images", 1), ("images", 40), ("images", 91), ("bytes", 9_000), ("bytes", 9_001)]
MOMENTS = {
    "folder": [
        ("images", 1),
        ("images", 40),
        ("names", 1),
        ("names", 2),
        ("names", 30),
        ("bytes", 3000),
    ],
    "recordio": [*_OFTEN, ("names", 3), ("names", 4), ("names", 5)],
    "tfrecord": [*_OFTEN, ("names", 3), ("names", 4)],
    "webdataset": [*_OFTEN, ("names", 3), ("bytes", 20_700)],
}


"""How and when a pack is killed. `make soak` tries all of them, `make test` every third one."""


def is_complete(source: Path, target: Path, format: str, how: str, when: int) -> bool:
    """Pack in a process that is killed at a given moment; return whether it was not killed before
    its end."""
    command = [sys.executable, "-B", "-c", KILLED, *map(str, (source, target, format, how, when))]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode in (0, -(signal.SIGXFSZ if how == "bytes" else signal.SIGKILL)), (
        result.stderr
    )
    return result.returncode == 0


@pytest.fixture(scope="module")
def two_splits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    files = {f"{split}/{name}": data for split in ("train", "val") for name, data in MANY.items()}
    return image_folder(tmp_path_factory.mktemp("images") / "source", files)


@pytest.fixture(scope="module")
def pack_whole(two_splits: Path, tmp_path_factory: pytest.TempPathFactory) -> PackWhole:
    """A function that returns the files of a pack that was not killed."""

    @cache
    def read(format: str) -> dict[str, bytes]:
        return files_of(pack_as(two_splits, tmp_path_factory.mktemp(format), format, shards=2))

    return read


@pytest.mark.slow
@pytest.mark.parametrize(
    ("format", "how", "when"),
    [(format, *moment) for format in FORMATS for moment in MOMENTS[format][:: 1 if SOAK else 3]],
)
def test_a_killed_pack_started_again_ends_with_the_files_of_one_that_was_not(
    format: str, how: str, when: int, two_splits: Path, pack_whole: PackWhole, tmp_path: Path
) -> None:
    whole = pack_whole(format)
    target = tmp_path / "target"
    assert not is_complete(two_splits, target, format, how, when)
    check_unfinished(target, whole)
    pack_as(two_splits, target, format, shards=2)
    assert files_of(target) == whole


@pytest.mark.slow
@pytest.mark.parametrize("format", FORMATS if SOAK else ["folder"])
def test_a_pack_killed_again_and_again_comes_to_an_end(
    format: str, two_splits: Path, pack_whole: PackWhole, tmp_path: Path
) -> None:
    whole = pack_whole(format)
    # RecordIO names four other files first: the indexes and lists of two files that are finished at
    # the same time.
    target = tmp_path / "target"
    each_time = {"folder": 60, "recordio": 6, "webdataset": 3}.get(format, 4)
    ended = []
    while not any(ended):
        ended.append(is_complete(two_splits, target, format, "names", each_time))
        if not ended[-1]:
            check_unfinished(target, whole)
        assert len(ended) < 10
    assert len(ended) > 2
    assert files_of(target) == whole


def test_a_too_long_image_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"a/1.jpg": jpeg(), "a/2.jpg": jpeg() + bytes(4000), "a/3.jpg": jpeg()}
    source = image_folder(tmp_path / "source", files)
    monkeypatch.setattr(recordio, "MOST_BYTES", len(jpeg()) + 3000)
    with pytest.raises(DataError, match=rf"{re.escape(str(source))}/a/2\.jpg: .*has \d+ bytes"):
        pack_as(source, tmp_path / "target", "recordio")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("format", "limit"),
    [("folder", 3000), ("webdataset", 20_000)]
    + [("folder", 4000), ("recordio", 20_000), ("tfrecord", 20_000)] * SOAK,
)
def test_a_file_for_which_there_is_no_room_is_named_and_the_pack_goes_on_later(
    format: str, limit: int, two_splits: Path, pack_whole: PackWhole, tmp_path: Path
) -> None:
    # The system writes what fits, and fails at the next write.
    whole = pack_whole(format)
    target = tmp_path / "target"
    arguments = ["data", "pack", str(two_splits), str(target), "--format", format, "--shards", "2"]
    # -B: there is no room for compiled modules either.
    command = [sys.executable, "-B", "-m", "lockstep", *arguments]
    lower = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (limit, limit))
    result = subprocess.run(command, capture_output=True, text=True, check=False, preexec_fn=lower)
    assert result.returncode == 2
    kept = rf"Finished and unfinished files stay in {re.escape(str(target))}"
    to_do = "Free space and run the same command again to resume, or remove the folder"
    expected = rf"lockstep: {re.escape(str(target))}/\S+: File too large\. {kept}\. {to_do}\n"
    assert re.search(expected, result.stderr), result.stderr
    assert "Traceback" not in result.stderr
    check_unfinished(target, whole)
    pack_as(two_splits, target, format, shards=2)
    assert files_of(target) == whole


def check_unfinished(target: Path, whole: dict[str, bytes]) -> None:
    """Check that files with their final names are complete, and that the target is not accepted as
    a data set."""
    files = {name: data for name, data in files_of(target).items() if not name.endswith(".partial")}
    assert files == {name: whole[name] for name in files}
    if (target / ".lockstep" / "pack.json").exists():
        with pytest.raises(DataError, match=r"not complete: .*interrupted|no train images"):
            find_split(target, "train")
    else:
        assert files == {}
