"""`lockstep launch --on ray` on a cluster of two nodes: the weights of an undivided run, whether it
is stopped or loses a node; and nothing without the token."""

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.hosts import WHY_NOT, kill_all
from tests.processes import finish, wait_until
from tests.schedulers.cases import (
    BUSY_SEC,
    assert_undivided,
    list_ranks,
    newest,
    wait_for_checkpoint,
    wait_for_start,
    why_ended,
)
from tests.schedulers.ray_cluster import DASHBOARD, HAS_DASHBOARD, PROGRAM, Ray, ray_cluster

pytestmark = pytest.mark.skipif(
    bool(WHY_NOT or find_spec("ray") is None),
    reason=WHY_NOT or "Ray is not installed: pip install 'ray>=2.60'",
)


@pytest.fixture
def cluster() -> Iterator[Ray]:
    with ray_cluster() as running:
        yield running


def launch(
    cluster: Ray, train: list[object], nodes: int = 2, **variables: str
) -> subprocess.Popen[str]:
    """Start a launch with a rank on each of some nodes."""
    options = ["--on", "ray", "--address", cluster.address, "--nodes", nodes, "-n", 1, "--gpus", 0]
    variables = cluster.variables | variables
    return cluster.hosts[0].start("launch", *options, "--", *train, **variables)


def count_ranks(cluster: Ray, run: Path) -> int:
    """Return how many processes on both nodes train a run."""
    return sum(len(list_ranks(host, run)) for host in cluster.hosts)


@pytest.mark.parametrize("nodes", [1, 2])
def test_the_ranks_end_with_a_killed_launch(
    cluster: Ray, train: list[object], tmp_path: Path, nodes: int
) -> None:
    run = tmp_path / "run"
    driver = launch(cluster, [*train, "--out", run], nodes)
    wait_for_start(run, 1, lambda: why_ended(driver))
    assert count_ranks(cluster, run) == nodes
    driver.kill()
    finish(driver)
    wait_until(lambda: count_ranks(cluster, run) == 0)
    assert newest(run).step > 0, "the launchers let their ranks save"


def test_a_lost_node_is_replaced_and_the_run_resumes_exactly(
    cluster: Ray, train: list[object], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    train += ["--set", "save_every_steps=2"]
    driver = launch(cluster, [*train, "--out", run])

    wait_for_start(run, 1, lambda: why_ended(driver))
    wait_for_checkpoint(run)
    kill_all(cluster.hosts[1])
    cluster.start_node(1)
    wait_for_start(run, 2, lambda: why_ended(driver))
    driver.send_signal(signal.SIGTERM)
    code, output, errors = finish(driver, BUSY_SEC)
    assert code == 75, output + errors
    # Ray chooses which node has which number.
    assert re.search("node [01] was lost; the ranks start again", errors)
    assert "step 2 of" in output, "the output of rank 0 comes to the driver"
    assert_undivided(run, train, tmp_path)


@pytest.mark.skipif(not HAS_DASHBOARD, reason="needs ray[default]; run make schedulers")
def test_a_submitted_job_that_is_stopped_saves_and_resumes_exactly(
    cluster: Ray, train: list[object], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    place = ["--address", f"http://127.0.0.1:{DASHBOARD}"]
    options = ["--now", "--nodes", 2, "-n", 1, "--gpus", 0, *place]
    for number in (1, 2):
        submitting = cluster.hosts[0].start(
            "submit", "ray", *options, "--", *train, "--out", run, **cluster.variables
        )
        code, answer, errors = finish(submitting, BUSY_SEC)
        assert code == 0, errors
        job = re.search("raysubmit_[A-Za-z0-9]+", answer)
        assert job is not None, answer
        wait_for_start(run, number)
        assert count_ranks(cluster, run) == 2
        stop = [PROGRAM, "job", "stop", *place, job[0]]
        stopped = subprocess.run(
            cluster.hosts[0].inside(*stop),
            env=os.environ | cluster.variables,
            capture_output=True,
            text=True,
            check=False,
        )
        assert stopped.returncode == 0, stopped.stdout + stopped.stderr
        wait_until(lambda: count_ranks(cluster, run) == 0)
    assert_undivided(run, train, tmp_path)


def test_a_launch_without_the_token_is_refused(
    cluster: Ray, train: list[object], tmp_path: Path
) -> None:
    driver = launch(
        cluster, [*train, "--out", tmp_path / "run"], RAY_AUTH_TOKEN="fedcba9876543210" * 4
    )
    code, _, errors = finish(driver, BUSY_SEC)
    assert code == 2, errors
    assert "lockstep: cannot reach a Ray cluster" in errors
    assert "the same RAY_AUTH_TOKEN" in errors
    assert "Traceback" not in errors
    assert not (tmp_path / "run").exists()
