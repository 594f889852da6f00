"""A window decoded alone has the pixels of a full decode, to the last bit, for every kind of JPEG."""

import io

import numpy as np
import pytest
from PIL import Image

from lockstep.data.decoding import jpeg, turbojpeg
from lockstep.data.decoding.decode import decode, decode_into
from lockstep.data.decoding.turbojpeg import Window, decode_window
from tests.data.pictures import any_window, encoded, picture, wrong_in_threads

SAMPLINGS = ("444", "422", "420", "440", "411", "Gray")


def assert_same(data: bytes, window: Window, case: str, reduction: int = 1) -> None:
    size, whole = decode(data).shape[:2], decode(data, reduction)
    top, left, height, width = window
    found = decode_window(data, size, window, reduction)
    assert found is not None, case
    assert np.array_equal(found, whole[top : top + height, left : left + width]), case


def test_the_library_is_installed_with_lockstep() -> None:
    assert turbojpeg.library() is not None


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_a_window_has_the_pixels_of_a_full_decode(sampling: str) -> None:
    rng = np.random.default_rng(SAMPLINGS.index(sampling))
    for case in range(150):
        height, width = rng.integers(1, 140, 2).tolist()
        data = encoded(picture(rng, height, width), sampling, int(rng.integers(30, 99)))
        window = any_window(rng, height, width)
        assert_same(data, window, f"case {case}: {height} x {width}, window {window}")


def test_a_window_of_a_progressive_jpeg_too() -> None:
    rng = np.random.default_rng(9)
    for case in range(100):
        height, width = rng.integers(1, 140, 2).tolist()
        file = io.BytesIO()
        Image.fromarray(picture(rng, height, width)).save(file, "JPEG", progressive=True, subsampling=case % 3)
        assert_same(file.getvalue(), any_window(rng, height, width), f"case {case}")


@pytest.mark.parametrize("reduction", [2, 4, 8])
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_a_window_of_a_reduced_image_too(sampling: str, reduction: int) -> None:
    rng = np.random.default_rng(reduction)
    for case in range(60):
        height, width = rng.integers(16, 200, 2).tolist()  # of fewer pixels other reductions leave as many
        data = encoded(picture(rng, height, width), sampling)
        smaller = decode(data, reduction).shape
        assert smaller == (-(-height // reduction), -(-width // reduction), 3)
        window = any_window(rng, *smaller[:2])
        assert_same(data, window, f"case {case}: {height} x {width}, window {window}", reduction)


def test_a_reduced_image_is_the_mean_of_its_blocks() -> None:
    # Of a grey ramp, which quantisation leaves as it is.
    ramp = np.tile(np.arange(0, 192, 3, dtype=np.uint8)[:, None, None], (1, 64, 3))
    means = ramp[..., 0].reshape(16, 4, 16, 4).mean(axis=(1, 3))
    assert np.abs(decode(encoded(ramp, "444", 100), 4)[..., 0] - means).max() <= 2


WINDOWS = {"half": ((0, 0, 64, 80), 2), "less than half": ((0, 0, 63, 80), 1), "a quarter": ((8, 4, 130, 150), 4)}


@pytest.mark.parametrize("antialias", [False, True])
@pytest.mark.parametrize(("window", "reduction"), WINDOWS.values(), ids=WINDOWS)
def test_with_dct_scaling_a_large_window_is_taken_from_a_reduced_image(
    window: Window, reduction: int, antialias: bool
) -> None:
    data = encoded(picture(np.random.default_rng(6), 150, 170), "420")
    outs = np.zeros((2, 32, 32, 3), np.uint8)
    decode_into(data, (150, 170), window, (32, 32), (0, 0), flip=False, antialias=antialias, dct_scaling=True, out=outs[0])
    smaller = decode(data, reduction)
    top, left, height, width = (length // reduction for length in window)
    part, file = smaller[top : top + height, left : left + width], io.BytesIO()
    Image.fromarray(part).save(file, "PNG")
    whole = (0, 0, *part.shape[:2])
    decode_into(file.getvalue(), part.shape[:2], whole, (32, 32), (0, 0), flip=False, antialias=antialias, out=outs[1])
    assert np.array_equal(*outs)


def test_every_window_of_a_small_image() -> None:
    data = encoded(picture(np.random.default_rng(1), 19, 21), "420")
    for top in range(19):
        for left in range(0, 21, 4):
            assert_same(data, (top, left, 19 - top, 21 - left), f"from {top}, {left}")
            assert_same(data, (0, 0, top + 1, left + 1), f"to {top}, {left}")


def test_the_window_of_one_image_does_not_reach_into_the_next() -> None:
    rng = np.random.default_rng(2)
    data = encoded(picture(rng, 90, 80), "420")
    decode_window(data, (90, 80), (40, 40, 5, 5))
    assert_same(data, (0, 0, 90, 80), "the whole image after a part")


@pytest.mark.parametrize(
    "data",
    [
        encoded(picture(np.random.default_rng(3), 40, 40), "420")[:-300],
        b"\xff\xd8\xff",
        b"",
        b"no image",
    ],
    ids=["cut short", "a marker", "nothing", "text"],
)
def test_what_is_damaged_is_left_to_a_full_decode(data: bytes) -> None:
    assert decode_window(data, (40, 40), (0, 0, 40, 40)) is None


def test_an_image_of_another_size_is_left_to_a_full_decode() -> None:
    data = encoded(picture(np.random.default_rng(3), 40, 40), "420")
    assert decode_window(data, (40, 41), (0, 0, 10, 10)) is None
    with pytest.raises(ValueError, match="it has 40 x 40 pixels"):
        decode_into(
            data,
            (40, 41),
            (0, 0, 10, 10),
            (8, 8),
            (0, 0),
            flip=False,
            antialias=False,
            out=np.empty((8, 8, 3), np.uint8),
        )


@pytest.mark.parametrize("antialias", [False, True])
def test_without_the_library_the_pixels_are_the_same(antialias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(4)
    data = encoded(picture(rng, 130, 170), "420")
    monkeypatch.setattr(jpeg, "_jpeg", None)
    outs = []
    for _ in range(2):
        out = np.zeros((32, 32, 3), np.uint8)
        decode_into(data, (130, 170), (33, 41, 70, 90), (40, 36), (3, 2), flip=True, antialias=antialias, out=out)
        outs.append(out)
        monkeypatch.setattr(turbojpeg, "library", lambda: None)
    assert decode_window(data, (130, 170), (0, 0, 130, 170)) is None
    assert np.array_equal(*outs)


def test_threads_do_not_share_a_decoder() -> None:
    rng = np.random.default_rng(5)
    assert wrong_in_threads(decode_window, [encoded(picture(rng, 100, 120), "420") for _ in range(4)]) == []
