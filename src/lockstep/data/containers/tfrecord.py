"""TFRecord files of `Example` messages, as NVIDIA's and TensorFlow's ImageNet scripts write them.

A record, in little endian: length in 8 bytes | masked CRC-32C of the length | payload | masked
CRC-32C of the payload. A CRC has 4 bytes. The payload is a protocol buffer, tensorflow.Example: a
map from keys to lists of bytes, floats or integers.
"""

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from lockstep.data.containers import Appended, Bytes, Damage, Sample, Stored
from lockstep.data.containers.places import MOST_BYTES, Places
from lockstep.data.stores.places import open_pass
from lockstep.system.crc import masked_crc
from lockstep.system.files import written_text

_LENGTH = struct.Struct("<Q")
_CRC = struct.Struct("<I")
_FRONT = _LENGTH.size + _CRC.size
_HEAD_BYTES = 2**6
"""An image is found in a message by this many of its first bytes."""
_KEPT = 2**12
"""This many parts of messages are cached, because many images share them."""
_LISTS = {"BytesList": "TYPE_BYTES", "FloatList": "TYPE_FLOAT", "Int64List": "TYPE_INT64"}
_KINDS = {"bytes_list": "BytesList", "float_list": "FloatList", "int64_list": "Int64List"}


@dataclass(frozen=True)
class Keys:
    """The keys under which a writer of TFRecords stores an image and its properties."""

    image: str
    label: str
    first_label: int
    name: str
    class_names: tuple[str, ...]
    """The first of these keys that is there has the name of the class."""


KNOWN_KEYS = (
    Keys(
        "image/encoded",
        "image/class/label",
        1,
        "image/filename",
        ("image/class/synset", "image/class/text"),
    ),
    Keys("image", "label", 0, "file_name", ()),
)
"""The keys of NVIDIA's and TensorFlow's scripts, where label 0 is the background; then those of
TensorFlow Datasets."""


@cache
def _message(name: str) -> Any:
    """Return the class of a message that example.proto or feature.proto of TensorFlow defines."""
    file = descriptor_pb2.FileDescriptorProto(
        name="lockstep/example.proto", package="lockstep", syntax="proto3"
    )
    for kind, values in _LISTS.items():
        message = file.message_type.add(name=kind)
        message.field.add(name="value", number=1, type=values, label="LABEL_REPEATED")
    feature = file.message_type.add(name="Feature")
    feature.oneof_decl.add(name="kind")
    for number, (field, kind) in enumerate(_KINDS.items(), 1):
        feature.field.add(**_child(field, number, kind), oneof_index=0)
    features = file.message_type.add(name="Features")
    entry = features.nested_type.add(name="FeatureEntry")
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, type="TYPE_STRING", label="LABEL_OPTIONAL")
    entry.field.add(**_child("value", 2, "Feature"))
    entries = _child("feature", 1, "Features.FeatureEntry")
    features.field.add(**entries | {"label": "LABEL_REPEATED"})
    file.message_type.add(name="Example").field.add(**_child("features", 1, "Features"))
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"lockstep.{name}"))


def _child(name: str, number: int, message: str) -> dict[str, Any]:
    kind = {"type": "TYPE_MESSAGE", "type_name": message}
    return {"name": name, "number": number, "label": "LABEL_OPTIONAL", **kind}


def frame_record(*payload: Bytes) -> list[Bytes]:
    """Return the bytes of a record in a file, in pieces. The payload may be in pieces, too."""
    length = _LENGTH.pack(sum(map(len, payload)))
    return [length + _CRC.pack(masked_crc(length)), *payload, _CRC.pack(masked_crc(*payload))]


def length_at(file: Places, offset: int) -> int:
    """Return the length of the payload of the record at an offset. Raises `ValueError` with the
    problem."""
    if offset + _FRONT > file.size:
        raise ValueError(f"the file ends at byte {file.size} within the record at byte {offset}")
    front = file.read(offset, _FRONT)
    (length,) = _LENGTH.unpack_from(front)
    (crc,) = _CRC.unpack_from(front, _LENGTH.size)
    if masked_crc(front[: _LENGTH.size]) != crc:
        raise ValueError(f"no record begins at byte {offset}: the checksum of its length is wrong")
    if offset + _FRONT + length + _CRC.size > file.size:
        raise ValueError(f"the file ends at byte {file.size} within the record at byte {offset}")
    if length > MOST_BYTES:
        raise ValueError(f"the record at byte {offset} has {length} bytes, which are too many")
    return int(length)


def payload_at(file: Places, offset: int) -> bytes:
    """Return the payload of the record at an offset. Raises `ValueError` with the problem."""
    length = length_at(file, offset)
    data = file.read(offset + _FRONT, length + _CRC.size)
    payload = data[:length]
    if masked_crc(payload) != _CRC.unpack_from(data, length)[0]:
        raise ValueError(f"the checksum of the record at byte {offset} is wrong")
    return payload


def records(file: Places) -> Iterator[tuple[int, int] | Damage]:
    """Yield offset and payload length of every record with right checksums, and the damage between
    the records."""
    for record in _payloads(file):
        yield record if isinstance(record, Damage) else (record[0], len(record[1]))


def _payloads(file: Places, offset: int = 0) -> Iterator[tuple[int, bytes] | Damage]:
    """Yield offset and payload of every record from an offset on, and the damage between the
    records."""
    while offset < file.size:
        try:
            payload = payload_at(file, offset)
        except ValueError as error:
            # Even if the length is right, the next record may begin before this end: bytes may be
            # missing.
            end = _next_record(file, offset + 1)
            yield Damage(offset, end, str(error))
            offset = end
            continue
        yield offset, payload
        offset += _FRONT + len(payload) + _CRC.size


def _next_record(file: Places, start: int) -> int:
    """Return the offset of the next length with a right checksum, or the end of the file."""
    for begin, chunk in file.chunks(start, _FRONT - 1):
        data = np.frombuffer(chunk, np.uint8)
        # The upper half of a length is 0, and the checksum of zeros is not 0: only few offsets need
        # a full check.
        zero = data == 0
        places = len(data) - _FRONT + 1
        upper = np.logical_and.reduce([zero[i : places + i] for i in range(4, 8)])
        rest = np.logical_and.reduce([zero[i : places + i] for i in (0, 1, 2, 3, 8, 9, 10, 11)])
        for i in np.flatnonzero(upper & ~rest).tolist():
            try:
                length_at(file, begin + i)
            except ValueError:
                continue
            return int(begin + i)
    return file.size


def scan_images(path: Path, stopped: Event | None = None) -> Iterator[Stored | Damage]:
    """Yield the images of a file in its order."""
    for record in _payloads(open_pass(path, stopped, read_ahead=True)):
        if isinstance(record, Damage):
            yield record
            continue
        begin, payload = record
        try:
            yield _find_image(payload, begin + _FRONT)
        except ValueError as error:
            end = begin + _FRONT + len(payload) + _CRC.size
            yield Damage(begin, end, f"the record at byte {begin}: {error}")


def _find_image(payload: bytes, offset: int) -> Stored:
    try:
        features = _message("Example").FromString(payload).features.feature
    except DecodeError:
        raise ValueError("it is not an Example message") from None
    for keys in KNOWN_KEYS:
        if keys.image in features and keys.label in features:
            break
    else:
        known = " or ".join(f"{keys.image} and {keys.label}" for keys in KNOWN_KEYS)
        own = ", ".join(sorted(features)) or "none"
        raise ValueError(f"it does not have the keys {known}; it has {own}")
    images = features[keys.image].bytes_list.value
    labels = features[keys.label].int64_list.value
    kind = features[keys.label].WhichOneof("kind") or "int64_list"
    if kind != "int64_list":
        raise ValueError(f"its label is a {kind}; expected an int64_list of one class")
    if len(images) != 1 or len(labels) != 1:
        raise ValueError(
            f"it has {len(images)} images and {len(labels)} labels; expected one of each"
        )
    label = labels[0] - keys.first_label
    if label < 0:
        raise ValueError(
            f"its label is {labels[0]}; expected a class, counted from {keys.first_label}"
        )
    begin = find_bytes(payload, images[0])
    return Stored(
        offset + begin,
        len(images[0]),
        label,
        _text(features, keys.name),
        next(filter(None, (_text(features, key) for key in keys.class_names)), ""),
    )


def find_bytes(payload: bytes, image: bytes) -> int:
    """Return where the bytes of an image are in a message. Any place that has them is right.

    The first place with its head is nearly always that of the image, and is found in a twentieth of
    the time. Only one is tried: there may be a million.
    """
    begin = payload.find(image[:_HEAD_BYTES])
    return begin if payload.startswith(image, begin) else payload.find(image)


def _text(features: Any, key: str) -> str:
    values: Any = features[key].bytes_list.value if key in features else ()
    return values[0].decode("utf-8", "surrogateescape") if len(values) else ""


def example(sample: Sample) -> tuple[bytes, Bytes, bytes]:
    """Return the message of a sample in pieces, with the first label of NVIDIA's scripts and their
    keys, sorted by name.

    The image is inserted without the protobuf library, which would copy it twice.
    """
    front = _before_image(sample.class_name, sample.label)
    image = _before_text(b"image/encoded", len(sample.data))
    name = sample.name.encode("utf-8", "surrogateescape")
    back = _before_name(len(name)) + name + _behind_name(sample.height, sample.width)
    length = len(front) + len(image) + len(sample.data) + len(back)
    return _field(1, length) + front + image, sample.data, back


@lru_cache(_KEPT)
def _before_image(class_name: str, label: int) -> bytes:
    text = class_name.encode("utf-8", "surrogateescape")
    texts = {"class/synset": text, "class/text": text, "colorspace": b"RGB"}
    return _features(texts, {"channels": 3, "class/label": label + 1})


@lru_cache(_KEPT)
def _behind_name(height: int, width: int) -> bytes:
    return _features({"format": b"JPEG"}, {"height": height, "width": width})


@lru_cache(_KEPT)
def _before_name(length: int) -> bytes:
    return _before_text(b"image/filename", length)


def _before_text(key: bytes, length: int) -> bytes:
    """Return the bytes before a text of `length` bytes that is the only value of its feature."""
    # From inside to outside: a value of a BytesList, in a Feature, in an entry, in Features.
    value = _field(1, length)
    feature = _field(1, len(value) + length) + value
    entry = b"\n%c%b" % (len(key), key) + _field(2, len(feature) + length) + feature
    return _field(1, len(entry) + length) + entry


def _features(texts: dict[str, bytes], numbers: dict[str, int]) -> bytes:
    message = _message("Features")()
    for key, text in texts.items():
        message.feature[f"image/{key}"].bytes_list.value.append(text)
    for key, number in numbers.items():
        message.feature[f"image/{key}"].int64_list.value.append(number)
    return bytes(message.SerializeToString(deterministic=True))


def _field(number: int, length: int) -> bytes:
    """Return the bytes before a field of a message; the field has `length` bytes."""
    groups = [number << 3 | 2]
    while length > 127:
        groups.append(length & 127 | 128)
        length >>= 7
    return bytes((*groups, length))


class Writer(Appended):
    """Writes a file of examples, and `idx/<name>` for DALI with offset and size of every record."""

    @staticmethod
    def scan_ends(file: Places) -> Iterator[int | Damage]:
        """Yield the end of each record of a file, and the damage between them."""
        for record in records(file):
            if isinstance(record, Damage):
                yield record
            else:
                yield record[0] + _FRONT + record[1] + _CRC.size

    @staticmethod
    def record(sample: Sample) -> list[Bytes]:
        """Return a sample's bytes in the file, in pieces."""
        return frame_record(*example(sample))

    def describe(self, rows: Iterable[tuple[int, int, str]]) -> list[Path]:
        """Write DALI's index, and return its path."""
        folder = self.path.parent / "idx"
        folder.mkdir(exist_ok=True)
        with written_text(folder / self.path.name) as places:
            for _, begin, end in zip(rows, self._ends, self._ends[1:], strict=False):
                places.write(f"{begin} {end - begin}\n")
        return [folder / self.path.name]
