"""The field `class_weights`: what "balanced" stands for, and which values are refused."""

import re
from typing import Any

import numpy as np
import pytest

from lockstep.recipes import Recipe
from lockstep.recipes.class_weights import balance_classes
from lockstep.recipes.my_images import Facts, choose_recipe
from lockstep.system.errors import RecipeError


def test_balanced_weights_are_the_images_over_classes_times_images_of_the_class() -> None:
    # scikit-learn's documented formula: n_samples / (n_classes * np.bincount(y))
    labels = np.repeat([0, 1, 3], [1, 2, 9])
    assert balance_classes(labels, 5) == pytest.approx([12 / 3, 12 / 6, 1, 12 / 27, 1])
    assert np.mean(np.array(balance_classes(labels, 5))[labels]) == pytest.approx(1)


def test_a_recipe_is_settled_once() -> None:
    labels = np.array([0, 0, 0, 1])
    settled = Recipe(logits=2, class_weights="balanced").settle_class_weights(labels)
    assert settled.class_weights == (4 / 6, 2.0)
    assert settled.settle_class_weights(labels[:2]) is settled
    assert Recipe.of(settled.fields()) == settled


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("balance", "not 'balance'"),
        ([1, -1], r"not \[1, -1\]"),
        ([1, "2"], r"not \[1, '2'\]"),
        ([0, 0], r"not \[0, 0\]"),
        ([1, float("nan")], r"not \[1, nan\]"),
        ([], r"not \[\]"),
        (2, "not 2"),
        (None, "not None"),
    ],
)
def test_a_wrong_value_is_one_error(value: Any, message: str) -> None:
    expected = "expected none, balanced, or numbers of 0 or more, one of them above 0"
    with pytest.raises(RecipeError, match=f"^class_weights: {expected}, {message}$"):
        Recipe(logits=2, class_weights=value)


def test_another_number_of_weights_than_logits_is_refused() -> None:
    expected = "class_weights has length 2; expected one number for each of 3 logits"
    action = re.escape(" (for 2 classes, set logits=2 too)")
    with pytest.raises(RecipeError, match=f"^{expected}{action}$"):
        Recipe(logits=3, class_weights=(1, 2))


def test_weights_fit_the_logits_that_my_images_chooses() -> None:
    facts = Facts(classes=3, images=60, shorter_side=64, on_gpu=False, precision="fp32")
    assert choose_recipe(facts, {"class_weights": [1, 2, 3]}).class_weights == (1, 2, 3)
    with pytest.raises(RecipeError, match="class_weights has length 2"):
        choose_recipe(facts, {"class_weights": [1, 2]})
