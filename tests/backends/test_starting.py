"""From a table of machines to what each engine's ranks are told. That they meet is tested on two
hosts (`tests.cli`)."""

import json

import pytest

from lockstep.backends import Backend
from lockstep.backends.shared.horovod_rendezvous import rendezvous
from lockstep.launch.nodes import Node, Start, Table, one_machine
from lockstep.system.errors import BackendError
from tests.backends.conftest import of_frameworks
from tests.backends.native import name_of

NODES = (
    Node("10.0.0.1", "eth0", 2, (11, 12, 13, 14)),
    Node("10.0.0.2", "ib0", 2, (21, 22, 23, 24)),
)
LAST = Table(NODES, 1, "a secret of this start")
"""Two machines with two ranks each, as the second one sees them."""
PLACES = ["10.0.0.1:11", "10.0.0.1:12", "10.0.0.2:21", "10.0.0.2:22"]

TOLD = {
    "mxnet": {
        "DMLC_ROLE": "worker",
        "DMLC_PS_ROOT_URI": "10.0.0.1",
        "DMLC_PS_ROOT_PORT": "13",
        "DMLC_NODE_HOST": "10.0.0.2",
        "DMLC_USE_KUBERNETES": "0",
        "DMLC_LOCAL": "0",
        "DMLC_NUM_WORKER": "4",
        "DMLC_NUM_SERVER": "1",
        "LOCKSTEP_HOSTS_ADDRESS": "10.0.0.1:14",
        "LOCKSTEP_HOSTS_KEY": "a secret of this start",
    },
    "paddle": {
        "PADDLE_MASTER": "10.0.0.1:13",
        "PADDLE_TRAINER_ENDPOINTS": ",".join(PLACES),
        "PADDLE_CURRENT_ENDPOINT": "10.0.0.2:22",
        "PADDLE_TRAINERS_NUM": "4",
        "PADDLE_TRAINER_ID": "3",
    },
    "tensorflow": {
        "TF_CONFIG": {"cluster": {"worker": PLACES}, "task": {"type": "worker", "index": 3}}
    },
    "torch": {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "13"},
}
THREADS = {"OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS"}


def told(start: Start, local_rank: int) -> dict[str, object]:
    found: dict[str, object] = dict(start.environment(local_rank))
    if "TF_CONFIG" in found:
        found["TF_CONFIG"] = json.loads(str(found["TF_CONFIG"]))
    return found


@of_frameworks
def test_the_last_of_four_ranks_on_two_machines_knows_where_all_are(backend: Backend) -> None:
    with backend.starting(LAST, "native") as start:
        found = told(start, 1)
    assert {name: value for name, value in found.items() if name not in THREADS} == TOLD[
        name_of(backend)
    ]


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


@of_frameworks
def test_on_one_machine_no_rank_is_told_another_address_than_loopback(backend: Backend) -> None:
    table = one_machine(2)
    with backend.starting(table, "native") as start:
        found = [table.variables(rank) | start.environment(rank) for rank in (0, 1)]
    assert [each["RANK"] for each in found] == ["0", "1"]
    assert {each["LOCKSTEP_LISTEN_ADDRESS"] for each in found} == {"127.0.0.1"}
    assert "10.0.0." not in json.dumps(found)


def test_horovods_rendezvous_is_for_one_machine() -> None:
    with pytest.raises(BackendError, match="on one machine only"), rendezvous(LAST):
        pass
