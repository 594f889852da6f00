"""Read the images that are packed, and reduce them."""

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress

import cv2
import numpy as np
import simplejpeg

from lockstep.data.containers import Bytes, Sample
from lockstep.data.decoding.decode import check, check_ends, decode, header_size
from lockstep.data.decoding.file_parts import JPEG_START
from lockstep.data.decoding.orientation import UPRIGHT, add_orientation, read_orientation
from lockstep.data.packing.splits import Packing, Split
from lockstep.system.errors import DataError

TASK_BYTES = 2**21
"""The maximum that one task writes, unless a single image has more bytes."""


class _Memory(threading.local):
    """A buffer for images in each thread. It is reused, because memory from the system costs more
    than reading."""

    def __init__(self) -> None:
        # Other data may lie between the images.
        self.bytes = memoryview(bytearray(2 * TASK_BYTES))


_memory = _Memory()


def read_samples(split: Split, packing: Packing, numbers: Sequence[int]) -> Iterator[Sample]:
    """Yield samples, valid until the same thread asks for others. Bad images are not among them,
    but added to the split's faults."""
    labels = split.listing.rows["label"][numbers].tolist()
    classes = split.listing.classes
    for number, label, data in zip(numbers, labels, read_images(split, numbers), strict=True):
        split.check_bytes(number, data)
        try:
            if packing.resize:
                data = reduce_image(bytes(data), packing.resize, packing.quality)
            else:
                check_ends(data)
        except ValueError as error:
            split.faults.add(number, str(error))
            continue
        size = header_size(data) if packing.format == "tfrecord" else (0, 0)
        yield Sample(number, split.name_sample(number, data), label, classes[label], data, *size)


def read_images(split: Split, numbers: Sequence[int]) -> Iterable[Bytes]:
    """Return the bytes of images, valid as those of samples."""
    with suppress(OSError, ValueError):  # `_read` reports which of them cannot be read
        images = split.listing.read_together(numbers, _memory.bytes)
        if images is not None:
            return images
    return (_read(split, number) for number in numbers)


def _read(split: Split, number: int) -> bytes:
    try:
        return split.listing.read_encoded(number)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise DataError(
            f"{split.listing.source.root}/{split.listing.place(number)} cannot be read: {reason}. "
            "Put it back, or leave it out: lockstep data check --quarantine"
        ) from None


def reduce_image(data: bytes, shorter: int, quality: int) -> bytes:
    """Return an image as JPEG with its shorter side reduced to `shorter` pixels.

    A JPEG that is not larger is returned unchanged. EXIF data is left out but for the orientation.
    Raises `ValueError` with the reason if the image is damaged or beyond the budget.
    """
    # `decode` does not refuse a truncated file, but fills the missing part with grey.
    height, width = check(data)
    smaller = min(height, width)
    if data.startswith(JPEG_START) and smaller <= shorter:
        return data
    image = decode(data)
    if smaller > shorter:
        size = (round(width * shorter / smaller), round(height * shorter / smaller))
        image = cv2.resize(image, size, interpolation=cv2.INTER_AREA)
    reduced = simplejpeg.encode_jpeg(np.ascontiguousarray(image), quality, colorsubsampling="420")
    orientation = read_orientation(data)
    return reduced if orientation == UPRIGHT else add_orientation(reduced, orientation)
