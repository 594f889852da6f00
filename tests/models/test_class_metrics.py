"""Recall, precision and means over classes, against examples of scikit-learn's documentation."""

import numpy as np
import pytest

from lockstep.models.accuracy_interval import format_accuracy
from lockstep.models.class_metrics import ClassCounts, find_small_classes, summarise_classes
from lockstep.models.metrics import Scores


def count(labels: list[int], predictions: list[int], classes: int) -> ClassCounts:
    truth = np.array(labels, np.int32)
    guesses = np.array(predictions, np.int32)
    nothing = np.zeros(len(labels), np.float32)
    ranks = (truth != guesses).astype(np.int32)
    return Scores(nothing, ranks, guesses, truth, nothing).per_class(classes)


def test_balanced_accuracy_is_scikit_learns() -> None:
    """The example of `balanced_accuracy_score`."""
    summary = summarise_classes(count([0, 1, 0, 0, 1, 0], [0, 1, 0, 0, 0, 1], 2))
    assert summary["balanced_accuracy_percent"] == pytest.approx(62.5)


def test_precision_recall_and_f1_are_scikit_learns() -> None:
    """The example of `precision_recall_fscore_support` with average="macro"."""
    summary = summarise_classes(count([0, 1, 2, 0, 1, 2], [0, 2, 1, 0, 0, 1], 3))
    assert summary["macro_f1_percent"] == pytest.approx(26.6666667)
    assert summary["balanced_accuracy_percent"] == pytest.approx(33.3333333)
    assert summary["precision_percent"] == pytest.approx([66.6666667, 0.0, 0.0])
    assert summary["recall_percent"] == [100.0, 0.0, 0.0]


def test_classes_without_images_do_not_count() -> None:
    """Class 1 has no images and no predictions, class 2 has only predictions; class 4 is beyond the
    classes of the images. The F1 is `f1_score` with `labels=[0, 3]`."""
    summary = summarise_classes(count([0, 0, 3, 3], [0, 2, 3, 4], 4))
    assert summary["recall_percent"] == [50.0, None, None, 50.0]
    assert summary["precision_percent"] == [100.0, None, 0.0, 100.0]
    assert summary["balanced_accuracy_percent"] == 50.0
    assert summary["macro_f1_percent"] == pytest.approx(2 / 3 * 100)


def test_counts_of_older_reports_have_no_precision() -> None:
    summary = summarise_classes({"images": [1, 1], "top1": [1, 0], "top5": [1, 1]})
    assert summary["balanced_accuracy_percent"] == 50.0
    assert summary["macro_f1_percent"] is None
    assert summary["precision_percent"] == [None, None]


def test_small_classes_are_those_with_1_to_19_images() -> None:
    counts: ClassCounts = {"images": [0, 1, 19, 20], "top1": [0] * 4, "top5": [0] * 4}
    assert find_small_classes(counts) == [1, 2]


def test_accuracies_of_few_images_have_their_interval() -> None:
    assert format_accuracy(94.0, 150) == "94.00 % (89.0 to 96.8)"
    assert format_accuracy(76.13, 5000) == "76.13 %"
    assert format_accuracy(100.0, 3) == "100.00 % (43.9 to 100.0)"
