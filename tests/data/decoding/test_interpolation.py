"""Bicubic interpolation: Pillow's filter with antialiasing, the cubic of a = -0.75 without."""

import io

import numpy as np
import pytest
from PIL import Image

from lockstep.data.decoding.augment import Square, decode_into
from lockstep.data.decoding.jpeg import Window
from tests.data.pictures import encode, picture

PIXELS = picture(np.random.default_rng(8), 75, 101)
CUTS: dict[str, tuple[Window, tuple[int, int]]] = {
    "whole image": ((0, 0, 75, 101), (32, 32)),
    "shrunk": ((5, 7, 60, 80), (32, 32)),
    "enlarged": ((30, 40, 11, 13), (32, 32)),
    "one direction shrunk": ((3, 2, 16, 90), (32, 32)),
    "one pixel": ((74, 100, 1, 1), (32, 32)),
    "the centre": ((0, 0, 75, 101), (36, 48)),
}


def transform(
    data: bytes, cut: str, *, antialias: bool, interpolation: str = "bicubic", **more: str
) -> np.ndarray:
    window, resized = CUTS[cut]
    out = np.full((32, 32, 3), 77, np.uint8)
    how = {"flip": False, "antialias": antialias, "interpolation": interpolation, **more}
    decode_into(data, PIXELS.shape[:2], Square(window, resized, corner(resized), **how), out)
    return out


def corner(resized: tuple[int, int]) -> tuple[int, int]:
    return (resized[0] - 32) // 2, (resized[1] - 32) // 2


def square(pixels: np.ndarray, cut: str) -> np.ndarray:
    top, left = corner(CUTS[cut][1])
    return pixels[top : top + 32, left : left + 32]


def png() -> bytes:
    file = io.BytesIO()
    Image.fromarray(PIXELS).save(file, "PNG")
    return file.getvalue()


def cubic_matrix(count: int, wanted: int, a: float, centre_of_pixels: float = 0.5) -> np.ndarray:
    """Return float64 [wanted, count]: weights of Keys' cubic. Pixel i covers i to i + 1; the
    border's colours continue."""
    weights = np.zeros((wanted, count))
    for row, centre in enumerate(
        (np.arange(wanted) + centre_of_pixels) * count / wanted - centre_of_pixels
    ):
        for place in range(int(np.floor(centre)) - 1, int(np.floor(centre)) + 3):
            x = abs(centre - place)
            near = (a + 2) * x**3 - (a + 3) * x**2 + 1
            weights[row, min(max(place, 0), count - 1)] += (
                near if x <= 1 else a * (x**3 - 5 * x**2 + 8 * x - 4)
            )
    return weights


@pytest.mark.parametrize("cut", CUTS)
def test_with_antialias_bicubic_is_pillows(cut: str) -> None:
    (top, left, height, width), resized = CUTS[cut]
    window = Image.fromarray(PIXELS).crop((left, top, left + width, top + height))
    expected = np.asarray(window.resize(resized[::-1], Image.Resampling.BICUBIC))
    np.testing.assert_array_equal(transform(png(), cut, antialias=True), square(expected, cut))


@pytest.mark.parametrize("cut", CUTS)
def test_without_antialias_bicubic_is_the_cubic_of_sixteen_pixels(cut: str) -> None:
    (top, left, height, width), resized = CUTS[cut]
    part = PIXELS[top : top + height, left : left + width].astype(np.float64)
    rows, columns = (
        cubic_matrix(count, wanted, -0.75)
        for count, wanted in zip((height, width), resized, strict=True)
    )
    expected = np.clip(np.einsum("ih,hwc,jw->ijc", rows, part, columns), 0, 255)
    np.testing.assert_allclose(
        transform(png(), cut, antialias=False), square(expected, cut), atol=1
    )


@pytest.mark.parametrize("cut", ["shrunk", "enlarged", "one direction shrunk"])
def test_bicubic_samples_at_whole_multiples_of_the_scale_where_the_recipe_says_so(cut: str) -> None:
    (top, left, height, width), resized = CUTS[cut]
    part = PIXELS[top : top + height, left : left + width].astype(np.float64)
    rows, columns = (
        cubic_matrix(*counts, -0.75, 0) for counts in zip((height, width), resized, strict=True)
    )
    expected = np.clip(np.einsum("ih,hwc,jw->ijc", rows, part, columns), 0, 255)
    actual = transform(png(), cut, antialias=False, sampling="asymmetric")
    np.testing.assert_allclose(actual, square(expected, cut), atol=0.51)


@pytest.mark.parametrize("sampling", ["420", "444"])
@pytest.mark.parametrize("cut", CUTS)
def test_a_decoded_window_gets_the_pixels_of_the_cropped_image(cut: str, sampling: str) -> None:
    data = encode(PIXELS, sampling)
    (top, left, height, width), resized = CUTS[cut]
    window = Image.open(io.BytesIO(data)).crop((left, top, left + width, top + height))
    expected = np.asarray(window.resize(resized[::-1], Image.Resampling.BICUBIC))
    np.testing.assert_array_equal(transform(data, cut, antialias=True), square(expected, cut))
