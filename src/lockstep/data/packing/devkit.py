"""Read the labels of ImageNet's validation images from its development kit: a file of numbers, and
`meta.mat`, a MATLAB file of version 5 to 7, which says what they number."""

import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.data.decoding.image_formats import is_image_name
from lockstep.system.errors import DataError
from lockstep.system.regular_files import RECORDS, TEXT, read_regular, read_regular_text

_FIELDS = ("ILSVRC2012_ID", "WNID")
_COMPRESSED = 15
_MATRIX = 14
_MOST_BYTES = 2**26
_TEXTS = {1: "latin-1", 2: "latin-1", 4: "utf-16-le", 16: "utf-8", 17: "utf-16-le"}
"""The encodings of characters by the types of MATLAB's elements."""
_NUMBERS = {1: "b", 2: "B", 3: "h", 4: "H", 5: "i", 6: "I", 7: "f", 9: "d", 12: "q", 13: "Q"}
"""The formats of numbers by the types of MATLAB's elements."""


def read_ground_truth(
    path: Path, folder: Path, names: Sequence[str]
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield place, path and class of each image of a folder, in the order of their names.

    Raises `DataError` if there are more or fewer numbers than images, or `meta.mat` does not name a
    number.
    """
    classes = read_kit_classes(path.with_name("meta.mat"))
    numbers = read_regular_text(path, RECORDS, errors="replace").split()
    images = sorted(item.name for item in folder.glob("[!.]*") if is_image_name(item.name))
    if len(images) != len(numbers):
        raise DataError(
            f"{path} has {len(numbers)} numbers for {len(images)} images in {folder}; expected one"
            " for each. Name the folder of the validation images: --images FOLDER"
        )
    for line, (image, number) in enumerate(zip(images, numbers, strict=True), 1):
        place = f"{path}, line {line}"
        if number not in classes:
            raise DataError(f"{place}: meta.mat next to it has no class {number:.20}")
        yield place, {"path": image, "label": classes[number]}


def read_kit_classes(path: Path) -> dict[str, str]:
    """Return the names of ImageNet's classes (`n01440764`) by their numbers. Raises `DataError` if
    the file is missing or something else."""
    try:
        data = read_regular(path, TEXT)
        classes = dict(_read_classes(data[128:])) if data[126:128] == b"IM" else {}
    except (OSError, ValueError, struct.error, zlib.error, LookupError) as error:
        raise DataError(f"{path} cannot be read: {error}") from None
    if not classes:
        raise DataError(
            f"{path} is not a little-endian MATLAB file of version 5 to 7 with an array of"
            " structures that have the fields ILSVRC2012_ID and WNID"
        )
    return classes


def _read_classes(data: bytes) -> Iterator[tuple[str, str]]:
    for kind, content in _split_elements(data):
        if kind == _COMPRESSED:
            unpacked = zlib.decompressobj().decompress(content, _MOST_BYTES)
            kind, content = next(_split_elements(unpacked))
        parts = list(_split_elements(content)) if kind == _MATRIX else []
        if len(parts) < 5 or len(parts[3][1]) != 4:
            continue
        [length] = struct.unpack("<i", parts[3][1])  # of the names of fields
        text = parts[4][1]
        fields = (text[begin : begin + length] for begin in range(0, len(text), max(length, 1)))
        names = [field.partition(b"\0")[0].decode("latin-1") for field in fields]
        if set(_FIELDS) <= set(names):
            for first in range(5, len(parts), len(names)):
                number, name = (_read_value(parts[first + names.index(key)][1]) for key in _FIELDS)
                yield str(int(number)), str(name)


def _read_value(matrix: bytes) -> Any:
    """Return the text or the first number of an array."""
    kind, content = list(_split_elements(matrix))[3]
    is_text = matrix[8] == 4
    if is_text:
        return content.decode(_TEXTS[kind])
    return struct.unpack_from(f"<{_NUMBERS[kind]}", content)[0]


def _split_elements(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the types and the contents of elements that follow each other."""
    offset = 0
    while offset + 8 <= len(data):
        kind, length = struct.unpack_from("<II", data, offset)
        begin = offset + 8
        offset = begin + length
        if kind >> 16:  # a short one: its length is in the upper half of its type
            length = kind >> 16
            kind &= 0xFFFF
            begin -= 4
            offset = begin + 4
        elif kind != _COMPRESSED:
            offset += -length % 8
        if begin + length > len(data):
            raise ValueError("it ends too early")
        yield kind, data[begin : begin + length]
