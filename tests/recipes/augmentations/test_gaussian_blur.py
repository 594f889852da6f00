"""Gaussian blur: its distribution, and torchvision's filter by its formula."""

import numpy as np
import pytest

from lockstep.recipes.augmentations.gaussian_blur import GaussianBlur


@pytest.mark.parametrize("sigma", [0.1, 0.5, 1.3, 2.0])
def test_torchvisions_filter_weighs_23_pixels_by_a_gaussian(sigma: float) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (30, 26, 3), dtype=np.uint8)
    pixels[:10] = 255 * (pixels[:10] > 127)
    weights = np.exp(-0.5 * (np.arange(-11, 12) / sigma) ** 2)
    weights /= weights.sum()
    blurred = np.pad(pixels, [(11, 11), (11, 11), (0, 0)], mode="reflect").astype(float)
    for axis in (0, 1):
        windows = np.lib.stride_tricks.sliding_window_view(blurred, 23, axis)
        blurred = windows @ weights
    made = GaussianBlur(dialect="torchvision").apply(pixels, sigma)
    assert np.abs(made - blurred).max() <= 0.51


def test_images_are_blurred_with_a_probability_and_a_uniform_deviation() -> None:
    blur = GaussianBlur(probability=0.3, sigma=(0.5, 1.5))
    numbers = np.random.default_rng(0).random((4000, blur.numbers))
    sigmas = [sigma for sigma in map(blur.draw, numbers.tolist()) if sigma is not None]
    assert abs(len(sigmas) - 1200) < 4 * np.sqrt(840)
    uniform = np.linspace(0.5, 1.5, len(sigmas))
    assert np.abs(np.sort(sigmas) - uniform).max() < 1.95 / np.sqrt(len(sigmas))


def test_other_images_stay() -> None:
    pixels = np.eye(30, dtype=np.uint8)[:, :, None].repeat(3, 2)
    assert GaussianBlur(probability=0).draw([0.0, 0.5]) is None
    assert GaussianBlur().apply(pixels, None) is pixels
