"""The range test of the learning rate: what it says of drawn curves."""

import numpy as np
import pytest

from lockstep.recipes import Recipe
from lockstep.recipes.rate_range import has_diverged, judge, smooth


def make_curve(rates: np.ndarray) -> list[float]:
    """Return losses that fall from 2.3 to 1 where the rate is 0.1, and rise steeply after it."""
    distance = np.log10(rates / 0.1)
    falling = 1 + 1.3 / (1 + np.exp(4 * (distance + 1)))
    rising = np.exp(4 * np.maximum(distance - 0.3, 0)) - 1
    noise = np.random.default_rng(2).normal(0, 0.03, len(rates))
    return (falling + rising + noise).tolist()


@pytest.mark.parametrize("scaling", ["none", "linear"])
def test_a_tenth_of_the_best_rate_is_suggested(scaling: str, tiny_recipe: Recipe) -> None:
    recipe = tiny_recipe.replace(lr_scaling=scaling, lr_batch_images=32)  # 8 images a step
    rates = np.geomspace(1e-6, 10, 200)
    losses = make_curve(rates)
    result = judge(rates, losses, 200, recipe)
    assert 0.1 < result.lowest < 0.4
    assert result.suggested == pytest.approx(result.lowest / 10, rel=0.06)
    assert result.field == pytest.approx(result.suggested * {"none": 1, "linear": 4}[scaling])
    assert result.diverged


def test_a_loss_that_only_varies_suggests_nothing(tiny_recipe: Recipe) -> None:
    losses = np.random.default_rng(4).normal(2.3, 0.1, 200).tolist()
    result = judge(np.geomspace(1e-6, 1, 200), losses, 200, tiny_recipe)
    assert (result.suggested, result.field, result.diverged) == (None, None, False)


def test_a_smoothed_loss_is_the_mean_with_weights_that_fall() -> None:
    weights = 0.9 ** np.array([2, 1, 0])
    assert smooth([4.0, 2.0, 1.0])[-1] == pytest.approx(weights @ [4, 2, 1] / weights.sum())
    assert smooth([3.0] * 5) == pytest.approx([3.0] * 5)


@pytest.mark.parametrize(
    ("losses", "expected"),
    [([2.0, 2.1], False), ([2.0, 2.1, float("nan")], True), ([1.0, 1.0, 60.0], True)],
)
def test_a_loss_diverges_at_nan_or_four_times_least(losses: list[float], *, expected: bool) -> None:
    assert has_diverged(losses) is expected
