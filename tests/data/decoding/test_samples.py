"""Samples of every depth against v * 255 / max in closed form, and the checksums of PNG."""

import io
import struct
import zlib
from collections.abc import Sequence

import cv2
import numpy as np
import pytest
from PIL import Image

from lockstep.data.checking.images import describe_flat_pixels
from lockstep.data.decoding.decode import check, decode, decode_undamaged, header_size
from lockstep.data.decoding.file_parts import sift_png
from lockstep.inference.images import read_photo
from lockstep.recipes import Recipe
from tests.data.pictures import encode, picture

HEIGHT = 40
WIDTH = 48
RAMP = np.arange(HEIGHT * WIDTH).reshape(HEIGHT, WIDTH)
BLACK, WHITE = 1, 0  # what zero is: TIFF's photometric interpretations are 1 and 0
RGB = 2
UNSIGNED, SIGNED, FLOAT, COMPLEX = 1, 2, 3, 6


def tiff(
    samples: bytes,
    bits: int,
    kind: int = UNSIGNED,
    photometric: int = BLACK,
    order: str = "<",
    count: int = 1,
    planar: int = 1,
    tiles: Sequence[int] = (),
) -> bytes:
    """Return an uncompressed TIFF, written from the specification, of one strip or of tiles."""
    tags = {256: WIDTH, 257: HEIGHT, 258: bits, 259: 1, 262: photometric, 273: 8, 277: count}
    tags |= {278: HEIGHT, 279: len(samples), 284: planar, 339: kind}
    samples += bytes(len(samples) % 2)
    if tiles:
        del tags[273], tags[278], tags[279]
        tags |= {322: 32, 323: 32, 324: 8 + len(samples)}
        samples += struct.pack(f"{order}{len(tiles)}I", *tiles)
    directory = struct.pack(order + "H", len(tags))
    for tag, value in sorted(tags.items()):
        values = len(tiles) if tag == 324 else 1
        directory += struct.pack(order + "HHII", tag, 4, values, value)
    start = {"<": b"II*\0", ">": b"MM\0*"}[order] + struct.pack(order + "I", 8 + len(samples))
    return start + samples + directory + bytes(4)


def pack_bits(values: np.ndarray, bits: int) -> bytes:
    """Return values of a few bits, each row from a new byte."""
    places = np.arange(bits)[::-1]
    return np.packbits((values[..., None] >> places & 1).reshape(len(values), -1), axis=1).tobytes()


def scaled(values: np.ndarray, highest: int) -> np.ndarray:
    """Return what the pixels must be: values are grey, or have colours as their last axis."""
    levels = np.rint(values.astype(np.int64) * 255 / highest).astype(np.uint8)
    return levels if levels.ndim == 3 else levels[:, :, None].repeat(3, 2)


@pytest.mark.parametrize("zero", [BLACK, WHITE])
@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_grey_of_few_bits_is_scaled_by_its_own_depth(bits: int, zero: int) -> None:
    values = RAMP % 2**bits
    data = tiff(pack_bits(values, bits), bits, photometric=zero)
    highest = 2**bits - 1
    shown = values if zero == BLACK else highest - values
    np.testing.assert_array_equal(decode(data), scaled(shown, highest))
    np.testing.assert_array_equal(decode_undamaged(data), scaled(shown, highest))


def test_grey_of_12_bits_is_scaled_by_its_own_depth() -> None:
    values = RAMP * 37 % 4096
    np.testing.assert_array_equal(decode(tiff(pack_bits(values, 12), 12)), scaled(values, 4095))


WIDE = RAMP * 34 + 3


@pytest.mark.parametrize(("order", "zero"), [("<", BLACK), (">", BLACK), ("<", WHITE)])
def test_grey_of_16_bits_is_scaled_to_the_nearest_level(order: str, zero: int) -> None:
    data = tiff(WIDE.astype(order + "u2").tobytes(), 16, photometric=zero, order=order)
    shown = WIDE if zero == BLACK else 65535 - WIDE
    np.testing.assert_array_equal(decode(data), scaled(shown, 65535))
    pixels = read_photo(Image.open(io.BytesIO(data)), Recipe())
    np.testing.assert_array_equal(pixels, scaled(shown, 65535))


COLOURS = np.stack([WIDE, WIDE[::-1], WIDE[:, ::-1]], 2)


@pytest.mark.parametrize("order", "<>")
@pytest.mark.parametrize("count", [3, 4])
def test_colours_of_16_bits_are_scaled_to_the_nearest_level(order: str, count: int) -> None:
    samples = np.dstack([COLOURS, WIDE])[:, :, :count].astype(order + "u2")
    data = tiff(samples.tobytes(), 16, photometric=RGB, order=order, count=count)
    np.testing.assert_array_equal(decode(data), scaled(COLOURS, 65535))


@pytest.mark.parametrize("channels", [1, 3, 4])
@pytest.mark.parametrize("suffix", [".png", ".tif"])
def test_opencvs_16_bits_become_the_nearest_level(channels: int, suffix: str) -> None:
    samples = np.dstack([COLOURS[:, :, ::-1], WIDE])[:, :, :channels].astype(np.uint16)
    expected = COLOURS if channels > 1 else COLOURS[:, :, 2]
    data = cv2.imencode(suffix, samples)[1].tobytes()
    np.testing.assert_array_equal(decode(data), scaled(expected, 65535))


def test_overhanging_tiles_are_scaled() -> None:
    # tiles of 32 x 32 pixels, of an image of 48 x 40
    padded = np.pad(COLOURS, ((0, 24), (0, 16), (0, 0))).astype("<u2")
    tiles = b"".join(
        padded[top : top + 32, left : left + 32].tobytes() for top in (0, 32) for left in (0, 32)
    )
    size = len(tiles) // 4
    data = tiff(tiles, 16, photometric=RGB, count=3, tiles=[8 + i * size for i in range(4)])
    np.testing.assert_array_equal(decode(data), scaled(COLOURS, 65535))


def png(
    samples: bytes, depth: int, colour: int, *chunks: tuple[bytes, bytes], rows: int = HEIGHT
) -> bytes:
    """Return a PNG, written from the specification, with chunks before its pixels, and some rows of
    them."""
    pixels = np.frombuffer(samples, np.uint8).reshape(HEIGHT, -1)[:rows]
    filtered = np.pad(pixels, ((0, 0), (1, 0))).tobytes()
    header = struct.pack(">IIBBBBB", WIDTH, HEIGHT, depth, colour, 0, 0, 0)
    data = b"\x89PNG\r\n\x1a\n"
    for name, body in (
        (b"IHDR", header),
        *chunks,
        (b"IDAT", zlib.compress(filtered)),
        (b"IEND", b""),
    ):
        data += struct.pack(">I", len(body)) + name + body
        data += struct.pack(">I", zlib.crc32(name + body))
    return data


def test_grey_with_transparency_of_16_bits_is_scaled_to_the_nearest_level() -> None:
    samples = np.stack([WIDE, WIDE[::-1]], 2).astype(">u2").tobytes()
    np.testing.assert_array_equal(decode(png(samples, 16, 4)), scaled(WIDE, 65535))


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_a_png_of_few_bits_is_scaled_by_its_own_depth(bits: int) -> None:
    values = RAMP % 2**bits
    data = png(pack_bits(values, bits), bits, 0)
    np.testing.assert_array_equal(decode(data), scaled(values, 2**bits - 1))


@pytest.mark.parametrize("highest", [1, 100, 255, 1023, 65535])
@pytest.mark.parametrize("letter", [b"P5", b"P6"])
def test_a_ppm_is_scaled_by_its_own_highest_value(letter: bytes, highest: int) -> None:
    values = (WIDE if letter == b"P5" else COLOURS) % (highest + 1)
    samples = values.astype(">u2" if highest > 255 else np.uint8).tobytes()
    data = b"%b %d %d %d\n%b" % (letter, WIDTH, HEIGHT, highest, samples)
    np.testing.assert_array_equal(decode(data), scaled(values, highest))


REFUSED = {
    "int8": (np.int8, SIGNED, 1, "signed integers of 8 bits"),
    "int16": (np.int16, SIGNED, 1, "signed integers of 16 bits"),
    "int32": (np.int32, SIGNED, 1, "signed integers of 32 bits"),
    "uint32": (np.uint32, UNSIGNED, 1, "unsigned integers of 32 bits"),
    "uint64": (np.uint64, UNSIGNED, 1, "unsigned integers of 64 bits"),
    "float16": (np.float16, FLOAT, 1, "floating-point numbers of 16 bits"),
    "float32": (np.float32, FLOAT, 1, "floating-point numbers of 32 bits"),
    "float64": (np.float64, FLOAT, 1, "floating-point numbers of 64 bits"),
    "complex64": (np.complex64, COMPLEX, 1, "complex numbers of 64 bits"),
    "RGB float32": (np.float32, FLOAT, 3, "floating-point numbers of 32 bits"),
    "RGB int16": (np.int16, SIGNED, 3, "signed integers of 16 bits"),
}


@pytest.mark.parametrize("order", "<>")
@pytest.mark.parametrize("name", REFUSED)
def test_samples_of_no_known_range_are_refused_by_name(name: str, order: str) -> None:
    kind, format, count, message = REFUSED[name]
    values = (RAMP % 100).astype(np.dtype(kind).newbyteorder(order)).repeat(count, 1)
    bits = values.itemsize * 8
    photometric = RGB if count == 3 else BLACK
    data = tiff(values.tobytes(), bits, format, photometric, order, count)
    for use in (check, decode, decode_undamaged):
        with pytest.raises(ValueError, match=f"TIFF of {message}.* save it as PNG"):
            use(data)


@pytest.mark.parametrize("compression", [1, 8])
def test_planes_of_16_bits_are_refused_by_name(compression: int) -> None:
    samples = np.moveaxis(COLOURS, 2, 0).astype("<u2").tobytes()
    data = tiff(samples, 16, photometric=RGB, count=3, planar=2)
    # Pillow rounds compressed ones down.
    data = data.replace(
        struct.pack("<HHII", 259, 4, 1, 1), struct.pack("<HHII", 259, 4, 1, compression)
    )
    with pytest.raises(ValueError, match=f"planar configuration 2, compression {compression}"):
        decode(data)


@pytest.mark.parametrize(
    ("start", "message"),
    [(b"II+\0\x08\0\0\0", "TIFF of floating-point numbers of 64 bits"), (b"MM\0+", "big-endian")],
)
def test_a_bigtiff_that_pillow_does_not_read_is_refused_by_name(start: bytes, message: str) -> None:
    tags = ((256, 1, WIDTH), (257, 1, HEIGHT), (258, 1, 64), (262, 1, BLACK), (339, 1, FLOAT))
    data = start + struct.pack("<QQ", 16, len(tags))
    for tag, count, value in tags:
        data += struct.pack("<HHQQ", tag, 4, count, value)
    with pytest.raises(ValueError, match=message):
        decode(data + bytes(8))


@pytest.mark.parametrize("kind", [np.float32, np.int32])
def test_an_image_of_pillow_without_a_known_range_is_refused(kind: type) -> None:
    with pytest.raises(ValueError, match="32 bits, is not supported"):
        read_photo(Image.fromarray((RAMP % 256).astype(kind)), Recipe())


GREY = (RAMP % 256).astype(np.uint8)
TEXT = (b"tEXt", b"Comment\0something")
PNG = png(GREY.tobytes(), 8, 0, TEXT)


def change(data: bytes, name: bytes) -> bytes:
    """Return a PNG with a changed checksum of a chunk."""
    place = data.index(name)
    (length,) = struct.unpack_from(">I", data, place - 4)
    place += 4 + length
    return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]


@pytest.mark.parametrize("name", [b"IHDR", b"IDAT", b"IEND"])
def test_a_wrong_checksum_of_a_critical_chunk_refuses_a_png(name: bytes) -> None:
    data = change(PNG, name)
    for use in (check, decode, decode_undamaged):
        with pytest.raises(ValueError, match=f"checksum of a PNG's chunk {name.decode()} is wrong"):
            use(data)
    assert header_size(data) == ((0, 0) if name == b"IHDR" else (HEIGHT, WIDTH))


def test_half_a_png_of_zeros_is_refused() -> None:
    noise = np.random.default_rng(0).integers(0, 9, GREY.shape, np.uint8)
    data = png((GREY // 2 + noise).tobytes(), 8, 0)
    with pytest.raises(ValueError, match="chunk IDAT is wrong"):
        check(data[: len(data) // 2] + bytes(len(data) - len(data) // 2))


PROFILE = (b"iCCP", b"x\0\0" + zlib.compress(b"profile"))


@pytest.mark.parametrize("chunk", [TEXT, PROFILE], ids=["tEXt", "iCCP"])
def test_a_wrong_checksum_of_an_ancillary_chunk_is_listed(chunk: tuple[bytes, bytes]) -> None:
    data = change(png(GREY.tobytes(), 8, 0, chunk), chunk[0])
    np.testing.assert_array_equal(decode(data), scaled(GREY, 255))
    assert check(data) == header_size(data) == header_size(memoryview(data)) == (HEIGHT, WIDTH)
    assert sift_png(data) == (png(GREY.tobytes(), 8, 0), [chunk[0].decode()])
    assert sift_png(PNG) == (PNG, [])
    assert sift_png(b"no PNG") == (b"no PNG", [])


def test_a_png_without_its_end_is_decoded() -> None:
    np.testing.assert_array_equal(decode(PNG[:-12]), scaled(GREY, 255))

    flat = png(np.zeros_like(GREY).tobytes(), 8, 0)[:-12]
    assert check(flat) == (HEIGHT, WIDTH)


APPLE = (b"CgBI", bytes(4))
PALETTE = (b"PLTE", bytes(range(255, -1, -1)) * 3)


@pytest.mark.parametrize(
    ("colour", "chunks"),
    [(0, [APPLE]), (3, []), (3, [TEXT]), (3, [PALETTE, PALETTE]), (3, [(b"plTE", PALETTE[1])])],
    ids=["unknown", "no palette", "text alone", "two palettes", "no real palette"],
)
def test_what_libpng_refuses_is_refused(colour: int, chunks: list[tuple[bytes, bytes]]) -> None:
    data = png(GREY.tobytes(), 8, colour, *chunks)
    assert cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_UNCHANGED) is None
    for use in (check, decode, decode_undamaged):
        with pytest.raises(ValueError, match="critical chunks must be"):
            use(data)
    with_palette = png(GREY.tobytes(), 8, 3, TEXT, PALETTE, TEXT)
    read = cv2.imdecode(np.frombuffer(with_palette, np.uint8), cv2.IMREAD_COLOR_RGB)
    np.testing.assert_array_equal(decode_undamaged(with_palette), read)


@pytest.mark.parametrize("rows", [1, HEIGHT - 1])
@pytest.mark.parametrize("value", [0, 200])
def test_a_png_that_lacks_rows_is_refused(rows: int, value: int) -> None:
    grey = np.full_like(GREY, value)
    whole = png(grey.tobytes(), 8, 0)
    assert check(whole) == decode_undamaged(whole).shape[:2] == (HEIGHT, WIDTH)
    part = png(grey.tobytes(), 8, 0, rows=rows)
    for use in (check, decode_undamaged):
        with pytest.raises(ValueError, match="not enough image data"):
            use(part)


PHOTO = picture(np.random.default_rng(0), 64, 96)
SPOT = np.zeros((64, 96, 3), np.uint8)
SPOT[:4, :8] = 255
FLAT = {
    "photo": (PHOTO, ""),
    "black": (np.zeros_like(PHOTO), "constant"),
    "red": (np.full_like(PHOTO, (250, 0, 0)), "constant"),
    "dark noise": (PHOTO // 32, "nearly black"),
    "bright noise": (255 - PHOTO // 32, "nearly white"),
    "a spot": (SPOT, "nearly black"),
    "a larger spot": (np.maximum(SPOT, SPOT[:, ::-1]), ""),
    "checks": ((np.indices(PHOTO.shape).sum(0) - np.arange(3)) % 2 * 40 + np.uint8(100), ""),
}


@pytest.mark.parametrize("name", FLAT)
def test_an_image_that_shows_nothing_is_described(name: str) -> None:
    pixels, expected = FLAT[name]
    file = io.BytesIO()
    Image.fromarray(pixels.astype(np.uint8)).save(file, "PNG")
    assert describe_flat_pixels(decode(file.getvalue())) == expected
    if "noise" not in name:  # JPEG loses it
        jpeg = encode(pixels.astype(np.uint8), "444", 98)
        assert describe_flat_pixels(decode(jpeg)) == expected
