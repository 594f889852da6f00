"""Photos that are turned or mirrored as their EXIF orientation says, compared with Pillow's
`exif_transpose`."""

import io
import struct
import zlib
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image, ImageOps

from lockstep.data.decoding.augment import Square, decode_into
from lockstep.data.decoding.decode import decode
from lockstep.data.decoding.orientation import (
    add_orientation,
    find_stored_window,
    read_orientation,
    replace_orientation,
    shown_size,
    turn_image,
)
from tests.data.pictures import any_window, encode, picture

ORIENTATIONS = range(1, 9)
HEIGHT = 75
WIDTH = 101
PIXELS = picture(np.random.default_rng(3), HEIGHT, WIDTH)


def exif_of(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x010F] = "a camera"  # another tag before it
    exif[0x0112] = orientation
    return exif


def photo(orientation: int, format: str = "JPEG", **options: object) -> bytes:
    file = io.BytesIO()
    Image.fromarray(PIXELS).save(file, format, exif=exif_of(orientation), **options)
    return file.getvalue()


def shown(pixels: np.ndarray, orientation: int) -> np.ndarray:
    """Return pixels as Pillow turns them."""
    image = Image.fromarray(pixels)
    image.getexif()[0x0112] = orientation
    return np.asarray(ImageOps.exif_transpose(image))


@pytest.mark.parametrize("orientation", ORIENTATIONS)
@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP"])
def test_the_orientation_is_the_one_that_was_written(format: str, orientation: int) -> None:
    data = photo(orientation, format)
    assert Image.open(io.BytesIO(data)).getexif()[0x0112] == orientation
    assert read_orientation(data) == orientation


def add_exif(exif: bytes, before: bytes = b"") -> bytes:
    """Return a JPEG with EXIF data, and something before its segment."""
    jpeg = encode(PIXELS, "420")
    segment = b"Exif\0\0" + exif
    return (
        jpeg[:2] + before + b"\xff\xe1" + struct.pack(">H", len(segment) + 2) + segment + jpeg[2:]
    )


def tiff(order: str, kind: int, value: int, tags: int = 1) -> bytes:
    head = {"<": b"II*\0", ">": b"MM\0*"}[order]
    form, *rest = {1: "BBH", 3: "HH", 4: "I", 6: "bBH"}[kind]
    packed = struct.pack(order + form + "".join(rest), value, *[0] * len(rest))
    return head + struct.pack(order + "IHHHI", 8, tags, 0x0112, kind, 1) + packed + bytes(4)


@pytest.mark.parametrize("order", "<>")
@pytest.mark.parametrize("kind", [1, 3, 4, 6])
@pytest.mark.parametrize(
    "before",
    [b"", b"\xff\xff", b"\xff\xe0\0\x04ab", b"\xff\xe1\0\x09http:\0\0", b"garbage"],
    ids=["nothing", "fill bytes", "JFIF", "XMP", "garbage"],
)
def test_exif_is_found_in_any_byte_order(before: bytes, kind: int, order: str) -> None:
    assert read_orientation(add_exif(tiff(order, kind, 6), before)) == 6


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"no image",
        encode(PIXELS, "420"),
        add_exif(b""),
        add_exif(b"II*\0"),
        add_exif(b"II*\0\xff\xff\xff\xff"),
        add_exif(tiff("<", 3, 0)),
        add_exif(tiff("<", 3, 9)),
        add_exif(tiff("<", 3, 6)[:-8]),
        add_exif(tiff("<", 3, 6).replace(b"\x12\x01", b"\x13\x01")),
        add_exif(struct.pack("<4sIH", b"II*\0", 8, 65535)),
        add_exif(tiff("<", 3, 6), b"\xff\xd9"),
        b"\xff\xd8" + b"\xff\xe0\0\x02" * 5000 + add_exif(tiff("<", 3, 6))[2:],
        photo(6)[:10],
        photo(6, "TIFF"),
        b"\x89PNG\r\n\x1a\neXIf",
        b"RIFF\0\0\0\0WEBPEXIF",
    ],
    ids=range(17),
)
def test_an_image_without_a_valid_orientation_is_upright(data: bytes) -> None:
    assert read_orientation(data) == 1


XMP = b'<x:xmpmeta><rdf:Description tiff:Orientation="8"/></x:xmpmeta>'
LETTERS = b"EXIF and eXIf Exif\0\0 by an editor"
RAW = b"\nexif\n      32\n" + (b"Exif\0\0" + tiff("<", 3, 6)).hex().encode() + b"\n"


def png_with(*chunks: tuple[bytes, bytes], before: bool = True) -> bytes:
    """Return a PNG with chunks before or behind its pixels."""
    file = io.BytesIO()
    Image.fromarray(PIXELS).save(file, "PNG")
    data = file.getvalue()
    added = b""
    for name, body in chunks:
        added += struct.pack(">I", len(body)) + name + body
        added += struct.pack(">I", zlib.crc32(name + body))
    place = 33 if before else len(data) - 12
    return data[:place] + added + data[place:]


def webp_with(*chunks: tuple[bytes, bytes]) -> bytes:
    """Return a WebP with chunks behind its pixels."""
    file = io.BytesIO()
    Image.fromarray(PIXELS).save(file, "WEBP", lossless=True, exif=tiff("<", 3, 1), xmp=b"<x/>")
    start = file.getvalue().index(b"VP8L")
    (size,) = struct.unpack_from("<I", file.getvalue(), start + 4)
    data = file.getvalue()[: start + 8 + size + size % 2]
    for name, body in chunks:
        data += name + struct.pack("<I", len(body)) + body + bytes(len(body) % 2)
    return data[:4] + struct.pack("<I", len(data) - 8) + data[8:]


def with_xmp(jpeg: bytes, xmp: bytes = XMP) -> bytes:
    body = b"http://ns.adobe.com/xap/1.0/\0" + xmp
    return jpeg[:2] + b"\xff\xe1" + struct.pack(">H", len(body) + 2) + body + jpeg[2:]


PLACES = {
    "PNG, text before": png_with((b"tEXt", b"Comment\0" + LETTERS), (b"eXIf", tiff("<", 3, 6))),
    "PNG, text behind": png_with((b"eXIf", tiff(">", 4, 6)), (b"tEXt", b"a\0" + LETTERS)),
    "PNG, letters alone": png_with((b"tEXt", b"a\0\0\0\0\x20eXIf" + tiff("<", 3, 6))),
    "PNG, raw profile": png_with((b"tEXt", b"Raw profile type exif\0" + RAW)),
    "PNG, packed raw profile": png_with(
        (b"zTXt", b"Raw profile type exif\0\0" + zlib.compress(RAW)), before=False
    ),
    "PNG, international": png_with((b"iTXt", b"Raw profile type exif\0\0\0en\0x\0" + RAW)),
    "PNG, packed international": png_with(
        (b"iTXt", b"Raw profile type exif\0\1\0\0\0" + zlib.compress(RAW))
    ),
    "PNG, chunk and raw profile": png_with(
        (b"tEXt", b"Raw profile type exif\0" + RAW), (b"eXIf", tiff("<", 3, 3))
    ),
    "PNG, doubled prefix": png_with((b"eXIf", b"Exif\0\0" + tiff("<", 3, 6))),
    "PNG, XMP": png_with((b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0" + XMP)),
    "WebP": webp_with((b"EXIF", tiff("<", 3, 6))),
    "WebP, prefix": webp_with((b"EXIF", b"Exif\0\0" + tiff(">", 3, 6))),
    "WebP, LONG": webp_with((b"EXIF", tiff(">", 4, 6))),
    "WebP, letters in XMP": webp_with((b"EXIF", tiff("<", 3, 6)), (b"XMP ", LETTERS)),
    "WebP, letters alone": webp_with((b"XMP ", b"xxEXIF\x20\0\0\0" + tiff("<", 3, 6))),
    "WebP, XMP": webp_with((b"XMP ", XMP)),
    "WebP, EXIF and XMP": webp_with((b"EXIF", tiff("<", 3, 6)), (b"XMP ", XMP)),
    "WebP, odd length": webp_with((b"ABCD", b"abc"), (b"EXIF", tiff("<", 3, 6))),
    "WebP, not in its header": webp_with((b"EXIF", tiff("<", 3, 6))).replace(
        b"VP8X\x0a\0\0\0\x0c", b"VP8X\x0a\0\0\0\x04"
    ),
    "JPEG, XMP": with_xmp(encode(PIXELS, "420")),
    "JPEG, XMP and EXIF": with_xmp(add_exif(tiff("<", 3, 6))),
    "JPEG, XMP and an invalid EXIF": with_xmp(add_exif(tiff("<", 3, 9))),
    "JPEG, thumbnail": add_exif(tiff("<", 3, 6) + add_exif(tiff("<", 3, 3))),
    "JPEG, two": add_orientation(add_exif(tiff("<", 3, 6)), 3),
    "JPEG, letters in a comment": add_exif(tiff("<", 3, 6), b"\xff\xfe\0\x0cExif\0\0abcd"),
}


@pytest.mark.parametrize("name", PLACES)
def test_the_orientation_is_found_where_pillow_finds_it(name: str) -> None:
    image = Image.open(io.BytesIO(PLACES[name]))
    image.load()
    expected = image.getexif().get(0x0112, 1)
    assert read_orientation(PLACES[name]) == (expected if expected in ORIENTATIONS else 1)


@pytest.mark.parametrize(
    "data",
    [
        # as older versions of ImageMagick write it; ExifTool reads it, Pillow does not
        png_with((b"tEXt", b"Raw profile type APP1\0" + RAW)),
        with_xmp(encode(PIXELS, "420"), XMP.replace(b'"8"', b"'6'")),
        webp_with((b"EXIF", tiff("<", 6, 6))),
    ],
    ids=["PNG, profile of APP1", "JPEG, XMP in single quotes", "WebP, SBYTE"],
)
def test_the_orientation_is_found_where_others_write_it(data: bytes) -> None:
    assert read_orientation(data) == 6


def test_the_places_have_orientations_that_differ() -> None:
    assert {read_orientation(data) for data in PLACES.values()} == {1, 3, 6, 8}


def test_a_damaged_chunk_of_exif_data_does_not_count() -> None:
    data = png_with((b"eXIf", tiff("<", 3, 6)), before=False)
    assert read_orientation(data) == 6
    place = data.index(b"eXIf") + 4 + 22
    assert read_orientation(data[:place] + b"\1" + data[place + 1 :]) == 1


@pytest.mark.parametrize("orientation", [1, 8])
def test_a_replaced_orientation_is_the_only_exif_data(orientation: int) -> None:
    data = add_orientation(add_exif(tiff("<", 4, 6), b"\xff\xff"), 3)
    replaced = replace_orientation(data, orientation)
    assert replaced.count(b"Exif") == (orientation != 1)
    assert Image.open(io.BytesIO(replaced)).getexif().get(0x0112, 1) == orientation
    np.testing.assert_array_equal(decode(replaced), decode(data))


@pytest.mark.parametrize("orientation", ORIENTATIONS)
def test_a_turned_window_is_the_window_of_the_turned_image(orientation: int) -> None:
    rng = np.random.default_rng(orientation)
    whole = shown(PIXELS, orientation)
    np.testing.assert_array_equal(turn_image(PIXELS, orientation), whole)
    assert shown_size((HEIGHT, WIDTH), orientation) == whole.shape[:2]
    for _ in range(20):
        window = any_window(rng, *whole.shape[:2])
        top, left, height, width = find_stored_window(window, (HEIGHT, WIDTH), orientation)
        part = turn_image(PIXELS[top : top + height, left : left + width], orientation)
        top, left, height, width = window
        np.testing.assert_array_equal(part, whole[top : top + height, left : left + width])


@pytest.mark.parametrize("orientation", ORIENTATIONS)
@pytest.mark.parametrize("format", ["JPEG", "PNG", "progressive", "CMYK"])
def test_a_crop_is_that_of_the_image_turned_before(format: str, orientation: int) -> None:
    options = {"progressive": True} if format == "progressive" else {}
    data = photo(orientation, "PNG" if format == "PNG" else "JPEG", **options)
    if format == "CMYK":
        file = io.BytesIO()
        Image.fromarray(PIXELS).convert("CMYK").save(file, "JPEG", exif=exif_of(orientation))
        data = file.getvalue()
    whole = shown(decode(data), orientation)
    rng = np.random.default_rng(orientation)
    for sampling, antialias, flip in (
        ("half_pixel", False, False),
        ("half_pixel", True, True),
        ("asymmetric", False, True),
    ):
        window = any_window(rng, *whole.shape[:2])
        outs = np.zeros((3, 32, 32, 3), np.uint8)
        how = {"flip": flip, "antialias": antialias, "sampling": sampling}
        square = Square(window, (40, 36), (3, 2), **how)
        decode_into(whole, whole.shape[:2], square, outs[0])
        square = replace(square, orientation=orientation)
        decode_into(data, (HEIGHT, WIDTH), square, outs[1])
        decode_into(decode(data), (HEIGHT, WIDTH), square, outs[2])
        np.testing.assert_array_equal(outs[1], outs[0])
        np.testing.assert_array_equal(outs[2], outs[0])


@pytest.mark.parametrize("orientation", ORIENTATIONS)
def test_a_reduced_crop_is_that_of_the_image_turned_before(orientation: int) -> None:
    # 75 and 101 are no multiples of 2: the sides of the reduced image are rounded up.
    data = photo(orientation)
    whole = shown(decode(data, 2), orientation)
    outs = np.zeros((2, 16, 16, 3), np.uint8)
    top = 5
    left = 8
    height = 62
    width = 61
    part = np.ascontiguousarray(whole[top // 2 :, left // 2 :][: height // 2, : width // 2])
    how = {"flip": False, "antialias": True}
    square = Square((0, 0, *part.shape[:2]), (30, 30), (4, 6), **how)
    decode_into(part, part.shape[:2], square, outs[0])
    how |= {"dct_scaling": True, "orientation": orientation}
    square = Square((top, left, height, width), (30, 30), (4, 6), **how)
    decode_into(data, (HEIGHT, WIDTH), square, outs[1])
    np.testing.assert_array_equal(*outs)


@pytest.mark.parametrize("orientation", ORIENTATIONS)
def test_an_orientation_can_be_given_to_a_jpeg(orientation: int) -> None:
    plain = encode(PIXELS, "420")
    image = Image.open(io.BytesIO(add_orientation(plain, orientation)))
    assert image.getexif().get(0x0112, 1) == orientation
    np.testing.assert_array_equal(
        np.asarray(ImageOps.exif_transpose(image)), shown(decode(plain), orientation)
    )
