"""Labels that are probably wrong: confident learning (Northcutt et al. 2021, arXiv:1911.00068).

The probabilities must come from models that did not learn from the images.
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class LabelErrors:
    """What confident learning says about the labels of some images."""

    suspects: np.ndarray
    """int64 [suspects]: images whose label is probably wrong, the most certain first."""
    suggestions: np.ndarray
    """int64 [suspects]: the class that each of them probably belongs to."""
    margins: np.ndarray
    """float64 [suspects]: the label's probability less that of the most likely other class."""
    joint: np.ndarray
    """int64 [classes, classes]: the number of images by label and confident class. Images without a
    confident class are not counted."""


def find_label_errors(
    probabilities: np.ndarray, labels: np.ndarray, odds: float = 1.0
) -> LabelErrors:
    """Return the images whose label is probably wrong.

    `probabilities` are [N, classes], `labels` int [N]. A class is confident for an image if its
    probability is at least the mean probability of the class over the images with its label: the
    threshold follows how sure the model is of the class. It is at least that of chance, 1/classes:
    a model is seldom sure of a rare class, and would find it in images of others. Of several, the
    top one is taken. An image whose confident class is not its label, and more than `odds` times
    as likely as the label, is a suspect. A class without images has no threshold, and nothing is
    suspected to belong to it.
    """
    classes = probabilities.shape[1]
    thresholds = np.full(classes, np.inf)
    for number in np.unique(labels):
        own = probabilities[labels == number, number].mean()
        thresholds[number] = max(own, 1 / classes)
    # Rounding must not decide where a class has one image, or equal ones.
    confident = np.where(probabilities >= thresholds - 1e-12, probabilities, -1.0)
    guesses = confident.argmax(axis=1)
    has_guess = confident.max(axis=1) >= 0
    joint = np.zeros((classes, classes), np.int64)
    np.add.at(joint, (labels[has_guess], guesses[has_guess]), 1)
    others = probabilities.copy()
    rows = np.arange(len(labels))
    others[rows, labels] = -1.0
    margins = probabilities[rows, labels] - others.max(axis=1)
    is_likelier = probabilities[rows, guesses] > odds * probabilities[rows, labels]
    suspects = np.flatnonzero(has_guess & (guesses != labels) & is_likelier)
    suspects = suspects[np.argsort(margins[suspects], kind="stable")]
    return LabelErrors(suspects, guesses[suspects], margins[suspects], joint)
