"""Ranks that the frameworks' own launchers start."""

import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

import lockstep
from lockstep.launch.nodes import one_machine
from tests.backends.conftest import BACKENDS
from tests.cli.cases import read_report, set_fields
from tests.processes import PATIENT_SEC
from tests.soak import in_a_soak


def run_with_launcher(command: list[object], run: Path) -> None:
    """Train an epoch in two ranks."""
    done = subprocess.run(
        [str(word) for word in (*command, *set_fields(epochs=1), "--out", run)],
        capture_output=True,
        text=True,
        timeout=PATIENT_SEC,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert read_report(run)["ranks"] == 2


@pytest.mark.slow
@pytest.mark.skipif("torch" not in BACKENDS, reason="LOCKSTEP_BACKENDS leaves it out")
def test_plain_torchrun_works(arguments: list[object], tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    torchrun += ["--nproc-per-node", "2", "-m", "lockstep"]
    run_with_launcher([*torchrun, *arguments], tmp_path / "run")


@in_a_soak  # torchrun sets variables in the same way
@pytest.mark.skipif("paddle" not in BACKENDS, reason="LOCKSTEP_BACKENDS leaves it out")
def test_plain_paddle_launch_works(arguments: list[object], tmp_path: Path) -> None:
    program = Path(lockstep.__file__).with_name("__main__.py")  # this launcher has no -m
    launch = [sys.executable, "-m", "paddle.distributed.launch", "--nproc_per_node", "2"]
    launch += ["--log_dir", tmp_path / "log", program]
    run_with_launcher([*launch, *arguments, "--backend", "paddle"], tmp_path / "run")


@pytest.mark.slow
@in_a_soak  # `lockstep launch` sets the same variables
@pytest.mark.skipif("tensorflow" not in BACKENDS, reason="LOCKSTEP_BACKENDS leaves it out")
def test_plain_tf_config_works(arguments: list[object], tmp_path: Path) -> None:
    from lockstep.backends.tensorflow.rank_setup import worker

    arguments += ["--backend", "tensorflow", *set_fields(epochs=1), "--out", tmp_path / "run"]
    command = [sys.executable, "-m", "lockstep", *map(str, arguments)]
    table = one_machine(2)
    with ExitStack() as stack:
        ranks = []
        for rank in (0, 1):
            log = tmp_path / f"{rank}.txt"
            errors = stack.enter_context(log.open("w"))
            environment = os.environ | worker(table, rank)
            process = subprocess.Popen(command, env=environment, stderr=errors)
            stack.callback(process.kill)
            ranks.append((process, log))
        for process, log in ranks:
            assert process.wait(PATIENT_SEC) == 0, log.read_text()
    assert read_report(tmp_path / "run")["ranks"] == 2
