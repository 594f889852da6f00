"""Starting ranks, and ending them together. The ranks are programs of a few lines."""

import json
import os
import re
import socket
import sys
from pathlib import Path

import pytest

from lockstep.launch import watch
from lockstep.launch.launcher import Watch, read_code
from tests.launch.programs import launch_programs
from tests.processes import wait_until

# The exit code of several ranks


@pytest.mark.parametrize(
    ("codes", "code"),
    [
        ([0, 1, 75, 130, 2], 2),
        ([2, 1], 2),
        ([75, 130], 130),
        ([130, 1, 0], 130),
        ([0, 75, 1], 75),
        ([75], 75),
        ([1, 0], 1),
        ([3, 75, 0], 3),
        ([2, 3], 2),
        ([4], 1),
        ([0, 0], 1),
        ([], 1),
    ],
)
def test_the_worst_exit_code_wins(tmp_path: Path, codes: list[int], code: int) -> None:
    for rank, written in enumerate(codes):
        (tmp_path / str(rank)).write_text(str(written))
    assert read_code(tmp_path) == code


# Starting ranks

WRITE_VARIABLES = """
(folder / rank).write_text(json.dumps(dict(os.environ)))
"""


def test_ranks_know_which_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OF_ALL", "all")
    monkeypatch.setenv("OF_EACH", "the launcher's")
    before = dict(os.environ)
    program = f"{WRITE_VARIABLES}wait_for('0', '1', '2')"
    assert launch_programs(3, program, tmp_path, lambda rank: {"OF_EACH": f"of {rank}"}) == 0
    assert dict(os.environ) == before
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "OF_ALL", "OF_EACH")
    for rank in range(3):
        variables = json.loads((tmp_path / str(rank)).read_text())
        expected = [str(rank), str(rank), "3", "3", "all", f"of {rank}"]
        assert [variables[name] for name in names] == expected


FAIL_ON_RANK_1 = """
if rank == "1":
    wait_for("ready 0", "ready 2")
    {fail}
signal.pthread_sigmask(signal.SIG_BLOCK, {{signal.SIGTERM, signal.SIGINT, signal.SIGUSR1}})
(folder / f"ready {{rank}}").touch()
received = signal.sigtimedwait({{signal.SIGTERM, signal.SIGINT, signal.SIGUSR1}}, 60)
(folder / rank).write_text(signal.Signals(received.si_signo).name)
"""
"""The other ranks end successfully, but only after a signal."""

FAILURES = {
    "leave(2)": 2,
    # not written to the folder, so not Lockstep's code: for example Python's for a missing file
    "sys.exit(2)": 1,
    "raise ValueError('a traceback that belongs to this test')": 1,
    "os.kill(os.getpid(), signal.SIGKILL)": 1,
}


@pytest.mark.parametrize(("fail", "code"), FAILURES.items(), ids=FAILURES)
def test_when_a_rank_fails_the_others_are_asked(fail: str, code: int, tmp_path: Path) -> None:
    assert launch_programs(3, FAIL_ON_RANK_1.format(fail=fail), tmp_path) == code
    assert [(tmp_path / rank).read_text() for rank in ("0", "2")] == ["SIGTERM", "SIGTERM"]


def test_a_deaf_rank_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "GRACE_SEC", 0.5)
    deaf = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
(folder / f"deaf {rank}").touch()
wait_for("deaf 0", "deaf 1")
if rank == "1":
    leave(1)
time.sleep(600)
"""
    assert launch_programs(2, deaf, tmp_path) == 1


def test_a_rank_that_ends_well_early_stops_no_other(tmp_path: Path) -> None:
    # Rank 1 runs long enough for the launcher to check the ranks.
    program = "if rank == '0':\n    leave(0)\ntime.sleep(0.3)\nleave(0)"
    assert launch_programs(2, program, tmp_path) == 0


def test_of_two_that_fail_the_code_goes_by_the_rule(tmp_path: Path) -> None:
    # Rank 0 ends with 1. It makes rank 1 end too, with 2, which has priority.
    program = (
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n(folder / rank).touch()\nwait_for('0',"
        " '1')\n"
    )
    assert launch_programs(2, f"{program}leave(1 + int(rank))", tmp_path) == 2


# Ranks that hang

BEATS = """
from lockstep.system import heartbeat
heartbeat.begin()
"""
BOTH_READY = """
(folder / f"ready {rank}").touch()
wait_for("ready 0", "ready 1")
"""


def run_until_hung(folder: Path, program: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return what the launcher says of two ranks that do not end by themselves.

    Of ranks that stall, one without a beat for half of the patience counts as silent: a busy
    machine must not take as long.
    """
    monkeypatch.setattr(watch, "GRACE_SEC", 0.3)
    messages: list[str] = []
    assert (
        launch_programs(
            2, BEATS + program, folder, watch=Watch(patience_sec=6.0, say=messages.append)
        )
        == 1
    )
    return "\n".join(messages)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="it reads /proc")
def test_a_stopped_rank_ends_the_launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stops = """
heartbeat.note("training", 7)
(folder / f"pid {rank}").write_text(str(os.getpid()))
if rank == "1":
    os.kill(os.getpid(), signal.SIGSTOP)
time.sleep(60)
"""
    messages = run_until_hung(tmp_path, BOTH_READY + stops, monkeypatch)
    pid = (tmp_path / "pid 1").read_text()
    assert (
        f"rank 1 (host {socket.gethostname()}, pid {pid}) has shown no sign of life for" in messages
    )
    assert "its process is stopped (state T); it was last training, 7 steps begun" in messages
    assert not Path(f"/proc/{pid}").exists()


def test_deadlocked_ranks_end_the_launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits = """
heartbeat.note("training", 7 + int(rank), moved=True)
if rank == "1":
    heartbeat.note("training", 8, moved=True)
time.sleep(60)
"""
    messages = run_until_hung(tmp_path, BOTH_READY + waits, monkeypatch)
    assert "lockstep: no rank has taken a batch for" in messages
    assert "rank 0" in messages
    assert "was last training, 7 steps begun" in messages
    assert "other ranks are ahead of it" in messages


def test_a_rank_that_computes_without_beats_is_not_hung(tmp_path: Path) -> None:
    computes = "ends = time.monotonic() + 3.0\nwhile time.monotonic() < ends:\n    pass"
    assert launch_programs(1, computes, tmp_path, watch=Watch(patience_sec=2.0)) == 0


def test_when_ranks_cannot_be_started_those_that_run_are_ended(tmp_path: Path) -> None:
    def refuse_the_second(rank: int) -> dict[str, str]:
        if rank == 1:
            wait_until(lambda: (tmp_path / "0").exists() and (tmp_path / "0").read_text() != "")
            raise OSError("no place for this rank")
        return {}

    with pytest.raises(OSError, match="no place for this rank"):
        launch_programs(
            2,
            "(folder / rank).write_text(str(os.getpid()))\ntime.sleep(60)",
            tmp_path,
            refuse_the_second,
        )
    assert not Path(f"/proc/{(tmp_path / '0').read_text()}").exists()


# Output


def test_other_ranks_are_only_logged(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    logs = tmp_path / "a run" / "logs"
    program = "print('out of', rank)\nprint('error of', rank, file=sys.stderr)"
    for _ in range(2):
        assert launch_programs(3, program, tmp_path, watch=Watch(logs=logs)) == 0
    assert capfd.readouterr() == ("out of 0\n" * 2, "error of 0\n" * 2)
    expected = {f"rank-{rank}.log": f"out of {rank}\nerror of {rank}\n" * 2 for rank in (1, 2)}
    assert {file.name: file.read_text() for file in logs.iterdir()} == expected


FAILS = f"""
{BEATS}
for number in range(100):
    print("line", number)
if rank == "1":
    leave(1)
time.sleep(60)
"""


@pytest.mark.parametrize("is_kept", [True, False])
def test_the_last_lines_of_a_rank_that_failed_are_shown(tmp_path: Path, is_kept: bool) -> None:
    messages: list[str] = []
    logs = tmp_path / "logs"
    assert (
        launch_programs(
            2, FAILS, tmp_path, watch=Watch(logs=logs if is_kept else None, say=messages.append)
        )
        == 1
    )
    first, second, *lines = messages[0].splitlines()
    assert first.endswith("failed with exit code 1; it was starting. Stopping all ranks.")
    assert second == f"The last lines of its output{f', {logs}/rank-1.log' if is_kept else ''}:"
    assert lines == [f"  line {number}" for number in range(80, 100)]
    assert logs.exists() == is_kept


def test_a_folder_that_cannot_be_made_keeps_no_rank_from_running(tmp_path: Path) -> None:
    (tmp_path / "a file").touch()
    assert launch_programs(2, "", tmp_path, watch=Watch(logs=tmp_path / "a file" / "logs")) == 0


# Starting again

TRIES = """
restart = json.loads(os.environ.get("LOCKSTEP_RESTARTED", '{"restart": 0, "reason": ""}'))
heartbeat.note("training", 1 + restart["restart"])
(folder / f"{rank} try {restart['restart']}").write_text(restart["reason"])
"""


def tries(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.glob("* try *"))


def test_all_ranks_are_started_again_after_a_failure(tmp_path: Path) -> None:
    # Rank 0 may start later: it is asked to stop a second after rank 1 has ended, and must be noted
    # before.
    program = (
        "if rank == '1' and restart['restart'] < 2:\n    wait_for(f'0 try"
        ' {restart["restart"]}\')\n'
    )
    program += "    os.kill(os.getpid(), signal.SIGKILL)"
    messages: list[str] = []
    assert (
        launch_programs(
            2, BEATS + TRIES + program, tmp_path, watch=Watch(restarts=5, say=messages.append)
        )
        == 0
    )
    assert tries(tmp_path) == [f"{rank} try {number}" for rank in (0, 1) for number in range(3)]
    assert (tmp_path / "0 try 0").read_text() == ""
    assert re.fullmatch(
        r"rank 1 \(.*\) was killed by SIGKILL.*, 2 steps begun", (tmp_path / "0 try 2").read_text()
    )
    result = messages[1]
    assert result == "lockstep: all ranks restart (1 of 5) from the newest checkpoint"


@pytest.mark.parametrize(
    ("program", "code", "attempts"),
    [
        ("leave(1)", 1, 3),
        ("leave(2)", 2, 1),
        ("leave(3)", 3, 1),
        ("heartbeat.note('training', 4)\nleave(1)", 1, 2),
    ],
    ids=["until there are no more", "wrong use", "not finite", "twice at the same step"],
)
def test_hopeless_ranks_stay_ended(program: str, code: int, attempts: int, tmp_path: Path) -> None:
    assert launch_programs(1, BEATS + TRIES + program, tmp_path, watch=Watch(restarts=2)) == code
    assert tries(tmp_path) == [f"0 try {number}" for number in range(attempts)]


def test_ranks_that_were_asked_to_stop_are_not_started_again(tmp_path: Path) -> None:
    program = "os.kill(os.getppid(), signal.SIGTERM)\ntime.sleep(60)"
    assert launch_programs(1, BEATS + TRIES + program, tmp_path, watch=Watch(restarts=2)) == 1
    assert tries(tmp_path) == ["0 try 0"]
