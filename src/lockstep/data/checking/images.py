"""Decode, hash and compare all images."""

import errno
import hashlib
import io
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import PurePosixPath

import numpy as np
from PIL import Image

from lockstep.data.checking.findings import ERROR, KINDS, WARNING
from lockstep.data.checking.parts import FORMAT_OF, TOO_LARGE, Part, describe_error
from lockstep.data.decoding.decode import check
from lockstep.data.decoding.orientation import UPRIGHT, read_orientation
from lockstep.data.listing import ROW
from lockstep.system.machine import cores

_FORMATS = sorted(set(FORMAT_OF.values()))
_SIGNATURES = (b"\xff\xd8\xff", b"\x89PNG", b"GIF8")
_TRUNCATED = re.compile(r"premature end|truncated|reached eof|not enough image data", re.IGNORECASE)
_MOST_PIXELS_A_SIDE = int(np.iinfo(ROW["height"]).max)


def inspect_images(part: Part, smallest: int, advance: Callable[[int], None]) -> None:
    """Decode and hash the images of a split on all cores; call `advance` with the number of images
    done."""
    listing = part.listing
    wrong = {i for i, _, _ in part.of_images}

    def inspect(some: range) -> tuple[int, int, list[tuple[int, str, str]]]:
        size = 0
        found = []
        for i in part.kept[some.start : some.stop].tolist():
            try:
                data = listing.read_encoded(i)
            except OSError as error:
                found.append(
                    (
                        i,
                        "too-large" if error.errno == errno.EFBIG else "unreadable",
                        describe_error(error),
                    )
                )
                continue
            except ValueError as error:
                found.append((i, _kind_of(b"", str(error)), str(error)))
                continue
            size += len(data)
            part.hashes[i] = np.frombuffer(
                hashlib.blake2b(data, digest_size=16).digest(), np.uint64
            )
            problems = _problems(data, listing.name(i), smallest)
            part.sound[i] = i not in wrong and all(
                KINDS[kind].severity == WARNING for kind, _ in problems
            )
            found += [(i, kind, detail) for kind, detail in problems]
        return len(some), size, found

    # As in the index: one task for each image takes too much memory; an interruption does not wait
    # for tasks not begun.
    tasks = [
        range(first, min(first + 64, len(part.kept))) for first in range(0, len(part.kept), 64)
    ]
    with ThreadPoolExecutor(cores()) as pool, closing(pool.map(inspect, tasks)) as inspected:  # type: ignore[type-var]
        for done, size, found in inspected:
            part.total_bytes += size
            part.of_images += found
            advance(done)


def _problems(data: bytes, name: str, smallest: int) -> list[tuple[str, str]]:
    """Return kind and detail of every problem of an encoded image."""
    try:
        height, width = check(data)
    except ValueError as error:
        return [(_kind_of(data, str(error)), str(error))]
    size = f"{width} x {height} pixels"
    if max(height, width) > _MOST_PIXELS_A_SIDE:
        return [("too-large", f"{size} are too many")]
    problems = []
    (format, mode), orientation = _header(data), read_orientation(data)
    suffix = PurePosixPath(name).suffix
    if mode == "CMYK":
        problems.append(("cmyk", "CMYK"))
    if format and format != FORMAT_OF.get(suffix.lower(), format):
        problems.append(("another-format", f"{format} named {suffix}"))
    if orientation != UPRIGHT:
        problems.append(("rotated", f"orientation {orientation}"))
    if min(height, width) < smallest:
        problems.append(("tiny", size))
    return problems


def _kind_of(data: bytes, reason: str) -> str:
    """Return the kind of finding for an image that `check` refuses; `reason` is the message of
    `check`."""
    if reason == "empty file":
        return "empty"
    if TOO_LARGE.search(reason):
        return "too-large"
    if _TRUNCATED.search(reason):
        return "truncated"
    # Data that begins like an image was an image.
    return (
        "not-an-image"
        if reason.startswith("not an image") and not data.startswith(_SIGNATURES)
        else "damaged"
    )


def _header(data: bytes) -> tuple[str, str]:
    """Return format and mode of an image without decoding it; empty if they cannot be read."""
    try:
        with Image.open(io.BytesIO(data), formats=_FORMATS) as image:
            # MPO is a JPEG followed by other JPEGs, as cameras write them.
            return (image.format or "").replace("MPO", "JPEG"), image.mode
    except (
        Exception
    ):  # a damaged header makes Pillow raise almost anything; the image itself was decoded
        return "", ""


def compare_images(parts: list[Part]) -> None:
    """Find equal images. An image of val counts as the original, because a training image is easier
    to leave out."""
    parts = parts[::-1]
    sound = [np.flatnonzero(part.sound) for part in parts]
    owners = np.repeat(np.arange(len(parts)), [len(numbers) for numbers in sound])
    numbers = np.concatenate(sound)
    hashes = np.concatenate([part.hashes[some] for part, some in zip(parts, sound, strict=True)])
    order = np.lexsort((hashes[:, 1], hashes[:, 0]))  # stable: equal images stay in their order
    hashes = hashes[order]
    first = last = -1
    for at in np.flatnonzero((hashes[1:] == hashes[:-1]).all(axis=1)).tolist():
        if at != last:
            first = int(order[at])
        last = at + 1
        copy = int(order[last])
        mine = parts[owners[copy]]
        others = parts[owners[first]]
        i = int(numbers[copy])
        j = int(numbers[first])
        if mine is not others:
            kind = "in-train-and-val"
        elif mine.listing.rows["label"][i] != mine.listing.rows["label"][j]:
            kind = "duplicate-other-label"
        else:
            kind = "duplicate"
        mine.of_images.append((i, kind, others.listing.place(j)))


def check_usable(part: Part) -> None:
    """Add a problem if no image of the split can be used."""
    wrong = {i for i, kind, _ in part.of_images if KINDS[kind].severity == ERROR}
    if (
        part.format
        and len(wrong) == len(part.kept)
        and not any(kind == "no-images" for kind, _, _ in part.problems)
    ):
        part.problems.append(("no-images", ".", f"none of {len(part.listing)} images can be used"))
