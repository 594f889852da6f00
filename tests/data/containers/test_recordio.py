"""RecordIO, compared with its specification: dmlc-core's recordio.h and recordio.cc, MXNet's
recordio.py and im2rec.py."""

import struct
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import Mock

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lockstep.data.containers import Damage, Stored, recordio
from lockstep.data.containers.places import Places
from lockstep.data.containers.recordio import (
    Header,
    Record,
    frame_record,
    pack_header,
    unpack_header,
)
from lockstep.data.stores.places import open_pass
from tests.data.containers.shared import (
    MAGIC,
    PAYLOADS,
    check_damaged,
    five,
    list_images,
    sample,
    shifts,
    unlike,
    write,
)
from tests.soak import EXAMPLES


def join_record(payload: bytes) -> bytes:
    return b"".join(frame_record(payload))


def frame(flag: int, length: int) -> bytes:
    return MAGIC + (flag << 29 | length).to_bytes(4, "little")


def records_of(path: Path) -> list[Record]:
    items = list(recordio.records(Places(path)))
    assert all(isinstance(record, Record) for record in items)
    return items  # type: ignore[return-value]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Five samples, the third with the magic number in it."""
    return write(recordio, tmp_path / "train.rec", five(MAGIC))


def damages(path: Path) -> list[Damage]:
    return [item for item in recordio.scan_images(path) if isinstance(item, Damage)]


SPLIT = {
    "nothing else": (MAGIC, frame(1, 0) + frame(3, 0)),
    "between": (b"abcd" + MAGIC + b"ef", frame(1, 4) + b"abcd" + frame(3, 2) + b"ef\0\0"),
    "twice": (MAGIC * 2 + b"a", frame(1, 0) + frame(2, 0) + frame(3, 1) + b"a\0\0\0"),
    "not at a multiple of 4": (b"ab" + MAGIC, frame(0, 6) + b"ab" + MAGIC + b"\0\0"),
    "neither at one": (b"ab" + MAGIC * 2 + b"cd", frame(0, 12) + b"ab" + MAGIC * 2 + b"cd"),
    "not all of it": (MAGIC[:3] + b"a", frame(0, 4) + MAGIC[:3] + b"a"),
}


@pytest.mark.parametrize(("payload", "expected"), SPLIT.values(), ids=SPLIT)
def test_a_payload_is_split_at_aligned_magic_numbers(payload: bytes, expected: bytes) -> None:
    assert join_record(payload) == expected


@pytest.mark.parametrize("front", [MAGIC, MAGIC + b"abcd" + MAGIC, b"\0\0" + MAGIC + b"\0\0"])
@pytest.mark.parametrize("back", [b"", MAGIC, b"ab" + MAGIC, b"abcd" + MAGIC + b"e"])
def test_a_payload_in_pieces_is_framed_as_it_is_in_one(front: bytes, back: bytes) -> None:
    assert b"".join(frame_record(front, memoryview(back))) == join_record(front + back)


@pytest.mark.parametrize(
    "payload", [b"", bytes(23), bytes.fromhex("02000000") + bytes(27)], ids=len
)
def test_a_payload_too_short_for_its_header_is_refused(payload: bytes) -> None:
    with pytest.raises(ValueError, match=rf"a record of {len(payload)} bytes has no room for"):
        unpack_header(payload)


def test_a_part_that_is_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert recordio.MOST_BYTES == 0x1FFFFFFF
    monkeypatch.setattr(recordio, "MOST_BYTES", 7)
    assert join_record(bytes(7))
    with pytest.raises(ValueError, match="has 8 bytes; a part can have at most 7"):
        frame_record(bytes(8))


def test_a_file_and_what_stands_beside_it(tmp_path: Path) -> None:
    write(recordio, tmp_path / "val.rec", [sample(0, 3, b"ninebytes"), sample(1, 12, b"x")])
    headers = [struct.pack("<IfQQ", 0, 3.0, 0, 0), struct.pack("<IfQQ", 0, 12.0, 1, 0)]
    expected = (
        frame(0, 33) + headers[0] + b"ninebytes\0\0\0" + frame(0, 25) + headers[1] + b"x\0\0\0"
    )
    assert (tmp_path / "val.rec").read_bytes() == expected
    assert (tmp_path / "val.idx").read_text() == "0\t0\n1\t44\n"
    result = (tmp_path / "val.lst").read_text()
    assert result == "0\t3.000000\tclass 3/0.JPEG\n1\t12.000000\tclass 12/1.JPEG\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["val.idx", "val.lst", "val.rec"]


def test_places_numbers_and_names_are_listed(tmp_path: Path) -> None:
    path = write(recordio, tmp_path / "val.rec", [sample(0, 3, b"ninebytes"), sample(1, 12, b"x")])
    assert list(recordio.scan_images(path)) == [
        Stored(32, 9, 3, "class 3/0.JPEG", number=0),
        Stored(76, 1, 12, "class 12/1.JPEG", number=1),
    ]


def test_a_list_of_im2rec_may_be_shuffled_and_have_several_labels(tmp_path: Path) -> None:
    path = write(
        recordio,
        tmp_path / "val.rec",
        [sample(0, 3, b"a"), sample(1, 12, b"b"), sample(2, 1, b"c")],
    )
    # ² is a digit but not a number. U+2028 does not end a line.
    text = "1\t12.000000\t0.500000\tb.jpg\n\n0\t3.000000\ta\u2028 2.jpg\n²\t0\tc.jpg\n2\tnothing\n"
    path.with_suffix(".lst").write_text(text, encoding="utf-8")
    result = [item.name for item in recordio.scan_images(path) if isinstance(item, Stored)]
    assert result == ["a\u2028 2.jpg", "b.jpg", ""]


def test_no_list_is_needed(file: Path) -> None:
    file.with_suffix(".lst").unlink()
    file.with_suffix(".idx").unlink()
    result = [item.name for item in recordio.scan_images(file) if isinstance(item, Stored)]
    assert result == [""] * 5


def test_an_index_gives_numbers_and_places(file: Path) -> None:
    result = recordio.read_index(file.with_suffix(".idx"))
    assert result == [(i, record.offset) for i, record in enumerate(records_of(file))]


@pytest.mark.parametrize(
    "line", ["garbage", "3 1200", "3\t", "\t1200", "3\t-8", "3\t1.5", "x\t1200", "", "³\t1200"]
)
def test_an_index_with_a_line_that_is_no_place_is_refused(line: str, tmp_path: Path) -> None:
    path = tmp_path / "train.idx"
    path.write_text(f"0\t0\n1\t400\n{line}\n4\t1600\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"line 3 of train\.idx .*; expected a number"):
        recordio.read_index(path)


IMAGES = pytest.mark.parametrize(
    "image", [b"image", b"imag" + MAGIC + b"e"], ids=["whole", "in parts"]
)


@IMAGES
def test_a_list_of_one_label_is_that_label(image: bytes, tmp_path: Path) -> None:
    """MXNet's flag is then 1, and the label stands after the header."""
    path = tmp_path / "any.rec"
    path.write_bytes(join_record(struct.pack("<IfQQf", 1, 0.0, 5, 0, 7.0) + image))
    assert list_images(recordio, path) == [(image, 7)]


@pytest.mark.parametrize("labels", [(7.0, 3.5), (0.0, 1.0, 0.0)], ids=["any", "one-hot"])
@IMAGES
def test_several_labels_are_damage(labels: tuple[float, ...], image: bytes, tmp_path: Path) -> None:
    path = tmp_path / "any.rec"
    path.write_bytes(join_record(pack_header(Header(labels, 5)) + image))
    [damage] = recordio.scan_images(path)
    assert isinstance(damage, Damage)
    assert f"byte 0: it has {len(labels)} labels; expected one" in damage.reason


@pytest.mark.parametrize("label", [3.5, -1.0, float("nan"), float("inf")])
def test_a_label_that_is_no_class_is_damage(label: float, tmp_path: Path) -> None:
    path = tmp_path / "any.rec"
    path.write_bytes(
        join_record(bytes(24)) + join_record(pack_header(Header((label,), 0)) + b"image")
    )
    [good, bad] = recordio.scan_images(path)
    assert good == Stored(32, 0, 0, number=0)
    assert isinstance(bad, Damage)
    assert (bad.begin, bad.end) == (32, path.stat().st_size)
    assert f"the record at byte 32: its label is {label:g}; " in bad.reason


def test_a_record_too_short_for_a_header_is_damage(tmp_path: Path) -> None:
    path = tmp_path / "any.rec"
    path.write_bytes(join_record(b"short") + join_record(bytes(24)))
    assert [type(item) for item in recordio.scan_images(path)] == [Damage, Stored]
    assert damages(path) == [
        Damage(0, 16, "the record at byte 0: a record of 5 bytes has no room for a header of 24")
    ]


KINDS = (0.0, 7.0, 3.5, -1.0, float("nan"), float("inf"), 2.0**24, 1e30)
LABELS = st.sampled_from([*((label,) for label in KINDS), (1.0, 2.0)])
NUMBERS = st.sampled_from([0, 1, 2, 2**63 - 1, 2**63, 2**64 - 1])
HEADERS = st.tuples(LABELS, NUMBERS).map(lambda fields: pack_header(Header(*fields)))
HEADED = st.builds(bytes.__add__, HEADERS, st.binary(max_size=9))
DAMAGED = st.binary(max_size=40) | st.just(frame(0, 2**20)) | st.just(frame(2, 4) + bytes(4))
ALIKE = NUMBERS.map(lambda number: join_record(pack_header(Header((7.0,), number)) + b"image"))
ONE_EACH = b"".join(
    join_record(pack_header(Header((label,), 5)) + b"image")
    for kind in KINDS
    for label in (7.0, 7.0, kind)
)


@EXAMPLES
@example(records=ONE_EACH, cut=0)
@example(records=join_record(bytes(8)) * 4, cut=0)
@given(
    records=st.lists(
        ALIKE | HEADED.map(join_record) | PAYLOADS.map(b"".join).map(join_record) | DAMAGED,
        max_size=12,
    ).map(b"".join),
    cut=st.integers(0, 40),
)
def test_records_are_listed_together_as_they_are_one_by_one(
    records: bytes, cut: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("mixed") / "any.rec"
    path.write_bytes(records[: len(records) - cut])
    path.with_suffix(".lst").write_text("1\t7\tone.jpg\n9223372036854775808\t7\tlarge.jpg\n")
    with pytest.MonkeyPatch.context() as patch:
        listings = []
        for together, one_by_one in ((0, 1), (2, 1), (3, 2), (2**10, 2**4)):
            patch.setattr(recordio, "_AT_ONCE", together)
            patch.setattr(recordio, "_ONE_BY_ONE", one_by_one)
            # As text, because a label may be NaN.
            listings.append(list(map(repr, recordio.scan_images(path))))
    assert listings == [listings[0]] * 4


def test_alike_records_are_listed_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(recordio, tmp_path / "any.rec", [sample(i, 3, b"image") for i in range(100)])
    monkeypatch.setattr(recordio, "_find_image", closely := Mock(wraps=recordio._find_image))
    result = [item.number for item in recordio.scan_images(path) if isinstance(item, Stored)]
    assert result == list(range(100))
    assert closely.call_count == 1


def test_a_file_is_listed_with_reading_ahead(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recordio, "open_pass", opened := Mock(wraps=open_pass))
    assert len(list(recordio.scan_images(file))) == 5
    assert opened.call_args_list[0].kwargs == {"read_ahead": True}


def test_a_number_that_no_order_can_have_is_no_number(tmp_path: Path) -> None:
    path = tmp_path / "any.rec"
    path.write_bytes(join_record(pack_header(Header((0.0,), 2**64 - 1)) + b"image"))
    assert [item.number for item in recordio.scan_images(path) if isinstance(item, Stored)] == [-1]


def test_what_is_no_such_file_is_damage_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "any.rec"
    path.write_bytes(unlike(1000, 0))
    [damage] = damages(path)
    assert (damage.begin, damage.end) == (0, 1000)
    assert damage.reason.startswith("no record begins at byte 0: expected 0xced7230a, found 0x")


def find_touched(records: Sequence[Record], bytes_: range) -> set[int]:
    """Return the records in which bytes were changed, and those before them."""
    hit = {
        i for i, item in enumerate(records) if item.offset < bytes_.stop and bytes_.start < item.end
    }
    return hit | {i - 1 for i in hit}


def test_a_flipped_byte_of_a_frame_costs_two_records_at_most(file: Path) -> None:
    """There are no checksums: a flip in a header or an image cannot be detected. A flip in the
    zeros after it has no effect.

    A length that is wrong by less than 4 cannot always be detected; the next test is about its
    lowest byte.
    """
    data = file.read_bytes()
    records = records_of(file)
    frames = {
        begin - 8 + i
        for record in records
        for begin, _ in record.spans
        for i in (0, 1, 2, 3, 5, 6, 7)
    }
    assert len(frames) == 6 * 7
    for i in sorted(frames):
        for bit in range(8):
            file.write_bytes(data[:i] + bytes([data[i] ^ 1 << bit]) + data[i + 1 :])
            left, damages = check_damaged(recordio, file, five(MAGIC))
            assert damages
            assert set(range(5)) - set(left) <= find_touched(records, range(i, i + 1))


def test_a_length_that_is_wrong_by_4_or_more_costs_that_record_alone(file: Path) -> None:
    data = file.read_bytes()
    records = records_of(file)
    for number, record in enumerate(records):
        for begin, _ in record.spans:
            for bit in range(2, 8):
                file.write_bytes(
                    data[: begin - 4] + bytes([data[begin - 4] ^ 1 << bit]) + data[begin - 3 :]
                )
                left, damages = check_damaged(recordio, file, five(MAGIC))
                assert damages
                assert left == [i for i in range(5) if i != number]


def test_a_length_that_reaches_over_the_next_records_does_not_lose_them(file: Path) -> None:
    """The length must not end exactly where one of these records ends: that looks like a long
    image."""
    data = bytearray(file.read_bytes())
    records = records_of(file)
    data[4:8] = struct.pack("<I", records[3].offset)
    file.write_bytes(data)
    left, [damage] = check_damaged(recordio, file, five(MAGIC))
    assert left == [1, 2, 3, 4]
    assert (damage.begin, damage.end) == (0, records[1].offset)


def test_a_part_that_swallowed_the_next_is_damage(file: Path) -> None:
    """All of its frames are valid, but a part must not contain the magic number."""
    image = b"abcd" + MAGIC + b"efgh" + MAGIC + b"ijkl"
    data = bytearray(join_record(pack_header(Header((0.0,), 0)) + image))
    struct.pack_into("<I", data, 4, 1 << 29 | 24 + 4 + 8 + 4)
    file.write_bytes(data)
    assert damages(file) == [
        Damage(
            0,
            len(data),
            "the record at byte 0: a part begins at byte 36, inside the part at byte 0",
        )
    ]


def test_missing_and_added_bytes_cost_what_they_touch_and_one_in_front(file: Path) -> None:
    data = file.read_bytes()
    records = records_of(file)
    for bytes_, damaged in shifts(data, (1, 2, 4, 8, 600), stride=53):
        file.write_bytes(damaged)
        left, damages = check_damaged(recordio, file, five(MAGIC))
        assert damages or damaged == data[: len(damaged)]
        assert set(range(5)) - set(left) <= find_touched(records, bytes_)


def test_a_cut_costs_what_is_behind_it(file: Path) -> None:
    data = file.read_bytes()
    records = records_of(file)
    ends = {record.end for record in records}
    for size in sorted({*range(0, len(data), 3), *ends}):
        file.write_bytes(data[:size])
        left, damages = check_damaged(recordio, file, five(MAGIC))
        assert left == [i for i, record in enumerate(records) if record.end <= size]
        assert bool(damages) == (size not in {0, *ends})


def test_a_hole_of_zeros_costs_what_was_there(file: Path) -> None:
    """File systems leave such holes after a power failure."""
    data = file.read_bytes()
    records = records_of(file)
    begin = records[1].offset + 40
    end = records[3].offset + 40
    file.write_bytes(data[:begin] + bytes(end - begin) + data[end:])
    left, [damage] = check_damaged(recordio, file, five(MAGIC))
    assert left == [0, 4]
    assert (damage.begin, damage.end) == (records[1].offset, records[4].offset)
