"""Engines with a fault in the loss, in targets or in what mixes and drops, and the tests that must
find it."""

from dataclasses import replace
from typing import Any

import numpy as np

from lockstep.backends.reference import functions as f
from lockstep.backends.reference.engine import ReferenceEngine
from lockstep.data import Batch
from lockstep.models.metrics import Counts
from tests.backends import wrong
from tests.backends.fault_finders import (
    ALL_IN_PARTS,
    GRADIENT,
    LOSS,
    RESNET50,
    RESNEXT101,
    SCORES,
    make_step_tests,
)
from tests.backends.wrong import Array, change_function, change_recipe

BINARY_TARGETS = "binary targets, CutMix and dropout"
OF_1001_LOGITS = "binary cross-entropy of 1001 logits"
CUTMIX = "narrow resnext101-32x4d with CutMix"
IN_CROSS_ENTROPY = {"loss": "cross_entropy", "target_threshold": 0.0, "class_reduction": "mean"}


class ChangesTheBatch(ReferenceEngine):
    """Trains on a batch with other columns."""

    def change(self, batch: Batch) -> dict[str, Any]:
        raise NotImplementedError

    def _gradients(self, batch: Batch, rows: Array) -> tuple[dict[str, Array], Counts]:
        changed = batch if batch.boxes is None else replace(batch, **self.change(batch))
        return super()._gradients(changed, rows)


class WeighsTargetsAsPixels(ChangesTheBatch):
    """Gives a pasted image the target of its own label alone."""

    def change(self, batch: Batch) -> dict[str, Any]:
        return {"target_coefficients": None}


class PastesNothing(ChangesTheBatch):
    """Mixes the targets of CutMix, but not the pixels."""

    def change(self, batch: Batch) -> dict[str, Any]:
        return {"boxes": np.zeros_like(batch.boxes)}


class TurnsBoxes(ChangesTheBatch):
    """Takes top for left and height for width."""

    def change(self, batch: Batch) -> dict[str, Any]:
        assert batch.boxes is not None
        return {"boxes": batch.boxes[:, [1, 0, 3, 2]]}


_binary_cross_entropy = f.binary_cross_entropy


def softmax_slope(logits: Array, target: Array, reduction: str) -> tuple[Array, Any]:
    """Return binary cross-entropy with the gradient of cross-entropy."""
    return _binary_cross_entropy(logits, target, reduction)[0], f.cross_entropy(logits, target)[1]


LOSS_FAULTS: dict[str, tuple[Any, ...]] = {
    # Loss and targets
    "labels not mixed": (
        change_function("mix", wrong.images_mixed_alone),
        *make_step_tests(
            LOSS,
            "one mixup coefficient",
            "a mixup coefficient each",
            "two parts with mixup",
            RESNET50,
            RESNEXT101,
            "narrow resnext101-32x4d with CutMix",
        ),
    ),
    "the first image's coefficient for all": (
        change_function("mix", wrong.mix_by_the_first),
        *make_step_tests(LOSS, "a mixup coefficient each", "two parts with mixup", RESNEXT101),
    ),
    "coefficients of the partner": (
        change_function("mix", wrong.mix_the_other_way),
        *make_step_tests(
            LOSS, "one mixup coefficient", "a mixup coefficient each", "two parts with mixup"
        ),
    ),
    "smoothing over the other classes": (
        change_function("targets", wrong.smooth_over_the_others),
        *make_step_tests(LOSS, "smoothed", RESNET50),
    ),
    "smoothing where none was asked": (
        change_recipe(lambda recipe: {"label_smoothing": 0.1}),
        *make_step_tests(LOSS, "not smoothed", "narrow resnet50 not smoothed"),
    ),
    "gradient of the sum of losses": (
        change_function("cross_entropy", wrong.sum_losses),
        *make_step_tests(GRADIENT, "smoothed"),
    ),
    # Class weights and dropout
    "no class weights": (
        change_recipe(lambda recipe: {"class_weights": "none"}),
        *make_step_tests(LOSS, "class weights", ALL_IN_PARTS),
    ),
    "class weights of the label alone": (
        wrong.WeighsTheLabel,
        *make_step_tests(LOSS, ALL_IN_PARTS),
    ),
    "the mean over the weights": (
        change_function("cross_entropy", wrong.weigh_by_the_image),
        *make_step_tests(LOSS, "class weights"),
        *make_step_tests(GRADIENT, ALL_IN_PARTS),
    ),
    "a gradient for targets that sum to 1": (
        change_function("cross_entropy", wrong.targets_sum_to_1),
        *make_step_tests(GRADIENT, "class weights", ALL_IN_PARTS),
    ),
    "weighs the losses of an evaluation": (wrong.WeighsScores, SCORES),
    "no dropout": (wrong.DropsNothing, *make_step_tests(LOSS, BINARY_TARGETS, ALL_IN_PARTS)),
    "does not divide what dropout keeps": (
        change_function("drop", wrong.drop_without_scaling),
        *make_step_tests(LOSS, BINARY_TARGETS, ALL_IN_PARTS),
    ),
    "drops the features of the next image": (
        change_function("drop", wrong.drop_of_the_next_image),
        *make_step_tests(LOSS, BINARY_TARGETS, ALL_IN_PARTS),
    ),
    "dropout in the forward pass alone": (
        change_function("drop", wrong.drop_forward_alone),
        *make_step_tests(GRADIENT, BINARY_TARGETS, ALL_IN_PARTS),
    ),
    # CutMix and binary cross-entropy
    "the target of a pasted image is its own label": (
        WeighsTargetsAsPixels,
        *make_step_tests(LOSS, BINARY_TARGETS, CUTMIX),
    ),
    "pastes nothing": (PastesNothing, *make_step_tests(LOSS, BINARY_TARGETS, CUTMIX)),
    "takes top for left": (TurnsBoxes, *make_step_tests(LOSS, BINARY_TARGETS, CUTMIX)),
    "cross-entropy where binary was asked": (
        change_recipe(lambda recipe: IN_CROSS_ENTROPY),
        *make_step_tests(LOSS, BINARY_TARGETS, OF_1001_LOGITS),
    ),
    "the sum over classes where the mean was asked": (
        change_recipe(
            lambda recipe: {} if recipe.loss == "cross_entropy" else {"class_reduction": "sum"}
        ),
        *make_step_tests(LOSS, BINARY_TARGETS),
    ),
    "the mean over classes where the sum was asked": (
        change_recipe(lambda recipe: {"class_reduction": "mean"}),
        *make_step_tests(LOSS, OF_1001_LOGITS),
        *make_step_tests(GRADIENT, OF_1001_LOGITS),
    ),
    "leaves targets below and above the threshold": (
        change_recipe(lambda recipe: {"target_threshold": 0.0}),
        *make_step_tests(LOSS, BINARY_TARGETS),
    ),
    "the gradient of softmax with binary targets": (
        change_function("binary_cross_entropy", softmax_slope),
        *make_step_tests(GRADIENT, BINARY_TARGETS, OF_1001_LOGITS),
    ),
}
"""A wrong engine, and tests that must all fail with it."""
