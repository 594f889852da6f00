"""How a process finds out that it is a rank, and its duties to its launcher."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from lockstep.backends.frameworks import name_rank
from lockstep.system.errors import UserError
from lockstep.system.ranks import EXIT_CODE_FOLDER, is_leading, leave_exit_code

# A single rank


@pytest.mark.parametrize(
    ("rank", "leads"), [(None, True), ("0", True), ("1", False), ("17", False)]
)
def test_rank_0_or_the_only_process_leads(
    rank: str | None, leads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    assert is_leading() == leads


def test_a_rank_leaves_its_exit_code_where_the_launcher_looks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
def test_a_worker_of_tf_config_is_the_rank_of_its_index(
    named: Named, index: object, rank: str
) -> None:
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
def test_a_tf_config_that_is_none_is_refused_with_what_was_expected(
    named: Named, text: str
) -> None:
    with pytest.raises(
        UserError,
        match=r"TF_CONFIG is .*: expected JSON with cluster.worker, task.type and task.index",
    ):
        named(TF_CONFIG=text)


def test_a_trainer_of_paddles_launcher_is_the_rank_it_says(named: Named) -> None:
    said = {
        "PADDLE_TRAINER_ID": "5",
        "PADDLE_TRAINERS_NUM": "16",
        "PADDLE_LOCAL_RANK": "1",
        "PADDLE_LOCAL_SIZE": "4",
    }
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
    with pytest.raises(
        UserError,
        match=f"TF_CONFIG: task {kind} 0, expected a worker from 0 to 1; list all as workers",
    ):
        named(TF_CONFIG=tf_config(0, TWO | {str(kind): ["three:2222"]}, kind))


@pytest.mark.parametrize("index", [2, -1, 100])
def test_a_worker_that_is_not_in_the_cluster_is_refused(named: Named, index: int) -> None:
    with pytest.raises(
        UserError, match=f"TF_CONFIG: task worker {index}, expected a worker from 0 to 1"
    ):
        named(TF_CONFIG=tf_config(index))


@pytest.mark.parametrize("kind", ["chief", "ps"])
@pytest.mark.parametrize("task", ["worker", "the other"])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_cluster_of_others_than_workers_is_refused_on_all_its_machines(
    named: Named, kind: str, task: str, workers: int
) -> None:
    # A rank that did not refuse would wait for one that did, or train alone at the same time as
    # another.
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
    horovods = {
        "HOROVOD_RANK": "5",
        "HOROVOD_SIZE": "8",
        "HOROVOD_LOCAL_RANK": "1",
        "HOROVOD_LOCAL_SIZE": "4",
    }
    ours = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    assert named(**horovods) == horovods | ours


def test_what_horovod_does_not_say_is_not_named(named: Named) -> None:
    assert named(HOROVOD_RANK="0", HOROVOD_SIZE="2").keys() == {
        "HOROVOD_RANK",
        "HOROVOD_SIZE",
        "RANK",
        "WORLD_SIZE",
    }


@pytest.mark.parametrize(
    "launcher",
    [
        {"TF_CONFIG": tf_config(1)},
        {"HOROVOD_RANK": "1", "HOROVOD_SIZE": "2", "HOROVOD_LOCAL_RANK": "0"},
    ],
    ids=["TF_CONFIG", "Horovod"],
)
def test_a_local_rank_that_was_given_stays(named: Named, launcher: dict[str, str]) -> None:
    found = named(LOCAL_RANK="3", **launcher)
    assert (found["RANK"], found["LOCAL_RANK"]) == ("1", "3")
