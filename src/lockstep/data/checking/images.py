"""Decode, hash and compare all images."""

import errno
import hashlib
import io
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import PurePosixPath

import numpy as np
from PIL import Image

from lockstep.data.checking.findings import ERROR, FLAT, KINDS
from lockstep.data.checking.near_duplicates import (
    MOST_IMAGES,
    are_alike,
    find_candidates,
    hash_image,
)
from lockstep.data.checking.split_files import TOO_LARGE, ImageProblem, Part, describe_error
from lockstep.data.decoding.decode import check, decode, header_size
from lockstep.data.decoding.file_parts import sift_png
from lockstep.data.decoding.image_formats import FORMAT_OF, MISSING, readable_formats
from lockstep.data.decoding.orientation import UPRIGHT, read_orientation, turn_image
from lockstep.data.images import ROW, Names
from lockstep.data.inspection import run_in_ranges
from lockstep.data.split import hold_out
from lockstep.system.errors import DataError

_SIGNATURES = (b"\xff\xd8\xff", b"\x89PNG", b"GIF8")
_TRUNCATED = re.compile(r"premature end|truncated|reached eof|not enough image data", re.IGNORECASE)
_FEW_BLANK = 4
_MOST_DIFFERENCE = 2
"""The levels of a constant image's colours differ by at most this; lossy formats round."""
_MARGIN = 8
"""A level that is this near to 0 or 255 is nearly black or white."""
_SHARE = 0.99
"""The share of levels that are nearly black or white in such an image."""
_MOST_PIXELS_A_SIDE = int(np.iinfo(ROW["height"]).max)


def inspect_images(part: Part, smallest: int, advance: Callable[[int], None]) -> None:
    """Decode and hash the images of a split on all cores; call `advance` with the number of images
    done."""
    wrong = {i for i, _, _ in part.image_problems}

    def inspect(some: range) -> tuple[int, int, list[ImageProblem]]:
        size = 0
        problems: list[ImageProblem] = []
        for i in part.kept[some.start : some.stop].tolist():
            try:
                data = part.listing.read_encoded(i)
            except OSError as error:
                kind = "too-large" if error.errno == errno.EFBIG else "unreadable"
                problems.append((i, kind, describe_error(error)))
                continue
            except ValueError as error:
                problems.append((i, _find_kind(b"", str(error)), str(error)))
                continue
            size += len(data)
            digest = hashlib.blake2b(data, digest_size=16).digest()
            part.hashes[i] = np.frombuffer(digest, np.uint64)
            own = _find_problems(data, part.listing.name(i), smallest)
            has_error = any(KINDS[kind].severity == ERROR for kind, _ in own)
            part.sound[i] = i not in wrong and not has_error
            if not has_error:
                part.looks[i], blank = _look(data)
                own += [("blank", blank)] * bool(blank)
            problems += [(i, kind, detail) for kind, detail in own]
        return len(some), size, problems

    def finish(result: tuple[int, int, list[ImageProblem]]) -> None:
        images, size, problems = result
        part.total_bytes += size
        part.image_problems += problems
        advance(images)

    run_in_ranges(inspect, len(part.kept), finish)


def _find_problems(data: bytes, name: str, smallest: int) -> list[tuple[str, str]]:
    """Return kind and detail of every problem of an encoded image."""
    try:
        height, width = check(data)
    except ValueError as error:
        return [(_find_kind(data, str(error)), str(error))]
    size = f"{width} x {height} pixels"
    if max(height, width) > _MOST_PIXELS_A_SIDE:
        return [("too-large", f"{size} are too many")]
    problems = []
    format, mode = _read_header(data)
    orientation = read_orientation(data)
    suffix = PurePosixPath(name).suffix
    _, damaged = sift_png(data)
    if damaged:
        problems.append(("wrong-checksum", ", ".join(damaged)))
    if mode == "CMYK":
        problems.append(("cmyk", "CMYK"))
    if format and format != FORMAT_OF.get(suffix.lower(), format):
        problems.append(("another-format", f"{format} named {suffix}"))
    if orientation != UPRIGHT:
        problems.append(("rotated", f"orientation {orientation}"))
    if min(height, width) < smallest:
        problems.append(("tiny", size))
    return problems


def _look(data: bytes) -> tuple[np.ndarray, str]:
    """Return the hashes of what a sound image shows, and how it is blank; "" if it is not."""
    pixels = decode_small(data)
    is_blank = describe_flat_pixels(pixels) and describe_flat_pixels(decode(data))
    return hash_image(pixels), is_blank or ""


def describe_flat_pixels(pixels: np.ndarray) -> str:
    """Return "constant", "nearly black" or "nearly white" if an image, uint8 [height, width, 3], is
    that, else "". One that is constant and black is "constant"."""
    if np.ptp(pixels, axis=(0, 1)).max() <= _MOST_DIFFERENCE:
        return "constant"
    if (pixels <= _MARGIN).mean() >= _SHARE:
        return "nearly black"
    if (pixels >= 255 - _MARGIN).mean() >= _SHARE:
        return "nearly white"
    return ""


def decode_small(data: bytes) -> np.ndarray:
    """Return a sound image as it is shown, a JPEG reduced as far as 64 pixels are left."""
    shorter = min(header_size(data))
    reduction = max(factor for factor in (1, 2, 4, 8) if factor == 1 or shorter >= 64 * factor)
    return turn_image(decode(data, reduction), read_orientation(data))


def _find_kind(data: bytes, reason: str) -> str:
    """Return the kind of finding for an image that `check` refuses; `reason` is the message of
    `check`."""
    if reason == "empty file":
        return "empty"
    if reason in MISSING.values():
        return "needs-plug-in"
    if TOO_LARGE.search(reason):
        return "too-large"
    if _TRUNCATED.search(reason):
        return "truncated"
    # Data that begins like an image was an image.
    if reason.startswith("not an image") and not data.startswith(_SIGNATURES):
        return "not-an-image"
    return "damaged"


def _read_header(data: bytes) -> tuple[str, str]:
    """Return format and mode of an image without decoding it; empty if they cannot be read."""
    try:
        with Image.open(io.BytesIO(data), formats=readable_formats()) as image:
            # MPO is a JPEG followed by other JPEGs, as cameras write them.
            return (image.format or "").replace("MPO", "JPEG"), image.mode
    # A damaged header makes Pillow raise almost anything. The image itself was decoded.
    except Exception:
        return "", ""


def compare_images(parts: list[Part], share: float) -> None:
    """Find equal images. An image of val counts as the original, because a training image is easier
    to leave out. Of one part, `share` is held out for validation."""
    parts = parts[::-1]
    owners = np.repeat(np.arange(len(parts)), [part.sound.sum() for part in parts])
    sides = owners  # 0 is validation, or all
    where = ""
    if len(parts) == 1 and share:
        sides = _divide(parts[0], share)
        where = f", which is in the share of {share:g} that is held out for validation"
    numbers = np.concatenate([np.flatnonzero(part.sound) for part in parts])
    hashes = np.concatenate([part.hashes[part.sound] for part in parts])
    order = np.lexsort(
        (sides, hashes[:, 1], hashes[:, 0])
    )  # stable: equal images stay in their order
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
        detail = others.place(j)
        is_comparable = mine.listing.numbered == others.listing.numbered
        if is_comparable and len({_name_class(mine, i), _name_class(others, j)} - {""}) > 1:
            kind = "duplicate-other-label"
        elif sides[copy] != sides[first]:
            kind = "in-train-and-val"
        else:
            kind = "duplicate"
        if sides[copy] != sides[first]:
            detail += where
        mine.image_problems.append((i, kind, detail))


def _name_class(part: Part, number: int) -> str:
    """Return the name of an image's class; "" in a folder of images without classes."""
    label = int(part.listing.rows["label"][number])
    return part.listing.classes[label] if part.format != FLAT else ""


def _divide(part: Part, share: float) -> np.ndarray:
    """Return the side of each sound image, 0 for validation and 1 for training: int64 [images]. All
    are 0 if they have no names, so that none can be held out."""
    numbers = np.flatnonzero(part.sound)
    names = Names.of(part.listing.names[int(i)] for i in numbers)
    images = replace(part.listing, rows=part.listing.rows[numbers], names=names)
    try:
        return np.where(hold_out(images, share), 0, 1)
    except DataError:
        return np.zeros(len(numbers), int)


def compare_photos(training: Part, validation: Part) -> None:
    """Find training images that show the same photo as a validation image, and are not equal."""
    if len(training.listing) + len(validation.listing) > MOST_IMAGES:
        detail = f"more than {MOST_IMAGES:,} images are not compared"
        validation.problems.append(("not-compared", ".", detail))
        return
    looks = np.where(training.sound[:, None], training.looks, 0)
    copies = ("in-train-and-val", "duplicate-other-label")
    looks[[i for i, kind, _ in training.image_problems if kind in copies]] = 0
    candidates = find_candidates(looks, np.where(validation.sound[:, None], validation.looks, 0))
    numbers = sorted(candidates)

    def compare(some: range) -> list[ImageProblem]:
        alike: list[ImageProblem] = []
        for i in numbers[some.start : some.stop]:
            pixels = decode_small(training.listing.read_encoded(i))
            for j in candidates[i]:
                if are_alike(pixels, decode_small(validation.listing.read_encoded(j))):
                    alike.append((i, "near-duplicate", validation.place(j)))
                    break
        return alike

    run_in_ranges(compare, len(numbers), training.image_problems.extend)


def check_blank(part: Part) -> None:
    """Add a problem if more than a hundredth of the images are blank, and more than a few."""
    count = sum(kind == "blank" for _, kind, _ in part.image_problems)
    if count > max(_FEW_BLANK, len(part.kept) // 100):
        share = f"{100 * count / len(part.kept):.1f} %"
        part.problems.append(("many-blank", ".", f"{count} images, {share} of them"))


def check_usable(part: Part) -> None:
    """Add a problem if no image of the split can be used."""
    wrong = {i for i, kind, _ in part.image_problems if KINDS[kind].severity == ERROR}
    is_known = any(kind == "no-images" for kind, _, _ in part.problems)
    if part.format and len(wrong) == len(part.kept) and not is_known:
        part.problems.append(("no-images", ".", f"0 of {len(part.listing)} can be used"))
