"""What a path can lead to besides a file, and files that are too large."""

import os
import socket
from pathlib import Path

import pytest

from lockstep.system.regular_files import (
    ANY_SIZE,
    IMAGE,
    NAMES,
    RECORDS,
    SETTINGS,
    TEXT,
    WEIGHTS,
    Limit,
    open_regular,
    read_regular,
    read_regular_text,
    read_stream,
)

SMALL = Limit(10, "a test")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a pipe, a socket, a link to an endless device, a link that loops and a file of
    10 bytes."""
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
    (tmp_path / "zero").symlink_to("/dev/zero")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "ten").write_bytes(bytes(range(10)))
    (tmp_path / "eleven").write_bytes(bytes(11))
    return tmp_path


def open_files() -> set[str]:
    return {file.name for file in Path("/proc/self/fd").iterdir()}


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("pipe", "it is a pipe, not a regular file"),
        ("socket", "it is a socket or a missing device, not a regular file"),
        ("zero", "it is a device, not a regular file"),
        ("", "Is a directory"),
        ("loop", "Too many levels of symbolic links"),
        ("missing", "No such file or directory"),
        ("a\0b", "no file can have this name"),
        ("\ud800", "no file can have this name"),
        ("x" * 5000, "File name too long"),
        ("eleven", "it has 11 bytes; expected at most 10 for a test"),
    ],
)
def test_what_is_no_bounded_file_is_refused(name: str, reason: str, folder: Path) -> None:
    before = open_files()
    for read in (read_regular, read_regular_text, open_regular):
        with pytest.raises(OSError, match=f"{reason}: '"):
            read(f"{folder}/{name}", SMALL)
    assert open_files() == before


def test_a_file_of_the_largest_size_is_read(folder: Path) -> None:
    assert read_regular(folder / "ten", SMALL) == bytes(range(10))
    with open_regular(folder / "ten", SMALL) as file:
        assert file.read() == bytes(range(10))


def test_files_that_become_pipes_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    system_open = os.open

    def swap(path: str, flags: int) -> int:
        Path(path).unlink()
        os.mkfifo(path)
        return system_open(path, flags)

    monkeypatch.setattr(os, "open", swap)
    with pytest.raises(OSError, match="it is a pipe, not a regular file"):
        read_regular(str(folder / "ten"), SMALL)


def test_files_of_the_system_without_a_size_are_not_read() -> None:
    assert read_regular("/proc/self/pagemap", SMALL) == b""


def test_text_has_one_kind_of_line_ends(folder: Path) -> None:
    (folder / "text").write_bytes(b"\xef\xbb\xbfa\r\nb\nc\r")
    assert read_regular_text(folder / "text", SMALL, encoding="utf-8-sig") == "a\nb\nc\n"


def test_a_stream_is_read_to_its_end_or_to_the_limit(folder: Path) -> None:
    with (folder / "ten").open("rb") as file:
        assert read_stream(file, SMALL) == bytes(range(10))
    with (folder / "ten").open("rb") as file:
        begin = file.read(4)
        assert read_stream(file, SMALL, begin) == bytes(range(10))
    with (
        Path("/dev/zero").open("rb") as endless,
        pytest.raises(OSError, match="it is longer than 10 bytes, the limit for a test"),
    ):
        read_stream(endless, SMALL)


def test_the_limits_are_documented() -> None:
    page = (Path(__file__).parents[2] / "docs/explanation/reliability.md").read_text(
        encoding="utf-8"
    )
    rows = dict(
        line.split(" | ")[:2]
        for line in page.splitlines()
        if line.startswith("| ") and line.count(" | ") >= 2
    )
    units = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
    for limit in (IMAGE, NAMES, RECORDS, WEIGHTS, TEXT, SETTINGS):
        number, unit = rows[f"| {limit.purpose}"].split()
        assert int(number) * units[unit] == limit.most_bytes
    assert rows[f"| {ANY_SIZE.purpose}"] == "any size"
