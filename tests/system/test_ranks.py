"""A rank's duties to its launcher, and starting ranks. The ranks are programs of a few lines."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lockstep.backends.frameworks import name_rank
from lockstep.system import ranks
from lockstep.system.errors import UserError
from lockstep.system.ranks import EXIT_CODE_FOLDER, code_of_ranks, is_leading, launch_ranks, leave_exit_code
from tests.processes import wait_until

# A single rank


@pytest.mark.parametrize(("rank", "leads"), [(None, True), ("0", True), ("1", False), ("17", False)])
def test_rank_0_or_the_only_process_leads(rank: str | None, leads: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    assert is_leading() == leads


def test_a_rank_leaves_its_exit_code_where_the_launcher_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(EXIT_CODE_FOLDER, str(tmp_path))
    monkeypatch.setenv("RANK", "5")
    leave_exit_code(75)
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("5", "75")]


def test_an_exit_code_is_left_nowhere_without_a_launcher_or_after_it_has_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RANK", "5")
    leave_exit_code(75)
    monkeypatch.setenv(EXIT_CODE_FOLDER, str(tmp_path / "gone"))
    leave_exit_code(75)
    assert list(tmp_path.iterdir()) == []


# The variables of other launchers

Named = Callable[..., dict[str, str]]
TWO = {"worker": ["one:2222", "two:2222"]}


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch) -> Named:
    """A function that sets environment variables, calls `name_rank` and returns the variables."""

    def name(backend: str = "tensorflow", **variables: str) -> dict[str, str]:
        monkeypatch.setattr(os, "environ", dict(variables))
        name_rank(backend)
        return dict(os.environ)

    return name


def tf_config(index: object, cluster: object = TWO, kind: object = "worker") -> str:
    return json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}})


@pytest.mark.parametrize(("index", "rank"), [(0, "0"), (1, "1"), ("1", "1")])
def test_a_worker_of_tf_config_is_the_rank_of_its_index(named: Named, index: object, rank: str) -> None:
    text = tf_config(index)
    assert named(TF_CONFIG=text) == {"TF_CONFIG": text, "RANK": rank, "WORLD_SIZE": "2"}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        tf_config(0, {"worker": ["one:2222"]}),
        tf_config(0, {"worker": []}),
        tf_config(0, {}),
        '{"cluster": {"worker": ["one:2222"]}}',
        '{"task": {"type": "worker", "index": 0}}',
    ],
)
def test_a_tf_config_of_one_worker_or_none_names_no_rank(named: Named, text: str) -> None:
    assert named(TF_CONFIG=text) == {"TF_CONFIG": text}


def test_a_process_that_no_launcher_started_has_no_rank(named: Named) -> None:
    assert named(HOME="/root") == {"HOME": "/root"}


@pytest.mark.parametrize(
    "text",
    [
        "cluster",
        "{'cluster': {}}",
        '{"cluster": ',
        "null",
        "3",
        "[]",
        '"text"',
        '{"cluster": null}',
        '{"cluster": 3}',
        '{"cluster": ["one:2222", "two:2222"]}',
        '{"cluster": {"worker": null}}',
        '{"cluster": {"worker": 2}}',
        tf_config(0, {"worker": "one:2222,two:2222"}),
        json.dumps({"cluster": TWO}),
        json.dumps({"cluster": TWO, "task": None}),
        json.dumps({"cluster": TWO, "task": []}),
        json.dumps({"cluster": TWO, "task": {"index": 0}}),
        json.dumps({"cluster": TWO, "task": {"type": "worker"}}),
        tf_config(None),
        tf_config("first"),
        tf_config([0]),
        tf_config(0.5),
    ],
)
def test_a_tf_config_that_is_none_is_refused_with_what_was_expected(named: Named, text: str) -> None:
    with pytest.raises(UserError, match=r"TF_CONFIG is .*: expected JSON with cluster.worker, task.type and task.index"):
        named(TF_CONFIG=text)


def test_a_trainer_of_paddles_launcher_is_the_rank_it_says(named: Named) -> None:
    said = {"PADDLE_TRAINER_ID": "5", "PADDLE_TRAINERS_NUM": "16", "PADDLE_LOCAL_RANK": "1", "PADDLE_LOCAL_SIZE": "4"}
    expected = {"RANK": "5", "WORLD_SIZE": "16", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    assert named("paddle", **said) == said | expected
    assert named("paddle", **said, RANK="2") == said | {"RANK": "2"}


@pytest.mark.parametrize("backend", ["reference", "tensorflow", "torch"])
def test_another_frameworks_launcher_says_nothing(named: Named, backend: str) -> None:
    assert named(backend, PADDLE_TRAINER_ID="1", PADDLE_TRAINERS_NUM="2") == {
        "PADDLE_TRAINER_ID": "1",
        "PADDLE_TRAINERS_NUM": "2",
    }
    text = tf_config(0)
    assert backend == "tensorflow" or named(backend, TF_CONFIG=text) == {"TF_CONFIG": text}


def test_a_long_tf_config_is_not_repeated_whole(named: Named) -> None:
    with pytest.raises(UserError) as refused:
        named(TF_CONFIG="worker " * 1000)
    assert len(str(refused.value)) < 400


@pytest.mark.parametrize("kind", ["chief", "ps", "evaluator", "master", None])
def test_a_task_that_is_no_worker_is_refused(named: Named, kind: object) -> None:
    with pytest.raises(UserError, match=f"TF_CONFIG: task {kind} 0, expected a worker from 0 to 1; list all as workers"):
        named(TF_CONFIG=tf_config(0, TWO | {str(kind): ["three:2222"]}, kind))


@pytest.mark.parametrize("index", [2, -1, 100])
def test_a_worker_that_is_not_in_the_cluster_is_refused(named: Named, index: int) -> None:
    with pytest.raises(UserError, match=f"TF_CONFIG: task worker {index}, expected a worker from 0 to 1"):
        named(TF_CONFIG=tf_config(index))


@pytest.mark.parametrize("kind", ["chief", "ps"])
@pytest.mark.parametrize("task", ["worker", "the other"])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_cluster_of_others_than_workers_is_refused_on_all_its_machines(
    named: Named, kind: str, task: str, workers: int
) -> None:
    # A rank that did not refuse would wait for one that did, or train alone at the same time as another.
    cluster = {"worker": TWO["worker"][:workers], kind: ["three:2222"]}
    with pytest.raises(UserError, match="list all as workers"):
        named(TF_CONFIG=tf_config(0, cluster, "worker" if task == "worker" else kind))


@pytest.mark.parametrize(
    "other",
    [
        {"TF_CONFIG": tf_config(1)},
        {"TF_CONFIG": "no JSON"},
        {"HOROVOD_RANK": "1", "HOROVOD_SIZE": "2", "HOROVOD_LOCAL_RANK": "1"},
    ],
    ids=["TF_CONFIG", "a wrong TF_CONFIG", "Horovod"],
)
def test_a_rank_that_was_given_stays(named: Named, other: dict[str, str]) -> None:
    given = other | {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "3"}
    assert named(**given) == given


def test_horovods_words_are_taken_over(named: Named) -> None:
    horovods = {"HOROVOD_RANK": "5", "HOROVOD_SIZE": "8", "HOROVOD_LOCAL_RANK": "1", "HOROVOD_LOCAL_SIZE": "4"}
    ours = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    assert named(**horovods) == horovods | ours


def test_what_horovod_does_not_say_is_not_named(named: Named) -> None:
    assert named(HOROVOD_RANK="0", HOROVOD_SIZE="2").keys() == {"HOROVOD_RANK", "HOROVOD_SIZE", "RANK", "WORLD_SIZE"}


@pytest.mark.parametrize(
    "launcher",
    [{"TF_CONFIG": tf_config(1)}, {"HOROVOD_RANK": "1", "HOROVOD_SIZE": "2", "HOROVOD_LOCAL_RANK": "0"}],
    ids=["TF_CONFIG", "Horovod"],
)
def test_a_local_rank_that_was_given_stays(named: Named, launcher: dict[str, str]) -> None:
    found = named(LOCAL_RANK="3", **launcher)
    assert (found["RANK"], found["LOCAL_RANK"]) == ("1", "3")


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
def test_wrong_use_comes_before_an_interrupt_and_that_before_a_stop_and_a_failure(
    tmp_path: Path, codes: list[int], code: int
) -> None:
    for rank, each in enumerate(codes):
        (tmp_path / str(rank)).write_text(str(each))
    assert code_of_ranks(tmp_path) == code


# Starting ranks

RANK = """
import json, os, signal, sys, time
from pathlib import Path

rank, folder = os.environ["RANK"], Path(sys.argv[1])

def wait_for(*names):
    deadline = time.monotonic() + 60
    while not all((folder / name).exists() for name in names):
        assert time.monotonic() < deadline
        time.sleep(0.005)

def leave(code):
    (Path(os.environ["LOCKSTEP_EXIT_CODE_FOLDER"]) / rank).write_text(str(code))
    sys.exit(code)
"""
"""The beginning of the programs below. They share a folder with the test."""


def nothing_more(rank: int) -> dict[str, str]:
    return {}


def launch(processes: int, program: str, folder: Path, environment: Callable[[int], dict[str, str]] = nothing_more) -> int:
    return launch_ranks(processes, ["-c", RANK + program, str(folder)], environment)


WRITE_VARIABLES = """
(folder / rank).write_text(json.dumps(dict(os.environ)))
"""


def variables(folder: Path) -> list[dict[str, str]]:
    """Return the variables that `WRITE_VARIABLES` wrote, by rank."""
    return [json.loads(file.read_text()) for file in sorted(folder.iterdir())]


def test_every_rank_is_told_which_it_is_of_how_many(tmp_path: Path) -> None:
    launch(3, WRITE_VARIABLES, tmp_path)
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    told = [tuple(found[name] for name in names) for found in variables(tmp_path)]
    assert told == [("0", "0", "3", "3"), ("1", "1", "3", "3"), ("2", "2", "3", "3")]


def test_every_rank_has_variables_of_its_own_and_those_of_the_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OF_ALL", "all")
    monkeypatch.setenv("OF_EACH", "the launcher's")
    launch(2, WRITE_VARIABLES, tmp_path, lambda rank: {"OF_EACH": f"of {rank}"})
    told = [(found["OF_ALL"], found["OF_EACH"]) for found in variables(tmp_path)]
    assert told == [("all", "of 0"), ("all", "of 1")]


def test_the_variables_of_the_launcher_stay_as_they_are(tmp_path: Path) -> None:
    before = dict(os.environ)
    launch(2, "", tmp_path, lambda rank: {"OF_EACH": f"of {rank}"})
    assert dict(os.environ) == before


def test_ranks_run_beside_each_other(tmp_path: Path) -> None:
    program = "(folder / rank).touch()\nwait_for('0', '1', '2')"
    assert launch(3, program, tmp_path) == 0


@pytest.mark.parametrize("program", ["", "leave(0)"], ids=["that leave no code", "that leave it"])
def test_ranks_that_all_end_well_end_the_launch_well(program: str, tmp_path: Path) -> None:
    assert launch(2, program, tmp_path) == 0


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
    "leave(130)": 130,
    "leave(75)": 75,
    "leave(1)": 1,
    "sys.exit(3)": 1,
    "sys.exit(2)": 1,  # not written to the folder, so not Lockstep's code: for example Python's for a missing file
    "raise ValueError('a traceback that belongs to this test')": 1,
    "os.kill(os.getpid(), signal.SIGKILL)": 1,
}


@pytest.mark.parametrize(("fail", "code"), FAILURES.items(), ids=FAILURES)
def test_when_a_rank_fails_the_others_are_asked_to_stop(fail: str, code: int, tmp_path: Path) -> None:
    assert launch(3, FAIL_ON_RANK_1.format(fail=fail), tmp_path) == code
    assert [(tmp_path / rank).read_text() for rank in ("0", "2")] == ["SIGTERM", "SIGTERM"]


def test_a_rank_that_hears_no_signal_is_killed_in_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "PATIENCE_SEC", 0.5)
    deaf = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
(folder / f"deaf {rank}").touch()
wait_for("deaf 0", "deaf 1")
if rank == "1":
    leave(1)
time.sleep(600)
"""
    assert launch(2, deaf, tmp_path) == 1


def test_a_rank_that_ends_well_early_stops_no_other(tmp_path: Path) -> None:
    # Rank 1 runs long enough for the launcher to check the ranks.
    program = "if rank == '0':\n    leave(0)\ntime.sleep(0.3)\nleave(0)"
    assert launch(2, program, tmp_path) == 0


def test_of_two_that_fail_the_code_goes_by_the_rule(tmp_path: Path) -> None:
    # Rank 0 ends with 1. It makes rank 1 end too, with 2, which has priority.
    program = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n(folder / rank).touch()\nwait_for('0', '1')\n"
    assert launch(2, f"{program}leave(1 + int(rank))", tmp_path) == 2


# Signals

WATCHED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


@contextmanager
def handlers(handler: Any) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number in WATCHED}
    try:
        yield
    finally:
        for number, each in before.items():
            signal.signal(number, each)


def own_handler(number: int, _: object) -> None:
    """Stands for any handler of the launching program."""


def test_after_a_launch_signals_are_handled_as_before(tmp_path: Path) -> None:
    with handlers(own_handler):
        launch(1, "", tmp_path)
        assert [signal.getsignal(number) for number in WATCHED] == [own_handler] * 3


def test_after_a_launch_that_could_not_start_signals_are_handled_as_before(tmp_path: Path) -> None:
    def refuse(rank: int) -> dict[str, str]:
        raise OSError("no place for this rank")

    with handlers(own_handler):
        with pytest.raises(OSError, match="no place for this rank"):
            launch(1, "", tmp_path, refuse)
        assert [signal.getsignal(number) for number in WATCHED] == [own_handler] * 3


LAUNCH = """
import os, signal, sys
from lockstep.system.ranks import launch_ranks

def environment(rank):
    {each}
    return {{}}

sys.exit(launch_ranks(2, ["-c", *sys.argv[1:]], environment))
"""

NOTE_SIGNALS = """
def note(number, frame):
    with (folder / f"{rank} received").open("a") as file:
        print(signal.Signals(number).name, file=file)

for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
    signal.signal(number, note)
(folder / f"{rank} is ready").touch()
wait_for("end")
"""


@contextmanager
def launching(program: str, folder: Path, each: str = "pass") -> Iterator[subprocess.Popen[str]]:
    """Launch two ranks from a process that leads a process group, as in a terminal; `each` runs before each rank starts.

    At the end of the block the ranks may end. A launcher that does not end is killed.
    """
    process = subprocess.Popen(
        [sys.executable, "-c", LAUNCH.format(each=each), RANK + program, str(folder)],
        env=os.environ | {"TMPDIR": str(folder)},
        start_new_session=True,
        text=True,
    )
    try:
        yield process
    finally:
        (folder / "end").touch()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise


def all_have(folder: Path, what: str) -> bool:
    return all((folder / f"{rank} {what}").exists() for rank in (0, 1))


@pytest.mark.parametrize("number", WATCHED)
def test_a_signal_to_the_terminals_process_group_reaches_every_rank_once(number: signal.Signals, tmp_path: Path) -> None:
    with launching(NOTE_SIGNALS, tmp_path) as process:
        wait_until(lambda: all_have(tmp_path, "is ready"))
        os.killpg(process.pid, number)
        wait_until(lambda: all_have(tmp_path, "received"))
    assert process.returncode == 0
    assert [(tmp_path / f"{rank} received").read_text() for rank in (0, 1)] == [f"{number.name}\n"] * 2


@pytest.mark.parametrize("number", WATCHED)
def test_a_signal_to_the_launcher_alone_reaches_every_rank_once(number: signal.Signals, tmp_path: Path) -> None:
    with launching(NOTE_SIGNALS, tmp_path) as process:
        wait_until(lambda: all_have(tmp_path, "is ready"))
        process.send_signal(number)
        wait_until(lambda: all_have(tmp_path, "received"))
    assert process.returncode == 0
    assert [(tmp_path / f"{rank} received").read_text() for rank in (0, 1)] == [f"{number.name}\n"] * 2


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGUSR1, 75), (signal.SIGINT, 130)])
def test_ranks_that_stop_on_a_signal_end_the_launch_with_their_code(
    number: signal.Signals, code: int, tmp_path: Path
) -> None:
    program = NOTE_SIGNALS.replace('wait_for("end")', f'wait_for(f"{{rank}} received")\nleave({code})')
    with launching(program, tmp_path) as process:
        wait_until(lambda: all_have(tmp_path, "is ready"))
        process.send_signal(number)
        assert process.wait(60) == code


@pytest.mark.parametrize("started", [0, 1])
def test_a_signal_that_comes_while_ranks_are_started_stops_them_all(started: int, tmp_path: Path) -> None:
    each = f"if rank == {started}: os.kill(os.getpid(), signal.SIGTERM)"
    with launching('wait_for("end")', tmp_path, each) as process:
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            pytest.fail(f"SIGTERM was lost that came when {started} ranks had been started", pytrace=False)
    assert process.returncode == 1


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other systems do not tell when a parent dies")
def test_ranks_that_follow_their_launcher_hear_of_its_sudden_end(tmp_path: Path) -> None:
    program = f"from lockstep.system.ranks import follow_launcher\nfollow_launcher()\n{NOTE_SIGNALS}"
    with launching(program, tmp_path) as process:
        wait_until(lambda: all_have(tmp_path, "is ready"))
        process.kill()
        wait_until(lambda: all_have(tmp_path, "received"))
    assert [(tmp_path / f"{rank} received").read_text() for rank in (0, 1)] == ["SIGTERM\n"] * 2
