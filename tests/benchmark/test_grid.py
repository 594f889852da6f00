"""Measure with real engines, each cell in a separate process: what a report holds, and what an
interrupted one keeps."""

import importlib.metadata
import json
import math
import resource
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lockstep import backends
from lockstep.benchmark import grid as grids
from lockstep.benchmark.cells import Cell, Plan, grid
from lockstep.benchmark.grid import benchmark
from lockstep.benchmark.report_file import find_environment, read_benchmark
from lockstep.inference.runtimes import RUNTIMES, count_threads
from lockstep.system.errors import DataError, Interrupted, UserError
from lockstep.system.files import write_json
from lockstep.system.workers import Ended
from tests.benchmark.cases import rank, timeline
from tests.processes import call, running, wait_until
from tests.soak import in_a_soak

SMALL: dict[str, Any] = {"image_size": 32, "eval_crop": 32, "eval_resize": 36, "logits": 10}
HERE = [name for name, framework in backends.FRAMEWORKS.items() if framework.version() is not None]
PLAN = Plan(iterations=3, epochs=2, warmup_epochs=1, changes=SMALL)
SET = [part for name, value in SMALL.items() for part in ("--set", f"{name}={value}")]


def cells(what: str = "train", **axes: Any) -> list[Cell]:
    return grid((what,), **{"models": ["resnet18"], "batches": (4,)} | axes)


def one(report: dict[str, Any]) -> dict[str, Any]:
    (entry,) = report["cells"]
    assert entry["status"] == "ok", entry["reason"]
    return entry


def assert_sound(entry: dict[str, Any]) -> None:
    """Check the figures of a cell by the rules, not by the code that made them."""
    times = entry["times_sec"]
    latency = entry["latency_ms"]
    assert len(times) == entry["iterations"] * entry["epochs"] == 6
    assert min(times) > 0
    result = entry["images_per_sec"] * math.fsum(times)
    assert result == pytest.approx(entry["batch"] * entry["ranks"] * len(times))
    assert latency["p100"] == pytest.approx(1000 * max(times))
    assert latency["p50"] <= latency["p90"] <= latency["p95"] <= latency["p99"] <= latency["p100"]
    low, high = entry["interval"]
    assert 0 < low <= high
    assert 0 <= entry["data_wait_share"] < 1
    assert entry["roofline"]["gflop_per_image"] > 0
    assert entry["roofline"]["bytes_per_image"] > 0
    assert len(entry["other_definitions"]) == 5
    assert entry["steady"] is False  # six iterations are too few to tell


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "backend"),
    [("train", "tensorflow"), pytest.param("inference", "torch", marks=in_a_soak)],
)
def test_a_cell_is_measured_in_a_process_of_its_own(what: str, backend: str) -> None:
    report = benchmark(cells(what, backends=[backend]), PLAN, command="a command")
    entry = one(report)
    assert_sound(entry)
    assert (entry["backend"], entry["what"], entry["bound_by"]) == (backend, what, "computing")
    assert report["machine"]["gemm_gflops"]["fp32"] == entry["roofline"]["gemm_gflops"] > 0
    assert report["machine"]["copy_gb_per_sec"] > 0
    assert report["environment"][backend][backend] == backends.FRAMEWORKS[backend].version()
    assert (report["kind"], report["version"]) == ("lockstep-benchmark", 1)
    assert report["command"] == "a command"
    assert json.loads(json.dumps(report, allow_nan=False)) == report


@pytest.mark.slow
def test_another_runtime_is_measured_without_a_limit_of_its_own_also_in_int8() -> None:
    report = benchmark(cells("inference", runtimes=["onnxruntime"], dtypes=("fp32", "int8")), PLAN)
    assert [entry["dtype"] for entry in report["cells"]] == ["fp32", "int8"]
    for entry in report["cells"]:
        times = entry["times_sec"]
        assert entry["images_per_sec"] * math.fsum(times) == pytest.approx(4 * len(times))
        assert entry["runtime"] == "onnxruntime"
        assert entry["device"].startswith(f"CPU, {count_threads()} thread")
        assert entry["roofline"]["share_of_limit"] is None
        assert min(entry["times_sec"]) < entry["first_answer_sec"] < 600
        assert 50e6 < entry["peak_memory_bytes"] < 4e9
    (environment,) = report["environment"].values()
    assert environment["onnxruntime"] == importlib.metadata.version("onnxruntime")


@pytest.mark.slow
def test_a_cell_in_int8_runs_the_model_that_was_quantised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grids, "_export_int8", lambda recipe, runtime: b"not a model")
    grid = cells("inference", runtimes=["onnxruntime"], dtypes=("int8",))
    [entry] = benchmark(grid, PLAN)["cells"]
    assert entry["status"] == "failed"
    assert "ONNX Runtime cannot run this model" in entry["reason"]


def test_a_runtime_that_is_missing_is_a_status(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        RUNTIMES, "openvino", replace(RUNTIMES["openvino"], distributions=("no-such-distribution",))
    )
    [entry] = benchmark(cells("inference", runtimes=["openvino"]), PLAN)["cells"]
    assert entry["status"] == "missing"
    assert entry["reason"].startswith("pip install openvino==")


@in_a_soak
def test_ranks_are_launched_and_folders_have_both_ceilings(textures: Path) -> None:
    grid = cells(data=str(textures), ranks=(2,))
    entry = one(benchmark(grid, replace(PLAN, num_examples=18)))
    assert_sound(entry)
    assert entry["ranks"] == 2
    assert entry["data_wait_share"] > 0
    ceilings = entry["compute_only_images_per_sec"], entry["loader_only_images_per_sec"]
    assert min(ceilings) > 0
    assert entry["bound_by"] == ("computing" if ceilings[0] <= ceilings[1] else "data")


@pytest.mark.slow
def test_images_too_few_for_a_step_fail_with_the_reason(textures: Path) -> None:
    report = benchmark(cells(data=str(textures)), replace(PLAN, num_examples=3))
    assert report["cells"][0]["status"] == "failed"
    assert "has 3 images to use, fewer than the 4 of one step" in report["cells"][0]["reason"]
    assert report["cells"][0]["images_per_sec"] is None


def infer_batches(batches: str, out: Path) -> list[Any]:
    """Return the arguments that measure the reference's inference at some batches."""
    grid = ("--backend", "reference", "--model", "resnet18", "-b", batches, "-i", 2)
    return ["benchmark", "inference", *grid, *SET, "-o", out]


def run(arguments: list[Any]) -> str:
    """Run a command that must succeed; return its output."""
    code, output, errors = call(*arguments)
    assert (code, errors) == (0, "")
    return output


@pytest.mark.slow
def test_a_killed_benchmark_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # the folder of a killed process stays
    out = tmp_path / "report.json"
    arguments = infer_batches("100000,1", out)
    with running(*arguments) as process:
        # 100,000 images of 32 px are 2.3 GiB in float64: more than the process may have, like on a
        # machine with less memory.
        limit = 3 * 2**30
        resource.prlimit(process.pid, resource.RLIMIT_AS, (limit, limit))
        wait_until(lambda: bool(out.exists() and read_benchmark(out)["cells"]), 300)
        process.kill()
        process.communicate()  # it is gone, and its pipes are closed
    kept = read_benchmark(out)["cells"]
    assert kept[0]["status"] == "out of memory"
    assert "MemoryError" in kept[0]["reason"]
    assert kept[0]["images_per_sec"] is kept[0]["times_sec"] is None
    output = run(arguments)
    assert "batch 100000 (kept): out of memory" in output
    large, small = read_benchmark(out)["cells"]
    assert [large, small][: len(kept)] == kept  # a cell may end before the kill
    assert small["status"] == "ok"


# Without processes


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Path], Ended]], None]:
    """A function that replaces the processes that measure with another function."""

    def replace_by(work: Callable[[Path], Ended]) -> None:
        monkeypatch.setattr(grids, "carry_out", lambda command, folder, progress: work(folder))

    return replace_by


def test_a_missing_backend_is_named_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "find_interpreter", lambda name: None)
    (entry,) = benchmark(cells(backends=["mxnet"]), PLAN)["cells"]
    assert entry["status"] == "missing"
    assert "make mxnet-env" in entry["reason"]


def test_a_process_that_says_nothing_has_failed(worker: Callable[..., None]) -> None:
    worker(lambda folder: Ended(1, ""))
    (entry,) = benchmark(cells(), PLAN)["cells"]
    assert entry["status"] == "failed"
    assert "exit code 1" in entry["reason"]


def test_failed_cells_are_measured_again(worker: Callable[..., None], tmp_path: Path) -> None:
    measured: list[int] = []

    def fail(folder: Path) -> Ended:
        batch = json.loads((folder / "cell.json").read_text())["cell"]["batch"]
        measured.append(batch)
        return Ended(1, "std::bad_alloc" if batch == 8 else "no")

    worker(fail)
    for _ in range(2):
        report = benchmark(cells(batches=(4, 8)), PLAN, out=tmp_path / "report.json")
    assert measured == [4, 8, 4]
    assert [entry["status"] for entry in report["cells"]] == ["failed", "out of memory"]


def test_new_versions_are_a_remark(worker: Callable[..., None], tmp_path: Path) -> None:
    versions = {"torch": "2.0", "reference": "1.26"}

    def measure(folder: Path) -> Ended:
        backend = json.loads((folder / "cell.json").read_text())["cell"]["backend"]
        environment = {backend: versions[backend], "python": backend}
        result = rank(timeline(*map(float, range(1, 7))), environment=environment)
        write_json(folder / "rank-0.json", result)
        return Ended(0, "")

    worker(measure)
    out = tmp_path / "report.json"
    report = benchmark(cells(backends=["torch", "reference"]), PLAN, out=out)
    assert report["environment"] == {
        "torch": {"torch": "2.0", "python": "torch"},
        "reference": {"reference": "1.26", "python": "reference"},
    }
    assert find_environment(report, "reference")["python"] == "reference"
    versions["torch"] = "2.1"
    first, _, again = benchmark(cells(backends=["torch"], batches=(8,)), PLAN, out=out)["cells"]
    assert first["remarks"] == []
    assert again["remarks"] == ["measured with torch 2.1, earlier cells with 2.0"]


def test_ctrl_c_keeps_what_is_there(worker: Callable[..., None], tmp_path: Path) -> None:
    done: list[Path] = []

    def interrupt(folder: Path) -> Ended:
        if done:
            raise KeyboardInterrupt
        done.append(folder)
        return Ended(1, "no")

    worker(interrupt)
    out = tmp_path / "report.json"
    with pytest.raises(Interrupted, match=r"after 1 of 2 cells, kept in .*report") as stopped:
        benchmark(cells(batches=(4, 8)), PLAN, out=out)
    assert stopped.value.exit_code == 130
    assert [entry["batch"] for entry in read_benchmark(out)["cells"]] == [4]
    assert not done[0].exists()


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("query_gpus", [{"gpu": "H200", "driver": "570"}], r"gpus: \['H100'\] there, \['H200'\]"),
        ("query_gpus", [{"gpu": "H100", "driver": "571"}], "driver: 570 there, 571 now"),
        ("version", "9.9", r"lockstep: \S+ there, 9.9 now"),
        ("", None, "iterations: 3 there, 4 now"),
    ],
)
def test_a_report_of_other_settings_or_machines_is_not_mixed_with(
    name: str,
    value: object,
    message: str,
    worker: Callable[..., None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worker(lambda folder: Ended(1, "no"))
    out = tmp_path / "report.json"
    monkeypatch.setattr(grids, "query_gpus", lambda: [{"gpu": "H100", "driver": "570"}])
    benchmark(cells(), PLAN, out=out)
    if name:
        monkeypatch.setattr(grids, name, lambda: value)
    with pytest.raises(UserError, match=message):
        benchmark(cells(), PLAN if name else replace(PLAN, iterations=4), out=out)


def test_a_file_that_is_no_report_is_refused_and_kept(tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    out.write_text(text := '{"kind": "lockstep-benchmark", "version": 2}')
    with pytest.raises(UserError, match=r"is (not )?a report of `lockstep benchmark`"):
        benchmark(cells(), PLAN, out=out)
    assert out.read_text() == text


def test_a_report_that_cannot_be_written_is_said_before_anything_is_measured(
    worker: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, value: Any) -> None:
        raise OSError(28, "No space left on device")

    measured: list[Path] = []
    worker(lambda folder: (measured.append(folder), Ended(1, "no"))[1])
    monkeypatch.setattr(grids, "write_json", full)
    with pytest.raises(UserError, match=r"cannot write .*report.json: No space left on device"):
        benchmark(cells(), PLAN, out=tmp_path / "report.json")
    assert measured == []


def test_a_folder_that_is_not_there_is_said_before_anything_is_measured(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not a folder"):
        benchmark(cells(), PLAN, out=tmp_path / "none" / "report.json")


def test_a_number_of_examples_needs_images() -> None:
    with pytest.raises(UserError, match="synthetic data is one batch"):
        benchmark(cells(), replace(PLAN, num_examples=9))


def test_data_that_are_not_there_are_said_before_anything_is_measured(tmp_path: Path) -> None:
    with pytest.raises(DataError):
        benchmark(cells(data=str(tmp_path / "none")), PLAN)
