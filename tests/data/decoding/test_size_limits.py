"""The budget of an image, and that of all threads together, which counts only large images."""

import io
import struct
import threading
import time
import zlib
from collections.abc import Callable

import numpy as np
import pytest

from lockstep.data.decoding import decode as decode_module
from lockstep.data.decoding import size_limits
from lockstep.data.decoding.augment import Square, decode_into
from lockstep.data.decoding.decode import check, check_frame, decode, decode_undamaged, header_size
from lockstep.data.decoding.file_parts import count_parts
from lockstep.data.decoding.size_limits import (
    MOST_BYTES_BESIDES,
    MOST_COMMENTS,
    MOST_HEADER_BYTES,
    MOST_PARTS,
    MOST_PIXELS,
    MOST_PIXELS_A_SIDE,
    MOST_PIXELS_IN_WHOLE,
    MOST_SCANS,
    MOST_SEGMENT_BYTES,
    MOST_SEGMENTS,
    MOST_SLOW_BYTES,
    USUAL,
    OverBudget,
    check_size,
    decoding,
)
from lockstep.inference.images import read_photo, read_square
from lockstep.recipes import Recipe
from tests.data.pictures import progressive_jpeg


def second(pixels: int, order: list[str]) -> threading.Thread:
    """Start a thread that decodes; return when it has begun, or waits for its turn."""

    def decode() -> None:
        with decoding(pixels):
            order.append("second")

    thread = threading.Thread(target=decode)
    thread.start()
    while thread.is_alive() and not decoding._changed._waiters:  # type: ignore[attr-defined]
        time.sleep(0)
    return thread


@pytest.mark.parametrize(
    ("first", "other", "order"),
    [
        (MOST_PIXELS - USUAL, USUAL + 1, ["first", "second"]),
        (MOST_PIXELS - USUAL - 1, USUAL + 1, ["second", "first"]),
        (MOST_PIXELS, USUAL, ["second", "first"]),
        (2 * MOST_PIXELS, USUAL + 1, ["first", "second"]),
    ],
    ids=["too many together", "as many as may be", "usual", "alone"],
)
def test_a_large_image_waits_for_room(first: int, other: int, order: list[str]) -> None:
    events: list[str] = []
    with decoding(first):
        thread = second(other, events)
        events.append("first")
    thread.join()
    assert events == order


def test_room_is_given_back_by_what_cannot_be_decoded() -> None:
    with pytest.raises(ValueError, match="damaged"), decoding(MOST_PIXELS):
        raise ValueError("damaged")
    assert decoding._pixels == 0


@pytest.mark.parametrize(
    ("height", "width", "size", "most", "message"),
    [
        (10_000, 10_000, 10**6, MOST_PIXELS_IN_WHOLE, None),
        (
            10_000,
            10_001,
            10**6,
            MOST_PIXELS_IN_WHOLE,
            "10001 x 10000 pixels are too many: at most 100,000,000 unless",
        ),
        (10_000, 10_001, 10**6, MOST_PIXELS, None),
        (13_378, 13_378, 10**8, MOST_PIXELS, "too many: at most 178,956,970; reduce"),
        (2048, 2048, 30, MOST_PIXELS_IN_WHOLE, None),
        (
            2048,
            2049,
            30,
            MOST_PIXELS_IN_WHOLE,
            "2049 x 2048 pixels are too many for a file of 30 bytes",
        ),
        (4096, 4096, 1024, MOST_PIXELS_IN_WHOLE, None),
        (MOST_PIXELS_A_SIDE, 90, 10**6, MOST_PIXELS_IN_WHOLE, None),
        (MOST_PIXELS_A_SIDE + 1, 1, 10**6, MOST_PIXELS_IN_WHOLE, "side: at most 1,048,576"),
        (1, MOST_PIXELS_A_SIDE + 1, 10**6, MOST_PIXELS_IN_WHOLE, "side: at most 1,048,576"),
    ],
)
def test_a_size_is_held_against_the_format_and_the_bytes(
    height: int, width: int, size: int, most: int, message: str | None
) -> None:
    if message is None:
        check_size(height, width, size, most)
        return
    with pytest.raises(ValueError, match=message):
        check_size(height, width, size, most)


def test_the_bound_of_a_jpeg_is_pillows() -> None:
    from PIL import Image

    assert Image.MAX_IMAGE_PIXELS is not None
    assert size_limits.MOST_PIXELS == 2 * Image.MAX_IMAGE_PIXELS


def plain(before: bytes = b"") -> bytes:
    """Return a JPEG with one scan, and `before` as its first segments."""
    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", (24, 16)).save(file, "JPEG")
    return file.getvalue()[:2] + before + file.getvalue()[2:]


@pytest.mark.parametrize("mode", ["RGB", "CMYK"])
@pytest.mark.parametrize("without_data", [False, True])
def test_a_jpeg_of_too_many_scans_is_refused_everywhere(mode: str, without_data: bool) -> None:
    out = np.empty((8, 8, 3), np.uint8)
    usual = {"RGB": 10, "CMYK": 18}[mode]  # as in libjpeg's own scripts
    decode(progressive_jpeg(mode, MOST_SCANS - usual, without_data))
    hostile = progressive_jpeg(mode, MOST_SCANS - usual + 1, without_data)
    square = Square((0, 0, 8, 8), (8, 8), (0, 0), flip=False)
    for use in (
        check,
        decode,
        decode_undamaged,
        lambda data: decode_into(data, (16, 24), square, out),
    ):
        with pytest.raises(OverBudget, match="more than 100 scans are too many"):
            use(hostile)
    assert header_size(hostile) == (0, 0) or mode == "CMYK"


PHOTO = progressive_jpeg(repeated=5)
THUMBNAIL = b"\xff\xe1" + (2 + len(PHOTO)).to_bytes(2, "big") + PHOTO
SCAN = PHOTO.index(b"\xff\xda") + 14


@pytest.mark.parametrize(
    ("data", "scans"),
    [
        (PHOTO, 15),
        (PHOTO[:2] + THUMBNAIL + PHOTO[2:], 15),
        (PHOTO + 20 * PHOTO, 15),  # a file of several photos, as cameras write them
        (plain(), 1),
        (memoryview(plain(THUMBNAIL)), 1),
        # libjpeg skips no segment that is not known
        (PHOTO[:SCAN] + b"\xff\x02\xff\xff" + PHOTO[SCAN:], 15),
    ],
    ids=range(6),
)
def test_scans_are_counted_as_libjpeg_reads_them(
    data: bytes | memoryview, scans: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_module, "MOST_SCANS", scans)
    assert check_frame(data)
    monkeypatch.setattr(decode_module, "MOST_SCANS", scans - 1)
    with pytest.raises(OverBudget, match=f"more than {scans - 1} scans are"):
        check_frame(data)


def test_scans_are_held_against_the_pixels() -> None:
    size = 2 * (13_377).to_bytes(2, "big")
    data = PHOTO.replace(struct.pack(">HH", 16, 24), size) + bytes(2**14)
    assert header_size(data) == (13_377, 13_377)
    scan = data[data.rindex(b"\xff\xda") : data.rindex(b"\xff\xd9")]
    end = data.rindex(b"\xff\xd9")
    check_frame(data[:end] + scan + data[end:])
    with pytest.raises(OverBudget, match="more than 16 scans of 13377 x 13377 pixels"):
        check_frame(data[:end] + 2 * scan + data[end:])


@pytest.mark.parametrize("mode", ["RGB", "CMYK"])
def test_pixels_limit_scans_everywhere(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """libjpeg-turbo opens RGB, Pillow CMYK."""
    data = progressive_jpeg(mode)
    height, width = check(data)
    monkeypatch.setattr(decode_module, "MOST_SCANNED_PIXELS", 4 * height * width)
    for read in (check, decode):
        with pytest.raises(OverBudget, match="more than 4 scans"):
            read(data)


@pytest.mark.parametrize("mode", ["RGB", "CMYK"])
def test_a_jpeg_of_many_segments_is_refused_before_they_are_parsed(mode: str) -> None:
    comment = b"\xff\xfe\x00\x02"
    data = progressive_jpeg(mode)
    check(data[:2] + 500 * comment + data[2:])
    for bad in (data[:2] + MOST_SEGMENTS * comment + data[2:], plain(MOST_SEGMENTS * comment)):
        with pytest.raises(OverBudget, match="more than 10,000 segments"):
            check(bad)


def test_a_file_of_many_bytes_and_few_pixels_is_refused() -> None:
    check_size(1, 1, MOST_BYTES_BESIDES)
    check_size(10_000, 10_000, 16 * 10**8)  # four channels of 32 bits
    with pytest.raises(OverBudget, match=r"67,108,881 bytes .* 1 x 1 pixels"):
        check_size(1, 1, MOST_BYTES_BESIDES + 17)


@pytest.mark.parametrize("kind", ["GIF", "PNG", "TIFF", "WEBP"])
def test_of_an_animation_the_first_frame_is_decoded(kind: str) -> None:
    from PIL import Image

    frames = [Image.new("RGB", (24, 16), (value, 0, 0)) for value in (255, *range(20))]
    file = io.BytesIO()
    frames[0].save(file, kind, save_all=True, append_images=frames[1:], lossless=True)
    first = np.asarray(frames[0])
    np.testing.assert_array_equal(decode(file.getvalue()), first)
    half = file.getvalue()[: len(file.getvalue()) // 2]
    if kind == "GIF":  # the others name what follows in the file's header
        np.testing.assert_array_equal(decode(half), first)


def image_file(kind: str) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.new("L" if kind == "GIF" else "RGB", (64, 64)).save(file, kind)
    return file.getvalue()


def png_of_chunks(chunks: int) -> bytes:
    """Return a PNG with empty chunks of an unknown kind, which Pillow reads one by one."""
    data = image_file("PNG")
    start = data.index(b"IDAT") - 4
    chunk = bytes(4) + b"xxXx" + zlib.crc32(b"xxXx").to_bytes(4, "big")
    return data[:start] + chunks * chunk + data[start:]


def tiff_of_tiles(tiles: int, order: str = "<", is_big: bool = False) -> bytes:
    """Return a TIFF of one row whose tiles of one pixel are all the same byte."""
    number = "Q" if is_big else "I"
    version = (43, 8, 0, 16) if is_big else (42, 8)
    start = {"<": b"II", ">": b"MM"}[order]
    start += struct.pack(order + ("HHHQ" if is_big else "HI"), *version)
    entry = order + "HH" + number + ("I4x" if is_big else "I")
    tags = {256: tiles, 257: 1, 258: 8, 259: 1, 262: 1, 277: 1, 322: 1, 323: 1}
    directory = struct.pack(order + ("Q" if is_big else "H"), len(tags) + 1)
    directory += b"".join(struct.pack(entry, tag, 4, 1, value) for tag, value in tags.items())
    next_directory = struct.pack(order + number, 0)
    end = len(start) + len(directory) + struct.calcsize(entry) + len(next_directory)
    directory += struct.pack(entry, 324, 4, tiles, end) + next_directory
    return start + directory + tiles * struct.pack(order + "I", 8)


def gif_with_comment(size: int) -> bytes:
    data = image_file("GIF")
    start = 13 + 3 * 2 ** (data[10] % 8 + 1)
    return data[:start] + b"!\xfe" + size // 2 * b"\1c" + b"\0" + data[start:]


def bmp_of_runs(runs: bytes) -> bytes:
    header = struct.pack("<IiiHHIIiiII", 40, 64, 64, 1, 8, 1, len(runs), 0, 0, 256, 0)
    return b"BM" + struct.pack("<IHHI", 0, 0, 0, 1078) + header + bytes(1024) + runs


@pytest.mark.parametrize(
    ("usual", "hostile", "message"),
    [
        (png_of_chunks(1000), lambda: png_of_chunks(MOST_PARTS), "262,144 parts"),
        (image_file("TIFF"), lambda: tiff_of_tiles(MOST_PARTS + 1), "262,144 parts"),
        (gif_with_comment(2000), lambda: gif_with_comment(MOST_HEADER_BYTES), "first 4,194,304"),
        (
            b"P6 #%b\n64 64 255\n" % bytes(1000) + bytes(3 * 64 * 64),
            lambda: b"P6 #%b\n64 64 255\n" % bytes(MOST_HEADER_BYTES) + bytes(3 * 64 * 64),
            "first 4,194,304",
        ),
        (
            b"P3 64 64 255 " + MOST_COMMENTS * b"#\n" + 3 * 64 * 64 * b"1 ",
            lambda: b"P3 64 64 255 " + (MOST_COMMENTS + 1) * b"#\n" + 3 * 64 * 64 * b"1 ",
            "1,000 comments",
        ),
        (
            b"P6 64 64 65535 " + bytes(6 * 64 * 64),
            lambda: b"P6 2048 1025 65535 " + bytes(6 * 2048 * 1025),
            "at most 2,097,152",
        ),
        (
            bmp_of_runs(64 * b"\x40\0\0\0"),
            lambda: bmp_of_runs(bytes(MOST_SLOW_BYTES)),
            "and 33,554,432",
        ),
    ],
    ids=["PNG", "TIFF", "GIF", "PPM's header", "PPM's comments", "PPM of 16 bits", "BMP"],
)
def test_small_parts_are_counted(usual: bytes, hostile: Callable[[], bytes], message: str) -> None:
    assert check(usual) == (64, 64)
    assert header_size(usual) == (64, 64)
    data = hostile()
    start = time.process_time()
    for decoder in (check, decode, decode_undamaged):
        with pytest.raises(OverBudget, match=message):
            decoder(data)
    header_size(data)
    assert time.process_time() - start < 30, "decoding all parts takes minutes"


@pytest.mark.parametrize(("order", "is_big"), [("<", False), (">", False), ("<", True)])
def test_the_tiles_of_a_tiff_are_counted(order: str, is_big: bool) -> None:
    data = tiff_of_tiles(100, order, is_big)
    assert check(data) == (1, 100)
    assert count_parts(data, MOST_PARTS) == 100
    assert count_parts(data[:40], MOST_PARTS) == 0


def test_a_jpeg_of_much_metadata_is_refused() -> None:
    segment = b"\xff\xe1\xff\xff" + bytes(2**16 - 3)
    check(plain(2 * segment))
    with pytest.raises(OverBudget, match="33,554,432 bytes of metadata"):
        check(plain((MOST_SEGMENT_BYTES // 2**16 + 1) * segment))


def strip(height: int, width: int, kind: str) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", (width, height), (90, 10, 20)).save(file, kind)
    return file.getvalue()


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
@pytest.mark.parametrize(("height", "width"), [(1, 30_000), (30_000, 1), (1, 257), (2, 513)])
def test_strips_are_refused_where_they_are_resized(height: int, width: int, kind: str) -> None:
    data = strip(height, width, kind)
    pixels = decode(data)
    recipe = Recipe(eval_resize=256, eval_crop=224)
    out = np.zeros((224, 224, 3), np.uint8)
    shorter = 256 / min(height, width)
    resized = (round(height * shorter), round(width * shorter))

    def evaluate(data: bytes) -> None:
        square = Square((0, 0, height, width), resized, (0, 0), flip=False)
        decode_into(data, (height, width), square, out)

    for use in (
        check,
        decode_undamaged,
        evaluate,
        lambda data: read_square(data, recipe, out),
        lambda _: read_square(pixels, recipe, out),
        lambda data: read_photo(data, recipe),
        lambda _: read_photo(pixels, recipe),
    ):
        with pytest.raises(OverBudget, match="at most 256 times the shorter"):
            use(data)


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_a_strip_within_the_limit_is_evaluated(kind: str) -> None:
    data = strip(1, 256, kind)
    recipe = Recipe(eval_resize=32, eval_crop=32)
    out = np.zeros((32, 32, 3), np.uint8)
    assert check(data) == (1, 256)
    read_square(data, recipe, out)
    assert np.abs(out.astype(int) - (90, 10, 20)).max() < 8
