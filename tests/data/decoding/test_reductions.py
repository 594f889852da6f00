"""JPEGs decoded at a fraction of their size."""

import io

import numpy as np
import pytest
from PIL import Image

from lockstep.data.decoding.augment import Square, decode_into
from lockstep.data.decoding.decode import decode
from lockstep.data.decoding.jpeg import Window
from tests.data.pictures import encode, picture


def test_a_reduced_image_is_the_mean_of_its_blocks() -> None:
    # The image is a grey ramp, which quantisation does not change.
    ramp = np.tile(np.arange(0, 192, 3, dtype=np.uint8)[:, None, None], (1, 64, 3))
    means = ramp[..., 0].reshape(16, 4, 16, 4).mean(axis=(1, 3))
    assert np.abs(decode(encode(ramp, "444", 100), 4)[..., 0] - means).max() <= 2


WINDOWS = {
    "half": ((0, 0, 64, 80), 2),
    "less than half": ((0, 0, 63, 80), 1),
    "a quarter": ((8, 4, 130, 150), 4),
}


@pytest.mark.parametrize("sampling", ["half_pixel", "asymmetric"])
@pytest.mark.parametrize("antialias", [False, True])
@pytest.mark.parametrize(("window", "reduction"), WINDOWS.values(), ids=WINDOWS)
def test_with_dct_scaling_a_large_window_is_taken_from_a_reduced_image(
    window: Window, reduction: int, antialias: bool, sampling: str
) -> None:
    data = encode(picture(np.random.default_rng(6), 150, 170), "420")
    outs = np.zeros((2, 32, 32, 3), np.uint8)
    how = {"flip": False, "antialias": antialias, "sampling": sampling}
    square = Square(window, (32, 32), (0, 0), **how, dct_scaling=True)
    decode_into(data, (150, 170), square, outs[0])
    smaller = decode(data, reduction)
    top, left, height, width = (length // reduction for length in window)
    part = smaller[top : top + height, left : left + width]
    file = io.BytesIO()
    Image.fromarray(part).save(file, "PNG")
    whole = (0, 0, *part.shape[:2])
    square = Square(whole, (32, 32), (0, 0), **how)
    decode_into(file.getvalue(), part.shape[:2], square, outs[1])
    assert np.array_equal(*outs)
