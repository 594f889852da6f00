"""Colour jitter and 3-Augment: their distributions, and their pixels made of Pillow's."""

from itertools import pairwise

import numpy as np
import pytest
from PIL import Image, ImageEnhance, ImageFilter, ImageOps

from lockstep.recipes.augmentations.colour_jitter import ColourJitter, rotate_hue
from lockstep.recipes.augmentations.three_augment import ThreeAugment

PIXELS = np.random.default_rng(0).integers(0, 256, (24, 24, 3), dtype=np.uint8)
IMAGE = Image.fromarray(PIXELS)


def test_a_jitter_draws_its_factors_and_every_order_equally_often() -> None:
    jitter = ColourJitter(probability=0.5, brightness=0.2, contrast=0.4, saturation=1.5, hue=0.1)
    numbers = np.random.default_rng(1).random((9600, 6))
    drawn = [changes for changes in map(jitter.draw, numbers.tolist()) if changes]
    assert abs(len(drawn) - 4800) < 4 * np.sqrt(9600 / 4)
    orders = [" ".join(name for name, _ in changes) for changes in drawn]
    _, frequencies = np.unique(orders, return_counts=True)
    assert len(frequencies) == 24
    np.testing.assert_allclose(frequencies, 200, atol=4 * np.sqrt(200))
    ranges = {
        "brightness": (0.8, 1.2),
        "contrast": (0.6, 1.4),
        "saturation": (0.0, 2.5),
        "hue": (-0.1, 0.1),
    }
    uniform = (np.arange(len(drawn)) + 0.5) / len(drawn)
    for name, (smallest, largest) in ranges.items():
        values = np.sort([dict(changes)[name] for changes in drawn])
        shares = (values - smallest) / (largest - smallest)
        assert np.abs(shares - uniform).max() < 1.95 / np.sqrt(len(drawn))


def test_what_has_no_width_is_left_out() -> None:
    result = [name for name, _ in ColourJitter().draw([0.0] * 6)]
    assert result == ["brightness", "contrast", "saturation"]
    jitter = ColourJitter(brightness=0, contrast=0, saturation=0, hue=0)
    assert jitter.draw([0.0] * 6) == []


@pytest.mark.parametrize("names", list(pairwise(["brightness", "contrast", "saturation"] * 2)))
def test_changes_are_made_in_their_order(names: tuple[str, str]) -> None:
    enhancers = {
        "brightness": ImageEnhance.Brightness,
        "contrast": ImageEnhance.Contrast,
        "saturation": ImageEnhance.Color,
    }
    image = IMAGE
    for name in names:
        image = enhancers[name](image).enhance(1.4)
    pixels = ColourJitter().apply(PIXELS, [(name, 1.4) for name in names])
    np.testing.assert_array_equal(pixels, np.asarray(image))


@pytest.mark.parametrize("share", [-0.5, -0.13, 0.0, 0.002, 0.31, 0.5])
def test_hues_are_rotated_as_by_torchvision(share: float) -> None:
    # torchvision: the hue channel of Pillow's HSV, plus the share times 255 without its fraction
    hue, saturation, value = IMAGE.convert("HSV").split()
    turned = (np.asarray(hue).astype(int) + int(share * 255)) % 256
    bands = (Image.fromarray(turned.astype(np.uint8)), saturation, value)
    expected = np.asarray(Image.merge("HSV", bands).convert("RGB"))
    np.testing.assert_array_equal(rotate_hue(PIXELS, share), expected)


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (0.1, IMAGE.convert("L").convert("RGB")),
        (0.5, ImageOps.solarize(IMAGE)),
        (0.9, IMAGE.filter(ImageFilter.GaussianBlur(0.1 + 0.3 * 1.9))),
    ],
)
def test_3_augment_is_one_of_three_and_a_jitter(choice: float, expected: Image.Image) -> None:
    plain = ThreeAugment(jitter=0)
    numbers = [choice, 0.3, *[0.5] * 6]
    pixels = plain.apply(PIXELS, plain.draw(numbers))
    np.testing.assert_array_equal(pixels, np.asarray(expected))
    jittered = ThreeAugment()
    changes = ColourJitter(brightness=0.3, contrast=0.3, saturation=0.3).draw(numbers[2:])
    assert len(changes) == 3
    expected_pixels = ColourJitter().apply(pixels, changes)
    np.testing.assert_array_equal(jittered.apply(PIXELS, jittered.draw(numbers)), expected_pixels)


def test_3_augment_chooses_equally_often_and_draws_its_radius() -> None:
    augmentation = ThreeAugment()
    numbers = np.random.default_rng(2).random((3000, augmentation.numbers))
    choices, radii, _ = zip(*map(augmentation.draw, numbers.tolist()), strict=True)
    _, frequencies = np.unique(choices, return_counts=True)
    np.testing.assert_allclose(frequencies, 1000, atol=4 * np.sqrt(667))
    assert np.abs(np.sort(radii) - np.linspace(0.1, 2, 3000)).max() < 1.9 * 1.95 / np.sqrt(3000)
