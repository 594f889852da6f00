import dataclasses
import math
import re
from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.recipes import Recipe
from lockstep.recipes.epoch_order import shuffle
from lockstep.recipes.order import (
    BatchPlan,
    check_batch_norm,
    check_shares,
    keep_blocks,
    keep_features,
    steps_per_epoch,
    training_plans,
    unit_positions,
)
from lockstep.recipes.stochastic_depth import branch_factors, drop_rates
from lockstep.system.errors import RecipeError
from tests.recipes.cases import MIXED, RECIPE, SIZES
from tests.soak import EXAMPLES


def assert_equal_plans(first: Iterable[BatchPlan], second: Iterable[BatchPlan]) -> None:
    for a, b in zip(first, second, strict=True):
        for field in dataclasses.fields(BatchPlan):
            np.testing.assert_array_equal(
                getattr(a, field.name), getattr(b, field.name), err_msg=field.name
            )


# The order of an epoch.


@pytest.mark.parametrize("images", [1, 2, 3, 4, 5, 63, 1000])
def test_an_epochs_order_has_every_image_once(images: int) -> None:
    order = shuffle(0, 0, images)

    assert order.dtype == np.int64
    np.testing.assert_array_equal(np.sort(order), np.arange(images))


def test_an_order_never_changes() -> None:
    assert shuffle(0, 0, 12).tolist() == [8, 7, 4, 2, 6, 10, 5, 9, 0, 11, 1, 3]
    assert shuffle(2**63 - 1, 89, 12).tolist() == [0, 10, 2, 3, 8, 6, 11, 1, 9, 4, 7, 5]


def test_every_image_comes_to_every_place_equally_often() -> None:
    places = np.array([shuffle(1, epoch, 5) for epoch in range(4000)])

    for place in places.T:
        counts = np.bincount(place, minlength=5)
        # Exceeded once in a thousand cases with 4 degrees of freedom.
        assert ((counts - 800) ** 2 / 800).sum() < 18.5


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
def test_reversing_even_units_pairs_as_reversing_the_step(units: int, half: int) -> None:
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
    with pytest.raises(RecipeError, match=r"256, .*only 100 .*global_batch_images=12"):
        steps_per_epoch(Recipe(), 100)


@pytest.mark.parametrize("side", [32, 33, 224])
@pytest.mark.parametrize(("ranks", "parts"), [(1, 1), (2, 1), (1, 3), (4, 2)])
@pytest.mark.parametrize("batch_norm", ["local", "synchronised"])
def test_advice_for_few_images_works(side: int, ranks: int, parts: int, batch_norm: str) -> None:
    for images in (1, 2, 3, 5, 9, 40):
        recipe = Recipe(image_size=side, batch_norm=batch_norm)
        with pytest.raises(RecipeError) as refusal:
            steps_per_epoch(recipe, images, ranks=ranks, parts=parts)
        advice = re.findall(r"--set (\w+)=(\d+)", str(refusal.value))
        if images < ranks * parts:
            assert str(refusal.value).endswith("or use fewer ranks and accumulation steps")
            continue
        assert advice[0][0] == "global_batch_images"
        followed = recipe.replace(**{name: int(value) for name, value in advice})
        assert steps_per_epoch(followed, images, ranks=ranks, parts=parts) >= 1
        check_shares(followed, ranks * parts)
        check_batch_norm(followed, ranks, parts)


def test_a_run_has_a_plan_for_every_step() -> None:
    assert len(list(training_plans(RECIPE, SIZES, 0))) == 3 * (40 // 16)


def test_a_step_that_does_not_divide_into_ranks_and_parts_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"\(16\) must be a multiple of .* \(6\)"):
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
def test_tiny_images_are_refused(images: int, ranks: int, parts: int, batch_norm: str) -> None:
    recipe = Recipe(global_batch_images=images, image_size=32, batch_norm=batch_norm)
    with pytest.raises(RecipeError, match="one image of 32 pixels"):
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
        np.testing.assert_array_equal(samples, shuffle(5, epoch, 40)[:32])


DIVISIONS = [(1, 1), (2, 1), (4, 1), (1, 2), (1, 4), (2, 2), (8, 1), (16, 1)]


def rows_of_a_step(plans: Iterable[BatchPlan]) -> dict[int, list[object]]:
    """Return what plans of a step, for any rank, do with each sample. Partners are places in a
    unit, and are left out."""
    rows = {}
    for plan in plans:
        values = {name: value for name, value in vars(plan).items() if name != "partners"}
        columns = [value for value in values.values() if isinstance(value, np.ndarray)]
        for i, sample in enumerate(plan.samples.tolist()):
            rows[sample] = [plan.size, *(column[i].tolist() for column in columns)]
    return rows


@pytest.mark.parametrize("coefficient", ["batch", "sample"])
@pytest.mark.parametrize(("ranks", "parts"), DIVISIONS[1:])
def test_any_ranks_and_parts_have_the_same_steps(ranks: int, parts: int, coefficient: str) -> None:
    recipe = MIXED.replace(
        mixup_coefficient=coefficient,
        vertical_flip_probability=0.5,
        crop="random",
        training_interpolation="random",
    )
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
def test_reversal_mixes_the_same_images_for_any_ranks_and_parts(ranks: int, parts: int) -> None:
    shares = [
        training_plans(MIXED, SIZES, 0, rank=rank, ranks=ranks, parts=parts)
        for rank in range(ranks)
    ]

    for plan, *plans in zip(training_plans(MIXED, SIZES, 0), *shares, strict=True):
        expected = dict(zip(plan.samples.tolist(), plan.samples[::-1].tolist(), strict=True))
        assert partners_of(plans, parts) == expected


@pytest.mark.parametrize(("ranks", "parts"), DIVISIONS)
def test_permutation_gives_every_image_one_partner_in_its_unit(ranks: int, parts: int) -> None:
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
def test_a_run_starts_at_any_step_as_the_whole_run(first: int, ranks: int, parts: int) -> None:
    whole = list(training_plans(MIXED, SIZES, 0, rank=ranks - 1, ranks=ranks, parts=parts))
    tail = training_plans(MIXED, SIZES, first, rank=ranks - 1, ranks=ranks, parts=parts)

    assert_equal_plans(tail, whole[first:])


def test_a_plan_never_changes() -> None:
    recipe = MIXED.replace(global_batch_images=8, mixup_alpha=1.0, mixup_pairing="permutation")

    plan = list(training_plans(recipe, SIZES, 0, rank=1, ranks=2))[13]

    assert plan.samples.tolist() == [6, 29, 20, 19]
    result = plan.windows.tolist()
    assert result == [[10, 8, 71, 90], [8, 56, 182, 154], [24, 272, 56, 57], [211, 54, 56, 68]]
    assert plan.flips.tolist() == [False, True, False, False]
    assert plan.partners.tolist() == [3, 1, 2, 0]
    expected = pytest.approx([0.81585455, 0.88846058, 0.56322628, 0.73124439], rel=1e-6)
    assert plan.coefficients.tolist() == expected


def test_a_plan_resizes_every_window_to_the_whole_square() -> None:
    plan = next(training_plans(RECIPE, SIZES, 0))

    assert plan.resized.tolist() == [[32, 32]] * 16
    assert plan.offsets.tolist() == [[0, 0]] * 16


# Flips.


@pytest.mark.parametrize(
    ("probability", "low", "high"), [(0.0, 0, 0), (1.0, 1, 1), (0.5, 0.48, 0.52), (0.1, 0.09, 0.11)]
)
def test_flips_have_the_recipes_probability(probability: float, low: float, high: float) -> None:
    recipe = Recipe(
        epochs=1,
        global_batch_images=20_000,
        flip_probability=probability,
        vertical_flip_probability=probability,
        training_interpolation="random",
    )

    plan = next(training_plans(recipe, np.full((20_000, 2), 64), 0))

    for flips in (plan.flips, plan.vertical_flips):
        assert low <= flips.mean() <= high
        assert low / 2 - 0.01 <= (flips & plan.is_bicubic).mean() <= high / 2 + 0.01
    both = plan.flips & plan.vertical_flips
    assert low * low - 0.01 <= both.mean() <= high * high + 0.01


# Random crops.


# MixUp's coefficients.


def test_without_mixup_there_are_no_coefficients_and_no_partners() -> None:
    plan = next(training_plans(RECIPE, SIZES, 0, ranks=2, parts=2))

    assert plan.coefficients is None
    assert plan.partners is None


DROPPED = RECIPE.replace(dropout=0.3, stochastic_depth=0.5, model="resnet18")


@pytest.mark.parametrize("name", ["kept_features", "kept_blocks"])
def test_the_same_is_dropped_of_an_image_for_any_number_of_ranks_and_parts(name: str) -> None:
    whole = next(training_plans(DROPPED, SIZES, 1))
    by_sample = dict(zip(whole.samples.tolist(), getattr(whole, name), strict=True))
    for rank in range(2):
        plan = next(training_plans(DROPPED, SIZES, 1, rank=rank, ranks=2, parts=4))
        for sample, kept in zip(plan.samples.tolist(), getattr(plan, name), strict=True):
            assert np.array_equal(kept, by_sample[sample])


def test_dropout_depends_on_seed_epoch_position_and_feature_alone() -> None:
    positions = np.array([3, 4, 40, 7])
    kept = keep_features(DROPPED, 2, positions)
    assert kept is not None
    assert (kept.shape, kept.dtype) == ((4, 512), np.dtype(bool))
    for row, position in zip(kept, positions, strict=True):
        assert np.array_equal(keep_features(DROPPED, 2, np.array([position])), row[None])
    for other in (DROPPED.replace(seed=6), DROPPED.replace(image_size=64)):
        again = keep_features(other, 2, positions)
        assert np.array_equal(again, kept) == (other.seed == DROPPED.seed)
    assert not np.array_equal(keep_features(DROPPED, 1, positions), kept)


def test_dropout_leaves_features_with_its_probability_and_independently() -> None:
    kept = keep_features(DROPPED, 0, np.arange(400))
    assert kept is not None
    # Five deviations of the mean of as many draws of probability 0.7.
    deviation = np.sqrt(0.7 * 0.3)
    assert abs(kept.mean() - 0.7) < 5 * deviation / np.sqrt(kept.size)
    assert np.abs(kept.mean(axis=0) - 0.7).max() < 5 * deviation / np.sqrt(400)
    assert np.abs(kept.mean(axis=1) - 0.7).max() < 5 * deviation / np.sqrt(512)
    centred = kept - 0.7
    for shifted in (np.roll(centred, 1, axis=0), np.roll(centred, 1, axis=1)):
        assert abs((centred * shifted).mean()) < 5 * 0.21 / np.sqrt(kept.size)


def test_without_dropout_and_stochastic_depth_no_plan_drops_anything() -> None:
    plan = next(training_plans(RECIPE, SIZES, 0))
    assert plan.kept_features is plan.kept_blocks is None


def test_stochastic_depth_rises_linearly_over_all_blocks() -> None:
    # timm 1.0.31: the drop_prob of the blocks of create_model("resnet50", drop_path_rate=0.05),
    # as printed
    expected = [0.0, 0.0033333, 0.0066667, 0.01, 0.0133333, 0.0166667, 0.02, 0.0233333]
    expected += [0.0266667, 0.03, 0.0333333, 0.0366667, 0.04, 0.0433333, 0.0466667, 0.05]
    rates = drop_rates(RECIPE.replace(model="resnet50", stochastic_depth=0.05))
    assert list(rates.values()) == pytest.approx(expected, abs=1e-7)
    assert [*rates][:4] == ["layer1.0", "layer1.1", "layer1.2", "layer2.0"]


def test_stochastic_depth_keeps_blocks_with_their_probabilities_and_independently() -> None:
    kept = keep_blocks(DROPPED, 0, np.arange(800))
    assert kept is not None
    assert (kept.shape, kept.dtype) == ((800, 8), np.dtype(bool))
    assert kept[:, 0].all()
    shares = 1 - 0.5 * np.arange(8) / 7
    # Five deviations of the mean of as many draws.
    assert (np.abs(kept.mean(axis=0) - shares) <= 5 * np.sqrt(shares * (1 - shares) / 800)).all()
    centred = kept - shares
    for shifted in (np.roll(centred, 1, axis=0), np.roll(centred, 1, axis=1)):
        assert abs((centred * shifted).mean()) < 5 * 0.25 / np.sqrt(kept.size)
    again = keep_blocks(DROPPED, 0, np.array([7, 8, 500]))
    assert np.array_equal(again, kept[[7, 8, 500]])
    assert not np.array_equal(keep_blocks(DROPPED, 1, np.arange(800)), kept)


def test_factors_of_kept_blocks_have_a_mean_of_1() -> None:
    rates = np.array(list(drop_rates(DROPPED).values()))
    kept, dropped = branch_factors(DROPPED, np.array([[True] * 8, [False] * 8]))
    assert kept.dtype == np.float32
    assert kept * (1 - rates) + dropped * rates == pytest.approx(np.ones(8))
    assert not dropped.any()
