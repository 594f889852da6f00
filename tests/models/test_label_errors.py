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
