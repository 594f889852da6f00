"""AugMix: what it draws, and the mixture of what is drawn."""

import numpy as np
import pytest

from lockstep.recipes.augmentations.augmix import LARGEST, AugMix, Mixture
from lockstep.recipes.operations import Operation

PIXELS = np.random.default_rng(0).integers(0, 256, (24, 24, 3), dtype=np.uint8)


def draw_many(count: int, augmentation: AugMix) -> list[Mixture]:
    numbers = np.random.default_rng(1).random((count, augmentation.numbers))
    return [augmentation.draw(row) for row in numbers.tolist()]


def test_weights_have_the_dirichlet_distributions_of_torchvision() -> None:
    weights = np.array([one.weights for one in draw_many(4000, AugMix())])
    np.testing.assert_allclose(weights.sum(axis=1), 1)
    # alpha 1: the image's weight is uniform, and a chain's share of the rest has mean 1/3 and
    # variance 1/18.
    uniform = (np.arange(4000) + 0.5) / 4000
    assert np.abs(np.sort(weights[:, 0]) - uniform).max() < 1.95 / np.sqrt(4000)
    shares = weights[:, 1:] / (1 - weights[:, :1])
    np.testing.assert_allclose(shares.mean(axis=0), 1 / 3, atol=0.015)
    np.testing.assert_allclose(shares.var(axis=0), 1 / 18, rtol=0.1)
    np.testing.assert_allclose(np.cov(shares.T)[np.triu_indices(3, 1)], -1 / 36, rtol=0.1)


def test_chains_have_one_to_three_operations_of_every_kind() -> None:
    chains = [chain for one in draw_many(1000, AugMix()) for chain in one.chains]
    np.testing.assert_allclose(np.bincount([len(chain) for chain in chains]), [0] + [1000] * 3, 0.1)
    names, counts = np.unique(
        [one.operator for chain in chains for one in chain], return_counts=True
    )
    assert sorted(LARGEST) == names.tolist()
    np.testing.assert_allclose(counts, 6000 / 13, rtol=0.15)
    fixed = draw_many(20, AugMix(width=2, depth=4))
    assert {len(chain) for one in fixed for chain in one.chains} == {4}
    assert {len(one.chains) for one in fixed} == {2}


def test_magnitudes_are_the_first_ones_of_ten() -> None:
    drawn = {
        (one.operator, round(one.number, 6))
        for mixture in draw_many(500, AugMix(severity=3))
        for chain in mixture.chains
        for one in chain
    }
    numbers = {name: sorted(n for operator, n in drawn if operator == name) for name in LARGEST}
    # of torchvision's ten: 30 i / 9, 255 (1 - i / 9), 4 - 4 i / 9 rounded, and 1 +- 0.9 i / 9
    assert numbers["rotate"] == [-6.666667, -3.333333, 0, 3.333333, 6.666667]
    assert numbers["solarise"] == pytest.approx([198.333333, 226.666667, 255])
    assert numbers["posterise"] == [3, 4]
    assert numbers["colour"] == [0.8, 0.9, 1, 1.1, 1.2]


def test_an_image_is_mixed_with_its_chains() -> None:
    invert = Operation("solarise", 0, "nearest")
    black = Operation("brightness", 0.0, "nearest")
    mixture = Mixture((0.5, 0.25, 0.25), ((invert,), (invert, black)))
    expected = np.floor(0.5 * PIXELS + 0.25 * (255.0 - PIXELS))
    np.testing.assert_array_equal(AugMix().apply(PIXELS, mixture), expected)
