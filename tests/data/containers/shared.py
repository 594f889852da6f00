"""Images, files with images, and checks of damaged files, for the tests of all formats."""

import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType

from hypothesis import strategies as st

from lockstep.data.containers import Damage, Sample, Stored
from lockstep.data.containers.places import Places

MAGIC = bytes.fromhex("0a23d7ce")
"""RecordIO's magic number."""

PIECES = st.sampled_from([MAGIC, MAGIC[:3], b"\0", b"\0" * 4, b"ustar", b"."])
PAYLOADS = st.lists(st.binary(max_size=70) | st.lists(PIECES, max_size=9).map(b"".join), max_size=6)
"""Payloads that are empty, that have lengths of every residue, and that have magic numbers at any
place."""


def sample(number: int, label: int, data: bytes) -> Sample:
    """Return a sample of 20 x 30 pixels with `data` as its image."""
    return Sample(number, f"class {label}/{number}.JPEG", label, f"class {label}", data, 20, 30)


def unlike(length: int, seed: int) -> bytes:
    """Return random bytes, in which no format finds anything of its own."""
    return random.Random(seed).randbytes(length)


def five(separator: bytes = b"\x01\x02\x03\x04") -> list[Sample]:
    """Return five samples of different lengths; one has `separator` in the middle, at a multiple of
    4 after 24 bytes."""
    images = [unlike(length, length) for length in (301, 150, 402, 275, 333)]
    images[2] = images[2][:200] + separator + images[2][204:]
    return [
        sample(i, label, image)
        for i, (label, image) in enumerate(zip((3, 0, 12, 7, 3), images, strict=True))
    ]


def rows(samples: Sequence[Sample]) -> list[tuple[int, int, str]]:
    return [(item.number, item.label, item.name) for item in samples]


def write(format: ModuleType, path: Path, samples: Sequence[Sample]) -> Path:
    """Write a file of samples and the files that describe it; continue a file that an interrupted
    writer left."""
    with format.Writer(path) as writer:
        writer.extend(map(writer.record, samples[writer.written :]))
        writer.describe(rows(samples))
        writer.finish()
    return path


def read(format: ModuleType, path: Path, item: Stored) -> bytes:
    """Read an image as the loader does: by its offset."""
    file = Places(path)
    return (
        format.image_in_parts(file, item.offset)
        if item.in_parts
        else file.read(item.offset, item.length)
    )


def list_images(format: ModuleType, path: Path) -> list[tuple[bytes, int]]:
    """Return image and label of all images in a file, which must have no damage."""
    items = list(format.scan_images(path))
    assert not [item for item in items if isinstance(item, Damage)]
    items = [item for item in items if isinstance(item, Stored)]
    images = [read(format, path, item) for item in items]
    assert [len(image) for image in images] == [item.length for item in items]
    return [(image, item.label) for image, item in zip(images, items, strict=True)]


def check_damaged(
    format: ModuleType, path: Path, samples: Sequence[Sample]
) -> tuple[list[int], list[Damage]]:
    """List a damaged file; return the numbers of the samples that are still listed, and the damage.

    Every listed image must be one of the samples, with its label, once and in their order. All
    damage must lie in the file, and its reason must name a byte.
    """
    items = list(format.scan_images(path))
    size = path.stat().st_size
    damages = [item for item in items if isinstance(item, Damage)]
    for damage in damages:
        assert 0 <= damage.begin < damage.end <= size
        assert re.search(r"\bbyte \d+", damage.reason)
    known = {(item.data, item.label): item.number for item in samples}
    numbers = [
        known[read(format, path, item), item.label] for item in items if isinstance(item, Stored)
    ]
    assert numbers == sorted(set(numbers))
    return numbers, damages


def flips(
    data: bytes, skipped: Sequence[range] = (), stride: int = 1
) -> Iterator[tuple[int, bytes]]:
    """Yield every `stride`-th place outside `skipped`, and the file with one, several or all bits
    of that byte flipped."""
    within = {i for item in skipped for i in item}
    for i in range(0, len(data), stride):
        if i not in within:
            mask = (1 << i % 8, 0x5A, 0xFF)[i // stride % 3]
            yield i, data[:i] + bytes([data[i] ^ mask]) + data[i + 1 :]


def shifts(data: bytes, amounts: Sequence[int], stride: int) -> Iterator[tuple[range, bytes]]:
    """Yield the changed range, and the file with bytes removed, or zeros or others added, at every
    `stride`-th place."""
    for i in range(0, len(data), stride):
        for amount in amounts:
            yield range(i, min(i + amount, len(data))), data[:i] + data[i + amount :]
            yield range(i, i + 1), data[:i] + bytes(amount) + data[i:]
            yield range(i, i + 1), data[:i] + unlike(amount, i) + data[i:]


def continue_cut(
    format: ModuleType, folder: Path, samples: Sequence[Sample], stride: int = 1
) -> Iterator[tuple[Path, Path]]:
    """Write samples; then, for every `stride`-th byte, continue a file that is cut there. Yield the
    whole and the continued file each time.
    """
    whole = write(format, folder / "whole", samples)
    data = whole.read_bytes()
    for cut in range(0, len(data) + 1, stride):
        path = folder / "cut"
        path.with_name("cut.partial").write_bytes(data[:cut])
        assert path.with_name(f"{path.name}.partial").exists()
        yield whole, write(format, path, samples)
