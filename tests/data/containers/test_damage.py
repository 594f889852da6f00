"""Files of all formats, sound and with any damage in many places at the same time."""

from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.data.containers import Damage, Stored, recordio, tfrecord, webdataset
from tests.data.containers.shared import (
    MAGIC,
    PAYLOADS,
    PIECES,
    continue_cut,
    five,
    list_images,
    read,
    sample,
    write,
)
from tests.soak import EXAMPLES, SOAK

Edit = tuple[float, int, bytes]
"""The place in the file, how many bytes are removed there, and the bytes that are inserted."""
EDITS = st.lists(
    st.tuples(
        st.floats(0, 1),
        st.integers(0, 700),
        st.binary(max_size=9) | PIECES | st.binary(min_size=512, max_size=512),
    ),
    min_size=1,
    max_size=4,
)


def edit(data: bytes, edits: list[Edit]) -> bytes:
    for where, amount, added in edits:
        begin = round(where * len(data))
        data = data[:begin] + added + data[begin + amount :]
    return data


@pytest.fixture(
    scope="module",
    params=[recordio, tfrecord, webdataset],
    ids=lambda format: format.__name__.rpartition(".")[2],
)
def format(request: pytest.FixtureRequest) -> ModuleType:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def whole(
    format: ModuleType, tmp_path_factory: pytest.TempPathFactory
) -> tuple[ModuleType, Path, bytes]:
    path = write(format, tmp_path_factory.mktemp("whole") / "any.tar", five(MAGIC))
    return format, path, path.read_bytes()


@EXAMPLES
@given(payloads=PAYLOADS)
def test_images_are_read_as_they_were_written(
    format: ModuleType, payloads: list[bytes], tmp_path_factory: pytest.TempPathFactory
) -> None:
    samples = [sample(i, i % 3, data) for i, data in enumerate(payloads)]
    path = write(format, tmp_path_factory.mktemp("written") / "any.tar", samples)
    assert list_images(format, path) == [(item.data, item.label) for item in samples]


def check_listed(format: ModuleType, path: Path) -> None:
    """Check that listed images can be read, and that images and damage lie in the file and appear
    once."""
    size = path.stat().st_size
    places = []
    for item in format.scan_images(path):
        if isinstance(item, Damage):
            assert 0 <= item.begin < item.end <= size
            assert item.reason
        elif isinstance(item, Stored):
            assert len(read(format, path, item)) == item.length
            places.append(item.offset)
    assert places == sorted(set(places))


@EXAMPLES
@given(edits=EDITS)
def test_any_damage_can_be_listed(whole: tuple[ModuleType, Path, bytes], edits: list[Edit]) -> None:
    format, path, data = whole
    path.write_bytes(edit(data, edits))
    check_listed(format, path)


@EXAMPLES
@given(pieces=st.lists(PIECES | st.binary(max_size=600) | st.integers(0, 4000), max_size=30))
def test_any_bytes_can_be_listed(
    whole: tuple[ModuleType, Path, bytes], pieces: list[bytes | int]
) -> None:
    """The bytes are random pieces; a number stands for a piece of a good file from this offset."""
    format, path, data = whole
    parts = [data[piece : piece + 700] if isinstance(piece, int) else piece for piece in pieces]
    path.write_bytes(data[:1] + b"".join(parts))
    check_listed(format, path)


@EXAMPLES
@given(edits=EDITS)
def test_whatever_happens_to_a_tfrecord_its_images_are_right_or_not_listed(
    edits: list[Edit], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = write(tfrecord, tmp_path_factory.mktemp("damaged") / "any", five())
    damaged = edit(path.read_bytes(), edits)
    path.write_bytes(damaged)
    items = {
        read(tfrecord, path, item): item.label
        for item in tfrecord.scan_images(path)
        if isinstance(item, Stored)
    }
    assert items.items() <= {item.data: item.label for item in five()}.items()


def list_files(folder: Path, name: str) -> dict[str, bytes]:
    """Return a written file and what stands beside it, by paths without its name."""
    paths = [path for path in folder.rglob(f"{name}*") if path.is_file()]
    return {str(path.relative_to(folder)).replace(name, ""): path.read_bytes() for path in paths}


def test_a_killed_writer_continues_to_the_same_files(format: ModuleType, tmp_path: Path) -> None:
    contents = (b"", b"a", b"ab", b"abcd" + MAGIC + b"e", b"a" * 512)
    samples = [sample(i, i, data) for i, data in enumerate(contents)]
    # Between the members of a tar are only zeros. A stride of 31 reaches every position in a block.
    stride = 31 if format is webdataset else 1 if SOAK else 13
    for _ in continue_cut(format, tmp_path, samples, stride):
        assert list_files(tmp_path, "cut") == list_files(tmp_path, "whole")


def test_an_empty_file_holds_nothing(format: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "any").touch()
    assert list(format.scan_images(tmp_path / "any")) == []
