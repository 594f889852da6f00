"""Confident learning: against the figures of cleanlab, and by hand."""

import numpy as np
import pytest

from lockstep.models.label_errors import find_label_errors


def draw_labels() -> tuple[np.ndarray, np.ndarray]:
    """Return probabilities of 60 images and 3 classes, and labels of which some are wrong."""
    random = np.random.default_rng(1)
    true = random.integers(0, 3, 60)
    logits = random.normal(0, 1, (60, 3))
    logits[np.arange(60), true] += 3
    probabilities = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    labels = true.copy()
    flipped = random.random(60) < 0.15
    labels[flipped] = (labels[flipped] + random.integers(1, 3, flipped.sum())) % 3
    return probabilities, labels


def test_the_confident_joint_and_the_suspects_are_those_of_cleanlab() -> None:
    """`cleanlab.count.compute_confident_joint` (calibrate=False) and
    `cleanlab.filter.find_label_issues` (filter_by "confident_learning", ranked by
    "normalized_margin") of cleanlab 2.9.0."""
    errors = find_label_errors(*draw_labels())
    assert errors.joint.tolist() == [[16, 4, 2], [3, 8, 0], [2, 3, 16]]
    ranked = [26, 15, 50, 53, 57, 38, 27, 14, 29, 44, 11, 52, 34, 3]
    assert errors.suspects.tolist() == ranked


def test_a_class_is_confident_from_its_mean_probability_on() -> None:
    probabilities = np.array([[0.9, 0.1], [0.5, 0.5], [0.3, 0.7], [0.2, 0.8], [0.25, 0.75]])
    labels = np.array([0, 0, 1, 1, 0])
    # The thresholds are (0.9 + 0.5 + 0.25) / 3 = 0.55 and (0.7 + 0.8) / 2 = 0.75.
    errors = find_label_errors(probabilities, labels)
    assert errors.joint.tolist() == [[1, 1], [0, 1]]
    assert (errors.suspects.tolist(), errors.suggestions.tolist()) == ([4], [1])
    assert errors.margins.tolist() == pytest.approx([-0.5])


def test_nothing_belongs_to_a_class_without_images() -> None:
    probabilities = np.array([[0.1, 0.1, 0.8], [0.2, 0.1, 0.7], [0.1, 0.9, 0.0]])
    errors = find_label_errors(probabilities, np.array([0, 0, 1]))
    assert errors.suspects.size == 0


SIZES = (40, 30, 12, 6, 3, 2)


def draw_rare_labels(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return probabilities of 93 images of six classes, some rare, and labels, 6 % of them wrong.
    The model prefers frequent classes and is right on about 70 %."""
    random = np.random.default_rng(seed)
    true = np.repeat(np.arange(6), SIZES)
    logits = random.normal(0, 1.2, (93, 6)) + np.log(np.array(SIZES) / 93)
    logits[np.arange(93), true] += 2
    probabilities = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    labels = true.copy()
    flipped = random.random(93) < 0.06
    labels[flipped] = (labels[flipped] + random.integers(1, 6, flipped.sum())) % 6
    return probabilities, labels


CLEANLABS = {
    1: [36, 57, 74, 85, 87],
    2: [11, 36, 47, 57, 62, 71, 73, 75, 86, 88, 92],
    3: [1, 2, 6, 21, 39, 42, 44, 54, 56, 57, 59, 61, 71, 73, 78, 79, 84, 89],
}
"""`find_label_issues(labels, probabilities, filter_by="confident_learning")` of cleanlab 2.9.0."""


@pytest.mark.parametrize("seed", CLEANLABS)
def test_rare_classes_are_suspected_no_more_than_chance_and_labels_allow(seed: int) -> None:
    """Of cleanlab's suspects, those remain that have a likely suggestion."""
    probabilities, labels = draw_rare_labels(seed)
    errors = find_label_errors(probabilities, labels)
    assert set(errors.suspects.tolist()) <= set(CLEANLABS[seed])
    rows = probabilities[errors.suspects]
    suggested = rows[np.arange(len(rows)), errors.suggestions]
    assert (suggested > rows[np.arange(len(rows)), labels[errors.suspects]]).all()
    assert (suggested >= 1 / 6).all()
    rest = np.setdiff1d(CLEANLABS[seed], errors.suspects)
    thresholds = [max(probabilities[labels == k, k].mean(), 1 / 6) for k in range(6)]
    label_probabilities = probabilities[rest, labels[rest]][:, None]
    is_likely = (probabilities[rest] >= thresholds) & (probabilities[rest] > label_probabilities)
    assert not is_likely.any(), "no class is likely for those that are not suspected"


def test_odds_leave_the_clearest_suspects() -> None:
    probabilities, labels = draw_rare_labels(3)
    every = find_label_errors(probabilities, labels)
    clear = find_label_errors(probabilities, labels, odds=5)
    rows = probabilities[every.suspects]
    places = np.arange(len(rows))
    ratios = rows[places, every.suggestions] / rows[places, labels[every.suspects]]
    assert clear.suspects.tolist() == every.suspects[ratios > 5].tolist()
    assert 0 < len(clear.suspects) < len(every.suspects)
