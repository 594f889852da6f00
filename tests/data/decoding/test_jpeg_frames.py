"""JPEGs of every kind of frame, by other encoders: exact pixels or a refusal by name, wherever
images are decoded."""

import io
import re
from collections.abc import Callable
from contextlib import suppress

import numpy as np
import pytest
from PIL import Image

from lockstep.data.decoding.augment import Square, decode_into
from lockstep.data.decoding.decode import (
    check,
    check_ends,
    decode,
    decode_undamaged,
    header_size,
    is_plain_jpeg,
)
from lockstep.data.packing.samples import reduce_image
from tests.data.decoding.fuzz_jpeg import FRAMES, set_frame
from tests.data.decoding.other_encoders import FILES, PIXELS
from tests.data.pictures import encode

HEIGHT, WIDTH = PIXELS.shape[:2]
PLAIN = encode(PIXELS, "444")
RED = PIXELS[:, :, :1].repeat(3, 2)
EXACT = {
    "lossless": PIXELS,
    "lossless, grey": RED,
    # jpegtran made them of the baseline file without decoding its coefficients
    "arithmetic": decode(FILES["baseline"]),
    "arithmetic, progressive": decode(FILES["baseline"]),
}
REFUSED = {
    "12 bits": "a JPEG (marker 0xFFC1) with 12 bits",
    "lossless, 12 bits": "a lossless JPEG (marker 0xFFC3) with 12 bits",
    "lossless, 16 bits": "a lossless JPEG (marker 0xFFC3) with 16 bits",
    "JPEG-LS": "JPEG-LS",
}
UNKNOWN = sorted({*FRAMES} - {0xC0, 0xC1, 0xC2, 0xC3, 0xC9, 0xCA})


def reduce(data: bytes) -> np.ndarray:
    """Return an image as a recipe with DCT scaling has it at a quarter of its size."""
    out = np.zeros((8, 8, 3), np.uint8)
    how = {"flip": False, "antialias": True, "dct_scaling": True}
    decode_into(data, (HEIGHT, WIDTH), Square((0, 0, 32, 32), (8, 8), (0, 0), **how), out)
    return out


@pytest.mark.parametrize("name", EXACT)
def test_what_pillow_decodes_right_is_decoded_whole(name: str) -> None:
    data = FILES[name]
    assert not is_plain_jpeg(data)
    assert check(data) == header_size(data) == (HEIGHT, WIDTH)
    for reduction in (1, 2, 8):
        np.testing.assert_array_equal(decode(data, reduction), EXACT[name])
    np.testing.assert_array_equal(decode_undamaged(data), EXACT[name])
    np.testing.assert_array_equal(
        reduce(data), np.asarray(Image.fromarray(EXACT[name][:32, :32]).resize((8, 8), 2))
    )
    Image.open(io.BytesIO(reduce_image(data, 16, 90))).load()


def test_the_files_show_what_they_are_said_to_show() -> None:
    assert np.abs(decode(FILES["baseline"]).astype(int) - PIXELS).mean() < 3
    assert is_plain_jpeg(FILES["baseline"])


USES = [check, decode, decode_undamaged, reduce, lambda data: reduce_image(data, 16, 90)]


def double_frame(data: bytes, code: int, height: int) -> bytes:
    """Return a JPEG with a second frame, of another kind and size, before its pixels."""
    place = data.index(b"\xff\xc0")
    frame = bytearray(data[place : place + 19])
    frame[1] = code
    frame[6] = height
    return data[:place] + bytes(frame) + data[place:]


@pytest.mark.parametrize("use", USES, ids=range(len(USES)))
@pytest.mark.parametrize(
    ("data", "message"),
    [
        *((FILES[name], message) for name, message in REFUSED.items()),
        *((set_frame(PLAIN, code), f"0xFF{code:02X}") for code in UNKNOWN),
        (double_frame(PLAIN, 0xC0, 16), "more than one frame"),
        (double_frame(PLAIN, 0xC3, 16), "more than one frame"),
        (set_frame(double_frame(PLAIN, 0xC0, 16), 0xC3), "more than one frame"),
        (double_frame(FILES["baseline"], 0xC3, 40), "more than one frame"),
    ],
    ids=[*REFUSED, *(f"0x{code:X}" for code in UNKNOWN), *(f"doubled {i}" for i in range(4))],
)
def test_rare_frames_are_refused(data: bytes, message: str, use: Callable[[bytes], object]) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        use(data)
    with pytest.raises(ValueError, match=re.escape(message)):
        check_ends(data)


@pytest.mark.parametrize("fill", [b"", b"\xff\xff\xff", b"junk", b"\xff\0", b"\xff\xd0\xff\x01"])
@pytest.mark.parametrize("name", ["lossless", "baseline", "12 bits"])
def test_a_frame_is_found_where_libjpeg_finds_it(name: str, fill: bytes) -> None:
    data = FILES[name]
    # a thumbnail has a frame too
    thumbnail = b"Exif\0\0" + FILES["lossless"] + PLAIN
    thumbnail = b"\xff\xe1" + (len(thumbnail) + 2).to_bytes(2, "big") + thumbnail
    frame = re.search(rb"\xff[\xc0\xc1\xc3]", data).start()  # type: ignore[union-attr]
    other = data[:2] + thumbnail + data[2:frame] + fill + data[frame:] + PLAIN
    if name == "12 bits":
        with pytest.raises(ValueError, match="12 bits"):
            decode(other)
    elif name == "lossless":
        assert not is_plain_jpeg(other)
    else:
        np.testing.assert_array_equal(decode(other), decode(data))


def test_a_frame_after_the_pixels_changes_no_size() -> None:
    scan = PLAIN.index(b"\xff\xda")
    lossless = FILES["lossless"]
    frame = lossless[lossless.index(b"\xff\xc3") :][:19]
    for end in (scan + 14, len(PLAIN) - 40, len(PLAIN) - 2):
        for reduction in (1, 8):
            data = PLAIN[:end] + frame + PLAIN[end:]
            with suppress(ValueError):  # libjpeg: two SOF markers
                assert decode(data, reduction).shape == decode(PLAIN, reduction).shape


@pytest.mark.parametrize("sampling", ["440", "411"])
def test_rare_samplings_have_the_pixels_of_pillow(sampling: str) -> None:
    data = encode(PIXELS, sampling)
    np.testing.assert_array_equal(decode(data), np.asarray(Image.open(io.BytesIO(data))))


def test_an_extended_frame_of_8_bits_is_a_baseline_one() -> None:
    data = set_frame(PLAIN, 0xC1)
    assert is_plain_jpeg(data)
    np.testing.assert_array_equal(decode(data), decode(PLAIN))
