"""`lockstep launch` on two hosts: the same numbers as on one, private, and ended together whatever
happens to one of them.

The hosts are network namespaces of this machine (`tests.hosts`).
"""

import json
import os
import re
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import lockstep
from lockstep.models.state import State
from lockstep.verification.bounds import BOUNDS, distance
from lockstep.weights import checkpoint
from tests.backends.launchers import LAUNCHED
from tests.hosts import PORT, SECRET, Host, kill_all, two_hosts, variables, with_hosts
from tests.processes import LOOPBACK, as_proc_writes, call, finish, listening, wait_until
from tests.soak import SOAK, in_a_soak

pytestmark = [with_hosts, pytest.mark.slow]

NATIVE = tuple(name for name in LAUNCHED if " " not in name)
ENGINES = NATIVE if SOAK else tuple(name for name in NATIVE if name == "torch")
"""All engines meet through the same table; `make soak` tries every one."""
PATIENCE_SEC = 20
A_BUSY_MACHINE_SEC = 60


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    with two_hosts() as both:
        yield both


@pytest.fixture(params=ENGINES)
def train(request: pytest.FixtureRequest, recipe_file: Path, textures: Path) -> list[object]:
    """A command that trains for long, without its folder."""
    how = ["--backend", request.param, "--set", "epochs=500", "--set", "batch_norm=synchronised"]
    return ["train", "--recipe", recipe_file, "--data", textures, *how]


def launch(
    hosts: tuple[Host, Host], train: list[object], *options: object, n: int = 1
) -> list[subprocess.Popen[str]]:
    """Start a launcher on every host. Node 0 gets its name, which is loopback in its hosts file."""
    together = ["--nodes", 2, "-n", n, *options]
    return [
        host.start("launch", *together, "--rendezvous", place, "--node-rank", node, "--", *train)
        for node, (host, place) in enumerate(
            zip(
                hosts, (f"{socket.gethostname()}:{PORT}", f"{hosts[0].address}:{PORT}"), strict=True
            )
        )
    ]


def wait_for_steps(run: Path, launchers: list[subprocess.Popen[str]]) -> None:
    log = run / "log.jsonl"
    wait_until(
        lambda: (
            (log.exists() and '"train"' in log.read_text())
            or any(launcher.poll() is not None for launcher in launchers)
        ),
        seconds=300,
    )
    if any(launcher.poll() is not None for launcher in launchers):
        pytest.fail("\n".join(finish(launcher)[2] for launcher in launchers))


def ranks_on(host: Host) -> list[int]:
    return [number for number in host.processes() if b"\0RANK=" in variables(number)]


def test_two_hosts_train_as_one_listen_at_their_addresses_alone_and_stop_together(
    hosts: tuple[Host, Host], train: list[object], tmp_path: Path
) -> None:
    two = tmp_path / "two"
    one = tmp_path / "one"
    launchers = launch(hosts, [*train, "--out", two])
    wait_for_steps(two, launchers)
    sockets = {
        host.address: {number: listening(number) for number in host.processes()} for host in hosts
    }
    assert [len(ranks_on(host)) for host in hosts] == [1, 1]
    assert not [
        number
        for host in hosts
        for number in ranks_on(host)
        if SECRET.encode() in variables(number)
    ]
    os.kill(ranks_on(hosts[1])[0], signal.SIGUSR1)
    (code, _, errors), (other_code, output, other_errors) = map(finish, launchers)
    assert (code, other_code) == (75, 75), errors + other_errors
    assert f"using {hosts[0].address} instead, which other machines can reach" in errors
    stopped = set(re.findall(r"after step (\d+) of", errors + other_errors))
    assert len(stopped) == 1, "all stop after the same step"
    for address, processes in sockets.items():
        open_at = set().union(*processes.values())
        assert open_at <= LOOPBACK | as_proc_writes(address), processes
    assert as_proc_writes(hosts[0].address) & set().union(*sockets[hosts[0].address].values()), (
        "node 0 listens for the others"
    )
    assert output == "", "only rank 0 prints"
    code, _, errors = call(
        "launch", "-n", 2, "--", *train, "--out", one, "--stop-after-steps", *stopped
    )
    assert code == 0, errors
    assert_same_weights(one, two)


def assert_same_weights(one: Path, other: Path) -> None:
    """On two hosts the same ranks add up the same numbers."""
    a, b = (newest(run) for run in (one, other))
    assert a.step == b.step > 0
    result = [name for name in a.tensors if a.tensors[name].tobytes() != b.tensors[name].tobytes()]
    assert result == []


def newest(run: Path) -> State:
    state, _, damaged = checkpoint.newest_intact(run / "checkpoints")
    assert state is not None
    assert damaged == []
    return state


FAULTS = ("the link is cut", "the other host is gone", "the launcher of node 0 is killed")


@in_a_soak  # `test_launch_faults` loses a rank, which the others notice in the same way
@pytest.mark.parametrize("fault", FAULTS)
def test_when_a_host_is_lost_the_others_end_within_the_patience(
    hosts: tuple[Host, Host], train: list[object], tmp_path: Path, fault: str
) -> None:
    launchers = launch(
        hosts,
        [*train, "--out", tmp_path / "run", "--set", "save_every_steps=2"],
        "--patience",
        PATIENCE_SEC,
    )
    wait_for_steps(tmp_path / "run", launchers)
    wait_until(lambda: bool(checkpoint.steps(tmp_path / "run" / "checkpoints")))
    left = list(zip(hosts, launchers, strict=True))
    if fault == "the link is cut":
        hosts[0].cut()
    elif fault == "the other host is gone":
        kill_all(hosts[1])
        finish(left.pop(1)[1])
    else:
        launchers[0].kill()
        finish(left.pop(0)[1])
    for host, launcher in left:
        code, _, errors = finish(launcher, PATIENCE_SEC + A_BUSY_MACHINE_SEC)
        # 75: the ranks without a launcher stopped together with the others, and saved.
        assert code in (1, 75), errors
        assert re.search(r"lockstep: .*(node [01]|rank [01]|another rank).*", errors)
        assert "Traceback" not in errors
        assert host.processes() == []
    # Ranks end without their launcher.
    wait_until(lambda: hosts[0].processes() == [], A_BUSY_MACHINE_SEC)
    assert newest(tmp_path / "run").step > 0


@in_a_soak
def test_a_slow_link_changes_no_number(
    hosts: tuple[Host, Host], train: list[object], tmp_path: Path
) -> None:
    for host in hosts:
        host.slow_down("2mbit")
    launchers = launch(hosts, [*train, "--out", tmp_path / "slow", "--stop-after-steps", 8])
    for launcher in launchers:
        code, _, errors = finish(launcher, 300)
        assert code == 0, errors
    one = ["--out", tmp_path / "one", "--stop-after-steps", 8]
    assert call("launch", "-n", 2, "--", *train, *one)[0] == 0
    assert_same_weights(tmp_path / "slow", tmp_path / "one")


@in_a_soak
@pytest.mark.parametrize("launcher", ["srun", "mpirun"])
def test_ranks_that_another_launcher_only_numbers_meet_by_themselves(
    hosts: tuple[Host, Host], train: list[object], tmp_path: Path, launcher: str
) -> None:
    two = ["--out", tmp_path / "two", "--stop-after-steps", 8]
    ranks = [
        host.start(*train, *two, **numbered(launcher, hosts, number))
        for number, host in enumerate(hosts)
    ]
    wait_for_steps(tmp_path / "two", ranks)
    addresses = {host.address: set().union(*map(listening, host.processes())) for host in hosts}
    for rank in ranks:
        code, _, errors = finish(rank)
        assert code == 0, errors
    for address, open_at in addresses.items():
        assert open_at <= LOOPBACK | as_proc_writes(address)
    one = ["--out", tmp_path / "one", "--stop-after-steps", 8]
    assert call("launch", "-n", 2, "--", *train, *one)[0] == 0
    assert_same_weights(tmp_path / "two", tmp_path / "one")


def numbered(launcher: str, hosts: tuple[Host, Host], number: int) -> dict[str, str]:
    """Return the variables that a launcher sets for one of two processes on two hosts."""
    if launcher == "mpirun":
        place = {"LOCKSTEP_RENDEZVOUS": f"{hosts[0].address}:{PORT}"}
        return place | {
            "OMPI_COMM_WORLD_RANK": str(number),
            "OMPI_COMM_WORLD_SIZE": "2",
            "OMPI_COMM_WORLD_LOCAL_RANK": "0",
        }
    sizes = {
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_STEP_NODELIST": hosts[0].address,
    }
    own = {"SLURM_PROCID": str(number), "SLURM_NODEID": str(number), "SLURM_LOCALID": "0"}
    return sizes | own | {"SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "0"}


@in_a_soak
def test_two_ranks_on_each_host_are_four(
    hosts: tuple[Host, Host], train: list[object], tmp_path: Path
) -> None:
    for launcher in launch(
        hosts, [*train, "--out", tmp_path / "two", "--stop-after-steps", 4], n=2
    ):
        code, _, errors = finish(launcher, 300)
        assert code == 0, errors
    one = ["--out", tmp_path / "one", "--stop-after-steps", 4]
    assert call("launch", "-n", 4, "--", *train, *one, seconds=300)[0] == 0
    a, b = (newest(tmp_path / run) for run in ("one", "two"))
    assert a.step == b.step == 4
    # Three and more numbers may be added up in another order: MXNet's server takes them as they
    # come.
    assert distance(a.tensors, b.tensors) < BOUNDS["ranks"].value


@in_a_soak
def test_ranks_on_both_hosts_start_again_after_one_was_killed(
    hosts: tuple[Host, Host], train: list[object], tmp_path: Path
) -> None:
    how = ["--set", "save_every_steps=2", "--set", "epochs=3"]
    options = ["--restarts", 1, "--patience", PATIENCE_SEC]
    launchers = launch(hosts, [*train, *how, "--out", tmp_path / "two"], *options)
    wait_until(lambda: bool(checkpoint.steps(tmp_path / "two" / "checkpoints")), seconds=300)
    os.kill(ranks_on(hosts[1])[0], signal.SIGKILL)
    for launcher in launchers:
        code, _, errors = finish(launcher, 300)
        assert code == 0, errors
        assert "started again" in errors
    assert call("launch", "-n", 2, "--", *train, *how, "--out", tmp_path / "one")[0] == 0
    assert_same_weights(tmp_path / "two", tmp_path / "one")


OWN: dict[str, Callable[[tuple[Host, Host], int], list[object]]] = {
    "torch": lambda hosts, node: [
        *("-m", "torch.distributed.run", "--nnodes", 2, "--nproc-per-node", 1, "--node-rank", node),
        *("--master-addr", hosts[0].address, "--master-port", PORT, "-m", "lockstep"),
    ],
    "paddle": lambda hosts, node: [
        *("-m", "paddle.distributed.launch", "--nnodes", 2, "--nproc_per_node", 1, "--rank", node),
        *("--master", f"{hosts[0].address}:{PORT}", "--host", hosts[node].address),
        *("--log_dir", "paddle-logs", Path(lockstep.__file__).with_name("__main__.py")),
    ],
    "tensorflow": lambda hosts, node: ["-m", "lockstep"],
}
"""Arguments of Python by which a framework's own launcher starts a rank on a node. TensorFlow has
TF_CONFIG instead."""


@in_a_soak
@pytest.mark.parametrize("engine", [name for name in OWN if name in NATIVE])
def test_ranks_of_a_frameworks_own_launcher_train_on_two_hosts(
    hosts: tuple[Host, Host],
    engine: str,
    recipe_file: Path,
    textures: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    how = ["--backend", engine, "--set", "batch_norm=synchronised", "--stop-after-steps", 8]
    train = ["train", "--recipe", recipe_file, "--data", textures, *how]
    ranks = []
    for node, host in enumerate(hosts):
        config = {
            "cluster": {"worker": [f"{host.address}:2222" for host in hosts]},
            "task": {"type": "worker", "index": node},
        }
        more = {"TF_CONFIG": json.dumps(config)} if engine == "tensorflow" else {}
        ranks.append(
            host.python(*OWN[engine](hosts, node), *train, "--out", tmp_path / "two", **more)
        )
    for rank in ranks:
        code, output, errors = finish(rank, 200)
        assert code == 0, output + errors
    assert call("launch", "-n", 2, "--", *train, "--out", tmp_path / "one")[0] == 0
    assert_same_weights(tmp_path / "two", tmp_path / "one")
