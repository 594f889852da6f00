"""The campaign on a CPU: `--device cpu --tiny`, and what it keeps, however its commands end. `make
soak` runs every part, `make test` those that take few seconds."""

import gzip
import json
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import campaign as program
from benchmarks.gpu.campaign import (
    Campaign,
    describe_machine,
    list_open_parts,
    main,
    run_parts,
)
from benchmarks.gpu.parts import Command, Part, list_parts, list_tiny_parts
from tests.processes import is_running, run_module, wait_until
from tests.soak import in_a_soak

SHORT = ("train-resnet50-fp32-4-tiny", "kernels")
ABOUT = {"device": "none", "sources": "a"}
Run = Callable[..., list[dict[str, Any]]]


def run_in_tree(*words: str, **environment: str) -> tuple[int, str, str]:
    done = run_module(*words, **environment)
    return done.returncode, done.stdout, done.stderr


def run_tiny(out: Path, *arguments: str) -> str:
    tiny = ("benchmarks.gpu.campaign", "--device", "cpu", "--tiny", "--minutes", "15")
    code, output, errors = run_in_tree(*tiny, "--out", str(out), *arguments)
    assert (code, errors) == (0, ""), output
    return output


def read_rows(out: Path, part: str) -> list[dict[str, Any]]:
    result = json.loads((out / f"{part}.json").read_text())
    assert (result["status"], result["reason"]) == ("ok", "")
    rows: list[dict[str, Any]] = result["rows"]
    return rows


@pytest.mark.slow
def test_the_campaign_runs_on_a_cpu_and_resumes(tmp_path: Path) -> None:
    output = run_tiny(tmp_path, "--parts", ",".join(SHORT))
    assert "fused kernels against float64" in output
    contenders = {row["contender"] for row in read_rows(tmp_path, SHORT[0])}
    assert {"plain", "deterministic", "eager, SGD", "traced, fused SGD"} <= contenders
    kernels = read_rows(tmp_path, "kernels")
    assert [row["passed"] for row in kernels] == [True] * 3
    assert all({"fused_ms", "plain_ms", "share_of_copy"} <= row.keys() for row in kernels)
    campaign = Campaign(tmp_path, "cpu", time.monotonic(), describe_machine("cpu"))
    parts = [part for part in list_tiny_parts() if part.name in SHORT]
    assert list_open_parts(parts, campaign) == []


@in_a_soak
def test_every_part_runs_on_a_cpu(tmp_path: Path) -> None:
    run_tiny(tmp_path)
    rows = {part.name: read_rows(tmp_path, part.name) for part in list_tiny_parts()}
    for what in ("repeated", "killed", "fine-tuned"):
        assert [row["same"] for row in rows[what]] == [True]
    assert " passed" in rows["conformance"][0]["lines"][-1]
    trace = json.loads(gzip.decompress((tmp_path / "trace.json.gz").read_bytes()))
    assert trace["traceEvents"]


@in_a_soak
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_conformance_suite_does_not_fall_back_to_a_cpu() -> None:
    words = ("pytest", "-q", "-p", "no:cacheprovider", "tests/backends/test_precision.py")
    settings = {"LOCKSTEP_BACKENDS": "torch", "LOCKSTEP_TEST_DEVICE": "cuda"}
    _, output, _ = run_in_tree(*words, **settings)
    assert "device is cuda, but PyTorch finds no GPU here" in output
    assert "passed" not in output.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--show", "nowhere"], "nowhere has no results"),
        (["--parts", "machine,nothing"], "there is no part 'nothing'; the parts are machine, "),
        pytest.param(
            [],
            "PyTorch finds no GPU; a CUDA build of torch",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
        ),
    ],
)
def test_wrong_options_are_refused_in_a_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    errors = capsys.readouterr().err
    assert errors.startswith(f"campaign.py: {message}")
    assert errors.count("\n") == 1


# What is kept


@pytest.fixture
def counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with a line for each command that began. Parts have time, however busy the machine."""
    monkeypatch.setattr(Part, "limit_sec", 600.0)
    monkeypatch.setattr(program, "ENDING_SEC", 0.5)
    return tmp_path / "counted"


@pytest.fixture
def run(tmp_path: Path, counted: Path) -> Run:
    """A function that measures the parts that are missing, and returns all results."""

    def measure(
        *parts: Part, seconds: float = 1000, about: dict[str, Any] = ABOUT
    ) -> list[dict[str, Any]]:
        campaign = Campaign(tmp_path, "cpu", time.monotonic() + seconds, about)
        run_parts(list_open_parts(parts, campaign), campaign)
        files = [tmp_path / f"{part.name}.json" for part in parts]
        return [json.loads(file.read_text()) for file in files if file.exists()]

    return measure


def make_part(name: str, counted: Path, *endings: str) -> Part:
    commands = [Command(f"tests.gpu.pretend {ending} {counted}") for ending in endings or ("well",)]
    return Part(name, 0.1, tuple(commands))


@pytest.mark.parametrize(
    ("ending", "reason"),
    [
        ("raise", "exit code 1: ValueError: the figure is not there"),
        ("die", "SIGKILL: without a message"),
    ],
)
def test_a_command_that_ends_badly_keeps_its_rows_and_does_not_take_the_others(
    run: Run, counted: Path, ending: str, reason: str
) -> None:
    [result] = run(make_part("bad", counted, ending, "well"))
    assert (result["status"], result["reason"]) == ("failed", reason)
    assert [row["what"] for row in result["rows"]] == ["begun", "begun"]


def test_a_command_that_hangs_is_killed_with_all_that_it_started(
    run: Run, counted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Patient(subprocess.Popen):  # type: ignore[type-arg]
        """Its time begins when the command hangs: a busy machine starts processes slowly."""

        def wait(self, timeout: float | None = None) -> int:
            wait_until(Path(f"{counted}-hangs").exists)
            return super().wait(timeout)

    monkeypatch.setattr(program.subprocess, "Popen", Patient)
    part = make_part("hangs", counted, "hang")
    [result] = run(part, seconds=1)
    assert (result["status"], result["reason"]) == ("stopped", "the campaign's time is over")
    [child] = [row["number"] for row in result["rows"] if row["what"] == "child"]
    wait_until(lambda: not is_running(child))
    monkeypatch.setattr(Part, "limit_sec", 1.0)
    [result] = run(part)  # once more, since it was not done
    assert result["reason"] == "ran longer than its limit of 1 s"


def test_what_is_done_is_measured_again_only_for_other_commands_devices_or_sources(
    run: Run, counted: Path
) -> None:
    part = make_part("one", counted)
    other = ABOUT | {"sources": "b"}
    for changed, about, times in (
        (part, ABOUT, 1),
        (part, ABOUT, 1),
        (part, other, 2),
        (make_part("one", counted, "otherwise"), other, 3),
    ):
        [result] = run(changed, about=about)
        assert result["status"] == "ok"
        assert counted.read_text() == "begun\n" * times


def test_a_part_is_left_out_if_too_little_time_is_left(run: Run, counted: Path) -> None:
    part = make_part("one", counted)
    assert run(replace(part, expected_sec=10_000)) == []
    [result] = run(part)
    assert result["status"] == "ok"


def test_every_part_has_another_name() -> None:
    for parts in (list_parts(), list_tiny_parts()):
        assert len({part.name for part in parts}) == len(parts)
