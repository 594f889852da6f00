import dataclasses
import math
from collections.abc import Callable, Iterable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.recipes import Recipe
from lockstep.recipes.order import (
    BatchPlan,
    check_batch_norm,
    epoch_order,
    random_windows,
    steps_per_epoch,
    training_plans,
    unit_positions,
)
from lockstep.recipes.philox import Purpose, draw
from lockstep.system.errors import RecipeError
from tests.recipes.cases import EXAMPLES, MIXED, RECIPE, SIZES

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


def assert_equal_plans(first: Iterable[BatchPlan], second: Iterable[BatchPlan]) -> None:
    for a, b in zip(first, second, strict=True):
        for field in dataclasses.fields(BatchPlan):
            np.testing.assert_array_equal(
                getattr(a, field.name), getattr(b, field.name), err_msg=field.name
            )


# The order of an epoch.


@pytest.mark.parametrize("images", [1, 2, 3, 4, 5, 63, 1000])
def test_an_epochs_order_has_every_image_once(images: int) -> None:
    order = epoch_order(0, 0, images)

    assert order.dtype == np.int64
    np.testing.assert_array_equal(np.sort(order), np.arange(images))


def test_an_order_never_changes() -> None:
    assert epoch_order(0, 0, 12).tolist() == [8, 7, 4, 2, 6, 10, 5, 9, 0, 11, 1, 3]
    assert epoch_order(2**63 - 1, 89, 12).tolist() == [0, 10, 2, 3, 8, 6, 11, 1, 9, 4, 7, 5]


def test_another_epoch_or_another_seed_has_another_order() -> None:
    orders = [epoch_order(seed, epoch, 100).tolist() for seed in range(4) for epoch in range(4)]

    assert len({tuple(order) for order in orders}) == 16


def test_every_image_comes_to_every_place_equally_often() -> None:
    places = np.array([epoch_order(1, epoch, 5) for epoch in range(4000)])

    for place in places.T:
        counts = np.bincount(place, minlength=5)
        assert (
            (counts - 800) ** 2 / 800
        ).sum() < 18.5  # exceeded once in a thousand cases with 4 degrees of freedom


# Steps and units.


@EXAMPLES
@given(units=st.integers(1, 16), size=st.integers(1, 33))
def test_units_of_any_size_divide_a_step_among_them(units: int, size: int) -> None:
    parts = [unit_positions(unit, units, units * size) for unit in range(units)]

    assert [len(part) for part in parts] == [size] * units
    assert all((np.diff(part) > 0).all() for part in parts)
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(units * size))


@EXAMPLES
@given(units=st.integers(1, 16), half=st.integers(1, 17))
def test_reversing_units_of_any_even_size_pairs_what_reversing_the_step_pairs(
    units: int, half: int
) -> None:
    images = units * 2 * half
    pairs = set()
    for unit in range(units):
        positions = unit_positions(unit, units, images).tolist()
        pairs |= set(zip(positions, positions[::-1], strict=True))

    assert pairs == {(position, images - 1 - position) for position in range(images)}


@pytest.mark.parametrize(
    ("images", "batch", "steps"), [(40, 16, 2), (32, 16, 2), (47, 16, 2), (48, 16, 3), (1, 1, 1)]
)
def test_an_epoch_has_as_many_steps_as_its_images_fill(images: int, batch: int, steps: int) -> None:
    assert steps_per_epoch(Recipe(global_batch_images=batch), images) == steps


def test_too_few_images_for_one_step_are_refused_with_a_batch_that_fits() -> None:
    with pytest.raises(
        RecipeError, match=r"256, but there are only 100 .*--set global_batch_images=12"
    ):
        steps_per_epoch(Recipe(), 100)


def test_a_run_has_a_plan_for_every_step() -> None:
    assert len(list(training_plans(RECIPE, SIZES, 0))) == 3 * (40 // 16)


def test_a_step_that_does_not_divide_into_ranks_and_parts_is_refused() -> None:
    with pytest.raises(
        RecipeError, match=r"\(16\) must be a multiple of ranks times accumulation steps \(6\)"
    ):
        next(training_plans(RECIPE, SIZES, 0, ranks=3, parts=2))


@pytest.mark.parametrize(
    ("images", "ranks", "parts", "batch_norm"),
    [
        (1, 1, 1, "local"),
        (4, 2, 2, "local"),
        (1, 1, 1, "synchronised"),
        (4, 1, 4, "synchronised"),
        (4, 2, 4, "synchronised"),
    ],
)
def test_an_image_too_small_for_batch_norm_is_refused(
    images: int, ranks: int, parts: int, batch_norm: str
) -> None:
    recipe = Recipe(global_batch_images=images, image_size=32, batch_norm=batch_norm)
    with pytest.raises(
        RecipeError, match="one image of 32 pixels leaves a single value of each channel"
    ):
        check_batch_norm(recipe, ranks, parts)
    check_batch_norm(recipe.replace(image_size=33), ranks, parts)
    check_batch_norm(recipe.replace(global_batch_images=2 * images), ranks, parts)


def test_no_image_comes_twice_in_an_epoch_and_others_are_left_out_of_each() -> None:
    plans = list(training_plans(RECIPE, SIZES, 0))
    epochs = [np.concatenate([plan.samples for plan in plans[i : i + 2]]) for i in (0, 2, 4)]

    assert [len(set(epoch.tolist())) for epoch in epochs] == [32, 32, 32]
    assert len({frozenset(epoch.tolist()) for epoch in epochs}) == 3


def test_the_steps_of_an_epoch_follow_its_order() -> None:
    plans = list(training_plans(RECIPE, SIZES, 0))

    for epoch in range(3):
        samples = np.concatenate([plan.samples for plan in plans[2 * epoch : 2 * epoch + 2]])
        np.testing.assert_array_equal(samples, epoch_order(5, epoch, 40)[:32])


DIVISIONS = [(1, 1), (2, 1), (4, 1), (1, 2), (1, 4), (2, 2), (8, 1), (16, 1)]


def rows_of_a_step(plans: Iterable[BatchPlan]) -> list[tuple[object, ...]]:
    """Return the plan for each image of a step, for any rank, in a fixed order."""
    rows = []
    for plan in plans:
        for i, sample in enumerate(plan.samples):
            coefficient = None if plan.coefficients is None else float(plan.coefficients[i])
            window, resized, offset = (
                tuple(values[i].tolist()) for values in (plan.windows, plan.resized, plan.offsets)
            )
            rows.append((int(sample), window, resized, offset, bool(plan.flips[i]), coefficient))
    return sorted(rows)


@pytest.mark.parametrize("coefficient", ["batch", "sample"])
@pytest.mark.parametrize(("ranks", "parts"), DIVISIONS[1:])
def test_a_step_has_the_same_images_crops_flips_and_coefficients_for_any_number_of_ranks_and_parts(
    ranks: int, parts: int, coefficient: str
) -> None:
    recipe = MIXED.replace(mixup_coefficient=coefficient)
    whole = training_plans(recipe, SIZES, 0)
    shares = [
        training_plans(recipe, SIZES, 0, rank=rank, ranks=ranks, parts=parts)
        for rank in range(ranks)
    ]

    for plan, *plans in zip(whole, *shares, strict=True):
        assert [len(part.samples) for part in plans] == [16 // ranks] * ranks
        assert rows_of_a_step(plans) == rows_of_a_step([plan])


def partners_of(plans: Iterable[BatchPlan], parts: int) -> dict[int, int]:
    """Return the image with which each image of a step is mixed."""
    pairs = {}
    for plan in plans:
        for samples, partners in zip(
            np.split(plan.samples, parts), np.split(plan.partners, parts), strict=True
        ):
            pairs |= dict(zip(samples.tolist(), samples[partners].tolist(), strict=True))
    return pairs


@pytest.mark.parametrize(
    ("ranks", "parts"), [division for division in DIVISIONS if math.prod(division) <= 8]
)
def test_mixup_by_reversal_mixes_the_same_images_for_any_number_of_ranks_and_parts(
    ranks: int, parts: int
) -> None:
    shares = [
        training_plans(MIXED, SIZES, 0, rank=rank, ranks=ranks, parts=parts)
        for rank in range(ranks)
    ]

    for plan, *plans in zip(training_plans(MIXED, SIZES, 0), *shares, strict=True):
        expected = dict(zip(plan.samples.tolist(), plan.samples[::-1].tolist(), strict=True))
        assert partners_of(plans, parts) == expected


@pytest.mark.parametrize(("ranks", "parts"), DIVISIONS)
def test_mixup_by_permutation_gives_every_image_of_a_unit_one_partner_in_it(
    ranks: int, parts: int
) -> None:
    recipe = MIXED.replace(mixup_pairing="permutation")
    for rank in range(ranks):
        for plan in training_plans(recipe, SIZES, 0, rank=rank, ranks=ranks, parts=parts):
            for partners in np.split(plan.partners, parts):
                np.testing.assert_array_equal(np.sort(partners), np.arange(16 // (ranks * parts)))


def test_permutations_of_partners_differ_from_step_to_step_and_from_reversal() -> None:
    recipe = MIXED.replace(mixup_pairing="permutation")
    permutations = {tuple(plan.partners.tolist()) for plan in training_plans(recipe, SIZES, 0)}

    assert len(permutations) == 6
    assert tuple(range(16))[::-1] not in permutations


@pytest.mark.parametrize(("ranks", "parts"), [(1, 1), (2, 2)])
@pytest.mark.parametrize("first", range(7))
def test_a_run_that_starts_at_any_step_goes_on_as_the_whole_run_does(
    first: int, ranks: int, parts: int
) -> None:
    whole = list(training_plans(MIXED, SIZES, 0, rank=ranks - 1, ranks=ranks, parts=parts))
    tail = training_plans(MIXED, SIZES, first, rank=ranks - 1, ranks=ranks, parts=parts)

    assert_equal_plans(tail, whole[first:])


def test_a_plan_never_changes() -> None:
    recipe = MIXED.replace(global_batch_images=8, mixup_alpha=1.0, mixup_pairing="permutation")

    plan = list(training_plans(recipe, SIZES, 0, rank=1, ranks=2))[13]

    assert plan.samples.tolist() == [6, 29, 20, 19]
    assert plan.windows.tolist() == [
        [10, 8, 71, 90],
        [8, 56, 182, 154],
        [24, 272, 56, 57],
        [211, 54, 56, 68],
    ]
    assert plan.flips.tolist() == [False, True, False, False]
    assert plan.partners.tolist() == [3, 1, 2, 0]
    assert plan.coefficients.tolist() == pytest.approx(
        [0.81585455, 0.88846058, 0.56322628, 0.73124439], rel=1e-6
    )


def test_a_plan_resizes_every_window_to_the_whole_square() -> None:
    plan = next(training_plans(RECIPE, SIZES, 0))

    assert plan.resized.tolist() == [[32, 32]] * 16
    assert plan.offsets.tolist() == [[0, 0]] * 16


def test_a_run_with_another_seed_has_another_plan() -> None:
    first, other = (next(training_plans(RECIPE.replace(seed=seed), SIZES, 0)) for seed in (5, 6))

    assert first.samples.tolist() != other.samples.tolist()
    assert first.flips.tolist() != other.flips.tolist()


# Flips.


@pytest.mark.parametrize(
    ("probability", "low", "high"), [(0.0, 0, 0), (1.0, 1, 1), (0.5, 0.48, 0.52), (0.1, 0.09, 0.11)]
)
def test_images_are_flipped_with_the_recipes_probability(
    probability: float, low: float, high: float
) -> None:
    recipe = Recipe(epochs=1, global_batch_images=20_000, flip_probability=probability)

    flips = next(training_plans(recipe, np.full((20_000, 2), 64), 0)).flips

    assert low <= flips.mean() <= high


# Random crops.


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


@EXAMPLES
@given(
    sizes=st.lists(
        st.tuples(st.integers(300, 400), st.integers(300, 400)), min_size=1, max_size=20
    ),
    area=st.tuples(st.floats(0.05, 0.5), st.floats(0.5, 1)),
    epoch=st.integers(0, 1000),
)
def test_area_and_aspect_of_a_window_are_in_the_recipes_ranges(
    sizes: list[tuple[int, int]], area: tuple[float, float], epoch: int
) -> None:
    recipe = Recipe(crop_area=area)

    *_, height, width = random_windows(recipe, np.array(sizes), numbers_of(len(sizes), epoch)).T

    # A side is rounded to whole pixels, by at most half a pixel.
    pixels = np.prod(sizes, axis=1)
    assert ((height - 0.5) * (width - 0.5) <= area[1] * pixels + 1e-3).all()
    assert ((height + 0.5) * (width + 0.5) >= area[0] * pixels - 1e-3).all()
    assert ((width - 0.5) / (height + 0.5) <= 4 / 3).all()
    assert ((width + 0.5) / (height - 0.5) >= 3 / 4).all()


def test_area_aspect_and_place_of_windows_are_spread_evenly() -> None:
    recipe = Recipe(
        crop_area=[0.08, 0.5]
    )  # a window with these areas and aspect ratios always fits into a square
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


def test_windows_that_do_not_fit_are_drawn_again_until_one_does() -> None:
    count = 5000
    side = 10_000
    random = np.random.default_rng(0)
    areas = random.uniform(0.08, 1, 60_000)
    aspects = np.exp(random.uniform(math.log(3 / 4), math.log(4 / 3), 60_000))
    expected = np.sort(areas[(areas * aspects <= 1) & (areas / aspects <= 1)])

    *_, height, width = random_windows(
        Recipe(), np.full((count, 2), side), numbers_of(count)
    ).T.astype(float)

    share = height * width / side**2
    assert (
        distance(share, lambda x: np.searchsorted(expected, x) / len(expected))
        < KOLMOGOROV_ONE_IN_A_THOUSAND
    )


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
def test_without_a_fit_the_largest_centred_window_of_an_allowed_aspect_is_taken(
    size: tuple[int, int], window: tuple[int, ...]
) -> None:
    misfit = np.array(
        [[NEARLY_ALL, NOTHING, HALF, HALF]], np.uint64
    )  # the whole area, with the largest allowed height
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


def test_fewer_attempts_change_only_the_images_that_need_more() -> None:
    sizes = np.tile([[100, 1000]], (2000, 1))
    few, many = (
        random_windows(Recipe(crop_attempts=n), sizes, numbers_of(2000)) for n in (10, 100)
    )
    changed = (few != many).any(axis=1)
    assert (few[changed] == [0, 433, 100, 133]).all()
    assert 0.5 < changed.mean() < 0.9


def test_an_image_of_one_pixel_is_its_own_window() -> None:
    assert random_windows(Recipe(), np.array([[1, 1]]), numbers_of(1)).tolist() == [[0, 0, 1, 1]]


# MixUp's coefficients.


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


def test_without_mixup_there_are_no_coefficients_and_no_partners() -> None:
    plan = next(training_plans(RECIPE, SIZES, 0, ranks=2, parts=2))

    assert plan.coefficients is None
    assert plan.partners is None
