"""Engines with one fault each, and the tests of the suite that must find it.

The same tests pass on the engine without a fault: in the files that they come from, and one of each
kind through the code here.
"""

from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
import pytest

from lockstep import backends
from lockstep.backends.reference.engine import ReferenceEngine
from lockstep.recipes import Execution, Recipe
from tests.backends import (
    test_engine,
    test_masks,
    test_precision,
    test_quantisation,
    test_steps,
    wrong,
    wrong_updates,
)
from tests.backends.cases import FP16, OTHER_COLOURS
from tests.backends.conftest import starter
from tests.backends.depth_faults import DEPTH_FAULTS
from tests.backends.fault_finders import (
    BY_STEPS,
    COSINE,
    CURVE,
    DECAY_ROLES,
    GRADIENT,
    LOSS,
    QUANTISED_STEP,
    RESNET50,
    RESNEXT101,
    REST,
    STATISTICS,
    WEIGHTS,
    WRITTEN,
    Test,
    find_name,
    make_logits_tests,
    make_quantised_logits_tests,
    make_rank_test,
    make_resumed_test,
    make_scaler_test,
    make_schedule_tests,
    make_step_tests,
    make_trajectory_tests,
)
from tests.backends.frozen_faults import FROZEN_FAULTS
from tests.backends.loss_faults import LOSS_FAULTS
from tests.backends.optimizer_faults import OPTIMIZER_FAULTS
from tests.backends.wrong import Build, change_function, change_rates, change_recipe

FAULTS: dict[str, tuple[Any, ...]] = {
    # Decay
    "decays batch norm": (
        change_recipe(
            lambda recipe: {
                "weight_decay_roles": (*recipe.weight_decay_roles, "bn_scale", "bn_bias")
            }
        ),
        DECAY_ROLES,
    ),
    "decays the batch norm of shortcuts": (
        wrong_updates.DecaysShortcuts,
        DECAY_ROLES,
    ),
    "does not decay the classifier's bias": (
        change_recipe(
            lambda recipe: {
                "weight_decay_roles": [r for r in recipe.weight_decay_roles if r != "fc_bias"]
            }
        ),
        DECAY_ROLES,
    ),
    "decays weights apart from gradients": (
        wrong_updates.DecaysApart,
        DECAY_ROLES,
        *make_trajectory_tests("much decay"),
    ),
    # Rates and velocities
    "takes the next step's rate": (
        change_rates(lambda rates: np.roll(rates, -1)),
        *make_trajectory_tests("plain", "no momentum"),
        *make_schedule_tests(WEIGHTS, COSINE),
        *make_schedule_tests(CURVE, BY_STEPS),
    ),
    "learning rate inside the velocity": (
        wrong_updates.RateInside,
        *make_trajectory_tests("plain", "mixup"),
        *make_schedule_tests(WEIGHTS, BY_STEPS),
        *make_schedule_tests(CURVE, BY_STEPS),
    ),
    "momentum as Nesterov's": (
        wrong_updates.Nesterov,
        test_steps.test_weights_move_by_the_rate_times_the_velocity,
        *make_trajectory_tests("plain"),
    ),
    "no Nesterov momentum": (
        change_recipe(lambda recipe: {"nesterov": False}),
        *make_trajectory_tests("much decay"),
    ),
    "no momentum": (
        change_recipe(lambda recipe: {"momentum": 0.0}),
        *make_trajectory_tests("plain"),
    ),
    # The model
    "v1 for v1.5": (
        change_recipe(wrong.v1_for_v15),
        *make_step_tests(LOSS, "smoothed", RESNET50, RESNEXT101),
        *make_step_tests(GRADIENT, RESNET50, RESNEXT101),
        *make_logits_tests({}),
        *make_logits_tests(test_engine.NARROW_RESNET50),
        *make_logits_tests(test_engine.NARROW_RESNEXT101),
    ),
    "blurs with zeros at the edge": (
        change_function("blur", wrong.blur_with_zeros),
        *make_step_tests(LOSS, "modern parts"),
        *make_logits_tests(test_engine.MODERN_MODEL, size=37),
    ),
    "averages beyond an odd edge": (
        change_function("average_pool_2x2", wrong.average_with_padding),
        *make_logits_tests(test_engine.MODERN_MODEL, size=37),
    ),
    "no gradient through squeeze-and-excitation": (
        change_function("scale_channels", wrong.constant_factors),
        *make_step_tests(GRADIENT, "modern parts"),
    ),
    "symmetric padding where SAME was asked": (
        change_function("padding", wrong.symmetric),
        *make_step_tests(LOSS, "SAME padding", "narrow resnet50 with SAME padding and 1001 logits"),
        *make_logits_tests({"padding": "same"}),
    ),
    "SAME with the odd row before": (
        change_function("padding", wrong.odd_row_before),
        *make_step_tests(LOSS, "SAME padding"),
        *make_logits_tests({"padding": "same"}),
    ),
    # Batch norm
    "biased running variance": (
        change_function("running_statistics", wrong.bias_statistics),
        *make_step_tests(STATISTICS, "smoothed", "two parts", RESNET50),
    ),
    "epsilon ten times too large": (
        change_recipe(lambda recipe: {"bn_epsilon": 10 * recipe.bn_epsilon}),
        *make_step_tests(LOSS, "smoothed", "other batch norm"),
        *make_logits_tests({}),
        *make_logits_tests({"bn_epsilon": 0.1}),
    ),
    "epsilon left out of training": (
        change_function("batch_norm", wrong.without_epsilon),
        *make_step_tests(LOSS, "other batch norm"),
    ),
    "no gradient through mean and variance": (
        change_function("batch_norm", wrong.constant_statistics),
        *make_step_tests(GRADIENT, "smoothed", RESNET50),
    ),
    "statistics of the batch in inference": (
        wrong.PredictsInTraining,
        *make_logits_tests({}),
        partial(test_engine.test_every_image_counts_once, size=8),
    ),
    # Loss
    "the last loss for all": (
        wrong.ReportsTheLastLoss,
        *make_schedule_tests(CURVE, COSINE),
    ),
    # Accumulation
    "sums parts": (
        wrong.SumsParts,
        *make_step_tests(
            GRADIENT, "two parts", "two parts with mixup", "narrow resnext101-32x4d in two parts"
        ),
    ),
    # Masks
    "forgets masks after a step": (
        wrong.MaskedOnce,
        partial(test_masks.test_masked_weights_stay_0_in_training, pattern="two of four"),
        partial(test_masks.test_other_weights_go_where_float64_goes, pattern="half", parts=1),
    ),
    "masks weights alone": (
        wrong.MasksWeightsAlone,
        partial(test_masks.test_masked_weights_stay_0_in_training, pattern="two of four"),
    ),
    "masks by a product": (
        wrong.MaskedByProduct,
        partial(
            test_masks.test_an_infinite_gradient_behind_a_mask_does_no_harm, loss_scaling="static"
        ),
    ),
    "masks pile up": (
        wrong.MasksPileUp,
        test_masks.test_new_masks_replace_those_set_before,
        test_masks.test_no_masks_let_all_weights_move_again,
    ),
    "masks do not outlive a state": (
        wrong.MasksOnceWritten,
        test_masks.test_masks_outlive_a_state_that_is_written,
    ),
    # Quantisation
    "does not quantise": (
        change_function("fake_quantise", wrong.not_quantised),
        make_quantised_logits_tests(test_quantisation.COARSE),
        make_quantised_logits_tests(test_quantisation.LIMITING),
        QUANTISED_STEP,
    ),
    "quantises in evaluation alone": (
        change_function("fake_quantise", wrong.not_quantised, only="train"),
        QUANTISED_STEP,
    ),
    "one scale for all channels": (
        change_function("fake_quantise", wrong.quantise_per_tensor),
        make_quantised_logits_tests(test_quantisation.COARSE),
        QUANTISED_STEP,
    ),
    "a gradient where inputs are limited": (
        change_function("fake_quantise", wrong.quantise_with_a_gradient_everywhere),
        test_quantisation.test_no_gradient_passes_where_an_input_is_limited,
    ),
    "calibrates on the last batch": (
        wrong.CalibratesOnTheLastBatch,
        test_quantisation.test_calibration_takes_the_largest_inputs_of_all,
    ),
    # Evaluation and prediction
    "drops the ragged tail": (
        wrong.DropsTheTail,
        partial(test_engine.test_every_image_counts_once, size=8),
    ),
    "counts padding": (
        wrong.CountsPadding,
        test_engine.test_a_batch_of_padding_alone_counts_nothing,
        partial(test_engine.test_every_image_counts_once, size=8),
    ),
    "is sure of the label and not of what it predicts": (
        wrong.IsSureOfTheLabel,
        partial(
            test_engine.test_a_confidence_is_the_share_of_the_exponentials,
            logits=[*[0.0] * 9, np.log(27.0)],
            confidence=0.75,
        ),
    ),
    "a label before its equals": (
        change_function("rank_labels", wrong.before_ties),
        make_rank_test("of equals the highest class is last"),
        make_rank_test("equals behind better ones"),
    ),
    "a label behind its equals": (
        change_function("rank_labels", wrong.behind_ties),
        make_rank_test("of equals the lowest class is first"),
    ),
    "predicts blue for red": (
        change_function("normalise", wrong.blue_first, only="predict"),
        *make_logits_tests(OTHER_COLOURS),
        *make_logits_tests({}),
    ),
    "trains on blue for red": (
        change_function("normalise", wrong.blue_first, only="train"),
        *make_step_tests(LOSS, "other colours", "smoothed"),
    ),
    "evaluates blue for red": (
        change_function("normalise", wrong.blue_first, only="evaluate"),
        test_engine.test_scores_are_those_of_the_logits_predicted,
    ),
    # Precision and loss scaling
    "updates on an overflow": (
        wrong.UpdatesInAnyCase,
        *(
            partial(test_precision.test_an_overflow_skips_the_update, optimizer=optimizer)
            for optimizer in ("sgd", "adamw", "rmsprop_tf")
        ),
        test_precision.test_training_recovers_after_an_overflow,
        test_masks.test_masks_hold_when_a_step_is_skipped,
    ),
    "keeps the loss scale inside": (
        wrong.KeepsTheScaleInside,
        *tuple(
            partial(test_precision.test_loss_scales_change_no_update, loss_scaling=kind)
            for kind in ("static", "dynamic")
        ),
    ),
    "does not scale the loss": (
        change_recipe(lambda recipe: {"loss_scaling": "none"}),
        test_precision.test_a_static_loss_scale_reaches_the_gradients,
    ),
    "the scale never grows": (
        change_recipe(lambda recipe: {"loss_scale_growth_steps": 10**9}),
        make_scaler_test("enough of them double the scale"),
        make_scaler_test("a row of good steps goes on where it was left"),
    ),
    "the scale never shrinks": (
        change_recipe(lambda recipe: {"loss_scale_backoff_steps": 10**9}),
        make_scaler_test("an overflow halves the scale"),
        partial(test_precision.test_an_overflow_skips_the_update, optimizer="sgd"),
        test_precision.test_training_recovers_after_an_overflow,
    ),
    "float32 where fp16 was asked": (
        change_recipe(lambda recipe: {"precision": "fp32"}),
        partial(test_precision.test_low_precision_logits_are_near, precision="fp16"),
    ),
    "fp16 where float32 was asked": (
        change_recipe(lambda recipe: FP16),
        *make_logits_tests({}),
        *make_step_tests(LOSS, "smoothed"),
        *make_step_tests(STATISTICS, "smoothed"),
    ),
    "weights in bf16": (
        wrong_updates.WeightsInHalf,
        partial(test_precision.test_small_updates_are_not_lost, precision="bf16"),
    ),
    # Moving average
    "averages a step late": (
        wrong.AveragesLate,
        partial(test_precision.test_the_moving_average_follows_the_formula, step=0, keep=1 / 10),
        *make_schedule_tests(REST, COSINE),
    ),
    "averages parameters alone": (
        wrong.AveragesParametersAlone,
        partial(test_precision.test_the_moving_average_follows_the_formula, step=7, keep=8 / 17),
    ),
    "evaluates what is trained for the average": (
        wrong.EvaluatesWhatIsTrained,
        test_precision.test_evaluating_the_average_uses_all_of_it,
    ),
    # State
    "loses velocities": (wrong.LosesMomentum, WRITTEN, make_resumed_test("frozen tensors")),
    "loses the loss scale": (wrong.LosesTheScaler, WRITTEN, make_resumed_test("dynamic fp16")),
    "loses the moving average": (wrong.LosesTheAverage, WRITTEN),
}
FAULTS |= DEPTH_FAULTS | FROZEN_FAULTS | LOSS_FAULTS | OPTIMIZER_FAULTS
"""A wrong engine, and tests that must all fail with it."""
CASES = []
SOUND = {}
"""Each of these tests, by its name, once."""
for name, (build, *finders) in FAULTS.items():
    for number, finder in enumerate(finders):
        CASES.append(pytest.param(build, finder, id=f"{name}-{number}"))
        SOUND[find_name(finder)] = finder


def carry_out(test: Test, build: Build, tiny_recipe: Recipe) -> None:
    """Run a test of the suite on another engine."""
    world = backends.load("reference").world(Execution())
    with ExitStack() as stack:
        test(start=starter(wrong.make_backend(build), world, stack), tiny_recipe=tiny_recipe)


@pytest.mark.parametrize(("build", "test"), CASES)
def test_a_fault_is_found(build: Build, test: Test, tiny_recipe: Recipe) -> None:
    with pytest.raises(AssertionError):
        carry_out(test, build, tiny_recipe)


@pytest.mark.parametrize("test", SOUND.values(), ids=SOUND)
def test_the_same_tests_pass_without_a_fault(test: Test, tiny_recipe: Recipe) -> None:
    carry_out(test, ReferenceEngine, tiny_recipe)
