"""`mpirun` and `lockstep launch --hosts` over a real sshd, and frameworks' own launchers, on two
hosts whose names are 127.0.1.1 at home, as Debian writes them."""

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import lockstep
from tests.hosts import PORT, SECRET
from tests.processes import command, finish, wait_until
from tests.schedulers.cases import (
    BUSY_SEC,
    assert_undivided,
    list_ranks,
    needs,
    newest,
    wait_for_checkpoint,
    wait_for_start,
    why_ended,
)
from tests.schedulers.ssh import NAMES, Machines, machines

pytestmark = needs("sshd", "ssh", "ssh-keygen")

HOROVOD = Path(__file__).parents[2] / ".venv-tensorflow-horovod/bin"
MEETING = {"LOCKSTEP_RENDEZVOUS": f"{NAMES[0]}:{PORT}", "LOCKSTEP_SECRET": SECRET}


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    with machines(tmp_path_factory.mktemp("ssh")) as running:
        yield running


def mpirun(*arguments: object) -> list[object]:
    """Return a command that starts a rank on each host. Open MPI refuses root without its
    option."""
    hosts = ",".join(f"{name}:1" for name in NAMES)
    passed_on = [word for name in MEETING for word in ("-x", name)]
    how = ["--allow-run-as-root", "-np", 2, "-H", hosts, *passed_on]
    return ["mpirun", *how, *command(*arguments)]


@needs("mpirun")
@pytest.mark.parametrize("backend", ["torch", "tensorflow"])
def test_ranks_of_mpirun_stop_together_and_resume_exactly(
    both: Machines, train: list[object], tmp_path: Path, backend: str
) -> None:
    run = tmp_path / "run"
    train += ["--backend", backend]
    for number in (1, 2):
        running = both.start(0, *mpirun(*train, "--out", run), **MEETING)
        wait_for_start(run, number, lambda now=running: why_ended(now))  # type: ignore[misc]
        assert [len(list_ranks(host, run)) for host in both.hosts] == [1, 1]
        running.send_signal(signal.SIGUSR1)
        code, output, errors = finish(running, BUSY_SEC)
        assert code == 75, output + errors
    assert_undivided(run, train, tmp_path)


@needs("mpirun")
def test_ranks_of_mpirun_end_with_one_that_is_killed(
    both: Machines, train: list[object], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    running = both.start(0, *mpirun(*train, "--out", run), **MEETING)
    wait_for_start(run, 1, lambda: why_ended(running))
    os.kill(list_ranks(both.hosts[1], run)[0], signal.SIGKILL)
    code, output, errors = finish(running, BUSY_SEC)
    assert code == 128 + signal.SIGKILL, output + errors
    assert "another rank has ended" in errors
    for host in both.hosts:
        wait_until(lambda here=host: not list_ranks(here, run))  # type: ignore[misc]


def test_launch_hosts_starts_the_other_launcher_and_resumes_exactly(
    both: Machines, train: list[object], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    launch = command("launch", "--hosts", NAMES[1], "-n", 1, "--", *train, "--out", run)
    for number in (1, 2):
        running = both.start(0, *launch)
        wait_for_start(run, number, lambda now=running: why_ended(now))  # type: ignore[misc]
        assert [len(list_ranks(host, run)) for host in both.hosts] == [1, 1]
        running.send_signal(signal.SIGTERM)
        code, output, errors = finish(running, BUSY_SEC)
        assert code == 75, output + errors
    assert_undivided(run, train, tmp_path)


@pytest.mark.parametrize("lost", ["the launch", "the connection"])
def test_the_ranks_end_when_ssh_ends(
    both: Machines, train: list[object], tmp_path: Path, lost: str
) -> None:
    run = tmp_path / "run"
    train += ["--set", "save_every_steps=2"]
    launch = command("launch", "--hosts", NAMES[1], "-n", 1, "--", *train, "--out", run)
    running = both.start(0, *launch)
    wait_for_start(run, 1, lambda: why_ended(running))
    wait_for_checkpoint(run)
    if lost == "the launch":
        running.kill()
    else:
        (connection,) = [
            process
            for process in both.hosts[0].processes()
            if Path(f"/proc/{process}/comm").read_text().strip() == "ssh"
        ]
        os.kill(connection, signal.SIGKILL)
    finish(running, BUSY_SEC)
    for host in both.hosts:
        wait_until(lambda here=host: not list_ranks(here, run))  # type: ignore[misc]
    assert newest(run).step > 0


def own_launcher(both: Machines, backend: str, number: int) -> tuple[list[object], dict[str, str]]:
    """Return the arguments of Python by which a framework's own launcher starts the rank of a host,
    and its variables."""
    if backend == "torch":
        words = ["--nnodes", 2, "--nproc-per-node", 1, "--node-rank", number]
        place = ["--master-addr", NAMES[0], "--master-port", PORT]
        return ["-m", "torch.distributed.run", *words, *place, "-m", "lockstep"], {}
    if backend == "paddle":
        words = ["--nnodes", 2, "--nproc_per_node", 1, "--rank", number, "--log_dir", "logs"]
        program = Path(lockstep.__file__).with_name("__main__.py")
        # Paddle's launcher knows its own machine only by the address.
        addresses = [host.address for host in both.hosts]
        place = ["--master", f"{addresses[0]}:{PORT}", "--host", addresses[number]]
        return ["-m", "paddle.distributed.launch", *words, *place, program], {}
    workers = [f"{name}:2222" for name in NAMES]
    task = {"type": "worker", "index": number}
    config = json.dumps({"cluster": {"worker": workers}, "task": task})
    return ["-m", "lockstep"], {"TF_CONFIG": config}


@pytest.mark.skipif(not HOROVOD.exists(), reason="not built: run make tensorflow-horovod")
def test_ranks_of_horovodrun_meet(
    both: Machines, train: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    python = HOROVOD / "python"
    train += ["--backend", "tensorflow", "--distributed", "horovod"]
    words = [python, "-m", "lockstep", *train, "--out", run, "--stop-after-steps", 8]
    hosts = ",".join(f"{name}:1" for name in NAMES)
    with both.routed_names():  # Horovod's gloo takes the address of a machine's own name
        running = both.start(0, HOROVOD / "horovodrun", "-np", 2, "-H", hosts, *words)
        code, output, errors = finish(running, BUSY_SEC)
    assert code == 0, output + errors
    monkeypatch.setattr("tests.processes.sys.executable", str(python))  # the same TensorFlow
    assert_undivided(run, train, tmp_path)


@pytest.mark.parametrize("backend", ["torch", "paddle", "tensorflow"])
def test_ranks_of_a_frameworks_own_launcher_meet(
    both: Machines,
    train: list[object],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    backend: str,
) -> None:
    monkeypatch.chdir(tmp_path)  # Paddle's launcher writes logs there
    run = tmp_path / "run"
    train += ["--backend", backend]
    ranks = []
    for number in (0, 1):
        launcher, variables = own_launcher(both, backend, number)
        words = [*launcher, *train, "--out", run, "--stop-after-steps", 8]
        ranks.append(both.start(number, sys.executable, *words, **variables))
    for rank in ranks:
        code, output, errors = finish(rank, BUSY_SEC)
        assert code == 0, output + errors
    assert_undivided(run, train, tmp_path)
