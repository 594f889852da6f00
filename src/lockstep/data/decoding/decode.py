"""From encoded bytes to the pixels of a whole image: TurboJPEG for usual JPEGs, else Pillow.

EXIF orientation is not applied here: a turned photo stays as it is stored
(`lockstep.data.decoding.orientation`).
"""

import io
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import simplejpeg
from PIL import Image, ImageFile, UnidentifiedImageError

from lockstep.data.decoding import jpeg
from lockstep.data.decoding.file_parts import (
    JPEG_START,
    START_OF_SCAN,
    check_start,
    list_segments,
    sift_png,
)
from lockstep.data.decoding.image_formats import explain_unreadable, readable_formats
from lockstep.data.decoding.size_limits import (
    MOST_HEADER_BYTES,
    MOST_PIXELS,
    MOST_SCANNED_PIXELS,
    MOST_SCANS,
    MOST_SEGMENT_BYTES,
    MOST_SEGMENTS,
    OverBudget,
    TooManyPixels,
    check_bytes,
    check_ratio,
    check_size,
    check_slow_format,
    decoding,
)

# Warnings of libjpeg that do not affect pixels: bytes before a marker (a few files of ImageNet have
# them), and zeros where a baseline file should name all its coefficients.
_HARMLESS = ("extraneous bytes", "Invalid SOS parameters")
_HEADERS_IN_PYTHON = (b"G", b"P")  # GIF, PPM
_DECODERS_IN_PYTHON = ("bmp_rle", "ppm", "ppm_plain")
_JPEG_END = b"\xff\xd9"
_FAST = (0xC0, 0xC1, 0xC2)
"""Baseline, extended sequential and progressive JPEG, with Huffman coding. TurboJPEG and DALI get
only kinds that they are tested with. For a lossless JPEG, for example, TurboJPEG before
libjpeg-turbo 3.1.4 writes whole pixels to a buffer of reduced size."""
_BY_PILLOW = (0xC3, 0xC9, 0xCA)
"""Lossless; sequential and progressive with arithmetic coding."""
_NAMES = {0xC3: "lossless JPEG", 0xF7: "JPEG-LS"}
_FRAMES = {*range(0xC0, 0xD0), *_NAMES} - {0xC4, 0xCC}
"""The markers SOF0 to SOF15 (ITU-T T.81, table B.1) and that of JPEG-LS. The two others start
tables."""
_SEQUENTIAL = (0xC0, 0xC1, 0xC9)
"""The frames whose pixels are complete after one scan if it has all their colours; libjpeg refuses
a second one."""
_BITS = 8


def decode(data: bytes, reduction: int = 1) -> np.ndarray:
    """Return an image as uint8 RGB [height, width, 3]. Grey and CMYK are converted to RGB;
    transparency is dropped.

    A `reduction` of 2, 4 or 8 decodes a JPEG at that fraction of its size, rounded up.

    Raises `ValueError` with the reason if the bytes are not an image. A truncated or damaged JPEG
    is decoded as far as possible; use `check` to detect it.
    """
    size = _jpeg_size(data)
    if size is None:
        with _load_by_pillow(data) as image:
            return convert_to_rgb(image)
    height, width = (-(-side // reduction) for side in size)
    with decoding(height * width):
        return np.asarray(
            simplejpeg.decode_jpeg(
                data, min_height=height, min_width=width, min_factor=reduction, strict=False
            )
        )


def decode_undamaged(data: bytes) -> np.ndarray:
    """Return an image as `decode` does, decoded once. Raises `ValueError` for everything that
    `check` refuses.

    The array is valid until the same thread decodes again.
    """
    from lockstep.data.decoding.samples import check_last_rows

    if not data:
        raise ValueError("empty file")
    size = _jpeg_size(data)
    if size is None:
        whole = decode(data)  # Pillow finds damage
        check_ratio(*whole.shape[:2])
        check_last_rows(data, whole[-2:])
        return whole
    check_ratio(*size)
    # Our decoder reads up to the last pixel, and not whether the file ends there.
    if data.endswith(_JPEG_END):
        with decoding(size[0] * size[1]):
            pixels = jpeg.decode_window(data, size, (0, 0, *size))
        if pixels is not None:
            return pixels
    try:
        with decoding(size[0] * size[1]):
            return np.asarray(simplejpeg.decode_jpeg(data))
    except ValueError as error:
        if not any(words in str(error) for words in _HARMLESS):
            raise
    return decode(data)


def check(data: bytes) -> tuple[int, int]:
    """Decode all of an image and return its height and width.

    Raises `ValueError` with the reason if it is empty, truncated, damaged or not an image. JPEG has
    no checksums: damage that leaves its codes readable is not found.
    """
    if not data:
        raise ValueError("empty file")
    size = _jpeg_size(data)
    if size is None:
        return _check_by_pillow(data)
    check_ratio(*size)
    try:
        # At an eighth of the size, all of the file is still read and entropy-decoded, at two thirds
        # of the cost. For a progressive JPEG, the coefficients of all its pixels are in memory.
        with decoding(size[0] * size[1]):
            simplejpeg.decode_jpeg(data, min_height=1, min_width=1)
    except ValueError as error:
        if not any(words in str(error) for words in _HARMLESS):
            raise
    return size


def check_ends(data: bytes | memoryview) -> None:
    """Raise `ValueError` as `check` does, but decode a JPEG only if its last bytes are not the
    marker that ends it.

    Most JPEGs cost little more than reading them. Damage within a JPEG is not found.
    """
    if data[-2:] != _JPEG_END or _jpeg_size(data) is None:
        check(bytes(data))


def is_plain_jpeg(data: bytes) -> bool:
    """Return whether the bytes are a JPEG that TurboJPEG and DALI may decode; False if Pillow
    decodes it or it is refused."""
    try:
        return _jpeg_size(data) is not None
    except ValueError:
        return False


def header_size(data: bytes | memoryview) -> tuple[int, int]:
    """Return height and width from an image's header; (0, 0) if the bytes are not an image."""
    try:
        size = _jpeg_size(data)
        if size is not None:
            return size
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            width, height = open_by_pillow(data, [b"IHDR"]).size
    except Exception:  # a damaged file makes Pillow's readers raise almost anything
        return 0, 0
    return height, width


def _jpeg_size(data: bytes | memoryview) -> tuple[int, int] | None:
    """Return height and width if the bytes are a JPEG for TurboJPEG; None if Pillow is to decode
    them. Raises `ValueError` for a JPEG that neither decodes."""
    if data[:2] != JPEG_START or not check_frame(data):
        return None
    try:
        height, width, colours, _ = simplejpeg.decode_jpeg_header(data)
    # Damaged, or valid but rare: TurboJPEG lacks some chroma sampling ratios, and simplejpeg lacks
    # TurboJPEG's 4:4:1.
    except (ValueError, KeyError):
        return None
    return (height, width) if colours in ("RGB", "YCbCr", "Gray") else None


def check_frame(data: bytes | memoryview) -> bool:
    """Return whether TurboJPEG and DALI may decode a JPEG; False if Pillow is to decode it, at its
    whole size, or to report that it is damaged. Only markers are read.

    Raises `ValueError` with the kind of a JPEG that neither decodes, and for more than one frame,
    of which decoders might choose different ones. Raises `OverBudget` if there are more pixels,
    scans, pixels times scans, segments, or bytes of them, than allowed.
    """
    code = scans = segment_bytes = 0
    header = b""
    most = MOST_SCANS
    pixels = ""
    for number, (marker, start, end) in enumerate(list_segments(data), 1):
        segment_bytes += end - start + 2
        if number > MOST_SEGMENTS or segment_bytes > MOST_SEGMENT_BYTES:
            raise OverBudget(
                f"more than {MOST_SEGMENTS:,} segments or {MOST_SEGMENT_BYTES:,} bytes of metadata"
                " are too many; save the image again"
            )
        if marker == START_OF_SCAN:
            scans += 1
            if scans > most:
                raise OverBudget(
                    f"more than {most} scans{pixels} are too many; save the image again"
                )
            if scans == 1 and code in _SEQUENTIAL and data[start : start + 1] == header[5:]:
                break
        elif marker in _FRAMES and not scans:
            if code:
                raise ValueError("a JPEG with more than one frame; save the image again")
            code = marker
            header = bytes(data[start : start + 6]).ljust(6, b"\0")
            height, width = (int.from_bytes(header[at : at + 2], "big") for at in (1, 3))
            check_size(height, width, len(data), MOST_PIXELS)
            if height * width * most > MOST_SCANNED_PIXELS:
                most = MOST_SCANNED_PIXELS // (height * width)
                pixels = f" of {width} x {height} pixels"
    if code and (code not in _FAST + _BY_PILLOW or header[0] != _BITS):
        raise ValueError(
            f"a {_NAMES.get(code, 'JPEG')} (marker 0xFF{code:02X}) with {header[0]} bits per sample"
            " is not supported; expected 8 bits, and a baseline, progressive or lossless JPEG; save"
            " the image as PNG"
        )
    return code in _FAST


def _check_by_pillow(data: bytes) -> tuple[int, int]:
    from lockstep.data.decoding.samples import check_last_rows

    with _load_by_pillow(data) as image:
        # A pixel tests the conversion; converting all of them takes twice the memory.
        convert_to_rgb(image.crop((0, 0, 1, 1)), image)
        check_ratio(image.height, image.width)
        rows = image.crop((0, max(image.height - 2, 0), image.width, image.height))
        check_last_rows(data, np.asarray(rows))
        return image.height, image.width


def convert_to_rgb(image: Image.Image, source: Image.Image | None = None) -> np.ndarray:
    """Return a loaded Pillow image as uint8 RGB [height, width, 3], as `decode` does. Its `info`
    may change. `source` is the image as it was opened, if `image` was made of it.

    Raises `ValueError` if its values have no known range.
    """
    from lockstep.data.decoding.samples import scale_grey

    image = scale_grey(image, source or image)
    image.info.pop("transparency", None)  # otherwise Pillow warns that it is dropped
    return np.asarray(image if image.mode == "RGB" else image.convert("RGB"))


def open_by_pillow(data: bytes | memoryview, chunks: Sequence[bytes] = ()) -> ImageFile.ImageFile:
    """Return an image whose pixels are not loaded, a PNG with all undamaged chunks or some only.

    Raises `OverBudget`, `ValueError` as `sift_png` does, and Pillow's own errors.
    """
    check_bytes(data)
    data, _ = sift_png(data, chunks)
    if len(data) > MOST_HEADER_BYTES and data[:1] in _HEADERS_IN_PYTHON:
        try:
            Image.open(io.BytesIO(data[:MOST_HEADER_BYTES]), formats=readable_formats())
        except Exception:  # a damaged file makes Pillow's readers raise almost anything
            raise OverBudget(
                f"no image within the first {MOST_HEADER_BYTES:,} bytes; save the image again"
            ) from None
    return Image.open(io.BytesIO(data), formats=readable_formats())


@contextmanager
def _load_by_pillow(data: bytes) -> Iterator[Image.Image]:
    """Yield an image with its pixels loaded. Errors in the block are raised as `ValueError`."""
    from lockstep.data.decoding.samples import check_tiff, load_colours, read_tiff_tags

    try:
        check_start(data)
        image = open_by_pillow(data)
        check_size(image.height, image.width, len(data))
        if image.tile and image.tile[0][0] in _DECODERS_IN_PYTHON:
            check_slow_format(data, image.height * image.width)
        with decoding(image.height * image.width):
            check_tiff(getattr(image, "tag_v2", {}))
            load_colours(image, lambda: open_by_pillow(data))
            yield image
    except UnidentifiedImageError:
        check_tiff(read_tiff_tags(data), is_readable=False)
        raise ValueError(explain_unreadable(data)) from None
    except OverBudget:
        raise
    except Image.DecompressionBombError as error:
        raise TooManyPixels(str(error)) from None
    except Exception as error:  # a damaged file makes Pillow's readers raise almost anything
        raise ValueError(str(error) or type(error).__name__) from None
