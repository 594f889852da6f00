"""Tests of the suite with their arguments, as `test_faults` runs them on wrong engines."""

from collections.abc import Callable
from functools import partial
from typing import Any

from tests.backends import (
    test_engine,
    test_precision,
    test_quantisation,
    test_steps,
    test_trajectories,
)
from tests.backends.cases import Step
from tests.backends.steps import STEPS, TRAJECTORIES

Test = Callable[..., None]


def make_step_tests(check: Callable[..., None], *names: str) -> tuple[Test, ...]:
    def make_test(step: Step) -> Test:
        return lambda start, tiny_recipe: test_steps.hold_step(start, tiny_recipe, step, check)

    return tuple(name_test(make_test(STEPS[name]), f"{check.__name__} {name}") for name in names)


def name_test(test: Test, name: str) -> Test:
    test.__name__ = name
    return test


def make_trajectory_tests(*names: str) -> tuple[Test, ...]:
    test = test_steps.test_eight_steps_at_changing_rates_lead_where_float64_goes
    keys = ("changes", "mixup", "parts")
    return tuple(
        partial(test, **dict(zip(keys, TRAJECTORIES[name], strict=True))) for name in names
    )


def make_schedule_tests(check: Callable[..., None], *names: str) -> tuple[Test, ...]:
    def make_test(changes: dict[str, Any]) -> Test:
        return lambda start, tiny_recipe: test_trajectories.hold_trajectory(
            start, tiny_recipe, changes, check
        )

    return tuple(
        name_test(make_test(test_trajectories.SCHEDULES[name]), f"{check.__name__} {name}")
        for name in names
    )


def make_logits_tests(changes: dict[str, Any], size: int = 32) -> tuple[Test, ...]:
    return (partial(test_engine.test_logits_are_those_of_float64, changes=changes, size=size),)


def make_scaler_test(name: str) -> Test:
    keys = ("changes", "first", "steps", "last")
    return partial(
        test_precision.test_a_dynamic_loss_scale_adapts,
        **dict(zip(keys, test_precision.SCALERS[name], strict=True)),
    )


def make_rank_test(name: str) -> Test:
    keys = ("logits", "label", "rank", "prediction")
    return partial(
        test_engine.test_ranks_count_the_classes_in_front,
        **dict(zip(keys, test_engine.RANKED[name], strict=True)),
    )


def make_resumed_test(name: str) -> Test:
    changes, parts = test_engine.RESUMED[name]
    return partial(
        test_engine.test_a_new_engine_goes_on_to_the_same_bits, changes=changes, parts=parts
    )


def make_quantised_logits_tests(factor: float) -> Test:
    return partial(
        test_quantisation.test_quantised_logits_are_those_of_float64, model="grouped", factor=factor
    )


QUANTISED_STEP = partial(
    test_quantisation.test_a_quantised_step_is_that_of_float64, model="grouped"
)
LOSS, GRADIENT, STATISTICS = test_steps.CHECKS
WEIGHTS, CURVE, REST = test_trajectories.CHECKS
WRITTEN = test_engine.test_what_was_written_is_read_to_the_last_bit
SCORES = test_engine.test_scores_are_those_of_the_logits_predicted
COSINE = "warm-up and cosine"
BY_STEPS = "step"
ALL_IN_PARTS = "class weights, dropout, stochastic depth and mixup in two parts"
RESNET50 = "narrow resnet50 at 32 pixels"
RESNEXT101 = "narrow resnext101-32x4d at 32 pixels"


DECAY_ROLES = partial(test_steps.test_only_its_roles_decay, roles=test_steps.DEFAULT_ROLES)


def find_name(test: Test) -> str:
    """Return the name of a test without its arguments."""
    return (test.func if isinstance(test, partial) else test).__name__.split()[0]
