"""What a launcher does about what it sees of its ranks, without processes."""

import signal
from dataclasses import replace
from typing import Any

import pytest

from lockstep.launch.watch import (
    AFTER_CTRL_C_SEC,
    GRACE_SEC,
    TO_END_ALONE_SEC,
    Elsewhere,
    Ending,
    Fault,
    Outcome,
    Rank,
    describe_fault,
    find_fault,
    has_explained_itself,
    next_signal,
    update_rank,
    will_try_again,
)
from lockstep.system.heartbeat import Beat

PATIENCE = 60.0
TRAINS = Beat(1, "training", step=7, moves=7)


def ranks(*differ: dict[str, Any], now: float = 100.0) -> list[Rank]:
    """Return healthy ranks that train, each with differences."""
    healthy = Rank(0, 10, heard_at=now, moved_at=now, beat=TRAINS, state="S")
    return [
        replace(healthy, **({"number": number, "pid": 10 + number} | changes))
        for number, changes in enumerate(differ)
    ]


def look(rank: Rank, now: float, **changes: Any) -> Rank:
    same: dict[str, Any] = {
        "beat": rank.beat,
        "processor_sec": rank.processor_sec,
        "state": "S",
        "code": None,
        "reported": None,
    }
    return update_rank(rank, now, **(same | changes))


# What is seen


@pytest.mark.parametrize(
    ("changes", "heard_at"),
    [
        ({}, 5.0),
        ({"beat": None}, 5.0),
        ({"beat": replace(TRAINS, number=2)}, 8.0),
        ({"processor_sec": 0.01}, 8.0),
    ],
    ids=["nothing new", "an unreadable beat", "a beat", "processor time"],
)
def test_beats_and_processor_time_are_life(changes: dict[str, Any], heard_at: float) -> None:
    assert look(Rank(0, 1, heard_at=5.0, beat=TRAINS), 8.0, **changes).heard_at == heard_at


@pytest.mark.parametrize(
    ("beat", "moved_at", "slowest"),
    [
        (replace(TRAINS, number=9), 5.0, 0.0),
        (replace(TRAINS, moves=8), 8.0, 3.0),
        (replace(TRAINS, activity="saving"), 8.0, 0.0),
        (Beat(2, "saving", 7, 8), 8.0, 0.0),
    ],
    ids=["only a beat", "a batch", "another activity", "another activity with a batch"],
)
def test_a_batch_is_a_move_and_its_time_counts(beat: Beat, moved_at: float, slowest: float) -> None:
    rank = look(Rank(0, 1, moved_at=5.0, beat=TRAINS), 8.0, beat=beat)
    assert (rank.moved_at, rank.slowest_sec) == (moved_at, slowest)


# Faults


def judge(*differ: dict[str, Any], now: float = 100.0) -> tuple[str, int] | None:
    """Return the kind of the fault of ranks, and the number of the rank that is to blame."""
    fault = find_fault(ranks(*differ), now, PATIENCE)
    if fault is None:
        return None
    assert fault.rank is not None
    return fault.kind, fault.rank.number


def test_healthy_ranks_have_no_fault() -> None:
    assert judge({}, {}, now=100.0 + PATIENCE) is None


@pytest.mark.parametrize("activity", ["starting", "compiling", "training", "evaluating", "saving"])
def test_a_rank_without_a_sign_of_life_is_silent_whatever_it_did(activity: Any) -> None:
    fault = find_fault(ranks({}, {"heard_at": 39.0, "beat": Beat(1, activity)}), 100.0, PATIENCE)
    assert fault is not None
    assert (fault.kind, fault.began_at, fault.rank and fault.rank.number) == ("silent", 39.0, 1)


@pytest.mark.parametrize(
    ("first", "second", "stalls"),
    [
        ("training", "training", True),
        ("training", "evaluating", True),
        ("training", "saving", False),
        ("compiling", "training", False),
        ("starting", "starting", False),
    ],
)
def test_ranks_without_batches_stall(first: Any, second: Any, stalls: bool) -> None:
    standing = ranks(
        {"moved_at": 39.0, "beat": Beat(1, first)}, {"moved_at": 38.0, "beat": Beat(1, second)}
    )
    fault = find_fault(standing, 100.0, PATIENCE)
    assert (fault is not None and (fault.kind, fault.began_at) == ("stalled", 39.0)) == stalls


@pytest.mark.parametrize(
    ("elsewhere", "stalls"),
    [
        (Elsewhere(True, 50.0), False),
        (Elsewhere(False, 50.0), False),
        (Elsewhere(False, 39.0), True),
    ],
    ids=["saves", "saved a while ago", "saved long ago"],
)
def test_ranks_that_wait_for_a_saving_rank_do_not_stall(elsewhere: Elsewhere, stalls: bool) -> None:
    fault = find_fault(ranks({"moved_at": 30.0}, {"moved_at": 30.0}), 100.0, PATIENCE, elsewhere)
    assert (fault is not None) == stalls


def test_one_rank_with_a_batch_is_enough_against_a_stall() -> None:
    assert judge({"moved_at": 0.0}, {"moved_at": 99.0}) is None


def test_slow_steps_are_no_stall_until_three_times_the_slowest() -> None:
    slow = ranks({"moved_at": 0.0, "slowest_sec": 40.0}, {"moved_at": 0.0})
    assert find_fault(slow, 119.0, PATIENCE) is None
    fault = find_fault(slow, 121.0, PATIENCE)
    assert fault is not None
    assert fault.kind == "stalled"


def test_a_silent_rank_or_else_that_with_the_fewest_batches_is_to_blame_for_a_stall() -> None:
    stands = {"moved_at": 0.0}
    behind = stands | {"beat": Beat(1, "training", step=6, moves=6)}
    assert judge(stands, behind) == ("stalled", 1)
    long = PATIENCE + 0.5
    assert judge(stands | {"heard_at": long}, stands | {"heard_at": 1.0}, now=long) == ("silent", 1)


@pytest.mark.parametrize(
    ("reported", "blamed"),
    [(1, ("silent", 1)), (2, ("ended", 0)), (3, ("ended", 0)), (None, ("ended", 0))],
)
def test_a_silent_rank_is_to_blame(reported: int | None, blamed: tuple[str, int]) -> None:
    failed = {"code": reported or -9, "reported": reported, "ended_at": 90.0}
    assert judge(failed, {"heard_at": 80.0, "moved_at": 80.0}, now=92.0) == blamed


@pytest.mark.parametrize("code", [0, 75, 130])
def test_a_rank_that_ends_as_it_should_is_no_fault(code: int) -> None:
    assert judge({"code": code, "reported": code, "ended_at": 1.0}, {}) is None


def test_others_may_end_alone_before_a_failure_is_a_fault() -> None:
    failed = {"code": 1, "ended_at": 99.5}
    assert judge({}, failed, now=99.5 + TO_END_ALONE_SEC - 0.1) is None
    assert judge({}, failed, now=99.5 + TO_END_ALONE_SEC + 0.1) is not None
    assert judge({"code": 0, "ended_at": 99.5}, failed, now=99.5) is not None


@pytest.mark.parametrize(
    ("first", "second", "blamed"),
    [
        ({"code": 1, "reported": 1}, {"code": -9, "reported": None}, 1),
        ({"code": 1, "reported": 1}, {"code": 1, "reported": None}, 1),
        ({"code": 1, "reported": 1}, {"code": 2, "reported": 2}, 1),
        ({"code": 1, "reported": 1}, {"code": 3, "reported": 3}, 1),
        ({"code": 1, "reported": 1}, {"code": 1, "reported": 1, "ended_at": 98.0}, 1),
        ({"code": 2, "reported": 2}, {"code": 2, "reported": 2}, 0),
    ],
    ids=["killed", "crashed", "used wrongly", "diverged", "earlier", "alike"],
)
def test_the_rank_is_to_blame_that_did_not_end_because_of_another(
    first: dict[str, Any], second: dict[str, Any], blamed: int
) -> None:
    assert judge({"ended_at": 98.5} | first, {"ended_at": 98.5} | second) == ("ended", blamed)


# Signals


def choose_signal(now: float, ending: Ending, *differ: dict[str, Any]) -> signal.Signals | None:
    return next_signal(ranks(*(differ or ({}, {}))), now, PATIENCE, ending)


def test_nothing_is_sent_to_healthy_ranks() -> None:
    assert choose_signal(1e6, Ending()) is None


def test_after_a_fault_ranks_are_asked_and_killed_after_the_grace() -> None:
    ending = Ending(Fault("silent", began_at=40.0, rank=ranks({})[0]), found_at=100.0)
    assert choose_signal(100.0, ending) == signal.SIGTERM
    ending = replace(ending, asked_at=100.0)
    assert choose_signal(100.0 + GRACE_SEC, ending) is None
    assert choose_signal(100.1 + GRACE_SEC, ending) == signal.SIGKILL


def test_a_rank_that_saves_may_finish_within_the_patience() -> None:
    fault = Fault("ended", began_at=100.0, rank=ranks({})[0])
    ending = Ending(fault, found_at=101.0, asked_at=101.0)
    saves = {"beat": Beat(1, "saving")}
    assert choose_signal(100.0 + PATIENCE, ending, saves, {"code": -9}) is None
    assert choose_signal(100.1 + PATIENCE, ending, saves, {"code": -9}) == signal.SIGKILL
    has_saved = saves | {"code": 1}
    assert choose_signal(101.1 + GRACE_SEC, ending, has_saved, {}) == signal.SIGKILL


def test_when_a_rank_has_saved_and_stopped_the_others_are_asked_once_and_not_killed() -> None:
    stopped = {"code": 75, "ended_at": 99.0}
    assert choose_signal(99.0 + TO_END_ALONE_SEC, Ending(), stopped, {}) is None
    assert choose_signal(99.1 + TO_END_ALONE_SEC, Ending(), stopped, {}) == signal.SIGTERM
    assert choose_signal(1e6, Ending(asked_at=100.0), stopped, {}) is None


def test_a_rank_that_stopped_and_got_the_signal_while_ending_has_no_fault() -> None:
    stopped = {"code": 75, "reported": 75, "ended_at": 98.0}
    ending = {"code": -15, "ended_at": 100.0}
    assert find_fault(ranks(stopped, ending | {"reported": 75}), 100.0, PATIENCE) is None
    assert find_fault(ranks(stopped, ending), 100.0, PATIENCE) is not None


def test_a_second_ctrl_c_ends_ranks_that_do_not_stop() -> None:
    ending = Ending(insisted_at=100.0)
    assert choose_signal(100.0 + AFTER_CTRL_C_SEC, ending) is None
    assert choose_signal(100.1 + AFTER_CTRL_C_SEC, ending) == signal.SIGKILL


# Another try

FAILED = Outcome(1, "rank 1 was killed", step=7, failed=True, was_asked=False)


@pytest.mark.parametrize(
    ("changes", "again"),
    [
        ({}, True),
        ({"code": 75}, True),
        ({"code": 2}, False),
        ({"code": 3}, False),
        ({"was_asked": True}, False),
        ({"code": 75, "failed": False}, False),
        ({"code": 0, "failed": False}, False),
    ],
    ids=str,
)
def test_only_passing_failures_are_tried_again(changes: dict[str, Any], again: bool) -> None:
    assert will_try_again([replace(FAILED, **changes)], 3)[0] == again


def test_there_are_no_more_restarts_than_asked_for() -> None:
    tries = [replace(FAILED, step=step) for step in range(4)]
    again = [will_try_again(tries[: number + 1], 2)[0] for number in range(4)]
    assert again == [True, True, False, False]
    assert will_try_again(tries[:1], 0) == (False, "")


def test_two_failures_at_the_same_step_are_not_followed_by_a_third() -> None:
    again, why = will_try_again([FAILED, FAILED], 9)
    assert not again
    assert "twice at step 7" in why


def test_machines_start_again_together_or_not_at_all() -> None:
    other = replace(FAILED, code=75, step=9, failed=False)
    assert FAILED.join([FAILED, other]) == replace(FAILED, code=75, step=9)
    assert not FAILED.join([FAILED, None]).is_curable
    assert not FAILED.join([FAILED, replace(other, code=2)]).is_curable
    assert not FAILED.join([FAILED, replace(other, was_asked=True)]).is_curable
    done = replace(FAILED, code=0, failed=False)
    assert done.join([done, done]).code == 0
    assert done.join([done, None]).code == 1
    assert Outcome.parse(FAILED.fields()) == FAILED


# Sentences


def describe(fault: Fault, *others: Rank) -> str:
    assert fault.rank is not None
    return describe_fault(fault, [fault.rank, *others], "a-host", 104.0)


def test_a_killed_rank_is_named_with_the_signal_and_what_it_did() -> None:
    (rank,) = ranks({"number": 3, "code": -9})
    text = describe(Fault("ended", 99.0, rank))
    assert text.startswith("rank 3 (host a-host, pid 10) was killed by SIGKILL")
    assert "it was training, 7 steps begun" in text


def test_a_hung_rank_is_named_with_its_state_and_its_last_step() -> None:
    (rank,) = ranks({"number": 1, "state": "T", "heard_at": 40.0, "moved_at": 39.0})
    text = describe(Fault("silent", 40.0, rank))
    assert text.startswith("rank 1 (host a-host, pid 10) has shown no sign of life for 64 s")
    assert "(state T); it was last training, 7 steps begun, 65 s ago" in text


def test_of_stalled_ranks_the_one_behind_is_named() -> None:
    behind = {"moved_at": 40.0, "beat": replace(TRAINS, moves=6), "state": "D"}
    first, second = ranks(behind, {"moved_at": 41.0})
    text = describe(Fault("stalled", 41.0, first), second)
    assert "for 63 s; rank 0 (host a-host, pid 10) was last training" in text
    assert "other ranks are ahead of it" in text
    assert "state D" in text
    both = describe(Fault("stalled", 41.0, second), second)
    assert "rank 1 (host a-host, pid 11) was last training" in both
    assert "no other rank is further ahead" in both


@pytest.mark.parametrize(
    ("leading", "other", "explained"),
    [
        ({"code": 2, "reported": 2}, {"code": 2, "reported": 2}, True),
        ({"code": 1, "reported": 1}, {"code": 2, "reported": 2}, False),
        ({"code": 1, "reported": 1}, {"code": 1, "reported": 1}, False),
        ({}, {"code": -9}, False),
    ],
    ids=["the same wrong use", "another rank has ended", "perhaps another failure", "killed"],
)
def test_what_rank_0_has_said_is_not_repeated(
    leading: dict[str, Any], other: dict[str, Any], explained: bool
) -> None:
    both = ranks(leading, other)
    assert has_explained_itself(Fault("ended", 1.0, both[1]), both) == explained


def test_rank_0_speaks_for_itself_unless_it_was_killed() -> None:
    (failed,), (killed,) = ranks({"code": 1, "reported": 1}), ranks({"code": -9})
    assert has_explained_itself(Fault("ended", 1.0, failed), [failed])
    assert not has_explained_itself(Fault("ended", 1.0, killed), [killed])
