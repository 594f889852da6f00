"""Messages of Protocol Buffers: their classes from a short notation, and the fields of a file."""

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from lockstep.system.errors import CheckpointError
from lockstep.system.regular_files import WEIGHTS, open_regular
from lockstep.weights.formats.lfs_pointers import read_whole

_MOST_BYTES = 2**31 - 1


def make_messages(package: str, messages: Mapping[str, str]) -> dict[str, Any]:
    """Return the classes of messages by name.

    `messages` has their fields: NAME=NUMBER:TYPE, with a star if it is repeated. A type may be the
    name of another message.
    """
    file = descriptor_pb2.FileDescriptorProto(
        name=f"{package}.proto", package=package, syntax="proto3"
    )
    for name, fields in messages.items():
        message = file.message_type.add(name=name)
        for label, number, kind, star in re.findall(r"(\w+)=(\d+):(\w+)(\*?)", fields):
            field = message.field.add(name=label, number=int(number))
            field.label = field.LABEL_REPEATED if star else field.LABEL_OPTIONAL
            if kind in messages:
                field.type = field.TYPE_MESSAGE
                field.type_name = f".{package}.{kind}"
            else:
                field.type = getattr(field, f"TYPE_{kind.upper()}")
                if not star:  # so that a false that a file says is written again
                    field.proto3_optional = True
                    field.oneof_index = len(message.oneof_decl)
                    message.oneof_decl.add(name=f"_{label}")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    classes = {}
    for name in messages:
        descriptor = pool.FindMessageTypeByName(f"{package}.{name}")
        classes[name] = message_factory.GetMessageClass(descriptor)
    return classes


def read_number(read: Any) -> int:
    """Return the next number, which is in seven bits a byte, the lowest first."""
    value = 0
    for shift in range(0, 64, 7):
        byte = read(1)
        if not byte:
            raise ValueError("the file ends in a number")
        value |= (byte[0] & 127) << shift
        if byte[0] < 128:
            return value
    raise ValueError("a number has more than 64 bits")


class Field(NamedTuple):
    """Where a field of a message is."""

    number: int
    kind: int
    """Its wire type: 0 is a number, 2 is bytes with their length."""
    begin: int
    content: int
    """Where its bytes begin."""
    end: int


def split_message(file: BinaryIO, begin: int, end: int) -> Iterator[Field]:
    """Yield the fields of a message in a file. Raises `ValueError` if it is damaged, or has fields
    of other wire types than 0 and 2."""
    while begin < end:
        file.seek(begin)
        number, kind = divmod(read_number(file.read), 8)
        length = read_number(file.read)
        content = file.tell()
        after = content + length * (kind == 2)
        if kind not in (0, 2) or after > end:
            raise ValueError(f"field {number} is damaged")
        yield Field(number, kind, begin, content, after)
        begin = after


def write_field(number: int, content: bytes) -> bytes:
    """Return a field, of a number of at most 15, that is bytes with their length."""
    size = len(content)
    head = bytearray([8 * number + 2])
    while size > 127:
        head.append(size & 127 | 128)
        size >>= 7
    return bytes([*head, size]) + content


def find_fields(path: Path, kinds: Mapping[int, int]) -> dict[int, int]:
    """Return where the first field of each number is in a file; empty if it has others than these.

    `kinds` are wire types by number.
    """
    places: dict[int, int] = {}
    try:
        size = path.stat().st_size
        with open_regular(path, WEIGHTS) as file:
            for field in split_message(file, 0, size):
                if kinds.get(field.number) != field.kind:
                    return {}
                places.setdefault(field.number, field.content)
    except (OSError, ValueError):
        return {}
    return places


def map_entries(entries: Iterable[Any]) -> dict[str, Any]:
    """Return repeated messages with a key and a value as a dict."""
    return {entry.key: entry.value for entry in entries}


def read_sizes(shape: Any) -> tuple[int, ...]:
    """Return the sizes in a message that is a shape."""
    return tuple(dim.size for dim in shape.dim)


def read_message(path: Path, what: str) -> bytes:
    """Return the bytes of a file that is a message: `what`. Raises `CheckpointError` if it cannot
    be read, or is larger than messages can be."""
    if path.is_file() and path.stat().st_size > _MOST_BYTES:
        raise CheckpointError(
            f"{path} has more than 2 GiB, which {what} cannot have; expected a smaller file"
        )
    return read_whole(path)
