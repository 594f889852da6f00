"""Crops, flips and MixUp's coefficients: their distributions, and how they are drawn."""

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.recipes import Recipe
from lockstep.recipes.order import centre_plan, draw_crops, random_windows, training_plans
from lockstep.recipes.philox import Purpose, draw
from tests.recipes.cases import MIXED, SIZES
from tests.soak import EXAMPLES

KOLMOGOROV_ONE_IN_A_THOUSAND = 1.95
"""Distance of distribution functions times the square root of the count. It is exceeded once in a
thousand cases."""


def numbers_of(count: int, epoch: int = 0) -> Callable[[Purpose, int], np.ndarray]:
    return lambda purpose, attempt=0: draw(0, purpose, 0, count, epoch=epoch, attempt=attempt)


def distance(numbers: np.ndarray, distribution: Callable[[np.ndarray], np.ndarray]) -> float:
    """Return the Kolmogorov distance of numbers to a distribution function, times the square root
    of their count."""
    expected = distribution(np.sort(numbers))
    count = len(numbers)
    steps = np.arange(count + 1) / count
    return max(np.abs(expected - steps[1:]).max(), np.abs(expected - steps[:-1]).max()) * math.sqrt(
        count
    )


@EXAMPLES
@given(
    sizes=st.lists(st.tuples(st.integers(1, 3000), st.integers(1, 3000)), min_size=1, max_size=20),
    area=st.floats(0.01, 1),
    aspect=st.floats(1, 4),
    attempts=st.integers(1, 10),
)
def test_a_random_window_lies_within_its_image(
    sizes: list[tuple[int, int]], area: float, aspect: float, attempts: int
) -> None:
    recipe = Recipe(crop_area=[area, 1], crop_aspect=[1 / aspect, aspect], crop_attempts=attempts)

    windows = random_windows(recipe, np.array(sizes), numbers_of(len(sizes)))

    assert windows.dtype == np.int32
    top, left, height, width = windows.T
    heights, widths = np.array(sizes).T
    assert (np.stack([top, left]) >= 0).all()
    assert (np.stack([height, width]) >= 1).all()
    assert (top + height <= heights).all()
    assert (left + width <= widths).all()


def test_area_aspect_and_place_of_windows_are_spread_evenly() -> None:
    # A window with these areas and aspect ratios always fits into a square.
    recipe = Recipe(crop_area=[0.08, 0.5])
    count = 5000
    side = 40_000
    sizes = np.full((count, 2), side)

    top, left, height, width = random_windows(recipe, sizes, numbers_of(count)).T.astype(float)

    low = math.log(3 / 4)
    high = math.log(4 / 3)
    spread = {
        "area": (height * width / side**2 - 0.08) / (0.5 - 0.08),
        "aspect": (np.log(width / height) - low) / (high - low),
        "top": top / (side - height),
        "left": left / (side - width),
    }
    for values in spread.values():
        assert distance(values, lambda x: x) < KOLMOGOROV_ONE_IN_A_THOUSAND
    assert np.abs(np.corrcoef(list(spread.values())) - np.eye(4)).max() < 5 / math.sqrt(count)


HALF = 2**63


NOTHING = 0


NEARLY_ALL = 2**64 - 1


@pytest.mark.parametrize(
    ("numbers", "window"),
    [
        # Area 0.08 of 1000 x 1000 at aspect 3/4: sqrt(80000 / 0.75), sqrt(80000 * 0.75), in the
        # upper left corner.
        ([NOTHING, NOTHING, NOTHING, NOTHING], [0, 0, 327, 245]),
        # Area 0.54 at aspect 1, in the middle: sqrt(540000) = 734.8, and 0.5 * (1000 - 735 + 1).
        ([HALF, HALF, HALF, HALF], [133, 133, 735, 735]),
        # Area 0.08 at aspect 4/3, in the lower right corner.
        ([NOTHING, NEARLY_ALL, NEARLY_ALL, NEARLY_ALL], [755, 673, 245, 327]),
        # The whole area at aspect 1.
        ([NEARLY_ALL, HALF, HALF, HALF], [0, 0, 1000, 1000]),
    ],
)
def test_a_window_is_computed_from_its_four_numbers(numbers: list[int], window: list[int]) -> None:
    raw = np.array([numbers], np.uint64)

    assert random_windows(Recipe(), np.array([[1000, 1000]]), lambda *_: raw).tolist() == [window]


def test_an_image_takes_its_first_window_that_fits_whatever_the_others_need() -> None:
    misfit = [NEARLY_ALL, NOTHING, HALF, HALF]
    fit = [HALF, HALF, HALF, HALF]
    attempts = [[fit, misfit], [misfit, misfit], [misfit, fit]]

    windows = random_windows(
        Recipe(),
        np.array([[1000, 1000], [500, 500]]),
        lambda _, attempt: np.array(attempts[attempt], np.uint64),
    )

    assert windows.tolist() == [[133, 133, 735, 735], [67, 67, 367, 367]]


@pytest.mark.parametrize(
    ("size", "window"),
    [
        ((10, 1000), (0, 493, 10, 13)),
        ((1000, 10), (493, 0, 13, 10)),
        ((300, 1000), (0, 300, 300, 400)),
        ((1000, 300), (300, 0, 400, 300)),
        ((500, 600), (0, 0, 500, 600)),
        ((1, 5000), (0, 2499, 1, 1)),
    ],
)
def test_without_a_fit_the_centre_is_taken(size: tuple[int, int], window: tuple[int, ...]) -> None:
    # The whole area, with the largest allowed height.
    misfit = np.array([[NEARLY_ALL, NOTHING, HALF, HALF]], np.uint64)
    recipe = Recipe(crop_area=[0.999, 1.0], crop_aspect=[3 / 4, 4 / 3])

    assert random_windows(recipe, np.array([size]), lambda *_: misfit)[0].tolist() == list(window)


@pytest.mark.parametrize("attempts", [1, 10, 100])
def test_the_share_of_images_without_a_fit_falls_with_every_attempt(attempts: int) -> None:
    """Test the share of centred windows of a wide image: (1 - p)^attempts for attempts that fit
    with probability p."""
    recipe = Recipe(crop_attempts=attempts)
    count = 20_000
    height = 100
    width = 1000
    # A window fits if sqrt(area / aspect) is below 100.5 pixels, so if its share of the area is
    # below c * aspect. The share is uniform in 0.08 to 1, and log(aspect) in log(3/4) to log(4/3):
    # p is the mean of (c * aspect - 0.08) / 0.92 above 0.
    c = 100.5**2 / (height * width)
    least = 0.08 / c
    largest = 4 / 3
    fits = (c * (largest - least) - 0.08 * math.log(largest / least)) / (0.92 * math.log(16 / 9))
    expected = (1 - fits) ** attempts

    windows = random_windows(recipe, np.tile([[height, width]], (count, 1)), numbers_of(count))

    centred = (windows == [0, 433, 100, 133]).all(axis=1).mean()
    assert abs(centred - expected) < 4 * math.sqrt(expected * (1 - expected) / count)


def test_an_image_of_one_pixel_is_its_own_window() -> None:
    assert random_windows(Recipe(), np.array([[1, 1]]), numbers_of(1)).tolist() == [[0, 0, 1, 1]]


def crops_of(kind: str, sizes: np.ndarray) -> list[list[object]]:
    crops = draw_crops(Recipe(crop=kind), 32, sizes, numbers_of(len(sizes)))
    return [part.tolist() for part in crops]


def test_a_centre_crop_is_that_of_an_evaluation_with_the_same_sizes() -> None:
    recipe = Recipe(eval_resize=32, eval_crop=32)
    plan = centre_plan(recipe, np.arange(len(SIZES)), SIZES)

    parts = [plan.windows, plan.resized, plan.offsets]
    assert crops_of("centre", SIZES) == [part.tolist() for part in parts]


def test_a_squashed_image_is_whole_and_fills_the_square() -> None:
    assert crops_of("squash", np.array([[40, 7]])) == [[[0, 0, 40, 7]], [[32, 32]], [[0, 0]]]


def test_a_random_crop_has_every_place_of_the_padded_image_equally_often() -> None:
    count = 45_000
    windows, resized, offsets = crops_of("random", np.tile([[40, 61]], (count, 1)))

    # torchvision's Resize(32) gives 32 x 48 pixels, and 4 more on every side leave 9 x 25 places.
    assert {tuple(window) for window in windows} == {(0, 0, 40, 61)}
    assert {tuple(size) for size in resized} == {(32, 48)}
    assert np.min(offsets, axis=0).tolist() == [-4, -4]
    assert np.max(offsets, axis=0).tolist() == [4, 20]
    _, frequencies = np.unique(offsets, axis=0, return_counts=True)
    assert len(frequencies) == 9 * 25
    chi_squared = ((frequencies - 200) ** 2 / 200).sum()
    assert abs(chi_squared - 224) < 4 * math.sqrt(2 * 224)


def coefficients_of(alpha: float, images: int = 20_000) -> np.ndarray:
    recipe = Recipe(
        epochs=1, global_batch_images=images, mixup_alpha=alpha, mixup_coefficient="sample"
    )
    plan = next(training_plans(recipe, np.full((images, 2), 64), 0))
    assert plan.coefficients.dtype == np.float32
    return plan.coefficients.astype(np.float64)


@pytest.mark.parametrize("alpha", [0.01, 0.2, 0.4, 1.0, 2.0, 4.0])
def test_coefficients_have_mean_and_variance_of_the_beta_distribution(alpha: float) -> None:
    numbers = coefficients_of(alpha)
    variance = 1 / (4 * (2 * alpha + 1))

    assert ((numbers >= 0) & (numbers <= 1)).all()
    assert abs(numbers.mean() - 1 / 2) < 4 * math.sqrt(variance / len(numbers))
    # The square of a deviation from 1/2 is between 0 and 1/4, so this is an upper bound of its
    # variance.
    spread = variance * (1 / 4 - variance)
    assert abs(((numbers - 1 / 2) ** 2).mean() - variance) < 4 * math.sqrt(spread / len(numbers))


@pytest.mark.parametrize(
    ("alpha", "distribution"),
    [
        (0.5, lambda x: 2 / np.pi * np.arcsin(np.sqrt(x))),
        (1.0, lambda x: x),
        (2.0, lambda x: 3 * x**2 - 2 * x**3),
    ],
)
def test_coefficients_follow_the_beta_distribution_where_it_has_a_closed_form(
    alpha: float, distribution: Callable[[np.ndarray], np.ndarray]
) -> None:
    assert distance(coefficients_of(alpha), distribution) < KOLMOGOROV_ONE_IN_A_THOUSAND


def test_a_coefficient_of_the_batch_is_one_for_a_step_and_another_for_the_next() -> None:
    plans = list(training_plans(MIXED.replace(mixup_coefficient="batch"), SIZES, 0))

    assert [len(set(plan.coefficients.tolist())) for plan in plans] == [1] * 6
    assert len({plan.coefficients[0] for plan in plans}) == 6


def test_coefficients_of_the_batch_have_mean_and_variance_of_the_beta_distribution() -> None:
    recipe = Recipe(epochs=1, global_batch_images=2, mixup_alpha=0.4)
    numbers = np.array(
        [plan.coefficients[0] for plan in training_plans(recipe, np.full((2000, 2), 64), 0)], float
    )

    variance = 1 / (4 * 1.8)
    assert abs(numbers.mean() - 1 / 2) < 4 * math.sqrt(variance / 1000)
    assert abs(numbers.var() - variance) < 4 * math.sqrt(variance * (1 / 4 - variance) / 1000)
