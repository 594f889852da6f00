"""Engines with one fault each, and the tests of the suite that must find it.

The same tests pass on the engine without a fault: in the files that they come from, and one of each
kind through the code here.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lockstep import backends
from lockstep.backends.reference.engine import ReferenceEngine
from lockstep.recipes import Execution, Recipe
from tests.backends import (
    test_across,
    test_engine,
    test_masks,
    test_precision,
    test_quantisation,
    test_steps,
    test_trajectories,
    wrong,
)
from tests.backends.cases import FP16, OTHER_COLOURS, Step
from tests.backends.conftest import starter
from tests.backends.steps import STEPS, TRAJECTORIES
from tests.backends.wrong import Build, with_function, with_rates, with_recipe

Test = Callable[..., None]


def of_step(check: Callable[..., None], *names: str) -> tuple[Test, ...]:
    def held(step: Step) -> Test:
        return lambda start, tiny_recipe: test_steps.hold_step(start, tiny_recipe, step, check)

    return tuple(named(held(STEPS[name]), f"{check.__name__} {name}") for name in names)


def named(test: Test, name: str) -> Test:
    test.__name__ = name
    return test


def of_trajectory(*names: str) -> tuple[Test, ...]:
    test = test_steps.test_eight_steps_at_changing_rates_lead_where_float64_goes
    keys = ("changes", "mixup", "parts")
    return tuple(
        partial(test, **dict(zip(keys, TRAJECTORIES[name], strict=True))) for name in names
    )


def of_schedule(check: Callable[..., None], *names: str) -> tuple[Test, ...]:
    def held(changes: dict[str, Any]) -> Test:
        return lambda start, tiny_recipe: test_trajectories.hold_trajectory(
            start, tiny_recipe, changes, check
        )

    return tuple(
        named(held(test_trajectories.SCHEDULES[name]), f"{check.__name__} {name}") for name in names
    )


def of_logits(changes: dict[str, Any], size: int = 32) -> tuple[Test, ...]:
    return (partial(test_engine.test_logits_are_those_of_float64, changes=changes, size=size),)


def of_scaler(name: str) -> Test:
    keys = ("changes", "first", "steps", "last")
    return partial(
        test_precision.test_a_dynamic_loss_scale_adapts,
        **dict(zip(keys, test_precision.SCALERS[name], strict=True)),
    )


def of_rank(name: str) -> Test:
    keys = ("logits", "label", "rank", "prediction")
    return partial(
        test_engine.test_ranks_count_the_classes_in_front,
        **dict(zip(keys, test_engine.RANKED[name], strict=True)),
    )


def of_resumed(name: str) -> Test:
    changes, parts = test_engine.RESUMED[name]
    return partial(
        test_engine.test_a_new_engine_goes_on_to_the_same_bits, changes=changes, parts=parts
    )


def of_quantised_logits(factor: float) -> Test:
    return partial(
        test_quantisation.test_quantised_logits_are_those_of_float64, model="grouped", factor=factor
    )


QUANTISED_STEP = partial(
    test_quantisation.test_a_quantised_step_is_that_of_float64, model="grouped"
)
LOSS, GRADIENT, STATISTICS = test_steps.CHECKS
WEIGHTS, CURVE, REST = test_trajectories.CHECKS
WRITTEN = test_engine.test_what_was_written_is_read_to_the_last_bit
COSINE = "warm-up and cosine"
BY_STEPS = "step"
RESNET50 = "narrow resnet50 at 32 pixels"
RESNEXT101 = "narrow resnext101-32x4d at 32 pixels"


@dataclass(frozen=True)
class Fault:
    """A wrong engine, and tests that must all fail with it."""

    build: Build
    tests: tuple[Test, ...]


FAULTS = {
    # Decay
    "decays batch norm": Fault(
        with_recipe(
            lambda recipe: {
                "weight_decay_roles": (*recipe.weight_decay_roles, "bn_scale", "bn_bias")
            }
        ),
        (
            partial(
                test_steps.test_weight_decay_reaches_the_listed_roles_alone,
                roles=test_steps.DEFAULT_ROLES,
            ),
            test_steps.test_the_batch_norm_of_a_shortcut_is_not_decayed_by_default,
        ),
    ),
    "decays the batch norm of shortcuts": Fault(
        wrong.DecaysShortcuts,
        (
            partial(
                test_steps.test_weight_decay_reaches_the_listed_roles_alone,
                roles=test_steps.DEFAULT_ROLES,
            ),
            test_steps.test_the_batch_norm_of_a_shortcut_is_not_decayed_by_default,
        ),
    ),
    "does not decay the classifier's bias": Fault(
        with_recipe(
            lambda recipe: {
                "weight_decay_roles": [r for r in recipe.weight_decay_roles if r != "fc_bias"]
            }
        ),
        (
            partial(
                test_steps.test_weight_decay_reaches_the_listed_roles_alone,
                roles=test_steps.DEFAULT_ROLES,
            ),
        ),
    ),
    "decays weights apart from gradients": Fault(
        wrong.DecaysApart,
        (
            partial(
                test_steps.test_weight_decay_reaches_the_listed_roles_alone,
                roles=test_steps.DEFAULT_ROLES,
            ),
            *of_trajectory("much decay"),
        ),
    ),
    # Rates and velocities
    "takes the next step's rate": Fault(
        with_rates(lambda rates: np.roll(rates, -1)),
        (
            test_steps.test_a_step_takes_the_rate_of_its_number,
            *of_trajectory("plain", "no momentum"),
            *of_schedule(WEIGHTS, COSINE),
            *of_schedule(CURVE, BY_STEPS),
        ),
    ),
    "takes the step before's rate": Fault(
        with_rates(lambda rates: np.roll(rates, 1)),
        (
            test_steps.test_a_step_takes_the_rate_of_its_number,
            *of_trajectory("plain"),
            *of_schedule(WEIGHTS, COSINE),
        ),
    ),
    "learning rate inside the velocity": Fault(
        wrong.RateInside,
        (
            *of_trajectory("plain", "mixup"),
            *of_schedule(WEIGHTS, BY_STEPS),
            *of_schedule(CURVE, BY_STEPS),
        ),
    ),
    "momentum as Nesterov's": Fault(
        wrong.Nesterov,
        (test_steps.test_weights_move_by_the_rate_times_the_velocity, *of_trajectory("plain")),
    ),
    "no Nesterov momentum": Fault(
        with_recipe(lambda recipe: {"nesterov": False}),
        (*of_trajectory("much decay"),),
    ),
    "no momentum": Fault(
        with_recipe(lambda recipe: {"momentum": 0.0}),
        (test_steps.test_momentum_keeps_the_rate_outside_the_velocity, *of_trajectory("plain")),
    ),
    "momentum of 0.9": Fault(
        with_recipe(lambda recipe: {"momentum": 0.9}),
        (test_steps.test_momentum_keeps_the_rate_outside_the_velocity, *of_trajectory("plain")),
    ),
    # The model
    "v1 for v1.5": Fault(
        with_recipe(wrong.v1_for_v15),
        (
            *of_step(LOSS, "smoothed", RESNET50, RESNEXT101),
            *of_step(GRADIENT, RESNET50, RESNEXT101),
            *of_logits({}),
            *of_logits(test_engine.NARROW_RESNET50),
            *of_logits(test_engine.NARROW_RESNEXT101),
        ),
    ),
    "symmetric padding where SAME was asked": Fault(
        with_function("padding", wrong.symmetric),
        (
            *of_step(LOSS, "SAME padding", "narrow resnet50 with SAME padding and 1001 logits"),
            *of_logits({"padding": "same"}),
        ),
    ),
    "SAME with the odd row before": Fault(
        with_function("padding", wrong.odd_row_before),
        (*of_step(LOSS, "SAME padding"), *of_logits({"padding": "same"})),
    ),
    "SAME where symmetric padding was asked": Fault(
        with_recipe(lambda recipe: {"padding": "same"}),
        (*of_step(LOSS, "smoothed", RESNET50), *of_logits({})),
    ),
    # Batch norm
    "biased running variance": Fault(
        with_function("running_statistics", wrong.biased_statistics),
        (
            test_steps.test_running_statistics_take_the_unbiased_variance,
            *of_step(STATISTICS, "smoothed", "two parts", RESNET50),
        ),
    ),
    "statistics do not move": Fault(
        with_function("running_statistics", wrong.still_statistics),
        of_step(STATISTICS, "smoothed", RESNEXT101),
    ),
    "batch norm momentum the other way round": Fault(
        with_recipe(lambda recipe: {"bn_momentum": 1 - recipe.bn_momentum}),
        of_step(STATISTICS, "smoothed", "other batch norm"),
    ),
    "epsilon ten times too large": Fault(
        with_recipe(lambda recipe: {"bn_epsilon": 10 * recipe.bn_epsilon}),
        (
            *of_step(LOSS, "smoothed", "other batch norm"),
            *of_logits({}),
            *of_logits({"bn_epsilon": 0.1}),
        ),
    ),
    "epsilon left out of training": Fault(
        with_function("batch_norm", wrong.without_epsilon), of_step(LOSS, "other batch norm")
    ),
    "no gradient through mean and variance": Fault(
        with_function("batch_norm", wrong.constant_statistics),
        of_step(GRADIENT, "smoothed", RESNET50),
    ),
    "statistics of the batch in inference": Fault(
        wrong.PredictsInTraining,
        (
            *of_logits({}),
            partial(test_engine.test_every_image_counts_once_in_batches_of_any_size, size=8),
        ),
    ),
    # Loss and targets
    "labels not mixed": Fault(
        with_function("mix", wrong.images_mixed_alone),
        of_step(
            LOSS,
            "one mixup coefficient",
            "a mixup coefficient each",
            "two parts with mixup",
            RESNET50,
            RESNEXT101,
            "narrow resnext101-32x4d with one mixup coefficient",
        ),
    ),
    "the first image's coefficient for all": Fault(
        with_function("mix", wrong.mixed_by_the_first),
        of_step(LOSS, "a mixup coefficient each", "two parts with mixup", RESNEXT101),
    ),
    "coefficients of the partner": Fault(
        with_function("mix", wrong.mixed_the_other_way),
        of_step(LOSS, "one mixup coefficient", "a mixup coefficient each", "two parts with mixup"),
    ),
    "smoothing over the other classes": Fault(
        with_function("targets", wrong.smoothed_over_the_others),
        of_step(LOSS, "smoothed", RESNET50),
    ),
    "no smoothing": Fault(
        with_recipe(lambda recipe: {"label_smoothing": 0.0}),
        of_step(LOSS, "smoothed", "1001 logits", RESNET50),
    ),
    "smoothing where none was asked": Fault(
        with_recipe(lambda recipe: {"label_smoothing": 0.1}),
        of_step(LOSS, "not smoothed", "narrow resnet50 not smoothed"),
    ),
    "gradient of the sum of losses": Fault(
        with_function("cross_entropy", wrong.summed),
        (
            *of_step(GRADIENT, "smoothed"),
            test_steps.test_a_step_of_plain_descent_goes_by_the_rate_times_the_gradient,
        ),
    ),
    "the last loss for all": Fault(
        wrong.ReportsTheLastLoss,
        (test_steps.test_an_interval_has_the_mean_loss_of_every_step, *of_schedule(CURVE, COSINE)),
    ),
    # Accumulation
    "sums parts": Fault(
        wrong.SumsParts,
        (
            *of_step(
                GRADIENT,
                "two parts",
                "two parts with mixup",
                "narrow resnext101-32x4d in two parts",
            ),
            test_steps.test_two_equal_parts_have_the_gradient_of_one,
        ),
    ),
    "the last part alone": Fault(
        wrong.TrainsOnTheLastPart,
        (*of_step(GRADIENT, "two parts"), *of_trajectory("two parts")),
    ),
    # Masks
    "forgets masks after a step": Fault(
        wrong.MaskedOnce,
        (
            partial(
                test_masks.test_masked_weights_stay_at_0_through_training, pattern="two of four"
            ),
            partial(test_masks.test_other_weights_go_where_float64_goes, pattern="half", parts=1),
            test_masks.test_masks_hold_with_a_dynamic_loss_scale,
        ),
    ),
    "masks weights alone": Fault(
        wrong.MasksWeightsAlone,
        (
            partial(
                test_masks.test_masked_weights_stay_at_0_through_training, pattern="two of four"
            ),
            partial(
                test_masks.test_the_first_gradients_are_those_of_a_model_with_zeros_in_it, parts=1
            ),
        ),
    ),
    "masks by a product": Fault(
        wrong.MaskedByProduct,
        (
            partial(
                test_masks.test_an_infinite_gradient_behind_a_mask_does_no_harm,
                loss_scaling="static",
            ),
        ),
    ),
    "masks pile up": Fault(
        wrong.MasksPileUp,
        (
            test_masks.test_new_masks_replace_those_set_before,
            test_masks.test_no_masks_let_all_weights_move_again,
        ),
    ),
    "masks do not outlive a state": Fault(
        wrong.MasksOnceWritten, (test_masks.test_masks_outlive_a_state_that_is_written,)
    ),
    # Quantisation
    "does not quantise": Fault(
        with_function("fake_quantised", wrong.not_quantised),
        (
            of_quantised_logits(test_quantisation.COARSE),
            of_quantised_logits(test_quantisation.LIMITING),
            QUANTISED_STEP,
        ),
    ),
    "quantises in evaluation alone": Fault(
        with_function("fake_quantised", wrong.not_quantised, only="train"), (QUANTISED_STEP,)
    ),
    "one scale for all channels": Fault(
        with_function("fake_quantised", wrong.quantised_per_tensor),
        (of_quantised_logits(test_quantisation.COARSE), QUANTISED_STEP),
    ),
    "a gradient where inputs are limited": Fault(
        with_function("fake_quantised", wrong.quantised_with_a_gradient_everywhere),
        (test_quantisation.test_no_gradient_passes_where_an_input_is_limited,),
    ),
    "calibrates on the last batch": Fault(
        wrong.CalibratesOnTheLastBatch,
        (test_quantisation.test_an_engine_calibrates_on_the_largest_inputs_of_all_images_in_float,),
    ),
    # Evaluation and prediction
    "drops the ragged tail": Fault(
        wrong.DropsTheTail,
        (
            test_engine.test_padding_does_not_count,
            partial(test_engine.test_every_image_counts_once_in_batches_of_any_size, size=8),
        ),
    ),
    "counts padding": Fault(
        wrong.CountsPadding,
        (
            test_engine.test_padding_does_not_count,
            test_engine.test_a_batch_of_padding_alone_counts_nothing,
            partial(test_engine.test_every_image_counts_once_in_batches_of_any_size, size=8),
        ),
    ),
    "is sure of the label and not of what it predicts": Fault(
        wrong.IsSureOfTheLabel,
        (test_engine.test_confidences_are_the_softmax_of_the_class_predicted,),
    ),
    "a label before its equals": Fault(
        with_function("rank_of", wrong.before_ties),
        (of_rank("of equals the highest class is last"), of_rank("equals behind better ones")),
    ),
    "a label behind its equals": Fault(
        with_function("rank_of", wrong.behind_ties),
        (of_rank("of equals the lowest class is first"),),
    ),
    "predicts blue for red": Fault(
        with_function("normalise", wrong.blue_first, only="predict"),
        (*of_logits(OTHER_COLOURS), *of_logits({})),
    ),
    "trains on blue for red": Fault(
        with_function("normalise", wrong.blue_first, only="train"),
        of_step(LOSS, "other colours", "smoothed"),
    ),
    "evaluates blue for red": Fault(
        with_function("normalise", wrong.blue_first, only="evaluate"),
        (test_engine.test_scores_are_those_of_the_logits_predicted,),
    ),
    # Precision and loss scaling
    "updates on an overflow": Fault(
        wrong.UpdatesInAnyCase,
        (
            test_precision.test_an_overflow_skips_the_update,
            test_precision.test_training_recovers_after_an_overflow,
            test_masks.test_masks_hold_when_a_step_is_skipped,
        ),
    ),
    "keeps the loss scale inside": Fault(
        wrong.KeepsTheScaleInside,
        tuple(
            partial(test_precision.test_a_loss_scale_leaves_the_update_as_it_is, loss_scaling=kind)
            for kind in ("static", "dynamic")
        ),
    ),
    "does not scale the loss": Fault(
        with_recipe(lambda recipe: {"loss_scaling": "none"}),
        (test_precision.test_a_static_loss_scale_reaches_the_gradients,),
    ),
    "the scale never grows": Fault(
        with_recipe(lambda recipe: {"loss_scale_growth_steps": 10**9}),
        (
            of_scaler("enough of them double the scale"),
            of_scaler("a row of good steps goes on where it was left"),
        ),
    ),
    "the scale never shrinks": Fault(
        with_recipe(lambda recipe: {"loss_scale_backoff_steps": 10**9}),
        (
            of_scaler("an overflow halves the scale"),
            test_precision.test_an_overflow_skips_the_update,
            test_precision.test_training_recovers_after_an_overflow,
        ),
    ),
    "float32 where fp16 was asked": Fault(
        with_recipe(lambda recipe: {"precision": "fp32"}),
        (partial(test_precision.test_logits_in_low_precision_are_near, precision="fp16"),),
    ),
    "fp16 where float32 was asked": Fault(
        with_recipe(lambda recipe: FP16),
        (*of_logits({}), *of_step(LOSS, "smoothed"), *of_step(STATISTICS, "smoothed")),
    ),
    "weights in bf16": Fault(
        wrong.WeightsInHalf,
        (partial(test_precision.test_updates_below_low_precision_are_not_lost, precision="bf16"),),
    ),
    # Moving average
    "averages a step late": Fault(
        wrong.AveragesLate,
        (
            partial(
                test_precision.test_the_moving_average_follows_the_formula, step=0, keep=1 / 10
            ),
            *of_schedule(REST, COSINE),
        ),
    ),
    "averages parameters alone": Fault(
        wrong.AveragesParametersAlone,
        (partial(test_precision.test_the_moving_average_follows_the_formula, step=7, keep=8 / 17),),
    ),
    "evaluates what is trained for the average": Fault(
        wrong.EvaluatesWhatIsTrained,
        (test_precision.test_evaluating_the_moving_average_uses_its_weights_and_statistics,),
    ),
    # State
    "loses velocities": Fault(wrong.LosesMomentum, (WRITTEN, of_resumed("fp32"))),
    "loses the loss scale": Fault(wrong.LosesTheScaler, (WRITTEN, of_resumed("dynamic fp16"))),
    "loses the moving average": Fault(wrong.LosesTheAverage, (WRITTEN,)),
}


CASES = [
    pytest.param(fault.build, test, id=f"{name}-{number}")
    for name, fault in FAULTS.items()
    for number, test in enumerate(fault.tests)
]


def of_run(name: str) -> Test:
    def test(pair: test_across.Pair, tiny_recipe: Recipe) -> None:
        changes, mixup, parts = test_across.RUNS[name]
        run = test_across.Run.of(tiny_recipe.replace(**changes), mixup, parts)
        test_across.test_a_run_handed_over_ends_where_float64_goes(pair, run)

    return test


HANDED_OVER = {
    "velocities": (wrong.LosesMomentum, of_run("plain")),
    "the moving average": (wrong.LosesTheAverage, of_run("mixup and a moving average")),
    "the loss scale": (
        wrong.LosesTheScaler,
        test_across.test_a_dynamic_loss_scale_goes_on_across_engines,
    ),
    "anything": (
        wrong.LosesMomentum,
        test_across.test_what_one_engine_reads_another_takes_over_to_the_last_bit,
    ),
    "the scale of velocities": (wrong.RateInside, of_run("plain")),
}


def of(build: Build) -> Any:
    """Return the part of a backend that is needed to start an engine."""
    return SimpleNamespace(name="reference", engine=build)


def carry_out(test: Test, build: Build, tiny_recipe: Recipe) -> None:
    """Run a test of the suite on another engine."""
    world = backends.load("reference").world(Execution())
    with ExitStack() as stack:
        test(start=starter(of(build), world, stack), tiny_recipe=tiny_recipe)


@pytest.mark.parametrize(("build", "test"), CASES)
def test_a_fault_is_found(build: Build, test: Test, tiny_recipe: Recipe) -> None:
    with pytest.raises(AssertionError):
        carry_out(test, build, tiny_recipe)


def kind(test: Test) -> str:
    """Return the name of a test without what it is given."""
    return (test.func if isinstance(test, partial) else test).__name__.split()[0]


SOUND = {kind(test): test for fault in FAULTS.values() for test in fault.tests}


@pytest.mark.parametrize("test", SOUND.values(), ids=SOUND)
def test_the_same_tests_pass_without_a_fault(test: Test, tiny_recipe: Recipe) -> None:
    carry_out(test, ReferenceEngine, tiny_recipe)


@pytest.mark.parametrize(("build", "test"), HANDED_OVER.values(), ids=HANDED_OVER)
def test_what_is_lost_between_engines_is_found(
    build: Build, test: Test, tiny_recipe: Recipe
) -> None:
    world = backends.load("reference").world(Execution())
    with ExitStack() as stack:
        sound, faulty = (starter(of(each), world, stack) for each in (ReferenceEngine, build))
        test = partial(test, tiny_recipe=tiny_recipe)
        test(pair=test_across.Pair(sound, sound))
        with pytest.raises(AssertionError):
            test(pair=test_across.Pair(sound, faulty))
