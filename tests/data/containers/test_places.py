"""Read a file at any offset, and read ahead."""

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from lockstep.data.containers import places
from lockstep.data.containers.places import Places
from tests.data.containers.shared import unlike

Read = tuple[int, int]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "any"
    path.write_bytes(unlike(1000, 0))
    return path


def reading_ahead(monkeypatch: pytest.MonkeyPatch, probe: Exception | None) -> list[Read]:
    """Make the system report for each byte whether it is cached; return the places that are then
    read ahead."""
    read: list[Read] = []
    preadv = os.preadv

    def noted(descriptor: int, buffers: Sequence[bytearray], offset: int, flags: int = 0) -> int:
        if flags == os.RWF_NOWAIT:
            if probe is not None:
                raise probe
            return 1
        read.append((offset, sum(map(len, buffers))))
        return preadv(descriptor, buffers, offset, flags)

    monkeypatch.setattr(os, "preadv", noted)
    monkeypatch.setattr(places, "_AHEAD_BYTES", 300)
    return read


def test_a_file_on_the_disk_is_read_ahead_once(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = reading_ahead(monkeypatch, BlockingIOError())
    places = Places(file, read_ahead=True)
    expected = [(0, 300), (300, 300), (600, 300), (900, 100)]
    for offset, length, chunks in (
        (0, 10, 1),
        (10, 290, 1),
        (300, 1, 2),
        (5, 3, 2),
        (899, 2, 4),
        (990, 10, 4),
    ):
        assert places.read(offset, length) == unlike(1000, 0)[offset : offset + length]
        assert read == expected[:chunks]


@pytest.mark.parametrize("probe", [None, OSError(95, "Operation not supported")])
def test_a_file_that_is_in_memory_or_not_known_to_be_elsewhere_is_not_read_ahead(
    probe: Exception | None, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = reading_ahead(monkeypatch, probe)
    places = Places(file, read_ahead=True)
    assert b"".join(places.read(offset, 100) for offset in range(0, 1000, 100)) == unlike(1000, 0)
    assert read == []


def test_only_reading_all_of_it_reads_ahead(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = reading_ahead(monkeypatch, BlockingIOError())
    assert Places(file).read(0, 1000) == unlike(1000, 0)
    assert read == []


def test_nothing_beyond_the_end_is_read_ahead(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reading_ahead(monkeypatch, BlockingIOError())
    with pytest.raises(ValueError, match="byte 1000, expected 20 bytes from 990"):
        Places(file, read_ahead=True).read(990, 20)
