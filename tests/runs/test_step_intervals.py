"""The intervals that a run is divided into."""

import pytest

from lockstep.recipes import Execution
from lockstep.runs.step_plan import plan_intervals


@pytest.mark.parametrize("first", range(23))
def test_borders_of_intervals_do_not_depend_on_where_a_run_starts(first: int) -> None:
    execution = Execution(log_every_steps=4, save_every_steps=5)
    whole = [plan.stop for plan in plan_intervals(0, 23, 9, execution)]
    assert whole == [4, 5, 8, 9, 10, 12, 15, 16, 18, 20, 23]
    rest = [plan.stop for plan in plan_intervals(first, 23, 9, execution)]
    assert rest == [stop for stop in whole if stop > first]


def test_a_run_saves_at_every_epoch_and_evaluates_at_some() -> None:
    execution = Execution(log_every_steps=100, evaluate_every_epochs=2)
    plans = list(plan_intervals(0, 30, 6, execution))
    assert [plan.stop for plan in plans if plan.saves] == [6, 12, 18, 24, 30]
    assert [plan.stop for plan in plans if plan.evaluates] == [12, 24, 30]


@pytest.mark.parametrize(
    ("changes", "stops", "traced"),
    [
        ({}, [4, 8, 10, 12, 16, 20], []),
        ({"profile_step": 5, "profile_steps": 2}, [4, 5, 7, 8, 10, 12, 16, 20], [(5, 7)]),
        # one trace, across log entries
        ({"profile_step": 0, "profile_steps": 9}, [9, 10, 12, 16, 20], [(0, 9)]),
        # an epoch ends in between
        ({"profile_step": 8, "profile_steps": 4}, [4, 8, 10, 12, 16, 20], [(8, 10), (10, 12)]),
        ({"profile_step": 30}, [4, 8, 10, 12, 16, 20], []),
    ],
)
def test_traced_steps_are_intervals_of_their_own(
    changes: dict[str, int], stops: list[int], traced: list[tuple[int, int]]
) -> None:
    plans = list(plan_intervals(0, 20, 10, Execution(log_every_steps=4, **changes)))
    assert [plan.stop for plan in plans] == stops
    assert [(plan.first, plan.stop) for plan in plans if plan.traced] == traced
