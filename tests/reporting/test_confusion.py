"""Confusion, compared with counts by hand."""

import numpy as np

from lockstep.reporting.views import (
    count_confusions,
    find_confident_mistakes,
    find_mistakes,
    group_classes,
)

LABELS = np.array([0, 0, 0, 1, 1, 2, 2, 2, 2])
PREDICTIONS = np.array([0, 1, 1, 1, 2, 0, 0, 0, 2])
MATRIX = np.array([[1, 2, 0], [0, 1, 1], [3, 0, 1]])
PAIRS = [[0, 0, 1], [0, 1, 2], [1, 1, 1], [1, 2, 1], [2, 0, 3], [2, 2, 1]]


def test_confusion_counts_which_class_was_taken_for_which() -> None:
    assert count_confusions(LABELS, PREDICTIONS).tolist() == PAIRS


def test_mistakes_are_the_most_frequent_first_and_leave_out_what_did_not_happen() -> None:
    assert find_mistakes(np.array(PAIRS)).tolist() == [[2, 0, 3], [0, 1, 2], [1, 2, 1]]


def test_neighbouring_classes_are_added_up_to_groups() -> None:
    matrix = np.arange(25).reshape(5, 5)
    pairs = np.column_stack([*np.unravel_index(np.arange(25), (5, 5)), np.arange(25)])
    assert group_classes(pairs, 2, 3).tolist() == [
        [matrix[:2, :2].sum(), matrix[:2, 2:4].sum(), matrix[:2, 4:].sum()],
        [matrix[2:4, :2].sum(), matrix[2:4, 2:4].sum(), matrix[2:4, 4:].sum()],
        [matrix[4:, :2].sum(), matrix[4:, 2:4].sum(), matrix[4:, 4:].sum()],
    ]


def test_few_classes_stay_by_themselves() -> None:
    np.testing.assert_array_equal(group_classes(np.array(PAIRS), 1, 3), MATRIX)


def test_the_surest_mistakes_come_first() -> None:
    confidences = np.array([0.9, 0.2, np.nan, 0.8, 0.95, 0.8])
    right = np.array([True, False, False, False, False, False])
    assert find_confident_mistakes(confidences, right, 3) == [4, 3, 5]
