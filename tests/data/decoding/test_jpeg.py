"""The decoder of windows, compared with libjpeg-turbo: it returns the same pixels to the last bit,
or None."""

import io

import numpy as np
import pytest
import simplejpeg
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from lockstep.data.decoding import _jpeg, jpeg
from lockstep.data.decoding.augment import Square, decode_into
from lockstep.data.decoding.jpeg import Window, decode_window
from tests.data.decoding.fuzz_jpeg import damage, draw_case, judge
from tests.data.pictures import any_window, encode, picture, wrong_in_threads
from tests.soak import SOAK

SAMPLINGS = ("444", "422", "420", "Gray")
WIDE = 32
"""The minimum width of images that our decoder decodes."""


def decode_by_pillow(pixels: np.ndarray, **options: object) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", **options)
    return file.getvalue()


def assert_same(data: bytes, window: Window, case: str = "") -> None:
    whole = simplejpeg.decode_jpeg(data)
    top, left, height, width = window
    part = decode_window(data, whole.shape[:2], window)
    assert part is not None, case
    assert np.array_equal(part, whole[top : top + height, left : left + width]), case


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_a_window_has_the_pixels_of_libjpeg_turbo(sampling: str) -> None:
    rng = np.random.default_rng(SAMPLINGS.index(sampling))
    for case in range(150 if SOAK else 50):
        height = int(rng.integers(1, 140))
        width = int(rng.integers(WIDE, 140))
        quality = int(rng.integers(5, 99))
        window = any_window(rng, height, width)
        data = encode(picture(rng, height, width), sampling, quality)
        assert_same(
            data, window, f"case {case}: {height} x {width}, quality {quality}, window {window}"
        )


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_every_window_of_a_small_image(sampling: str) -> None:
    data = encode(picture(np.random.default_rng(1), 35, 37), sampling)
    for top in range(35):
        for left in range(0, 37, 4):
            assert_same(data, (top, left, 35 - top, 37 - left), f"from {top}, {left}")
            assert_same(data, (0, 0, top + 1, left + 1), f"to {top}, {left}")


@pytest.mark.parametrize(
    "options",
    [{"optimize": True}, {"restart_marker_blocks": 3}, {"restart_marker_rows": 1}],
    ids=str,
)
@pytest.mark.parametrize("subsampling", [0, 1, 2])
def test_own_codes_and_restarts_are_the_same(options: dict[str, object], subsampling: int) -> None:
    rng = np.random.default_rng(subsampling)
    for case in range(40 if SOAK else 15):
        height, width = rng.integers(WIDE, 140, 2).tolist()
        data = decode_by_pillow(
            picture(rng, height, width),
            quality=int(rng.integers(30, 99)),
            subsampling=subsampling,
            **options,
        )
        assert_same(data, any_window(rng, height, width), f"case {case}")


def test_codes_of_sixteen_bits_are_read() -> None:
    # In the standard tables, coefficients of 10 bits and long runs of zeros have codes of 16 bits.
    rng = np.random.default_rng(3)
    noise = rng.integers(0, 256, (64, 64, 3)).astype(np.uint8)
    for quality in (60, 90):
        assert_same(
            simplejpeg.encode_jpeg(noise, quality, colorsubsampling="444"),
            (0, 0, 64, 64),
            str(quality),
        )
    checks = np.indices((64, 64)).sum(0) % 2 * 60 + 90
    assert_same(
        simplejpeg.encode_jpeg(checks[..., None].repeat(3, 2).astype(np.uint8), 100), (8, 8, 40, 40)
    )


PLAIN = encode(picture(np.random.default_rng(3), 40, 40), "420")
GREY = encode(picture(np.random.default_rng(3), 40, 40), "Gray")


def set_sampling(jpeg: bytes, factors: int) -> bytes:
    place = jpeg.index(b"\xff\xc0") + 11
    return jpeg[:place] + bytes([factors]) + jpeg[place + 1 :]


def add_code_of_ones(jpeg: bytes) -> bytes:
    """Add a table with the codes 0 and 1, which no scan uses."""
    place = jpeg.index(b"\xff\xda")
    return jpeg[:place] + b"\xff\xc4" + bytes([0, 21, 0x03, 2, *[0] * 15, 0, 1]) + jpeg[place:]


def test_a_table_that_no_scan_uses_makes_no_difference() -> None:
    other = add_code_of_ones(PLAIN).replace(bytes([0, 21, 0x03, 2, 0]), bytes([0, 21, 0x03, 0, 2]))
    assert_same(other, (0, 0, 40, 40))


NOISE = picture(np.random.default_rng(3), 40, 40)
RARE = {
    "progressive": decode_by_pillow(NOISE, progressive=True),
    "RGB": decode_by_pillow(NOISE, keep_rgb=True),
    "4:4:0": encode(NOISE, "440"),
    "4:1:1": encode(NOISE, "411"),
    "a factor of 5": set_sampling(GREY, 0x51),
    "a code of ones": add_code_of_ones(PLAIN),
    "cut short": PLAIN[:-300],
    "a marker": b"\xff\xd8\xff",
    "nothing": b"",
    "text": b"no image",
}


@pytest.mark.parametrize("data", RARE.values(), ids=RARE)
def test_what_is_rare_or_damaged_is_left_to_libjpeg_turbo(data: bytes) -> None:
    assert decode_window(data, (40, 40), (0, 0, 40, 30)) is None


def test_a_narrow_image_is_left_to_libjpeg_turbo() -> None:
    narrow = encode(picture(np.random.default_rng(3), 40, WIDE - 1), "420")
    assert decode_window(narrow, (40, WIDE - 1), (0, 0, 40, 30)) is None


def test_an_image_of_another_size_is_left_to_libjpeg_turbo() -> None:
    assert decode_window(PLAIN, (40, 41), (0, 0, 10, 10)) is None


def test_coefficients_that_no_image_has_are_left_to_libjpeg_turbo() -> None:
    plain = encode(picture(np.random.default_rng(3), 40, 40), "444", 50)
    table = plain.index(b"\xff\xdb") + 5
    # The quantizer says that every luma coefficient was divided by 255.
    assert (
        decode_window(plain[:table] + b"\xff" * 64 + plain[table + 64 :], (40, 40), (0, 0, 40, 40))
        is None
    )


def test_a_file_cut_anywhere_is_read_within_its_bytes() -> None:
    data = encode(picture(np.random.default_rng(5), 33, 35), "420")
    whole = simplejpeg.decode_jpeg(data)
    for length in range(len(data)):
        part = decode_window(data[:length], (33, 35), (0, 0, 33, 35))
        assert part is None or np.array_equal(part, whole), length


@pytest.mark.parametrize(
    "window",
    [
        (-1, 0, 5, 5),
        (0, -1, 5, 5),
        (0, 0, -5, 5),
        (0, 0, 0, 5),
        (0, 0, 5, 0),
        (36, 0, 5, 5),
        (0, 36, 5, 5),
    ],
)
def test_a_window_that_is_not_within_the_image_is_refused(window: Window) -> None:
    data = encode(picture(np.random.default_rng(3), 40, 40), "420")
    with pytest.raises(ValueError, match=r"image of 40 x 40 pixels|no window has"):
        decode_window(data, (40, 40), window)


@pytest.mark.parametrize("side", [65501, 2**31 - 1])
def test_an_image_larger_than_a_jpeg_can_be_is_refused(side: int) -> None:
    with pytest.raises(ValueError, match=f"no window has {side} x {side} pixels"):
        _jpeg.sizes(100, side, side)
    with pytest.raises(ValueError, match=f"not within an image of {side} x {side} pixels"):
        _jpeg.decode_window(
            PLAIN, (side, side), (0, 0, side, side), np.zeros(64, np.uint8), np.zeros(64, np.uint8)
        )


@pytest.mark.parametrize("short", ["room", "out"])
def test_a_buffer_that_is_too_small_is_refused(short: str) -> None:
    data = encode(picture(np.random.default_rng(3), 40, 40), "420")
    sizes = dict(zip(("room", "out"), _jpeg.sizes(len(data), 40, 40), strict=True))
    sizes[short] -= 1
    room, out = (np.zeros(size, np.uint8) for size in sizes.values())
    with pytest.raises(ValueError, match="a buffer is too small"):
        _jpeg.decode_window(data, (40, 40), (0, 0, 40, 40), room, out)


def test_a_crop_has_the_same_pixels_whatever_decodes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    data = encode(picture(np.random.default_rng(4), 130, 170), "420")

    def crop() -> np.ndarray:
        out = np.zeros((32, 32, 3), np.uint8)
        decode_into(data, (130, 170), Square((33, 41, 70, 90), (40, 36), (3, 2), flip=True), out)
        return out

    ours = crop()
    monkeypatch.setattr(jpeg, "_jpeg", None)
    assert ours.any()
    assert np.array_equal(crop(), ours)


@given(seed=st.integers(0, 2**32))
@settings(max_examples=300)
def test_whatever_is_damaged_has_the_pixels_of_libjpeg_turbo_or_no_answer(seed: int) -> None:
    rng = np.random.default_rng(seed)
    assert judge(_jpeg, rng, damage(rng, draw_case(rng))) != "wrong"


def test_threads_do_not_share_buffers() -> None:
    rng = np.random.default_rng(5)
    assert (
        wrong_in_threads(
            decode_window, [encode(picture(rng, 100, 120), sampling) for sampling in SAMPLINGS]
        )
        == []
    )
