"""Where machines meet: options, environment variables and Slurm."""

import io
import os
import sys
from pathlib import Path

import pytest

from lockstep.launch import nodes
from lockstep.launch.meeting import Asked, Meeting, meeting_of, meeting_of_rank, read_secret
from lockstep.launch.nodes import addresses, interface_between, resolve_bind
from lockstep.system.errors import UserError

WORDS = "a secret of the tests"
SECRET = {"LOCKSTEP_SECRET": WORDS}
TWO = Asked(nodes=2, node_rank=1, rendezvous="node0:29400")
STEP = {
    "SLURM_JOB_ID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NODELIST": "node[0-1]",
}


def test_options_say_where_to_meet() -> None:
    assert meeting_of(TWO, SECRET) == Meeting(1, 2, "node0", 29400, WORDS)


@pytest.mark.parametrize(
    "asked",
    [Asked(), Asked(nodes=1), Asked(nodes=1, node_rank=0, rendezvous="node0:29400")],
    ids=str,
)
def test_one_machine_meets_nobody_and_needs_no_secret(asked: Asked) -> None:
    assert meeting_of(asked, {}) is None


def test_the_environment_can_say_place_and_address() -> None:
    environment = SECRET | {"LOCKSTEP_RENDEZVOUS": "node0:29400", "LOCKSTEP_BIND": "127.0.0.1"}
    expected = Meeting(1, 2, "node0", 29400, WORDS, "127.0.0.1")
    assert meeting_of(Asked(nodes=2, node_rank=1), environment) == expected


def test_a_slurm_step_says_all_but_the_secret() -> None:
    assert meeting_of(Asked(), STEP | SECRET) == Meeting(1, 2, "node0", 15_008, WORDS)
    with pytest.raises(UserError, match="shared secret"):
        meeting_of(Asked(), STEP)


def test_options_come_before_slurm() -> None:
    asked = Asked(nodes=3, node_rank=2, rendezvous="other:1234")
    assert meeting_of(asked, STEP | SECRET) == Meeting(2, 3, "other", 1234, WORDS)


def test_several_launchers_on_a_node_are_refused() -> None:
    with pytest.raises(UserError, match=r"4 tasks on 2 nodes.*--ntasks-per-node=1"):
        meeting_of(Asked(), STEP | SECRET | {"SLURM_STEP_NUM_TASKS": "4"})
    with pytest.raises(UserError, match=r"8 tasks on 1 nodes.*--ntasks-per-node=1"):
        meeting_of(
            Asked(), STEP | SECRET | {"SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "8"}
        )


@pytest.mark.parametrize(
    ("asked", "missing"),
    [
        (Asked(nodes=2), "--node-rank and --rendezvous HOST:PORT is missing"),
        (Asked(nodes=2, node_rank=0), "but --rendezvous HOST:PORT is missing"),
        (Asked(nodes=2, rendezvous="node0:29400"), "but --node-rank is missing"),
        (
            Asked(nodes=2, node_rank=2, rendezvous="node0:29400"),
            "--node-rank is 2, expected 0 to 1",
        ),
        (Asked(node_rank=1, rendezvous="node0:29400"), "--nodes is 1"),
        (Asked(nodes=2, node_rank=0, rendezvous="node0"), "expected HOST:PORT"),
        (Asked(nodes=2, node_rank=0, rendezvous=":29400"), "expected HOST:PORT"),
        (Asked(nodes=2, node_rank=0, rendezvous="node0:70000"), "expected HOST:PORT"),
        (Asked(nodes=2, node_rank=0, rendezvous="node0:1", bind="192.0.2.1"), "--bind 192.0.2.1"),
    ],
    ids=str,
)
def test_what_is_missing_or_wrong_is_named(asked: Asked, missing: str) -> None:
    with pytest.raises(UserError) as refused:
        meeting_of(asked, SECRET)
    assert missing in str(refused.value)


# The secret


def test_without_a_secret_it_is_told_how_to_make_one() -> None:
    with pytest.raises(UserError, match=r"secrets.token_hex\(16\)"):
        meeting_of(TWO, {})


def test_a_short_secret_is_refused() -> None:
    with pytest.raises(UserError, match="5 characters; expected at least 16"):
        meeting_of(TWO, {"LOCKSTEP_SECRET": "short"})


def test_a_secret_comes_from_a_file_that_nobody_else_can_read(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text(f"{WORDS}\n")
    file.chmod(0o640)
    with pytest.raises(UserError, match=f"chmod 600 {file}"):
        read_secret(file, {})
    file.chmod(0o600)
    assert read_secret(file, {"LOCKSTEP_SECRET": "of the environment"}) == WORDS


def test_a_secret_from_a_pipe_is_refused_with_what_can_be_given_instead(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "secret")
    with pytest.raises(UserError, match=r"a pipe.*regular file, or set LOCKSTEP_SECRET"):
        read_secret(tmp_path / "secret", {})


def test_a_secret_comes_from_the_first_line_of_standard_input(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{WORDS}\nmore\n"))
    assert read_secret(Path("-"), {}) == WORDS


def test_a_secret_is_shown_nowhere() -> None:
    assert WORDS not in repr(Meeting(0, 2, "node0", 29400, WORDS))


# Machines that this one starts


def test_this_machine_is_node_0_of_those_it_starts() -> None:
    found = meeting_of(Asked(hosts=("127.0.0.1", "127.0.0.2")), {})
    assert found is not None
    assert (found.node, found.nodes, found.host) == (0, 3, "127.0.0.1")
    assert len(found.secret) == 32
    other = meeting_of(Asked(hosts=("127.0.0.1",)), {})
    assert other is not None
    assert other.secret != found.secret


@pytest.mark.parametrize(
    "asked", [Asked(hosts=("a",), nodes=2), Asked(hosts=("a",), node_rank=0)], ids=str
)
def test_machines_that_are_started_are_not_counted_by_hand(asked: Asked) -> None:
    with pytest.raises(UserError, match="leave out --nodes and --node-rank"):
        meeting_of(asked, {})


@pytest.mark.parametrize("host", ["", "-oProxyCommand=true"])
def test_what_is_no_host_is_refused(host: str) -> None:
    with pytest.raises(UserError, match="expected names such as"):
        meeting_of(Asked(hosts=("node1", host)), {})


# Ranks that meet without launchers


def test_ranks_of_srun_or_mpirun_meet_as_nodes() -> None:
    rank = {"RANK": "3", "WORLD_SIZE": "4"}
    assert meeting_of_rank(SECRET | rank | {"LOCKSTEP_RENDEZVOUS": "node0:29400"}) == Meeting(
        3, 4, "node0", 29400, WORDS
    )
    assert meeting_of_rank(SECRET | rank | STEP) == Meeting(3, 4, "node0", 15_008, WORDS)
    assert meeting_of_rank(SECRET | rank) is None
    assert meeting_of_rank(SECRET | {"LOCKSTEP_RENDEZVOUS": "node0:29400"}) is None


# Addresses


def test_an_interface_stands_for_its_address() -> None:
    assert addresses()["127.0.0.1"] == "lo"
    assert resolve_bind("lo") == resolve_bind("127.0.0.1") == "127.0.0.1"


@pytest.mark.parametrize("text", ["eth77", "192.0.2.1", "0.0.0.0", ""])
def test_what_this_machine_does_not_have_is_refused_with_what_it_has(text: str) -> None:
    with pytest.raises(UserError, match=r"127\.0\.0\.1 \(lo\)"):
        resolve_bind(text)


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [
        (["10.0.0.1", "10.0.0.2"], "eth0"),
        (["10.0.0.2", "10.0.0.1"], "eth0"),
        (["127.0.0.1", "10.0.0.2"], "eth0"),
        (["10.0.0.1", "10.0.0.1"], "lo"),
        (["127.0.0.1", "10.0.0.1"], "lo"),
        (["127.0.1.1", "127.0.1.1"], None),
        (["203.0.113.1"], None),
    ],
)
def test_ranks_of_several_machines_meet_on_the_way_and_those_of_one_on_loopback(
    hosts: list[str], expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find_source(host: str) -> str:
        if host.startswith("203."):
            raise UserError("there is no way to it")
        return "127.0.0.1" if host.startswith("127.") else "10.0.0.1"

    here = {"127.0.0.1": "lo", "10.0.0.1": "eth0:1"}
    monkeypatch.setattr(nodes, "addresses", lambda: here)
    monkeypatch.setattr(nodes, "address_towards", find_source)
    assert interface_between(hosts) == expected
