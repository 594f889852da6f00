"""The campaign on a CPU: `--device cpu --tiny`. `make soak` runs every part, `make test` those that
take few seconds."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import exact, inferring, jpegs, profiling
from benchmarks.gpu.baselines import Loop, Network
from benchmarks.gpu.engines import recipe_of
from benchmarks.gpu.parts import DETERMINISTIC, PLAIN, tiny_parts
from benchmarks.gpu.switches import Switches
from benchmarks.gpu.timing import Ground
from tests.processes import ONE_THREAD, ROOT, with_triton
from tests.soak import in_a_soak

TRAINING = "train-resnet50-fp32-4"
SHORT = ("machine", TRAINING, "memory", "kernels")


def campaign(out: Path, *arguments: str) -> tuple[int, str, str]:
    command = [sys.executable, "benchmarks/gpu/campaign.py", "--out", str(out), *arguments]
    environment = ONE_THREAD | {"PYTHONPATH": with_triton().get("PYTHONPATH", "")}
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=2000,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def results(out: Path) -> dict[str, dict[str, Any]]:
    return {
        result["part"]: result
        for result in json.loads((out / "campaign.json").read_text())["results"]
    }


@pytest.mark.slow
def test_the_campaign_runs_on_a_cpu_and_goes_on_with_what_is_missing(tmp_path: Path) -> None:
    tiny = ("--device", "cpu", "--tiny")
    code, output, errors = campaign(tmp_path, *tiny, "--parts", ",".join(SHORT[1:]))
    assert (code, errors) == (0, "")
    code, output, errors = campaign(tmp_path, *tiny, "--parts", ",".join(SHORT))
    assert (code, errors) == (0, "")
    assert "1 of 4 parts to measure" in output  # not what is done, only the part that is new
    found = results(tmp_path)
    assert {name: result["status"] for name, result in found.items()} == dict.fromkeys(SHORT, "ok")
    (said,) = found["memory"]["rows"]
    assert (said["is_right"], said["goes_on"]) == (True, True)
    rows = found[TRAINING]["rows"]
    trained = {row["contender"]: row["images_per_sec"] for row in rows if row["what"] == "train"}
    assert trained.keys() == {
        *(
            PLAIN,
            DETERMINISTIC,
            "eager, SGD",
            "eager, fused SGD",
            "traced, SGD",
            "traced, fused SGD",
        )
    }
    assert all(rate > 0 for rate in trained.values())
    assert [row["same"] for row in rows if row["what"] == "same bits"] == [True, True]
    assert {row["what"] for row in found["machine"]["rows"]} == {"copy", "product"}
    kernels = [row for row in found["kernels"]["rows"] if row["what"] == "fused kernel"]
    assert [row["passed"] for row in kernels] == [True] * 3
    assert all({"fused_ms", "plain_ms", "share_of_copy"} <= row.keys() for row in kernels)
    assert "lockstep, deterministic" in output.partition("images/s")[2]


@in_a_soak
def test_every_part_runs_on_a_cpu(tmp_path: Path) -> None:
    code, _, errors = campaign(tmp_path, "--device", "cpu", "--tiny", "--minutes", "15")
    assert (code, errors) == (0, "")
    found = results(tmp_path)
    assert found.keys() == {part.name for part in tiny_parts()}
    assert [name for name, result in found.items() if result["status"] != "ok"] == []
    for name, what, field in (
        ("killed", "killed", "same"),
        ("ranks", "ranks", "passed"),
        ("verify", "verify", "passed"),
    ):
        assert [row[field] for row in found[name]["rows"] if row["what"] == what] == [True]
    assert found["conformance"]["rows"][0]["tests"] > 0


@in_a_soak
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_conformance_suite_does_not_fall_back_to_a_cpu() -> None:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "tests/backends/test_precision.py",
    ]
    environment = (
        os.environ | ONE_THREAD | {"LOCKSTEP_BACKENDS": "torch", "LOCKSTEP_TEST_DEVICE": "cuda"}
    )
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert "device is cuda, but PyTorch finds no GPU here" in done.stdout
    assert "passed" not in done.stdout.splitlines()[-1]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_campaign_says_what_to_do(tmp_path: Path) -> None:
    code, output, errors = campaign(tmp_path)
    assert (code, output, errors.count("\n")) == (2, "", 1)
    assert errors.startswith("campaign.py: PyTorch finds no GPU")
    assert errors.endswith("--device cpu --tiny\n")


# Parts in this process


@pytest.fixture
def ground(tmp_path: Path) -> Iterator[Ground]:
    threads = torch.get_num_threads()
    switches = Switches.now()
    torch.set_num_threads(1)
    yield Ground("cpu", True, time.monotonic() + 1000, str(tmp_path))
    torch.set_num_threads(threads)
    switches.set()


def test_repeated_steps_have_the_same_bits(ground: Ground) -> None:
    rows: list[Any] = []
    exact.measure(ground, rows.append)
    assert [
        (row["what"], row.get("same"), row.get("resumed"), row.get("passed")) for row in rows
    ] == [
        ("repeated", True, True, None),
        ("gpu against cpu", None, None, True),
    ]


def test_training_from_pictures_is_measured(ground: Ground) -> None:
    rows: list[Any] = []
    jpegs.measure(ground, rows.append, ("fp32",))
    found = {row["what"]: row for row in rows}
    assert (found["ratio"]["of"], found["ratio"]["over"]) == ("from JPEGs", "held batch")
    assert found["loader alone"]["images_per_sec"] > 0
    assert found["pictures"]["drawn"]


def test_a_step_is_traced(ground: Ground) -> None:
    rows: list[Any] = []
    profiling.measure(ground, rows.append, precisions=("fp32",))
    (row,) = rows
    assert row["contender"] == PLAIN
    assert 0 < row["busy_share"] <= 1
    assert any("conv" in each["name"] for each in row["longest"])
    assert len(row["longest"]) == 10


def test_inference_is_measured_or_said_to_be_missing(ground: Ground) -> None:
    rows: list[Any] = []
    inferring.measure(ground, rows.append)
    measured = {
        (row["engine"], row["precision"], row["batch"]) for row in rows if row.get("status") == "ok"
    }
    assert {
        (engine, "fp32", images)
        for engine in ("native", "plain PyTorch, eager")
        for images in (1, 4)
    } <= measured
    assert [row["reason"] for row in rows if row.get("status") == "failed"] == []


def test_the_loops_take_the_step_of_sgd(ground: Ground) -> None:
    recipe = recipe_of(ground, "resnet50", "fp32", 4)
    moved = []
    for optimizer in ("SGD", "fused SGD"):
        network = Network(recipe, 4, "cpu", "eager")
        before = network.model.state_dict()["conv1.weight"].clone()
        loss = network.loss(network.images, network.labels)
        (gradient,) = torch.autograd.grad(loss, [network.model.get_parameter("conv1.weight")])
        Loop(network, optimizer).run(1)
        moved.append(network.model.get_parameter("conv1.weight").detach() - before)
        expected = -1e-3 * (gradient + recipe.weight_decay * before)
        torch.testing.assert_close(moved[-1], expected, rtol=1e-3, atol=1e-8)
    assert torch.equal(torch.sign(moved[0]), torch.sign(moved[1]))


def test_switches_are_set_back() -> None:
    before = Switches.now()
    try:
        Switches.of_a_careful_user("bf16").set()
        assert Switches.now() == Switches(False, False, True, True, True)
    finally:
        before.set()
    assert Switches.now() == before
