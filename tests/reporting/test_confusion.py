"""Confusion, compared with counts by hand."""

import numpy as np

from lockstep.reporting.views import (
    count_confusions,
    find_confident_mistakes,
    find_confused_pairs,
    find_frequent_mistakes,
    group_classes,
)

LABELS = np.array([0, 0, 0, 1, 1, 2, 2, 2, 2])
PREDICTIONS = np.array([0, 1, 1, 1, 2, 0, 0, 0, 2])
MATRIX = np.array([[1, 2, 0], [0, 1, 1], [3, 0, 1]])


def test_confusion_counts_which_class_was_taken_for_which() -> None:
    np.testing.assert_array_equal(count_confusions(LABELS, PREDICTIONS, 3), MATRIX)


def test_pairs_are_the_most_frequent_mistakes_and_leave_out_what_did_not_happen() -> None:
    assert find_confused_pairs(MATRIX, 10) == [(2, 0, 3), (0, 1, 2), (1, 2, 1)]
    assert find_confused_pairs(MATRIX, 1) == [(2, 0, 3)]


def test_a_class_is_most_taken_for_its_most_frequent_mistake() -> None:
    others, times = find_frequent_mistakes(MATRIX)
    assert (others.tolist(), times.tolist()) == ([1, 2, 0], [2, 1, 3])


def test_neighbouring_classes_are_added_up_to_groups() -> None:
    matrix = np.arange(25).reshape(5, 5)
    cells, size = group_classes(matrix, 3)
    assert size == 2
    assert cells.tolist() == [
        [matrix[:2, :2].sum(), matrix[:2, 2:4].sum(), matrix[:2, 4:].sum()],
        [matrix[2:4, :2].sum(), matrix[2:4, 2:4].sum(), matrix[2:4, 4:].sum()],
        [matrix[4:, :2].sum(), matrix[4:, 2:4].sum(), matrix[4:, 4:].sum()],
    ]


def test_few_classes_stay_by_themselves() -> None:
    cells, size = group_classes(MATRIX, 3)
    assert size == 1
    np.testing.assert_array_equal(cells, MATRIX)


def test_the_surest_mistakes_come_first() -> None:
    confidences = np.array([0.9, 0.2, np.nan, 0.8, 0.95, 0.8])
    right = np.array([True, False, False, False, False, False])
    assert find_confident_mistakes(confidences, right, 3) == [4, 3, 5]
