"""Logistic regression: the minimum of its definition, checked by its derivatives, differences and a
case that one equation solves."""

import numpy as np
import pytest

from lockstep.models.logistic_regression import fit_classifier

GENERATOR = np.random.default_rng(0)


def compute_loss(
    weight: np.ndarray, bias: np.ndarray, features: np.ndarray, labels: np.ndarray, penalty: float
) -> float:
    """Return the loss as the module's docstring defines it, for weights of unscaled features."""
    mean = features.mean(axis=0)
    scale = np.sqrt(((features - mean) ** 2).sum() / len(features))
    logits = features @ weight.T + bias
    losses = np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(len(labels)), labels]
    scaled = weight * scale
    centred = bias + weight @ mean
    return losses.mean() + penalty / 2 * ((scaled**2).sum() + (centred**2).sum())


@pytest.mark.parametrize(
    ("images", "count", "classes"), [(60, 5, 3), (9, 40, 4), (3, 2, 2), (1, 4, 3), (20, 6, 25)]
)
def test_no_small_change_makes_the_loss_smaller(images: int, count: int, classes: int) -> None:
    features = GENERATOR.normal(size=(images, count)) * 3 + 7
    labels = np.arange(images) % min(classes, images)
    arguments = (features, labels, 1e-2)
    weight, bias = fit_classifier(features.astype(np.float64), labels, classes, 1e-2)
    least = compute_loss(weight, bias, *arguments)
    scale = np.sqrt(((features - features.mean(axis=0)) ** 2).sum() / images) or 1.0
    for _ in range(20):
        change = GENERATOR.normal(size=weight.shape) / scale
        shift = GENERATOR.normal(size=bias.shape) - change @ features.mean(axis=0)
        slopes = []
        for sign in (1e-4, -1e-4):
            moved = compute_loss(weight + sign * change, bias + sign * shift, *arguments)
            assert moved > least - 1e-12
            slopes.append(moved)
        assert abs(slopes[0] - slopes[1]) / 2e-4 < 1e-5, "the derivative is 0 in this direction"


@pytest.mark.parametrize("penalty", [1.0, 0.1, 1e-4])
def test_two_images_have_the_solution_of_one_equation(penalty: float) -> None:
    # By symmetry the weights are w and -w, and penalty * w = 1 / (1 + exp(2 w)).
    low = 0.0
    high = 50.0
    for _ in range(100):
        middle = (low + high) / 2
        if penalty * middle * (1 + np.exp(2 * middle)) < 1:
            low = middle
        else:
            high = middle
    weight, bias = fit_classifier(np.array([[3.0], [7.0]]), np.array([0, 1]), 2, penalty)
    np.testing.assert_allclose(weight * 2, [[-low], [low]], rtol=1e-6)
    np.testing.assert_allclose(bias + weight[:, 0] * 5, 0, atol=1e-6)


def test_features_that_classes_can_be_told_apart_by_are_told_apart() -> None:
    labels = np.repeat(np.arange(4), 5)
    features = np.eye(4)[labels] * 1e3 + GENERATOR.normal(size=(20, 4))
    weight, bias = fit_classifier(features, labels, 5, 1e-4)
    assert (np.argmax(features @ weight.T + bias, axis=1) == labels).all()


def test_a_search_can_be_ended_within_a_step_of_newtons_method() -> None:
    features = GENERATOR.normal(size=(100, 40)) * np.logspace(0, 2, 40)
    steps: list[float] = []
    fit_classifier(features, np.arange(100) % 5, 5, 1e-5, begin_step=steps.append)
    assert len(steps) > 50, "there are at most 50 steps of Newton's method"
    assert steps[0] == 0
    assert 0.8 < steps[-1] <= 1


def test_features_that_are_all_equal_give_the_shares_of_the_classes() -> None:
    labels = np.array([0, 0, 0, 1])
    weight, bias = fit_classifier(np.full((4, 3), 2.5), labels, 2, 1e-9)
    assert not weight.any()
    assert np.exp(bias[0] - bias[1]) == pytest.approx(3, rel=1e-5)


def test_the_same_features_give_the_same_bits() -> None:
    features = GENERATOR.normal(size=(50, 30)).astype(np.float32)
    labels = np.arange(50) % 7
    first = fit_classifier(features, labels, 7, 1e-3)
    again = fit_classifier(features.copy(), labels, 7, 1e-3)
    assert first[0].tobytes() == again[0].tobytes()
    assert first[1].tobytes() == again[1].tobytes()


def test_a_search_stays_close_to_its_start() -> None:
    """At the minimum, the loss pulls away from the start as much as the penalty pulls back."""
    random = np.random.default_rng(4)
    features = random.normal(size=(60, 5))
    labels = np.arange(60) % 3
    start = (random.normal(size=(3, 5)), random.normal(size=3))
    penalty = 0.01
    weight, bias = fit_classifier(features, labels, 3, penalty, start=start)
    mean = features.mean(axis=0)
    scale = np.sqrt(np.square(features - mean).sum() / 60)
    powers = np.exp(features @ weight.T + bias)
    errors = powers / powers.sum(axis=1, keepdims=True) - np.eye(3)[labels]
    moved = (weight - start[0]) * scale
    pull = errors.T @ (features - mean) / scale / 60
    np.testing.assert_allclose(pull, -penalty * moved, atol=1e-7)
    shift = bias - start[1] + (weight - start[0]) @ mean
    np.testing.assert_allclose(errors.mean(axis=0), -penalty * shift, atol=1e-7)
    held, _ = fit_classifier(features, labels, 3, 1e9, start=start)
    np.testing.assert_allclose(held, start[0], atol=1e-6)
