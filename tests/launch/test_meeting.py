"""Where machines meet: options, environment variables and Slurm."""

import io
import os
import re
import sys
from pathlib import Path

import pytest

from lockstep.launch import nodes
from lockstep.launch.nodes import (
    find_interface,
    find_reachable_address,
    list_addresses,
    resolve_bind,
)
from lockstep.launch.rendezvous_address import (
    Meeting,
    Options,
    find_meeting,
    find_rank_meeting,
    read_secret,
)
from lockstep.system.errors import UserError

WORDS = "a secret of the tests"
SECRET = {"LOCKSTEP_SECRET": WORDS}
TWO = Options(nodes=2, node_rank=1, rendezvous="node0:29400")
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
    assert find_meeting(TWO, SECRET) == Meeting(1, 2, "node0", 29400, WORDS)


@pytest.mark.parametrize(
    "options",
    [Options(), Options(nodes=1), Options(nodes=1, node_rank=0, rendezvous="node0:29400")],
    ids=str,
)
def test_one_machine_meets_nobody_and_needs_no_secret(options: Options) -> None:
    assert find_meeting(options, {}) is None


def test_the_environment_can_say_place_and_address() -> None:
    environment = SECRET | {"LOCKSTEP_RENDEZVOUS": "node0:29400", "LOCKSTEP_BIND": "127.0.0.1"}
    expected = Meeting(1, 2, "node0", 29400, WORDS, "127.0.0.1")
    assert find_meeting(Options(nodes=2, node_rank=1), environment) == expected


def test_a_slurm_step_says_all_but_the_secret() -> None:
    result = find_meeting(Options(), STEP | SECRET)
    assert result == Meeting(1, 2, "node0", 15_008, WORDS, other="node1")
    with pytest.raises(UserError, match="shared secret"):
        find_meeting(Options(), STEP)


def test_options_come_before_slurm() -> None:
    options = Options(nodes=3, node_rank=2, rendezvous="other:1234")
    expected = Meeting(2, 3, "other", 1234, WORDS, other="node1")
    assert find_meeting(options, STEP | SECRET) == expected


def test_several_launchers_on_a_node_are_refused() -> None:
    with pytest.raises(UserError, match=r"srun started 4 tasks on 2 nodes.*--ntasks-per-node=1"):
        find_meeting(Options(), STEP | SECRET | {"SLURM_STEP_NUM_TASKS": "4"})
    with pytest.raises(UserError, match=r"srun started 8 tasks on 1 node;.*--ntasks-per-node=1"):
        find_meeting(
            Options(), STEP | SECRET | {"SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "8"}
        )


@pytest.mark.parametrize(
    ("options", "missing"),
    [
        (Options(nodes=2), "missing: --node-rank, --rendezvous HOST:PORT"),
        (Options(nodes=2, node_rank=0), "missing: --rendezvous HOST:PORT"),
        (Options(nodes=2, rendezvous="node0:29400"), "missing: --node-rank"),
        (
            Options(nodes=2, node_rank=2, rendezvous="node0:29400"),
            "--node-rank is 2, expected 0 to 1",
        ),
        (Options(node_rank=1, rendezvous="node0:29400"), "--nodes is 1"),
        (Options(nodes=2, node_rank=0, rendezvous="node0"), "expected HOST:PORT"),
        (Options(nodes=2, node_rank=0, rendezvous=":29400"), "expected HOST:PORT"),
        (Options(nodes=2, node_rank=0, rendezvous="node0:70000"), "expected HOST:PORT"),
        (Options(nodes=2, node_rank=0, rendezvous="node0:1", bind="192.0.2.1"), "--bind 192.0.2.1"),
    ],
    ids=str,
)
def test_what_is_missing_or_wrong_is_named(options: Options, missing: str) -> None:
    with pytest.raises(UserError) as refused:
        find_meeting(options, SECRET)
    assert missing in str(refused.value)


# The secret


def test_without_a_secret_it_is_told_how_to_make_one() -> None:
    with pytest.raises(UserError, match=r"secrets.token_hex\(16\)"):
        find_meeting(TWO, {})


def test_a_short_secret_is_refused() -> None:
    with pytest.raises(UserError, match="5 characters; expected at least 16"):
        find_meeting(TWO, {"LOCKSTEP_SECRET": "short"})


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
    with pytest.raises(UserError, match=r"a pipe.*LOCKSTEP_SECRET"):
        read_secret(tmp_path / "secret", {})


def test_a_secret_comes_from_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{WORDS}\nmore\n"))
    assert read_secret(Path("-"), {}) == WORDS


def test_a_secret_is_shown_nowhere() -> None:
    assert WORDS not in repr(Meeting(0, 2, "node0", 29400, WORDS))


# Machines that this one starts


def test_this_machine_is_node_0_of_those_it_starts() -> None:
    meeting = find_meeting(Options(hosts=("127.0.0.1", "127.0.0.2")), {})
    assert meeting is not None
    assert (meeting.node, meeting.nodes, meeting.host) == (0, 3, "127.0.0.1")
    assert len(meeting.secret) == 32
    other = find_meeting(Options(hosts=("127.0.0.1",)), {})
    assert other is not None
    assert other.secret != meeting.secret


@pytest.mark.parametrize(
    "options",
    [
        Options(hosts=("a",), nodes=2),
        Options(hosts=("a",), node_rank=0),
        Options(hosts=("a",), secret_file=Path("secret")),
    ],
    ids=str,
)
def test_machines_that_are_started_are_numbered_and_get_a_secret_here(options: Options) -> None:
    with pytest.raises(UserError, match="leave out --nodes, --node-rank and --secret"):
        find_meeting(options, {})


@pytest.mark.parametrize("host", ["", "-oProxyCommand=true"])
def test_what_is_no_host_is_refused(host: str) -> None:
    with pytest.raises(UserError, match="expected names such as"):
        find_meeting(Options(hosts=("node1", host)), {})


# Ranks that meet without launchers


def test_ranks_of_srun_or_mpirun_meet_as_nodes() -> None:
    rank = {"RANK": "3", "WORLD_SIZE": "4"}
    result = find_rank_meeting(SECRET | rank | {"LOCKSTEP_RENDEZVOUS": "node0:29400"})
    assert result == Meeting(3, 4, "node0", 29400, WORDS)
    result = find_rank_meeting(SECRET | rank | STEP)
    assert result == Meeting(3, 4, "node0", 15_008, WORDS, other="node1")
    assert find_rank_meeting(SECRET | rank) is None
    assert find_rank_meeting(SECRET | {"LOCKSTEP_RENDEZVOUS": "node0:29400"}) is None


# Addresses


def test_an_interface_stands_for_its_address() -> None:
    assert list_addresses()["127.0.0.1"] == "lo"
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
    monkeypatch.setattr(nodes, "list_addresses", lambda: here)
    monkeypatch.setattr(nodes, "find_address", find_source)
    assert find_interface(hosts) == expected


@pytest.mark.parametrize(
    ("interfaces", "routes", "expected"),
    [
        ({"10.0.0.1": "eth0"}, {}, "10.0.0.1"),
        ({"10.0.0.1": "eth0", "172.17.0.1": "docker0"}, {nodes._ANYWHERE: "10.0.0.1"}, "10.0.0.1"),
        (
            {"10.0.0.1": "eth0", "10.9.0.1": "ib0"},
            {nodes._ANYWHERE: "10.0.0.1", "node9": "10.9.0.1"},
            "10.9.0.1",
        ),
        ({"10.0.0.1": "eth0", "10.9.0.1": "ib0"}, {}, None),
        ({}, {}, None),
    ],
    ids=["only one", "default route", "way to another node", "two", "none"],
)
def test_debians_name_of_loopback_gives_way_to_an_address_that_others_reach(
    interfaces: dict[str, str],
    routes: dict[str, str],
    expected: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def find_way(host: str) -> str:
        if host not in routes:
            raise UserError("there is no way to it")
        return routes[host]

    monkeypatch.setattr(nodes, "resolve", lambda host: "127.0.1.1")
    monkeypatch.setattr(nodes, "list_addresses", lambda: {"127.0.0.1": "lo"} | interfaces)
    monkeypatch.setattr(nodes, "find_address", find_way)
    line = r"node0 is 127\.0\.1\.1 on this machine \(see /etc/hosts\)"
    if expected is None:
        with pytest.raises(UserError, match=line + ".*(give --bind|only loopback)") as refused:
            find_reachable_address("node0", "node9")
        assert all(address in str(refused.value) for address in interfaces)
        return
    address, note = find_reachable_address("node0", "node9")
    assert address == expected
    assert re.search(f"{line}; using {expected} instead, which other machines can reach", note)


def test_an_address_that_others_reach_is_used_without_a_note() -> None:
    assert find_reachable_address("127.0.0.1") == ("127.0.0.1", "")
    assert find_reachable_address("localhost") == ("127.0.0.1", "")
