"""Augmentations, given the same parameters, compared with torchvision's and timm's.

These tests need both: they are skipped where torchvision or timm is missing. Without them, the
other tests of this folder compare with Pillow and with formulas.
"""

import random
from typing import Any

import numpy as np
import pytest
from PIL import Image

from lockstep.recipes.augmentations.augmix import LARGEST, AugMix
from lockstep.recipes.augmentations.colour_jitter import ColourJitter
from lockstep.recipes.augmentations.gaussian_blur import GaussianBlur
from lockstep.recipes.augmentations.greyscale import Greyscale
from lockstep.recipes.augmentations.random_erasing import RandomErasing, Rectangle
from lockstep.recipes.augmentations.three_augment import ThreeAugment

torch: Any = pytest.importorskip("torch")
unusable: Any = (ImportError, RuntimeError)  # the latter of another build of PyTorch
torchvision: Any = pytest.importorskip("torchvision.transforms.v2", exc_type=unusable)
timm: Any = pytest.importorskip("timm.data.auto_augment")
erasing: Any = pytest.importorskip("timm.data.random_erasing")

PIXELS = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
IMAGE = Image.fromarray(PIXELS)


def test_jitters_have_torchvisions_bits() -> None:
    ours = ColourJitter(hue=0.2)
    theirs = torchvision.ColorJitter(0.4, 0.4, 0.4, 0.2)
    names = ["brightness", "contrast", "saturation", "hue"]
    for row in np.random.default_rng(1).random((40, ours.numbers)).tolist():
        changes = ours.draw(row)
        parameters = {f"{name}_factor": value for name, value in changes}
        order = torch.tensor([names.index(name) for name, _ in changes])
        expected = theirs.transform(IMAGE, parameters | {"fn_idx": order})
        np.testing.assert_array_equal(ours.apply(PIXELS, changes), np.asarray(expected))


def test_greys_are_torchvisions() -> None:
    expected = np.asarray(torchvision.functional.rgb_to_grayscale(IMAGE, 3))
    np.testing.assert_array_equal(Greyscale().apply(PIXELS, True), expected)


@pytest.mark.parametrize("sigma", [0.1, 0.6, 1.3, 2.0])
def test_a_blur_is_torchvisions_within_a_level(sigma: float) -> None:
    expected = np.asarray(torchvision.functional.gaussian_blur(IMAGE, [23, 23], [sigma, sigma]))
    made = GaussianBlur(dialect="torchvision").apply(PIXELS, sigma)
    assert np.abs(made.astype(int) - expected).max() <= 1


@pytest.mark.parametrize("number", range(3))
def test_3_augment_is_timms_policy(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    [step] = timm.auto_augment_policy_3a({"img_mean": (124, 116, 104)})[number]
    monkeypatch.setattr(random, "uniform", lambda low, high: low + 0.4 * (high - low))
    expected = np.asarray(step(IMAGE))
    ours = ThreeAugment(jitter=0)
    choice = [0.5, 0.1, 0.9][number]  # timm begins with solarise
    made = ours.apply(PIXELS, ours.draw([choice, 0.4, *[0.0] * 6]))
    np.testing.assert_array_equal(made, expected)


def test_magnitudes_of_augmix_are_torchvisions() -> None:
    space = torchvision.AugMix._AUGMENTATION_SPACE
    names = {"colour": "Color", "move_x_by_share": "TranslateX", "move_y_by_share": "TranslateY"}
    names |= {"equalise": "Equalize", "posterise": "Posterize", "solarise": "Solarize"}
    names |= {"autocontrast": "AutoContrast", "shear_x": "ShearX", "shear_y": "ShearY"}
    assert [names.get(name, name.title()) for name in LARGEST] == list(space)
    augmentation = AugMix(severity=10)
    for place, name in enumerate(LARGEST):
        magnitudes, _ = space[names.get(name, name.title())]
        expected = magnitudes(10, 64, 64)
        if expected is None or name.startswith("shear"):  # shears are angles there
            continue
        if name.startswith("move"):
            expected = expected / 64
        if name == "solarise":
            expected = expected * 255
        for index in range(10):
            row = [(place + 0.5) / 13, (index + 0.5) / 10, 0.9, 0.0]
            number = augmentation._draw_operation(row).number
            number -= name in ("brightness", "colour", "contrast", "sharpness")
            assert number == pytest.approx(float(expected[index]), rel=1e-6, abs=1e-6), (
                name,
                index,
            )


def draw_timms_rectangles(peer: Any, size: int, count: int) -> np.ndarray:
    """Return height, width, top and left of the rectangles that timm erases: int [count, 4]."""
    rectangles: list[tuple[int, ...]] = []
    while len(rectangles) < count:
        image = torch.ones(1, size, size)
        peer(image)
        rows, columns = np.nonzero(image[0].numpy() == 0)
        if len(rows):
            corner = (rows.min(), columns.min())
            end = (rows.max() + 1, columns.max() + 1)
            rectangles.append((end[0] - corner[0], end[1] - corner[1], *corner))
    return np.array(rectangles)


def test_rectangles_have_timms_distributions() -> None:
    random.seed(1)
    theirs = draw_timms_rectangles(erasing.RandomErasing(1.0, device="cpu"), 64, 3000)
    ours = RandomErasing(probability=1.0)
    places = np.zeros((3000, 4), int)
    for i, row in enumerate(np.random.default_rng(2).random((3000, ours.numbers)).tolist()):
        mask = ours.apply(np.full((64, 64, 3), 7, np.uint8), ours.draw(row))[..., 0] != 7
        rows, columns = np.nonzero(mask)
        corner = (rows.min(), columns.min())
        places[i] = (np.ptp(rows) + 1, np.ptp(columns) + 1, *corner)
    for mine, other in zip(places.T, theirs.T, strict=True):
        at = np.arange(65)
        below = [np.searchsorted(np.sort(sample), at, side="right") for sample in (mine, other)]
        # Kolmogorov and Smirnov: 1.95 is exceeded once in a thousand cases
        assert np.abs(below[0] - below[1]).max() / 3000 * np.sqrt(1500) < 1.95


@pytest.mark.parametrize(("fill", "mode"), [("mean", "const"), ("noise", "pixel")])
def test_fills_are_timms_within_half_a_level(fill: Any, mode: str) -> None:
    ours = RandomErasing(fill=fill)
    pixels = ours.apply(PIXELS.copy(), [Rectangle(0.9, 0.9, 0, 0, (0.5, 0.5, 0.5), 5)])
    area = (pixels[:57, :57] - np.array(ours.mean)) / np.array(ours.std)
    torch.manual_seed(0)
    theirs = erasing._get_pixels(mode == "pixel", False, (3, 57, 57), device="cpu").numpy()
    result = np.abs(area.mean((0, 1)) - theirs.mean((1, 2))).max()
    assert result < 0.5 / 57 + 4 * (mode == "pixel") / 57
    if mode == "pixel":
        # Clipping takes 4 % of the deviation at most.
        assert np.abs(area.std((0, 1)) - theirs.std((1, 2))).max() < 0.06
