"""Which rank a process is under Slurm and MPI. The variables of frameworks' launchers are in
`test_ranks`."""

import json

import pytest

from lockstep.system.errors import UserError
from lockstep.system.rank_variables import SlurmStep, first_host, last_host, slurm_step
from tests.system.conftest import NameRank

JOB = {
    "SLURM_JOB_ID": "4711",
    "SLURM_JOB_NODELIST": "node[01-02]",
    "SLURM_NTASKS": "4",
    "SLURM_NNODES": "2",
}
SCRIPT = JOB | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
"""What a batch script and a shell of salloc have."""
STEP = SCRIPT | {
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "node[01-02]",
}
TASK = STEP | {"SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NODEID": "1"}
"""The last of four tasks of srun on two nodes."""
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
}
MPICH = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
FIRST_OF_FOUR = {"cluster": {"worker": list("abcd")}, "task": {"type": "worker", "index": 0}}
THIRD = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}


@pytest.mark.parametrize("backend", ["mxnet", "paddle", "reference", "tensorflow", "torch"])
@pytest.mark.parametrize("launcher", [TASK, OPEN_MPI, MPICH], ids=["srun", "Open MPI", "MPICH"])
def test_a_process_of_slurm_or_mpi_is_the_rank_it_says_on_every_engine(
    name: NameRank, launcher: dict[str, str], backend: str
) -> None:
    assert name(launcher, backend) == THIRD


@pytest.mark.parametrize(
    "single",
    [
        SCRIPT,
        STEP | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "1"},
        {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"},
        {"PMI_RANK": "0", "PMI_SIZE": "1"},
    ],
    ids=["in a script", "a step of one task", "one of Open MPI", "one of MPICH"],
)
def test_a_single_process_is_no_rank(name: NameRank, single: dict[str, str]) -> None:
    assert name(single) == {}


def test_what_is_given_stays(name: NameRank) -> None:
    assert name(TASK | {"RANK": "0", "WORLD_SIZE": "2"}) == {}
    assert name(TASK | {"LOCAL_RANK": "0"}) == {"RANK": "3", "WORLD_SIZE": "4"}


def test_mpi_within_slurm_counts_with_another_number_of_processes(name: NameRank) -> None:
    # mpirun starts a helper on each other node through Slurm.
    helper = STEP | {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}
    assert name(helper | OPEN_MPI) == THIRD
    assert name(STEP | {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"} | OPEN_MPI) == THIRD


def test_launchers_that_agree_are_one(name: NameRank) -> None:
    assert name(TASK | OPEN_MPI | MPICH) == THIRD


@pytest.mark.parametrize(
    ("backend", "other", "says"),
    [
        ("torch", OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "2"}, "OMPI_COMM_WORLD_RANK=2"),
        ("paddle", {"PADDLE_TRAINER_ID": "0", "PADDLE_TRAINERS_NUM": "4"}, "PADDLE_TRAINER_ID=0"),
        ("tensorflow", {"TF_CONFIG": json.dumps(FIRST_OF_FOUR)}, "TF_CONFIG with task 0 of 4"),
    ],
    ids=["MPI", "Paddle", "TF_CONFIG"],
)
def test_two_that_number_the_same_processes_differently_are_refused_with_what_both_say(
    name: NameRank, backend: str, other: dict[str, str], says: str
) -> None:
    with pytest.raises(UserError) as refused:
        name(TASK | other, backend)
    assert says in str(refused.value)
    assert "SLURM_PROCID=3" in str(refused.value)


@pytest.mark.parametrize(
    "wrong",
    [
        TASK | {"SLURM_PROCID": "4"},
        TASK | {"SLURM_PROCID": "first"},
        TASK | {"SLURM_PROCID": "-1"},
        {"OMPI_COMM_WORLD_RANK": "0"},
        {"PMI_RANK": "0", "PMI_SIZE": ""},
        {"PMI_RANK": "0", "PMI_SIZE": "0"},
    ],
    ids=["too large", "no number", "negative", "no size", "an empty size", "a size of 0"],
)
def test_variables_of_no_rank_are_refused(name: NameRank, wrong: dict[str, str]) -> None:
    with pytest.raises(UserError, match=r"sets \w+=.*: expected a rank from 0 and a larger number"):
        name(wrong)


# Slurm's step


def test_a_step_is_read_with_its_first_host() -> None:
    assert slurm_step(TASK) == SlurmStep(
        node=1,
        nodes=2,
        tasks=4,
        first_host="node01",
        last_host="node02",
        port=15_000 + 8 * 4711 % 15_000,
    )
    assert slurm_step(SCRIPT) is None
    assert slurm_step({}) is None


def test_two_steps_of_a_job_have_different_ports_that_all_their_nodes_know() -> None:
    steps = [slurm_step(STEP | {"SLURM_STEP_ID": str(number)}) for number in range(8)]
    ports = {step.port for step in steps if step is not None}
    assert len(ports) == 8
    assert all(1024 < port < 32768 for port in ports)
    task = slurm_step(TASK)
    assert task is not None
    assert task.port == min(ports)


def test_a_step_that_lacks_a_variable_is_refused_with_its_name() -> None:
    lacking = {name: value for name, value in STEP.items() if name != "SLURM_NODEID"}
    with pytest.raises(UserError, match="SLURM_NODEID"):
        slurm_step(lacking)


@pytest.mark.parametrize(
    ("hosts", "first", "last"),
    [
        ("node1", "node1", "node1"),
        ("node1,node2", "node1", "node2"),
        ("node[01-04,7]", "node01", "node7"),
        ("node[7,01-04]", "node7", "node04"),
        ("login,node[1-3]", "login", "node3"),
        ("gpu[008-011]-ib,gpu020", "gpu008-ib", "gpu020"),
        ("rack[2-3]node[05,09]", "rack2node05", "rack3node09"),
        ("a-b[1-2]", "a-b1", "a-b2"),
    ],
)
def test_the_ends_of_slurms_list_of_hosts_are_found(hosts: str, first: str, last: str) -> None:
    # What `scontrol show hostnames` prints first and last for these lists, by Slurm's documentation
    # of host lists.
    assert first_host(hosts) == first
    assert last_host(hosts) == last
