"""`lockstep launch`: two ranks train, are signalled, stopped and refused together."""

import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from lockstep.runs.image_results import read_results
from lockstep.weights import checkpoint
from tests.cli.cases import (
    DEFAULT,
    LAUNCH,
    LONGER,
    ROUNDING,
    assert_same_training,
    count_zeros,
    find_ranks,
    last_step,
    measure_difference,
    read_report,
    run_command,
    set_fields,
)
from tests.processes import call, finish, is_running, room_for, running, wait_until
from tests.runs.cases import read_state
from tests.soak import in_a_soak

Answer = Callable[..., tuple[int, str, str]]


def compare_weights(run: Path, other: Path) -> float:
    return measure_difference(read_state(run).tensors, read_state(other).tensors)


@pytest.mark.slow
def test_only_rank_0_prints(whole_of_two_ranks: Path, textures: Path, answer: Answer) -> None:
    run = whole_of_two_ranks
    output = (run.parent / "output.txt").read_text()
    assert output.count("throughput") == 1
    assert "2 ranks" in output
    assert read_report(run)["final"]["trained"]["images"] == 20
    results = read_results(run)
    assert results is not None
    scores = results.scores["trained"]
    assert scores.labels.tolist() == sorted([*range(10), *range(10)])
    assert len(set(np.round(scores.losses, 2))) > 5, "which distinguishes images"
    alone = ("evaluate", run, "--data", textures, "--json", "--checkpoint", "newest", *DEFAULT)
    code, output, errors = answer(*alone)
    assert (code, errors) == (0, "")
    expected = json.loads(output)
    assert scores.losses.mean() == pytest.approx(expected["loss"], rel=1e-5)
    assert read_report(run)["per_class"]["trained"] == expected["per_class"]


@pytest.mark.slow
@in_a_soak  # `tests/backends/test_ranks.py` compares ranks of every engine with one process
def test_two_ranks_with_synchronised_batch_norm_end_with_the_weights_of_one(
    ranked: list[object], tmp_path: Path
) -> None:
    # A low rate and one epoch: rounding differences grow with every step, chaotically at a high
    # rate.
    changes = set_fields(batch_norm="synchronised", epochs=1, lr=0.001)
    one = tmp_path / "one"
    two = tmp_path / "two"
    run_command(*ranked, *changes, "--out", one)
    run_command(*LAUNCH, *ranked, *changes, "--out", two)
    assert compare_weights(one, two) < ROUNDING


@pytest.mark.slow
@in_a_soak  # `tests/backends/test_ranks.py` sees the same of every engine
def test_two_ranks_with_separate_batch_norm_end_with_other_weights(
    ranked: list[object], tmp_path: Path
) -> None:
    # This shows that the bound of synchronised ones can fail.
    changes = set_fields(epochs=1, lr=0.001)
    one = tmp_path / "one"
    two = tmp_path / "two"
    run_command(*ranked, *changes, "--out", one)
    run_command(*LAUNCH, *ranked, *changes, "--out", two)
    assert compare_weights(one, two) > ROUNDING


@pytest.mark.slow
@in_a_soak  # SIGTERM to the launcher: `test_loopback`; SIGUSR1 to one rank: below
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_one_signal_to_the_launcher_ends_all_ranks_saved(
    number: signal.Signals, ranked: list[object], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    with running(*LAUNCH, *ranked, *set_fields(epochs=500), "--out", run) as process:
        wait_until(lambda: last_step(run) > 0)
        ranks = find_ranks(process.pid)
        process.send_signal(number)
        code, _, errors = finish(process)
    assert code == (130 if number == signal.SIGINT else 75), errors
    assert len(ranks) == 2
    wait_until(lambda: not any(map(is_running, ranks)), seconds=10)
    assert checkpoint.newest_intact(run / "checkpoints")[0] is not None


@in_a_soak  # `test_two_hosts` stops two ranks so, and `tests/backends/test_ranks.py` resumes
def test_two_ranks_stopped_by_a_signal_to_one_resume_bit_for_bit(
    ranked: list[object], whole_of_two_ranks: Path, tmp_path: Path
) -> None:
    parts = tmp_path / "parts"
    ranked += LONGER
    with running(*LAUNCH, *ranked, "--out", parts, room=room_for(2)) as process:
        wait_until(lambda: last_step(parts) >= 2)
        os.kill(find_ranks(process.pid)[1], signal.SIGUSR1)
        code, _, errors = finish(process)
    assert code == 75, errors
    errors += (parts / "logs" / "rank-1.log").read_text()
    steps = re.findall(r"after step (\d+) of", errors)
    assert len(steps) == 2, errors
    assert steps[0] == steps[1]
    run_command(*LAUNCH, *ranked, "--out", parts)
    assert_same_training(whole_of_two_ranks, parts)


@pytest.mark.slow
def test_ranks_end_when_their_launcher_is_killed(ranked: list[object], tmp_path: Path) -> None:
    run = tmp_path / "run"
    with running(*LAUNCH, *ranked, *set_fields(epochs=500), "--out", run) as process:
        wait_until(lambda: last_step(run) > 0)
        ranks = find_ranks(process.pid)
        process.send_signal(signal.SIGKILL)
    # less than the patience, which would end them
    wait_until(lambda: not any(map(is_running, ranks)), seconds=100)
    assert len(ranks) == 2
    assert checkpoint.newest_intact(run / "checkpoints")[0] is not None


@in_a_soak  # a user error below ends the ranks in the same way
def test_a_folder_refused_to_rank_0_ends_all(ranked: list[object], finished_run: Path) -> None:
    changes = set_fields(epochs=1, momentum=0.5)
    code, _, errors = call(*LAUNCH, *ranked, "--out", finished_run, *changes)
    assert code == 2, errors
    assert "holds a run of a different recipe" in errors
    log = (finished_run / "logs" / "rank-1.log").read_text()
    assert "[rank 1] lockstep: another rank has ended" in log
    assert "Traceback" not in errors


@pytest.mark.slow
@in_a_soak  # `tests/backends/test_ranks.py` sees the scores, and a finished run those of two ranks
def test_ranks_evaluate_as_one(ranked: list[object], textures: Path, finished_run: Path) -> None:
    evaluate = ["evaluate", finished_run, "--data", textures, "--json", "--batch", 3, *ranked[-4:]]
    alone = json.loads(call(*evaluate)[1])
    code, output, errors = call(*LAUNCH, *evaluate)
    assert (code, errors) == (0, "")
    together = json.loads(output)
    assert together.pop("loss") == pytest.approx(alone.pop("loss"), rel=1e-6)
    assert together.pop("speed").keys() == alone.pop("speed").keys()
    assert together == alone
    assert together["images"] == 20


@pytest.mark.slow
def test_a_users_error_keeps_its_exit_code(arguments: list[object], tmp_path: Path) -> None:
    code, _, errors = call(*LAUNCH, *arguments, *set_fields(epoch=1), "--out", tmp_path / "run")
    assert code == 2
    assert "Did you mean --set epochs=" in errors
    assert "Traceback" not in errors


@pytest.mark.slow
@in_a_soak  # sparse runs and ranks are seen on every engine in `tests/backends`
def test_two_sparse_ranks_are_one(ranked: list[object], dense: Path, tmp_path: Path) -> None:
    changes = set_fields(sparsity="mask_2d_best", batch_norm="synchronised", epochs=1, lr=0.001)
    changes += ["--weights", str(dense)]
    one = tmp_path / "one"
    two = tmp_path / "two"
    run_command(*ranked, *changes, "--out", one)
    run_command(*LAUNCH, *ranked, *changes, "--out", two)
    assert compare_weights(one, two) < ROUNDING
    assert count_zeros(one) == count_zeros(two)
    assert set(count_zeros(two).values()) == {0}
    assert (one / "start.json").read_text() == (two / "start.json").read_text()


@pytest.mark.slow
@in_a_soak  # a user error ends the ranks in the same way
def test_refused_weights_end_all(ranked: list[object], dense: Path, finished_run: Path) -> None:
    changes = [*set_fields(epochs=1), "--weights", dense]
    code, _, errors = call(*LAUNCH, *ranked, *changes, "--out", finished_run)
    assert code == 2, errors
    assert "was started from its recipe's initial weights" in errors
    log = (finished_run / "logs" / "rank-1.log").read_text()
    assert "[rank 1] lockstep: another rank has ended" in log
    assert "Traceback" not in errors
