"""The operators compared with Pillow's, and the numbers of torchvision and timm as they were
recorded from torchvision 0.28.0 and timm 1.0.31."""

import math
from typing import Any

import numpy as np
import pytest
from PIL import Image

from benchmarks.loaders.pillow_operators import COLOURS, GEOMETRY, MODES
from lockstep.recipes.augmentations.autoaugment import AutoAugment
from lockstep.recipes.augmentations.randaugment import RandAugment
from lockstep.recipes.augmentations.trivialaugment_wide import TrivialAugmentWide
from lockstep.recipes.operations import (
    LARGEST,
    LARGEST_WIDE,
    Operation,
    draw_normal,
    number_of_timm,
    number_of_torchvision,
)
from lockstep.recipes.pixel_operators import OPERATORS, Resampling
from lockstep.system.errors import RecipeError
from tests.recipes.cases import make_photo

FILL = (124, 116, 104)
FACTORS = (0.0, 0.1, 0.37, 1.0, 1.36, 1.9)
NUMBERS: dict[str, tuple[float, ...]] = {
    "brightness": FACTORS,
    "colour": FACTORS,
    "contrast": FACTORS,
    "sharpness": FACTORS,
    "posterise": (1, 2, 4, 7, 8),
    "solarise": (0, 1, 77, 178.5, 255, 256),
    "solarise_add": (0, 77, 128),
    "rotate": (-135.0, -9.0, 0.0, 0.4, 30.0, 90.0, 180.0),
    "move_x": (-21.4, 0.0, 32.0, 48.0),
    "move_y": (-21.4, 0.0, 32.0, 48.0),
}


def make_images() -> dict[str, np.ndarray]:
    photo = make_photo(size=48)
    grey = np.random.default_rng(4).integers(0, 256, (32, 32, 1), np.uint8)
    return {
        "photo": photo,
        "grey noise": np.repeat(grey, 3, axis=2),
        "dark": photo // 5 + 3,
        "two levels": np.where(photo > 120, np.uint8(250), np.uint8(9)),
        "one level": np.full((32, 32, 3), 77, np.uint8),
        "one level and a pixel": np.pad(
            np.full((1, 1, 3), 9, np.uint8), ((0, 31), (0, 31), (0, 0))
        ),
    }


@pytest.mark.parametrize("operator", COLOURS)
@pytest.mark.parametrize("image", make_images())
def test_an_operator_on_colours_gives_pillows_bits(operator: str, image: str) -> None:
    pixels = make_images()[image]
    for number in NUMBERS.get(operator, (0,)):
        expected = np.asarray(COLOURS[operator](Image.fromarray(pixels), number))
        changed = OPERATORS[operator](pixels, number, Resampling("nearest", FILL))
        np.testing.assert_array_equal(changed, expected, err_msg=f"{operator} {number}")


@pytest.mark.parametrize("operator", GEOMETRY)
@pytest.mark.parametrize("interpolation", ["nearest", "bilinear", "bicubic"])
def test_an_operator_on_geometry_gives_pillows_bits(operator: str, interpolation: Any) -> None:
    pixels = make_photo(size=48)
    for number in NUMBERS.get(operator, (-1.0, -0.66, -0.09, 0.0, 0.01, 0.315)):
        expected = GEOMETRY[operator](Image.fromarray(pixels), number, MODES[interpolation], FILL)
        changed = OPERATORS[operator](pixels, number, Resampling(interpolation, FILL))
        np.testing.assert_array_equal(changed, np.asarray(expected), err_msg=f"{number}")
        assert changed.flags.c_contiguous


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("operator", ["translate_x", "translate_y"])
def test_a_translation_gives_pillows_bits_at_any_size(operator: str, interpolation: Any) -> None:
    generator = np.random.default_rng(6)
    how = Resampling(interpolation, FILL)
    # An eighth of a pixel puts many values on whole levels, where rounding decides.
    for eighths in (-3000, -257, -8, -1, 0, 1, 5, 83, 256, *generator.integers(-400, 400, 20)):
        size = int(generator.integers(32, 70))
        pixels = generator.integers(0, 256, (size, size, 3), np.uint8)
        for share in (eighths / 8 / size, eighths / 991):
            expected = GEOMETRY[operator](
                Image.fromarray(pixels), share, MODES[interpolation], FILL
            )
            changed = OPERATORS[operator](pixels, share, how)
            np.testing.assert_array_equal(changed, np.asarray(expected), err_msg=f"{share}")


def test_every_operator_is_compared_with_pillow() -> None:
    assert set(OPERATORS) == {*COLOURS, *GEOMETRY}


def test_posterising_to_no_bits_leaves_black() -> None:
    assert not OPERATORS["posterise"](make_photo(32), 0, Resampling("nearest", FILL)).any()


TORCHVISION = {
    "identity": (0, 0),
    "shear_x": (0.09000000357627869, 0.6600000262260437),
    "shear_y": (0.09000000357627869, 0.6600000262260437),
    "rotate": (9.0, 90.0),
    "brightness": (1.2699999809265137, 1.6600000262260437),
    "colour": (1.2699999809265137, 1.6600000262260437),
    "contrast": (1.2699999809265137, 1.6600000262260437),
    "sharpness": (1.2699999809265137, 1.6600000262260437),
    "posterise": (7, 4),
    "solarise": (178.5, 85.0),
    "autocontrast": (0, 0),
    "equalise": (0, 0),
}
"""Numbers of RandAugment at magnitude 9 and of TrivialAugmentWide at magnitude 20, of 0 to 30."""


@pytest.mark.parametrize("operator", TORCHVISION)
def test_a_number_is_torchvisions(operator: str) -> None:
    for largest, index, expected in zip(
        (LARGEST, LARGEST_WIDE), (9, 20), TORCHVISION[operator], strict=True
    ):
        number = number_of_torchvision(operator, largest[operator], index, 30, negative=False)
        # A shear is the tangent of an angle in degrees, to the last bit but one.
        exact = expected if "shear" not in operator else pytest.approx(expected, rel=4e-16)
        assert number == exact
        negative = number_of_torchvision(operator, largest[operator], index, 30, negative=True)
        signless = operator in ("posterise", "solarise")
        neutral = 1 if operator in ("brightness", "colour", "contrast", "sharpness") else 0
        assert negative == (number if signless else pytest.approx(2 * neutral - number, abs=0))


def test_moves_are_torchvisions() -> None:
    share = number_of_torchvision("move_x_by_share", 150 / 331, 9, 30, negative=False)
    photo = make_photo(size=224)
    how = Resampling("nearest", FILL)
    moved = OPERATORS["move_x_by_share"](photo, share, how)
    np.testing.assert_array_equal(moved[:, 30:], photo[:, :-30])  # 30.45 pixels there
    assert (moved[:, :30] == FILL).all()
    assert number_of_torchvision("move_x", 32, 20, 30, negative=True) == -21.333332061767578


TIMM = {
    "rotate": (21.0, 21.0),
    "posterise": (2, 2),
    "solarise": (179, 77),
    "solarise_add": (77, 77),
    "colour": (1.36, 1.63),
    "contrast": (1.36, 1.63),
    "brightness": (1.36, 1.63),
    "sharpness": (1.36, 1.63),
    "shear_x": (0.21, 0.21),
    "shear_y": (0.21, 0.21),
    "translate_x": (0.315, 0.315),
    "translate_y": (0.315, 0.315),
    "autocontrast": (0, 0),
    "equalise": (0, 0),
    "invert": (0, 0),
}
"""Numbers at magnitude 7 of 10, of the plain and of the increasing operators."""


@pytest.mark.parametrize("operator", TIMM)
def test_a_number_is_timms(operator: str) -> None:
    for is_increasing, expected in zip((False, True), TIMM[operator], strict=True):
        number = number_of_timm(operator, 0.7, negative=False, increasing=is_increasing)
        assert number == pytest.approx(expected, rel=1e-15)
        negative = number_of_timm(operator, 0.7, negative=True, increasing=is_increasing)
        if operator in ("rotate", "shear_x", "shear_y", "translate_x", "translate_y"):
            assert negative == -number
        elif is_increasing and expected == 1.63:
            assert negative == pytest.approx(0.37, rel=1e-15)
        else:
            assert negative == number


def test_normal_numbers_have_the_normal_distribution() -> None:
    uniform = (np.arange(20_000) + 0.5) / 20_000
    drawn = np.array([draw_normal(number, 7, 0.5) for number in uniform.tolist()])
    assert drawn.mean() == pytest.approx(7, abs=1e-6)
    assert drawn.std() == pytest.approx(0.5, rel=1e-3)
    assert (np.abs(drawn - 7) < 0.5).mean() == pytest.approx(math.erf(math.sqrt(0.5)), abs=1e-4)
    assert np.isfinite(draw_normal(0.0, 7, 0.5))


def draw(augmentation: Any, count: int = 4000) -> list[tuple[Operation, ...]]:
    rows = np.random.default_rng(2).random((count, augmentation.numbers)).tolist()
    return [augmentation.draw(row) for row in rows]


def test_timms_magnitudes_vary_as_the_fields_say() -> None:
    how: dict[str, Any] = {"dialect": "timm", "magnitude": 9}

    def draw_angles(**fields: Any) -> np.ndarray:
        drawn = draw(RandAugment(**how, **fields))
        numbers = [one.number for operations in drawn for one in operations]
        names = [one.operator for operations in drawn for one in operations]
        return np.abs(np.array(numbers)[np.array(names) == "rotate"])

    assert set(draw_angles()) == {27.0}
    angles = draw_angles(magnitude_std=0.5)
    assert np.median(angles) == pytest.approx(27, abs=0.3)
    assert angles.max() == 30  # a share of 2 % is cut off at magnitude 10
    assert draw_angles(magnitude_std=0.5, magnitude_max=30).max() > 30
    uniform = draw_angles(magnitude_std="uniform")
    assert uniform.max() < 27
    assert uniform.mean() == pytest.approx(13.5, rel=0.1)


def test_each_operation_has_the_probability_and_the_interpolation_that_the_fields_say() -> None:
    augmentation = RandAugment(dialect="timm")
    counts = np.bincount([len(operations) for operations in draw(augmentation)])
    assert counts / 4000 == pytest.approx(np.array([0.25, 0.5, 0.25]), abs=0.03)
    used = {one.interpolation for operations in draw(augmentation) for one in operations}
    assert used == {"bilinear", "bicubic"}
    plain = draw(RandAugment())
    assert {len(operations) for operations in plain} == {2}
    assert {one.interpolation for operations in plain for one in operations} == {"nearest"}
    assert {len(operations) for operations in draw(TrivialAugmentWide())} == {1}


def test_a_pair_of_a_policy_comes_with_its_probabilities() -> None:
    drawn = draw(AutoAugment(policy="original"), 20_000)
    # Only one of the 25 pairs has sharpness, with a probability of 0.4.
    share = np.mean([any(one.operator == "sharpness" for one in pair) for pair in drawn])
    assert share == pytest.approx(0.4 / 25, rel=0.15)
    # Only two pairs have contrast, always, at magnitude 8.
    contrasts = [one.number for pair in drawn for one in pair if one.operator == "contrast"]
    assert len(contrasts) / 20_000 == pytest.approx(2 / 25, rel=0.1)
    assert np.unique(contrasts) == pytest.approx([0.8 * 1.8 + 0.1])


def test_fields_have_the_defaults_of_the_dialect() -> None:
    assert RandAugment().fields() == {
        "name": "randaugment",
        "interpolation": "nearest",
        "fill": [0, 0, 0],
        "dialect": "torchvision",
        "operations": 2,
        "magnitude": 9.0,
        "full_magnitude": 30.0,
        "magnitude_std": 0.0,
        "magnitude_max": 10.0,
        "probability": 1.0,
        "increasing": True,
    }
    timm = RandAugment(dialect="timm", operations=3).fields()
    assert timm == {
        "name": "randaugment",
        "interpolation": "random",
        "fill": [124, 116, 104],
        "dialect": "timm",
        "operations": 3,
        "magnitude": 10.0,
        "full_magnitude": 10.0,
        "magnitude_std": 0.0,
        "magnitude_max": 10.0,
        "probability": 0.5,
        "increasing": False,
    }
    assert AutoAugment().interpolation == "nearest"
    assert AutoAugment(policy="v0").fill == (124, 116, 104)


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        (RandAugment, {"magnitude": 9.5}, "whole numbers"),
        (RandAugment, {"magnitude": 31}, "magnitude is 31; expected at most full_magnitude, 30"),
        (RandAugment, {"magnitude_std": 0.5}, "are timm's; add dialect: timm"),
        (RandAugment, {"increasing": False}, "are timm's; add dialect: timm"),
        (RandAugment, {"fill": [0, 0, 256]}, r"fill\.2: .* 255, not 256"),
        (RandAugment, {"operations": 0}, "operations: .* 1, not 0"),
        (AutoAugment, {"magnitude_std": 0.5}, "timm's; expected one of its policies"),
    ],
)
def test_fields_that_do_not_fit_are_refused(kind: Any, fields: Any, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        kind(**fields)
