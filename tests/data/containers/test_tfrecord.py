"""TFRecord, compared with its specification, published checksums and messages made by hand."""

from pathlib import Path

import crc32c
import pytest

from lockstep.data.containers import Damage, Stored, tfrecord
from lockstep.data.containers.places import Places
from lockstep.data.containers.tfrecord import frame_record
from lockstep.system.crc import masked_crc
from tests.data.containers.shared import check_damaged, five, flips, sample, shifts, unlike, write
from tests.soak import SOAK


def join_record(payload: bytes) -> bytes:
    return b"".join(frame_record(payload))


def varint(number: int) -> bytes:
    groups = [number >> 7 * i & 127 for i in range(max(1, -(-number.bit_length() // 7)))]
    return bytes([*(128 | group for group in groups[:-1]), groups[-1]])


def field(number: int, content: bytes) -> bytes:
    """Return a protocol buffer field that has a length."""
    return varint(number << 3 | 2) + varint(len(content)) + content


def example(features: dict[str, bytes | int | float | list[bytes]]) -> bytes:
    """Return a tensorflow.Example. A map is a repeated message of key and value; lists of integers
    are packed."""
    entries = b""
    for key, value in features.items():
        if isinstance(value, int):
            kind = field(3, field(1, varint(value % 2**64)))
        elif isinstance(value, float):
            kind = field(2, field(1, bytes(4)))
        else:
            kind = field(
                1,
                b"".join(
                    field(1, item) for item in ([value] if isinstance(value, bytes) else value)
                ),
            )
        entries += field(1, field(1, key.encode()) + field(2, kind))
    return field(1, entries)


NVIDIA: dict[str, bytes | int | float | list[bytes]] = {
    "image/channels": 3,
    "image/class/label": 4,
    "image/class/synset": b"class 3",
    "image/class/text": b"class 3",
    "image/colorspace": b"RGB",
    "image/encoded": b"the image",
    "image/filename": b"class 3/0.JPEG",
    "image/format": b"JPEG",
    "image/height": 20,
    "image/width": 30,
}
"""The keys of build_imagenet_data.py, without object boxes, with the values of sample(0, 3, b"the
image")."""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Five samples."""
    return write(tfrecord, tmp_path / "train-00000-of-00001", five())


def only(path: Path, *payloads: bytes) -> list[Stored | Damage]:
    path.write_bytes(b"".join(map(join_record, payloads)))
    return list(tfrecord.scan_images(path))


@pytest.mark.parametrize(
    ("data", "crc"),
    [
        (b"123456789", 0xE3069283),
        # RFC 3720, B.4.
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (bytes(range(31, -1, -1)), 0x113FDB5C),
    ],
)
def test_checksums_are_those_published_turned_by_15_bits_and_moved(data: bytes, crc: int) -> None:
    assert crc32c.crc32c(data) == crc
    bits = f"{crc:032b}"
    assert masked_crc(data) == (int(bits[-15:] + bits[:-15], 2) + 0xA282EAD8) % 2**32


@pytest.mark.parametrize("image", [0, 1, 127, 128, 16_383, 16_384, 2**21])
@pytest.mark.parametrize("name", [0, 1, 110, 127, 128, 255])
def test_lengths_of_all_sizes_stand_in_an_example(image: int, name: int) -> None:
    features = NVIDIA | {"image/encoded": bytes(image), "image/filename": b"n" * name}
    written = tfrecord.example(sample(0, 3, bytes(image))._replace(name="n" * name))
    assert b"".join(written) == example(features)


def test_an_image_is_found_behind_others_that_begin_like_it(tmp_path: Path) -> None:
    image = bytes(range(70))
    path = tmp_path / "any.tfrecord"
    alike = image[:64] + bytes(6)
    features: dict[str, bytes | int | float | list[bytes]] = {
        "a": alike,
        "image": image,
        "label": 1,
        "z": alike,
    }
    [item] = only(path, example(features))
    assert isinstance(item, Stored)
    assert path.read_bytes()[item.offset : item.offset + item.length] == image


def test_a_file_and_its_index(tmp_path: Path) -> None:
    path = tmp_path / "train-00000-of-00001"
    write(tfrecord, path, [sample(0, 3, b"the image"), sample(1, 3, b"")])
    second = example(NVIDIA | {"image/encoded": b"", "image/filename": b"class 3/1.JPEG"})
    assert path.read_bytes() == join_record(example(NVIDIA)) + join_record(second)
    sizes = [len(example(NVIDIA)) + 16, len(second) + 16]
    assert (tmp_path / "idx" / path.name).read_text() == f"0 {sizes[0]}\n{sizes[0]} {sizes[1]}\n"
    assert sorted(item.name for item in tmp_path.iterdir()) == ["idx", path.name]


def test_places_labels_and_names_are_listed(tmp_path: Path) -> None:
    payload = example(NVIDIA)
    expected = Stored(12 + payload.index(b"the image"), 9, 3, "class 3/0.JPEG", "class 3")
    assert only(tmp_path / "any", payload) == [expected]


def test_keys_may_stand_in_any_order(tmp_path: Path) -> None:
    payload = example(dict(reversed(NVIDIA.items())))
    [item] = only(tmp_path / "any", payload)
    assert isinstance(item, Stored)
    assert (payload[item.offset - 12 :][: item.length], item.label, item.name) == (
        b"the image",
        3,
        "class 3/0.JPEG",
    )


def test_tensorflow_datasets_count_labels_from_0(tmp_path: Path) -> None:
    payload = example({"file_name": b"a.jpg", "image": b"the image", "label": 0})
    result = only(tmp_path / "any", payload)
    assert result == [Stored(12 + payload.index(b"the image"), 9, 0, "a.jpg")]


@pytest.mark.parametrize(
    ("missing", "name", "class_name"),
    [
        ({"image/filename"}, "", "class 3"),
        ({"image/class/synset"}, "class 3/0.JPEG", "a fox"),
        ({"image/class/synset", "image/class/text"}, "class 3/0.JPEG", ""),
    ],
)
def test_names_may_be_missing(
    missing: set[str], name: str, class_name: str, tmp_path: Path
) -> None:
    values = NVIDIA | {"image/class/text": b"a fox"}
    left = {key: value for key, value in values.items() if key not in missing}
    [item] = only(tmp_path / "any", example(left))
    assert isinstance(item, Stored)
    assert (item.name, item.class_name) == (name, class_name)


WITHOUT = "it does not have the keys"
OTHER_CONTENTS = {
    "no message": (b"no message", "it is not an Example message"),
    "empty": (
        b"",
        f"{WITHOUT} image/encoded and image/class/label or image and label; it has none",
    ),
    "no image": (example({"x": 1, "label": 1}), f"{WITHOUT} .*; it has label, x"),
    "no label": (example({"image/encoded": b"a"}), f"{WITHOUT} .*; it has image/encoded"),
    "two images": (example({"image": [b"a", b"b"], "label": 1}), "it has 2 images and 1 labels"),
    "an image of numbers": (example({"image": 7, "label": 1}), "it has 0 images and 1 labels"),
    "a label in floats": (
        example({"image": b"a", "label": 1.0}),
        "its label is a float_list; expected an int64_list",
    ),
    "negative": (example({"image": b"a", "label": -1}), "its label is -1; .* counted from 0"),
    "background": (example(NVIDIA | {"image/class/label": 0}), "its label is 0; .* counted from 1"),
}


@pytest.mark.parametrize(("payload", "reason"), OTHER_CONTENTS.values(), ids=OTHER_CONTENTS)
def test_a_record_of_other_contents_is_damage(payload: bytes, reason: str, tmp_path: Path) -> None:
    good = example(NVIDIA)
    [first, damage, last] = only(tmp_path / "any", good, payload, good)
    assert isinstance(first, Stored)
    assert isinstance(last, Stored)
    assert isinstance(damage, Damage)
    begin = len(join_record(good))
    assert (damage.begin, damage.end) == (begin, begin + len(payload) + 16)
    with pytest.raises(ValueError, match=f"^the record at byte {begin}: {reason}"):
        raise ValueError(damage.reason)


def places_of(file: Path) -> list[tuple[int, int]]:
    """Return begin and end of every record."""
    items = [item for item in tfrecord.records(Places(file)) if not isinstance(item, Damage)]
    return [(offset, offset + length + 16) for offset, length in items]


def find_touched(file: list[tuple[int, int]], bytes_: range) -> set[int]:
    return {i for i, (begin, end) in enumerate(file) if begin < bytes_.stop and bytes_.start < end}


def test_a_flipped_byte_costs_its_record_alone(file: Path) -> None:
    """This holds for every byte, because checksums cover all bytes."""
    places = places_of(file)
    for i, damaged in flips(file.read_bytes(), stride=1 if SOAK else 7):
        file.write_bytes(damaged)
        left, damages = check_damaged(tfrecord, file, five())
        assert damages
        assert set(range(5)) - set(left) == find_touched(places, range(i, i + 1))


def test_missing_and_added_bytes_cost_the_records_they_touch_alone(file: Path) -> None:
    data = file.read_bytes()
    places = places_of(file)
    for bytes_, damaged in shifts(data, (1, 3, 500), stride=37):
        file.write_bytes(damaged)
        left, _ = check_damaged(tfrecord, file, five())
        assert set(range(5)) - set(left) <= find_touched(places, bytes_)


def test_a_cut_costs_what_is_behind_it(file: Path) -> None:
    data = file.read_bytes()
    places = places_of(file)
    for size in range(0, len(data), 1 if SOAK else 7):
        file.write_bytes(data[:size])
        left, damages = check_damaged(tfrecord, file, five())
        assert left == [i for i, (_, end) in enumerate(places) if end <= size]
        assert bool(damages) == (size not in {0, *(end for _, end in places)})


def test_a_hole_of_zeros_costs_what_was_there(file: Path) -> None:
    """File systems leave such holes after a power failure. Zeros could be a length if their
    checksum were 0."""
    data = file.read_bytes()
    places = places_of(file)
    begin = places[1][0] + 40
    end = places[3][0] + 40
    hole = bytes(end - begin + 3 * 2**20)
    file.write_bytes(data[:begin] + hole + data[end:])
    left, [damage] = check_damaged(tfrecord, file, five())
    assert left == [0, 4]
    assert (damage.begin, damage.end) == (
        places[1][0],
        file.stat().st_size - (places[4][1] - places[4][0]),
    )


def test_what_is_no_such_file_is_damage_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "any"
    path.write_bytes(unlike(1000, 0))
    expected = [Damage(0, 1000, "no record begins at byte 0: the checksum of its length is wrong")]
    assert list(tfrecord.scan_images(path)) == expected


def test_a_writer_continues_behind_the_last_record_that_is_right(tmp_path: Path) -> None:
    """After a power failure, a file may have its full length without all its bytes."""
    whole = write(tfrecord, tmp_path / "whole", five())
    data = bytearray(whole.read_bytes())
    places = places_of(whole)
    end = places[1][1]
    data[end - 100 : end] = bytes(100)
    (tmp_path / "torn.partial").write_bytes(data)
    with tfrecord.Writer(tmp_path / "torn") as writer:
        assert writer.written == 1
    assert write(tfrecord, tmp_path / "torn", five()).read_bytes() == whole.read_bytes()
