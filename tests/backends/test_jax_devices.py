"""JAX's worlds of several devices: of one process, and of two."""

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lockstep import backends
from lockstep.backends import LoadedBackend, World
from lockstep.recipes import Execution
from lockstep.system.errors import BackendError
from lockstep.verification.bounds import BOUNDS, distance
from tests.backends.cases import all_bits, statistics, subtract_states
from tests.backends.conftest import make_backend_fixture
from tests.backends.drawing import draw_state
from tests.backends.ranks import RECIPE, SCENARIOS, carry_out
from tests.processes import PATIENT_SEC, ROOT
from tests.soak import in_a_soak

backend = make_backend_fixture("jax")

Results = dict[str, Any]
TWO_DEVICES = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "NPROC": "1"}
"""Environment variables with which the CPU counts as two devices."""


def run_on_two_devices(folder: Path, *modules: str) -> None:
    """Run `tests.backends.ranks` with the first scenario in processes that have two devices."""
    command = [sys.executable, "-m", *modules, "tests.backends.ranks", "jax", "native"]
    done = subprocess.run(
        [*command, folder, "local"],
        cwd=ROOT,
        env=os.environ | TWO_DEVICES,
        capture_output=True,
        text=True,
        timeout=PATIENT_SEC,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def read_results(folder: Path, rank: int) -> Results:
    results: Results = pickle.loads((folder / f"{rank}.pickle").read_bytes())
    return results["local"]


def assert_same_run(results: Results, expected: Results) -> None:
    changes, others = (
        subtract_states(run["state"], draw_state(RECIPE)) for run in (results, expected)
    )
    assert distance(changes, others) < BOUNDS["trajectory"].value
    assert results["scores"].labels.tolist() == expected["scores"].labels.tolist()
    assert results["scores"].losses == pytest.approx(expected["scores"].losses, rel=1e-3)
    assert all_bits(results["resumed"]) == all_bits(results["state"]), "bits repeat"


@in_a_soak
def test_two_devices_compute_as_one(backend: LoadedBackend, world: World, tmp_path: Path) -> None:
    run_on_two_devices(tmp_path)
    results = read_results(tmp_path, 0)
    one = carry_out(SCENARIOS["local"], backend, world)
    assert_same_run(results, one)
    # Local batch norm normalises the images of both devices together.
    of_two, of_one = (statistics(run["state"]) for run in (results, one))
    assert distance(of_two, of_one) < BOUNDS["ranks"].value


@in_a_soak
def test_two_ranks_of_two_devices_are_two_ranks_of_one(
    backend: LoadedBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers = ("tests.backends.workers", "jax", "native")
    four = tmp_path / "four"
    two = tmp_path / "two"
    for folder in (four, two):
        folder.mkdir()
    run_on_two_devices(four, *workers)
    monkeypatch.setitem(TWO_DEVICES, "XLA_FLAGS", "")
    run_on_two_devices(two, *workers)
    for rank in (0, 1):
        assert_same_run(read_results(four, rank), read_results(two, rank))


def test_ranks_that_do_not_know_each_others_places_are_refused(alone: pytest.MonkeyPatch) -> None:
    alone.setenv("RANK", "0")
    alone.setenv("WORLD_SIZE", "2")
    with pytest.raises(BackendError, match=r"need JAX_COORDINATOR_ADDRESS.*`lockstep launch`"):
        backends.load("jax").world(Execution(backend="jax"))
