"""How a process finds out that it is a rank, and its duties to its launcher."""

import json
from pathlib import Path

import pytest

from lockstep.system.errors import UserError
from lockstep.system.ranks import EXIT_CODE_FOLDER, free_ports, is_leading, leave_exit_code
from tests.system.conftest import NameRank

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


def test_free_ports_differ_and_are_not_given_to_others() -> None:
    ports = free_ports(300)
    assert len(set(ports)) == 300
    assert all(20000 <= port < 30000 for port in ports)


def test_a_rank_leaves_its_exit_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(EXIT_CODE_FOLDER, str(tmp_path))
    monkeypatch.setenv("RANK", "5")
    leave_exit_code(75)
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("5", "75")]


def test_no_launcher_gets_no_exit_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RANK", "5")
    leave_exit_code(75)
    monkeypatch.setenv(EXIT_CODE_FOLDER, str(tmp_path / "gone"))
    leave_exit_code(75)
    assert list(tmp_path.iterdir()) == []


# The variables of other launchers

TWO = {"worker": ["one:2222", "two:2222"]}


def tf_config(index: object, cluster: object = TWO, kind: object = "worker") -> dict[str, str]:
    task = {"type": kind, "index": index}
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": task})}


def paddle(rank: int, ranks: int) -> dict[str, str]:
    return {"PADDLE_TRAINER_ID": str(rank), "PADDLE_TRAINERS_NUM": str(ranks)}


def horovod(rank: int, ranks: int) -> dict[str, str]:
    return {"HOROVOD_RANK": str(rank), "HOROVOD_SIZE": str(ranks)}


@pytest.mark.parametrize(("index", "rank"), [(0, "0"), (1, "1"), ("1", "1")])
def test_tf_configs_worker_is_its_index(name: NameRank, index: object, rank: str) -> None:
    assert name(tf_config(index), "tensorflow") == {"RANK": rank, "WORLD_SIZE": "2"}


@pytest.mark.parametrize(
    "variables",
    [
        {"HOME": "/root"},
        {"TF_CONFIG": ""},
        {"TF_CONFIG": "{}"},
        tf_config(0, {"worker": ["one:2222"]}),
        tf_config(0, {"worker": []}),
        tf_config(0, {}),
        {"TF_CONFIG": '{"cluster": {"worker": ["one:2222"]}}'},
        {"TF_CONFIG": '{"task": {"type": "worker", "index": 0}}'},
    ],
)
def test_one_worker_or_none_is_no_rank(name: NameRank, variables: dict[str, str]) -> None:
    assert name(variables, "tensorflow") == {}


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
        json.dumps({"cluster": TWO}),
        json.dumps({"cluster": TWO, "task": None}),
        json.dumps({"cluster": TWO, "task": []}),
        json.dumps({"cluster": TWO, "task": {"index": 0}}),
        json.dumps({"cluster": TWO, "task": {"type": "worker"}}),
        *(tf_config(index)["TF_CONFIG"] for index in (None, "first", [0], 0.5)),
        tf_config(0, {"worker": "one:2222,two:2222"})["TF_CONFIG"],
        "worker " * 1000,
    ],
)
def test_a_wrong_tf_config_is_refused_with_what_was_expected(name: NameRank, text: str) -> None:
    with pytest.raises(UserError, match=r"TF_CONFIG .*cluster.worker, task.type") as refused:
        name({"TF_CONFIG": text}, "tensorflow")
    assert len(str(refused.value)) < 400


@pytest.mark.parametrize(
    ("backend", "launcher", "local"),
    [
        ("paddle", paddle(5, 16), ("PADDLE_LOCAL_RANK", "PADDLE_LOCAL_SIZE")),
        ("tensorflow", horovod(5, 16), ("HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE")),
    ],
)
def test_a_process_of_a_frameworks_launcher_is_the_rank_it_says(
    name: NameRank, backend: str, launcher: dict[str, str], local: tuple[str, str]
) -> None:
    assert name(launcher, backend) == {"RANK": "5", "WORLD_SIZE": "16"}
    expected = {"RANK": "5", "WORLD_SIZE": "16", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    assert name(launcher | dict(zip(local, "14", strict=True)), backend) == expected
    assert name(launcher | {"RANK": "2"}, backend) == {}


@pytest.mark.parametrize("backend", ["reference", "tensorflow", "torch"])
def test_another_frameworks_launcher_says_nothing(name: NameRank, backend: str) -> None:
    assert name(paddle(1, 2), backend) == {}
    assert backend == "tensorflow" or name(tf_config(0), backend) == {}


@pytest.mark.parametrize("kind", ["chief", "ps", "evaluator", "master", None])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_cluster_of_others_than_workers_is_refused_on_all_its_machines(
    name: NameRank, kind: object, workers: int
) -> None:
    # A rank that did not refuse would wait for one that did, or train alone at the same time as
    # another.
    cluster = {"worker": TWO["worker"][:workers], str(kind): ["three:2222"]}
    for own in ("worker", kind):
        with pytest.raises(UserError, match=f"task {own} 0.* list all as workers"):
            name(tf_config(0, cluster, own), "tensorflow")


@pytest.mark.parametrize("index", [2, -1, 100])
def test_a_worker_that_is_not_in_the_cluster_is_refused(name: NameRank, index: int) -> None:
    with pytest.raises(UserError, match=f"task worker {index}, expected a worker from 0 to 1"):
        name(tf_config(index), "tensorflow")


@pytest.mark.parametrize(
    "launcher",
    [tf_config(1), horovod(1, 2) | {"HOROVOD_LOCAL_RANK": "1"}],
    ids=["TF_CONFIG", "Horovod"],
)
def test_a_rank_or_a_local_rank_that_is_set_stays(name: NameRank, launcher: dict[str, str]) -> None:
    assert name(launcher | {"RANK": "0", "WORLD_SIZE": "4"}, "tensorflow") == {}
    assert name({"TF_CONFIG": "no JSON", "RANK": "0"}, "tensorflow") == {}
    expected = {"RANK": "1", "WORLD_SIZE": "2"}
    assert name(launcher | {"LOCAL_RANK": "3"}, "tensorflow") == expected
