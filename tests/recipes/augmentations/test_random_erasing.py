"""Random erasing: its rectangles' distributions, and what they are filled with."""

from statistics import NormalDist
from typing import Any

import numpy as np
import pytest

from lockstep.recipes.augmentations.random_erasing import RandomErasing, Rectangle
from lockstep.system.errors import RecipeError

GREY = np.full((40, 40, 3), 7, np.uint8)
RECTANGLE = Rectangle(0.3, 0.5, 0.999, 0.0, (0.5, 0.975, 0.001), key=11)


def draw_many(images: int, **fields: Any) -> list[list[Rectangle]]:
    erasing = RandomErasing(**fields)
    numbers = np.random.default_rng(0).random((images, erasing.numbers))
    return [erasing.draw(row) for row in numbers.tolist()]


def test_the_share_of_images_and_the_number_of_rectangles_are_drawn() -> None:
    counts = np.bincount([len(one) for one in draw_many(6000, probability=0.25, count=3)])
    # None, then 1 to 3 equally often: within four standard deviations.
    np.testing.assert_allclose(counts, [4500, 500, 500, 500], atol=4 * 34)


def test_areas_and_shapes_are_those_of_torchvision_and_timm() -> None:
    drawn = draw_many(4000, probability=1.0, area=(0.02, 0.2))
    heights, widths, tops, lefts = np.array([one[0][:4] for one in drawn]).T
    # With these areas every first attempt fits, and so all numbers are uniform.
    areas = (heights * widths - 0.02) / 0.18
    shapes = (np.log(heights / widths) - np.log(0.3)) / np.log(1 / 0.09)
    uniform = (np.arange(4000) + 0.5) / 4000
    for values in (areas, shapes, tops, lefts):
        assert np.abs(np.sort(values) - uniform).max() < 1.95 / np.sqrt(4000)


def test_a_rectangle_that_does_not_fit_is_drawn_again() -> None:
    drawn = draw_many(300, probability=1.0, area=(0.9, 0.9))
    sides = [one[0][:2] for one in drawn if one]
    assert np.max(sides) < 1
    # A side fits if the aspect is between 0.9 and 1 / 0.9: in 8.75 % of attempts, so in 60 % of
    # ten.
    fits = np.log(1 / 0.9) / np.log(1 / 0.3)
    assert abs(len(sides) / 300 - (1 - (1 - fits) ** 10)) < 4 * np.sqrt(0.24 / 300)


def test_areas_are_divided_among_rectangles() -> None:
    drawn = draw_many(100, probability=1.0, area=(0.2, 0.2), count=2)
    assert {len(one) for one in drawn} == {1, 2}
    for one in drawn:
        np.testing.assert_allclose([r.height * r.width for r in one], 0.2 / len(one))


@pytest.mark.parametrize(
    ("fill", "expected"),
    # Normal quantiles: 0, 1.95996 and -3.09023
    [("mean", [124, 116, 104]), ("colour", [124, 228, 0])],
)
def test_a_rectangle_of_a_colour(fill: Any, expected: list[int]) -> None:
    pixels = RandomErasing(fill=fill).apply(GREY.copy(), [RECTANGLE])
    # 12 of 40 rows at the last of 29 places, and 20 of 40 columns at the first of 21
    assert (pixels[28:, :20] == expected).all()
    pixels[28:, :20] = 7
    np.testing.assert_array_equal(pixels, GREY)


def test_noise_is_normal_with_the_recipes_mean_and_deviation() -> None:
    erasing = RandomErasing(fill="noise", mean=(100, 120, 140), std=(20, 30, 60))
    rectangle = RECTANGLE._replace(height=0.6, width=0.5)
    noise, other = (
        erasing.apply(np.zeros((200, 200, 3), np.uint8), [rectangle._replace(key=key)])
        for key in (1, 2)
    )
    area = noise[80:, :100].reshape(-1, 3).astype(float)
    assert not noise[:80].any()
    assert not noise[:, 100:].any()
    for values, mean, std in zip(area.T, erasing.mean, erasing.std, strict=True):
        for level in (40, 100, 150, 230):
            share = NormalDist(mean, std).cdf(level + 0.5)
            spread = np.sqrt(share * (1 - share) / len(values))
            assert abs((values <= level).mean() - share) <= 4 * spread + 1 / len(values)
    assert np.abs(np.corrcoef(area.T) - np.eye(3)).max() < 4 / np.sqrt(len(area))
    assert abs((noise == other)[80:, :100].mean()) < 0.03


def test_no_image_is_erased_whole() -> None:
    pixels = RandomErasing().apply(GREY.copy(), [RECTANGLE._replace(height=0.999, width=0.999)])
    assert (pixels == 7).any()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"area": (0.3, 0.1)}, "area: expected a rising range, such as .*, not"),
        ({"area": (0.3, 1.1)}, "area: expected shares of the image's area, from 0 to 1, not"),
        ({"aspect": (0, 1)}, "aspect"),
        ({"count": 0}, "count"),
    ],
)
def test_wrong_fields_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        RandomErasing.of(fields)
