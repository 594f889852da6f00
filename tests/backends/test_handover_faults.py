"""Engines that lose a part of a run's state are found by the tests of `test_across`."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

import pytest

from lockstep import backends
from lockstep.backends.reference.engine import ReferenceEngine
from lockstep.recipes import Execution, Recipe
from tests.backends import test_across, wrong, wrong_updates
from tests.backends.conftest import starter
from tests.backends.wrong import Build


def make_handover_test(name: str) -> Callable[..., None]:
    def test(pair: test_across.Pair, tiny_recipe: Recipe) -> None:
        changes, mixup, parts = test_across.RUNS[name]
        run = test_across.Run.make(tiny_recipe.replace(**changes), mixup, parts)
        test_across.test_a_run_handed_over_ends_where_float64_goes(pair, run)

    return test


HANDED_OVER = {
    "velocities": (wrong.LosesMomentum, make_handover_test("much momentum and decay")),
    "the moving average": (
        wrong.LosesTheAverage,
        make_handover_test("LAMB, an average, SAME padding and two parts"),
    ),
    "the loss scale": (
        wrong.LosesTheScaler,
        test_across.test_a_dynamic_loss_scale_goes_on_across_engines,
    ),
    "anything": (
        wrong.LosesMomentum,
        test_across.test_what_one_engine_reads_another_takes_over_exactly,
    ),
    "the scale of velocities": (
        wrong_updates.RateInside,
        make_handover_test("much momentum and decay"),
    ),
}


@pytest.mark.parametrize(("build", "test"), HANDED_OVER.values(), ids=HANDED_OVER)
def test_what_is_lost_between_engines_is_found(
    build: Build, test: Callable[..., None], tiny_recipe: Recipe
) -> None:
    world = backends.load("reference").world(Execution())
    with ExitStack() as stack:
        sound, faulty = (
            starter(wrong.make_backend(engine), world, stack) for engine in (ReferenceEngine, build)
        )
        test = partial(test, tiny_recipe=tiny_recipe)
        test(pair=test_across.Pair(sound, sound))
        with pytest.raises(AssertionError):
            test(pair=test_across.Pair(sound, faulty))
