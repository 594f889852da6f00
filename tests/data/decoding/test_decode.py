"""Decoding, compared with Pillow and hand-made files; cropping and resizing, compared with the
bilinear formula."""

import io
import struct
import zlib
from collections.abc import Callable

import cv2
import numpy as np
import pytest
import simplejpeg
from PIL import Image

from lockstep.data.decoding import decode as module
from lockstep.data.decoding.augment import Square, decode_into
from lockstep.data.decoding.decode import check, decode, decode_undamaged
from tests.soak import SOAK

Use = Callable[[bytes], object]


def photo(height: int, width: int, seed: int = 0) -> Image.Image:
    """Return soft colours with fine noise on top, as in a photo."""
    random = np.random.default_rng(seed)
    soft = Image.fromarray(random.integers(0, 256, (6, 8, 3), np.uint8)).resize(
        (width, height), Image.Resampling.BICUBIC
    )
    noise = random.integers(-12, 13, (height, width, 3))
    return Image.fromarray(np.clip(np.asarray(soft) + noise, 0, 255).astype(np.uint8))


def encode_image(image: Image.Image, kind: str = "JPEG", **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def set_adobe_transform(jpeg: bytes, transform: int) -> bytes:
    place = jpeg.index(b"Adobe") + 11
    return jpeg[:place] + bytes([transform]) + jpeg[place + 1 :]


def decode_by_pillow(data: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


PHOTO = photo(75, 101)
PIXELS = np.asarray(PHOTO)
JPEG = encode_image(PHOTO)
CMYK = encode_image(PHOTO.convert("CMYK"))
MIDDLE = len(JPEG) // 2


@pytest.mark.parametrize(
    "options",
    [
        {"subsampling": "4:4:4"},
        {"subsampling": "4:2:2"},
        {"subsampling": "4:2:0"},
        {"progressive": True},
        {"keep_rgb": True},
        {"restart_marker_rows": 1},
        {"quality": 20},
    ],
    ids=str,
)
def test_a_jpeg_has_exactly_the_pixels_that_pillow_decodes(options: dict[str, object]) -> None:
    data = encode_image(PHOTO, **options)
    np.testing.assert_array_equal(decode(data), decode_by_pillow(data))


def test_a_grey_jpeg_becomes_three_equal_channels() -> None:
    data = encode_image(PHOTO.convert("L"))
    grey = np.asarray(Image.open(io.BytesIO(data)))
    np.testing.assert_array_equal(decode(data), np.stack([grey] * 3, axis=2))


@pytest.mark.parametrize(("adobe_transform", "colours"), [(0, "CMYK"), (2, "YCCK")])
def test_four_colours_are_converted_as_by_pillow(adobe_transform: int, colours: str) -> None:
    data = set_adobe_transform(CMYK, adobe_transform)
    assert simplejpeg.decode_jpeg_header(data)[2] == colours
    np.testing.assert_array_equal(decode(data), decode_by_pillow(data))


def test_a_jpeg_of_pure_magenta_and_yellow_ink_is_red() -> None:
    data = encode_image(Image.new("CMYK", (16, 16), (0, 255, 255, 0)), quality=100)
    np.testing.assert_allclose(decode(data), np.broadcast_to([255, 0, 0], (16, 16, 3)), atol=2)


@pytest.mark.parametrize("use", [decode, check])
def test_simplejpeg_decodes_no_cmyk(use: Use, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        module.simplejpeg, "decode_jpeg", lambda *_, **__: pytest.fail("decoded by simplejpeg")
    )
    use(CMYK)


@pytest.mark.parametrize(
    "factors",
    [(0x31, 0x11, 0x11), (0x22, 0x11, 0x21), (0x42, 0x11, 0x11), (0x14, 0x11, 0x11)],
    ids=str,
)
def test_nameless_ratios_of_chroma_sampling_are_decoded(factors: tuple[int, int, int]) -> None:
    plain = encode_image(Image.new("RGB", (32, 16), (128, 128, 128)), subsampling="4:4:4")
    header = bytearray(plain[: plain.index(b"\xff\xda") + 14])
    frame = header.index(b"\xff\xc0")
    for component, factor in enumerate(factors):
        header[frame + 11 + 3 * component] = factor
    # Every block is grey 128: "difference 0, end of block" in the standard codes for luma and
    # chroma.
    blocks = [
        ("001010" if component == 0 else "0000", factor) for component, factor in enumerate(factors)
    ]
    unit = "".join(code * ((factor >> 4) * (factor & 15)) for code, factor in blocks)
    widest = max(factor >> 4 for factor in factors)
    highest = max(factor & 15 for factor in factors)
    bits = unit * (-(-32 // (8 * widest)) * -(-16 // (8 * highest)))
    bits += "1" * (-len(bits) % 8)
    data = bytes(header) + int(bits, 2).to_bytes(len(bits) // 8, "big") + b"\xff\xd9"

    assert check(data) == (16, 32)
    np.testing.assert_array_equal(decode(data), np.full((16, 32, 3), 128))


@pytest.mark.parametrize(
    ("kind", "options"),
    [("PNG", {}), ("BMP", {}), ("PPM", {}), ("TIFF", {}), ("WEBP", {"lossless": True})],
)
def test_images_without_loss_keep_their_pixels(kind: str, options: dict[str, object]) -> None:
    np.testing.assert_array_equal(decode(encode_image(PHOTO, kind, **options)), PIXELS)


@pytest.mark.parametrize("kind", ["GIF", "PNG"])
def test_a_palette_is_looked_up(kind: str) -> None:
    colours = np.random.default_rng(1).integers(0, 256, (256, 3), np.uint8)
    numbers = np.random.default_rng(2).integers(0, 256, (20, 30), np.uint8)
    image = Image.fromarray(numbers, "P")
    image.putpalette(colours.tobytes())
    np.testing.assert_array_equal(decode(encode_image(image, kind)), colours[numbers])


def test_only_the_first_picture_of_an_animation_is_taken() -> None:
    flat = [Image.new("RGB", (8, 6), colour) for colour in ((255, 0, 0), (0, 0, 255))]
    data = encode_image(flat[0], "GIF", save_all=True, append_images=flat[1:])
    np.testing.assert_array_equal(decode(data), np.broadcast_to([255, 0, 0], (6, 8, 3)))


def test_transparency_is_dropped_and_the_colours_below_it_stay() -> None:
    alpha = np.random.default_rng(3).integers(0, 256, PIXELS.shape[:2], np.uint8)
    image = Image.fromarray(np.dstack([PIXELS, alpha]))
    np.testing.assert_array_equal(decode(encode_image(image, "PNG")), PIXELS)


@pytest.mark.parametrize("transparency", [7, bytes(range(256))], ids=["one colour", "every colour"])
def test_transparency_in_a_palette_raises_no_warning(transparency: int | bytes) -> None:
    image = PHOTO.quantize(256)
    data = encode_image(image, "PNG", transparency=transparency)
    np.testing.assert_array_equal(decode(data), np.asarray(image.convert("RGB")))


def test_a_png_of_16_bits_of_grey_is_scaled_to_8_bits() -> None:
    grey = np.arange(256, dtype=np.uint16).reshape(16, 16)
    data = encode_image(Image.fromarray(grey * 257), "PNG")
    np.testing.assert_array_equal(decode(data), np.stack([grey] * 3, axis=2))


def test_a_png_of_16_bits_a_colour_is_scaled_to_8_bits() -> None:
    data = cv2.imencode(".png", PIXELS[:, :, ::-1].astype(np.uint16) * 257)[1].tobytes()
    np.testing.assert_array_equal(decode(data), PIXELS)


@pytest.mark.parametrize("orientation", [3, 6, 8])
def test_a_photo_taken_on_its_side_stays_as_it_is_stored(orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encode_image(PHOTO, exif=exif)
    assert Image.open(io.BytesIO(data)).getexif()[0x0112] == orientation
    assert check(data) == (75, 101)
    np.testing.assert_array_equal(decode(data), decode(JPEG))


@pytest.mark.parametrize(
    "data",
    [
        JPEG,
        encode_image(PHOTO, progressive=True),
        encode_image(PHOTO.convert("L")),
        CMYK,
        encode_image(PHOTO, "PNG"),
        encode_image(PHOTO, "GIF"),
        encode_image(PHOTO, "WEBP"),
    ],
    ids=["JPEG", "progressive", "grey", "CMYK", "PNG", "GIF", "WebP"],
)
def test_check_returns_height_and_width(data: bytes) -> None:
    assert check(data) == (75, 101)


PNG = encode_image(PHOTO, "PNG")
BROKEN = {
    "empty": (b"", "empty file"),
    "text": (b"404: not found\n" * 50, "not an image"),
    "zeros": (bytes(4096), "not an image"),
    "a program's file": (
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\nshowpage\n",
        "not an image",
    ),
    "a JPEG's first two bytes": (JPEG[:2], "not an image"),
    "a JPEG cut in its header": (JPEG[:300], "Truncated"),
    "a JPEG cut in half": (JPEG[:MIDDLE], "Premature end"),
    "a JPEG without its last two bytes": (JPEG[:-2], "Premature end"),
    "a JPEG with a hole": (JPEG[:MIDDLE] + bytes(400) + JPEG[MIDDLE + 400 :], "Corrupt JPEG data"),
    "a JPEG with a piece missing": (JPEG[:MIDDLE] + JPEG[MIDDLE + 400 :], "Corrupt JPEG data"),
    "a progressive JPEG cut in half": (
        encode_image(PHOTO, progressive=True)[:MIDDLE],
        "Premature end",
    ),
    "a CMYK JPEG cut in half": (CMYK[: len(CMYK) // 2], "truncated"),
    "a PNG cut in half": (PNG[: len(PNG) // 2], "truncated"),
    "a PNG with a hole": (PNG[:2000] + bytes(400) + PNG[2400:], "checksum of a PNG's chunk IDAT"),
}


@pytest.mark.parametrize("use", [check, decode_undamaged])
@pytest.mark.parametrize(("data", "reason"), BROKEN.values(), ids=BROKEN)
def test_damage_is_described(data: bytes, reason: str, use: Use) -> None:
    with pytest.raises(ValueError, match=reason):
        use(data)


SCAN = JPEG.index(b"\xff\xda")
HARMLESS = {
    "zeros after the end": JPEG + bytes(100),
    "another file after the end": JPEG + PNG,
    "bytes before the end": JPEG[:-2] + b"abcd" + JPEG[-2:],
    "no last coefficient named": JPEG[: SCAN + 12] + b"\0" + JPEG[SCAN + 13 :],
    "an unknown version of JFIF": JPEG[:11] + b"\x03" + JPEG[12:],
}


@pytest.mark.parametrize("data", HARMLESS.values(), ids=HARMLESS)
def test_a_jpeg_that_only_breaks_the_rules_is_whole(data: bytes) -> None:
    assert check(data) == (75, 101)
    np.testing.assert_array_equal(decode(data), decode(JPEG))
    np.testing.assert_array_equal(decode_undamaged(data), decode(JPEG))


@pytest.mark.parametrize(
    "data",
    [JPEG, encode_image(PHOTO, progressive=True), CMYK, PNG],
    ids=["JPEG", "progressive", "CMYK", "PNG"],
)
def test_an_undamaged_image_has_the_pixels_that_pillow_decodes(data: bytes) -> None:
    difference = decode_undamaged(data).astype(int) - decode_by_pillow(data)
    assert np.abs(difference).max() <= 1  # Pillow may link another version of libjpeg


def jpeg_that_claims(height: int, width: int) -> bytes:
    frame = JPEG.index(b"\xff\xc0")
    return JPEG[: frame + 5] + struct.pack(">HH", height, width) + JPEG[frame + 9 :]


def png_that_claims(height: int, width: int) -> bytes:
    header = b"IHDR" + struct.pack(">II", width, height) + PNG[24:29]
    return PNG[:12] + header + struct.pack(">I", zlib.crc32(header)) + PNG[33:]


@pytest.mark.parametrize("use", [decode, check])
@pytest.mark.parametrize(
    "data", [jpeg_that_claims(65500, 65500), png_that_claims(65500, 65500)], ids=["JPEG", "PNG"]
)
def test_an_image_that_claims_billions_of_pixels_is_refused(use: Use, data: bytes) -> None:
    with pytest.raises(ValueError, match=r"too many|decompression bomb"):
        use(data)


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("use", [decode, check])
def test_a_png_of_more_pixels_than_are_decoded_in_whole_is_refused(use: Use) -> None:
    with pytest.raises(ValueError, match=r"13000 x 13000 pixels .* 100,000,000 "):
        use(png_that_claims(13000, 13000))


def test_a_jpeg_of_120_megapixels_is_decoded() -> None:
    with pytest.raises(ValueError, match="premature end"):  # only its header has this size
        check(jpeg_that_claims(10_000, 12_000) + bytes(8_000))


@pytest.mark.parametrize("use", [decode, check])
def test_huge_claims_are_not_decoded(use: Use, monkeypatch: pytest.MonkeyPatch) -> None:
    data = encode_image(Image.new("RGB", (16, 16)), "WEBP", lossless=True)

    def fail(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(module.Image.Image, "load", fail)
    sides = struct.pack("<I", (9_000 - 1) | (8_000 - 1) << 14)
    data = data[:21] + sides + data[25:]
    with pytest.raises(ValueError, match=f"9000 x 8000 pixels .* {len(data)} bytes"):
        use(data)


def test_a_blank_page_of_one_bit_a_pixel_is_decoded() -> None:
    page = encode_image(Image.new("1", (4960, 7016)), "PNG", optimize=True)
    assert len(page) < 6_000
    assert check(page) == (7016, 4960)


@pytest.mark.parametrize("use", [decode, check])
@pytest.mark.parametrize(
    "error",
    [TypeError("odd"), struct.error("odd"), IndexError("odd"), MemoryError("odd")],
    ids=repr,
)
def test_whatever_pillow_raises_is_a_value_error(
    use: Use, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(module.Image, "open", fail)
    with pytest.raises(ValueError, match="odd"):
        use(PNG)


FUZZED = {
    "JPEG": encode_image(photo(40, 56)),
    "progressive JPEG": encode_image(photo(40, 56), progressive=True),
    "CMYK JPEG": encode_image(photo(40, 56).convert("CMYK")),
    "PNG": encode_image(photo(40, 56), "PNG"),
    "WebP": encode_image(photo(40, 56), "WEBP"),
}


@pytest.mark.parametrize("data", FUZZED.values(), ids=FUZZED)
def test_a_damaged_file_is_an_image_of_one_size_or_a_value_error(data: bytes) -> None:
    random = np.random.default_rng(4)
    for case in range(300 if SOAK else 100):
        damaged = bytearray(data)
        reach = len(data) if case % 2 else 200
        for place in random.integers(0, reach, random.integers(1, 6)):
            damaged[place] = random.integers(256)
        if case % 3 == 0:
            damaged = damaged[: random.integers(len(damaged))]
        shapes = []
        for use in (check, decode):
            try:
                shapes.append(use(bytes(damaged)))
            except ValueError:
                shapes.append(None)
        size, image = shapes
        assert size is None or (image is not None and image.shape == (*size, 3)), f"case {case}"


def bilinear(image: np.ndarray, height: int, width: int) -> np.ndarray:
    """Return means of four pixels, weighted by their distance. Pixel i covers i to i + 1; the
    border's colours continue."""

    def taps(count: int, wanted: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        centre = (np.arange(wanted) + 0.5) * count / wanted - 0.5
        first = np.floor(centre).astype(int)
        return np.clip(first, 0, count - 1), np.clip(first + 1, 0, count - 1), centre - first

    top, bottom, down = taps(image.shape[0], height)
    left, right, along = taps(image.shape[1], width)
    rows = image[top] * (1 - down)[:, None, None] + image[bottom] * down[:, None, None]
    return rows[:, left] * (1 - along)[:, None] + rows[:, right] * along[:, None]


# window (top, left, height, width), resized (height, width), offset (top, left)
CUTS = {
    "shrunk": ((5, 7, 60, 80), (32, 32), (0, 0)),
    "halved": ((1, 2, 64, 64), (32, 32), (0, 0)),
    "enlarged": ((30, 40, 11, 13), (32, 32), (0, 0)),
    "as it is": ((30, 40, 32, 32), (32, 32), (0, 0)),
    "one pixel": ((74, 100, 1, 1), (32, 32), (0, 0)),
    "one row": ((74, 0, 1, 101), (32, 32), (0, 0)),
    "the centre": ((0, 0, 75, 101), (36, 48), (2, 8)),
    "the far corner": ((0, 0, 75, 101), (36, 48), (4, 16)),
}


def transform(*, flip: bool = False, antialias: bool = False, cut: str) -> np.ndarray:
    window, resized, offset = CUTS[cut]
    out = np.full((32, 32, 3), 77, np.uint8)
    file = io.BytesIO()
    Image.fromarray(PIXELS).save(file, "PNG")
    size = PIXELS.shape[:2]
    how = Square(window, resized, offset, flip=flip, antialias=antialias)
    decode_into(file.getvalue(), size, how, out)
    return out


def square(pixels: np.ndarray, cut: str) -> np.ndarray:
    top, left = CUTS[cut][2]
    return pixels[top : top + 32, left : left + 32]


@pytest.mark.parametrize("cut", CUTS)
def test_without_antialias_the_window_is_resized_by_the_bilinear_formula(cut: str) -> None:
    (top, left, height, width), resized, _ = CUTS[cut]
    expected = bilinear(
        PIXELS[top : top + height, left : left + width].astype(np.float64), *resized
    )
    np.testing.assert_allclose(transform(cut=cut), square(expected, cut), atol=1)


@pytest.mark.parametrize("cut", CUTS)
def test_with_antialias_the_window_is_resized_as_pillow_does(cut: str) -> None:
    (top, left, height, width), resized, _ = CUTS[cut]
    window = PHOTO.crop((left, top, left + width, top + height))
    expected = np.asarray(window.resize(resized[::-1], Image.Resampling.BILINEAR))
    np.testing.assert_array_equal(transform(cut=cut, antialias=True), square(expected, cut))


def test_antialias_changes_an_image_that_shrinks() -> None:
    assert (
        np.abs(transform(cut="shrunk").astype(int) - transform(cut="shrunk", antialias=True)).max()
        > 3
    )


@pytest.mark.parametrize("antialias", [False, True])
@pytest.mark.parametrize("cut", ["shrunk", "the centre"])
def test_a_flip_mirrors_the_finished_square(cut: str, antialias: bool) -> None:
    plain = transform(cut=cut, antialias=antialias)
    np.testing.assert_array_equal(
        transform(cut=cut, antialias=antialias, flip=True), plain[:, ::-1]
    )
