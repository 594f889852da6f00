"""From a table of machines to what each engine's ranks are told. That they meet is tested on two
hosts (`tests.cli`)."""

import json
from types import ModuleType

import pytest

from lockstep.backends import LoadedBackend
from lockstep.backends.shared.horovod import rendezvous
from lockstep.launch.nodes import Node, Table, one_machine
from lockstep.system.errors import BackendError
from tests.backends.conftest import for_ranks

NODES = (
    Node("10.0.0.1", "eth0", 2, (11, 12, 13, 14)),
    Node("10.0.0.2", "ib0", 2, (21, 22, 23, 24)),
)
LAST = Table(NODES, 1, "a secret of this start")
"""Two machines with two ranks each, as the second one sees them."""
THREADS = {"OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "NPROC"}


@for_ranks
def test_four_ranks_on_two_machines_know_all(backend: LoadedBackend, native: ModuleType) -> None:
    with backend.prepare_ranks(LAST, "native") as start:
        variables = start.environment(1)
    assert {name: variables[name] for name in variables.keys() - THREADS} == native.FACTS.last_rank


def test_a_rank_is_numbered_machine_by_machine_and_confined_to_its_address() -> None:
    assert LAST.variables(1) == {
        "RANK": "3",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "1",
        "LOCKSTEP_LISTEN_ADDRESS": "10.0.0.2",
        "GLOO_SOCKET_IFNAME": "ib0",
        "NCCL_SOCKET_IFNAME": "=ib0",
    }


@for_ranks
def test_ranks_of_one_machine_are_told_loopback_alone(backend: LoadedBackend) -> None:
    table = one_machine(2)
    with backend.prepare_ranks(table, "native") as start:
        first = table.variables(0) | start.environment(0)
        second = table.variables(1) | start.environment(1)
    assert (first["RANK"], second["RANK"]) == ("0", "1")
    assert first["LOCKSTEP_LISTEN_ADDRESS"] == second["LOCKSTEP_LISTEN_ADDRESS"] == "127.0.0.1"
    assert "10.0.0." not in json.dumps([first, second])


def test_horovods_rendezvous_is_for_one_machine() -> None:
    with pytest.raises(BackendError, match="on one machine only"), rendezvous(LAST):
        pass
