"""CutMix and its mixture with MixUp: which images are mixed, with which boxes and targets."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from lockstep.recipes import Recipe
from lockstep.recipes.mixing import Mixing, draw_mixing, weigh_pixels
from lockstep.recipes.order import BatchPlan, training_plans
from lockstep.recipes.philox import Numbers, Purpose
from tests.recipes.cases import MIXED, SIZES

CUT = Recipe(
    epochs=1, cutmix_alpha=1.0, mixup_coefficient="sample", mixup_pairing="reverse", image_size=64
)
BOTH = MIXED.replace(mixup_alpha=0.4, cutmix_alpha=1.0, image_size=64)
COLUMNS = ("coefficients", "target_coefficients", "boxes")


def draw(recipe: Recipe, images: int = 20_000, epoch: int = 0) -> Any:
    """Return how the images of one step are mixed."""
    numbers = Numbers(recipe.seed, epoch, np.arange(images))
    step_numbers = Numbers(recipe.seed, epoch, np.array([0]))
    return draw_mixing(recipe, recipe.image_size, step_numbers, numbers)


class Fixed(Numbers):
    """Fixed numbers of one position, by purpose."""

    def __init__(self, by_purpose: dict[Purpose, list[float]]) -> None:
        super().__init__(0, 0, np.array([0]))
        self.by_purpose = by_purpose

    def __call__(self, purpose: Purpose, attempt: int = 0) -> np.ndarray:
        values = (*self.by_purpose.get(purpose, []), 0.0, 0.0, 0.0, 0.0)[:4]
        return np.array([[int(value * 2**53) << 11 for value in values]], np.uint64)


@pytest.mark.parametrize(
    ("size", "coefficient", "centre", "box", "share"),
    # `CutMix.make_params` of torchvision 0.28.0 with these draws: y1, x1, y2 - y1, x2 - x1 and
    # lam_adjusted.
    [
        (224, 0.5, (100, 30), [21, 0, 158, 109], 0.6567681760204082),
        (224, 0.75, (0, 223), [0, 167, 56, 57], 0.9363839285714286),
        (224, 0.1, (112, 112), [6, 6, 212, 212], 0.10427295918367352),
        (160, 0.35, (10, 150), [0, 86, 74, 74], 0.78609375),
        (64, 0.999, (5, 5), [4, 4, 2, 2], 0.9990234375),
        (32, 0.0, (31, 0), [15, 0, 17, 16], 0.734375),
    ],
)
def test_a_box_is_that_of_torchvision(
    size: int, coefficient: float, centre: tuple[int, int], box: list[int], share: float
) -> None:
    # Jöhnk's x / (x + y) is the coefficient.
    beta = [coefficient / 2, (1 - coefficient) / 2]
    places = [(place + 0.5) / size for place in centre]
    numbers = Fixed({Purpose.CUTMIX_COEFFICIENT: beta, Purpose.CUTMIX_BOX: places})
    mixing = draw_mixing(CUT, size, numbers, numbers)
    assert mixing is not None
    assert mixing.boxes is not None
    assert mixing.target_coefficients is not None
    assert mixing.boxes.tolist() == [box]
    assert mixing.target_coefficients.tolist() == [np.float32(share)]
    assert mixing.coefficients.tolist() == [1]
    weights = weigh_pixels(mixing.coefficients, mixing.boxes, size, size)
    assert weights.mean() == pytest.approx(share, abs=1e-7)
    top, left, height, width = box
    assert not weights[0, top : top + height, left : left + width].any()


def test_boxes_lie_anywhere_in_the_image() -> None:
    mixing = draw(CUT.replace(image_size=1000))
    top, left, height, width = mixing.boxes.T.astype(float)
    is_whole = (top > 0) & (left > 0) & (top + height < 1000) & (left + width < 1000)
    # A box has the side sqrt(u) with u uniform in 0 to 1. It is whole with probability (1 - side)^2
    # of its centre, whose mean is 1 - 4/3 + 1/2.
    assert abs(is_whole.mean() - 1 / 6) < 4 * math.sqrt(1 / 6 * 5 / 6 / 20_000) + 2e-3
    for first, side in ((top, height), (left, width)):
        centre = (first + side / 2)[is_whole]
        assert abs(centre.mean() - 500) < 4 * 289 / math.sqrt(is_whole.sum())


@pytest.mark.parametrize(
    ("changes", "cut", "mixed"),
    [
        ({}, 0.5, 0.5),
        ({"mix_switch_probability": 0.2}, 0.2, 0.8),
        ({"mix_probability": 0.3}, 0.15, 0.15),
        ({"mixup_alpha": 0.0, "mix_switch_probability": 0.2}, 1.0, 0.0),
        ({"cutmix_alpha": 0.0, "mix_switch_probability": 0.7, "mix_probability": 0.6}, 0.0, 0.6),
    ],
    ids=str,
)
def test_mixing_has_its_probabilities(changes: dict[str, Any], cut: float, mixed: float) -> None:
    mixing = draw(BOTH.replace(mixup_alpha=1.0).replace(**changes))
    is_mixed = mixing.coefficients < 1
    is_cut = np.zeros(20_000, bool) if mixing.boxes is None else mixing.boxes.any(axis=1)
    assert not (is_mixed & is_cut).any()
    # A box of no pixels is not seen: a share of 1 / 1024, whose side is below 2 pixels.
    for share, probability in ((is_cut.mean(), cut), (is_mixed.mean(), mixed)):
        bound = 4 * math.sqrt(probability * (1 - probability) / 20_000)
        assert abs(share - probability) <= bound + probability / 1024 + 1e-3
    if mixing.boxes is not None:
        outside = 1 - mixing.boxes[:, 2] * mixing.boxes[:, 3] / 64**2
        expected = np.where(is_cut, outside.astype(np.float32), mixing.coefficients)
        assert np.array_equal(mixing.target_coefficients, expected)


def test_mixup_alone_has_the_coefficients_it_has_without_the_other_fields() -> None:
    plain = draw(MIXED, 100)
    assert plain.target_coefficients is plain.boxes is None
    both = draw(BOTH.replace(mixup_alpha=MIXED.mixup_alpha), 100)
    is_mixed = both.coefficients < 1
    assert 20 < is_mixed.sum() < 80
    assert np.array_equal(both.coefficients[is_mixed], plain.coefficients[is_mixed])


def test_what_is_drawn_for_the_batch_is_the_same_for_all_images_of_a_step() -> None:
    recipe = BOTH.replace(mixup_coefficient="batch", epochs=20)
    kinds = set()
    for plan in training_plans(recipe, SIZES, 0, rank=1, ranks=2, parts=2):
        rows = {
            (own, target, *box) for own, target, box in zip(*columns_of(plan, list), strict=True)
        }
        [row] = rows
        kinds.add(row)
    assert len(kinds) == 40
    assert {row[0] < 1 for row in kinds} == {True, False}


def columns_of(plan: BatchPlan, form: Callable[..., Any] = np.asarray) -> list[Any]:
    return [form(getattr(plan, name).tolist()) for name in COLUMNS]


@pytest.mark.parametrize("coefficient", ["batch", "sample"])
def test_an_image_is_mixed_alike_for_any_ranks_and_parts(coefficient: str) -> None:
    recipe = BOTH.replace(mixup_coefficient=coefficient)
    for step, whole in enumerate(training_plans(recipe, SIZES, 0)):
        assert whole.partners is not None
        partners = dict(zip(whole.samples, whole.samples[whole.partners], strict=True))
        rows = dict(zip(whole.samples.tolist(), zip(*columns_of(whole), strict=True), strict=True))
        for rank in range(2):
            plans = training_plans(recipe, SIZES, step, rank=rank, ranks=2, parts=2)
            plan = next(plans)
            assert plan.partners is not None
            units = zip(np.split(plan.samples, 2), np.split(plan.partners, 2), strict=True)
            for samples, own in units:
                assert [partners[sample] for sample in samples] == samples[own].tolist()
            for sample, row in zip(
                plan.samples.tolist(), zip(*columns_of(plan), strict=True), strict=True
            ):
                for value, expected in zip(row, rows[sample], strict=True):
                    assert np.array_equal(value, expected)


def test_a_mixing_never_changes() -> None:
    mixing: Mixing = draw(BOTH, 4, epoch=2)
    assert mixing.boxes is not None
    assert mixing.target_coefficients is not None
    result = mixing.boxes.tolist()
    assert result == [[0, 1, 44, 50], [13, 32, 51, 32], [11, 0, 48, 34], [0, 0, 0, 0]]
    assert mixing.coefficients.tolist() == [1, 1, 1, 0.36758455634117126]
    targets = [0.462890625, 0.6015625, 0.6015625, 0.36758455634117126]
    assert mixing.target_coefficients.tolist() == targets
