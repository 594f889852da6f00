"""A made-up run and report in the formats of other programs; every figure is computed by hand."""

import csv
import json
import os
from pathlib import Path
from typing import Any

import pytest

from lockstep.benchmark.foreign_reports import convert
from lockstep.recipes import Recipe
from lockstep.system.errors import CheckpointError, DataError, UserError
from tests.benchmark.published_cases import report

BATCH = 8
ENDED = 1_700_000_100.0


def train(first: int, step: int, seconds: float, **figures: float) -> dict[str, Any]:
    images = BATCH * (step - first)
    entry = {"kind": "train", "step": step, "first_step": first, "losses": [2.0] * (step - first)}
    entry |= {"loss": 2.0, "top1_percent": 25.0, "top5_percent": 50.0, "loss_scale": 128.0}
    entry |= {"images": images, "images_per_sec": images / seconds, "data_wait_share": 0.25}
    return entry | {"lr": 0.5, "elapsed_sec": 0.0} | figures


def evaluate(step: int, weights: str = "trained", **figures: float) -> dict[str, Any]:
    entry = {"kind": "evaluate", "step": step, "weights": weights, "images": 20}
    entry |= {"loss": 1.5, "top1_percent": 60.0, "top5_percent": 90.0}
    return entry | {"images_per_sec": 40.0, "elapsed_sec": 0.0} | figures


# Five steps in each epoch. The run was stopped once within the second epoch. Of the 42 images 2 are
# left out.
LOG = [
    {"kind": "start", "step": 0, "elapsed_sec": 0.0},
    train(0, 4, 2.0, loss=3.0, top1_percent=10.0),
    train(4, 5, 0.5, loss=1.0, top1_percent=60.0, lr=0.75),
    evaluate(5, elapsed_sec=3.5),
    {"kind": "start", "step": 5, "elapsed_sec": 0.25},
    train(5, 8, 3.0),
    train(8, 10, 1.0, lr=0.125),
    evaluate(10, loss=1.25, top1_percent=70.0, images_per_sec=80.0, batches=5, data_wait_share=0.2),
    evaluate(10, "ema", loss=1.0, top1_percent=75.0, top5_percent=95.0, elapsed_sec=5.5),
]


@pytest.fixture
def run(tiny_recipe: Recipe, tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    recipe = tiny_recipe.replace(model="resnet50", global_batch_images=BATCH, ema_decay=0.9)
    (folder / "recipe.yaml").write_text(recipe.format_yaml())
    about = {
        "ranks": 2,
        "train": {"images": 42},
        "execution": {"backend": "torch"},
        "command": ["lockstep", "train"],
    }
    (folder / "environment.json").write_text(json.dumps(about))
    write_log(folder, LOG)
    return folder


def write_log(folder: Path, entries: list[dict[str, Any]]) -> None:
    (folder / "log.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    os.utime(folder / "log.jsonl", (ENDED, ENDED))


def write_report(tmp_path: Path, *changes: dict[str, Any]) -> Path:
    (tmp_path / "report.json").write_text(json.dumps(report(*changes)))
    os.utime(tmp_path / "report.json", (ENDED, ENDED))
    return tmp_path / "report.json"


def parse_lines(text: str) -> list[dict[str, Any]]:
    assert all(line.startswith('DLLL {"timestamp": "') for line in text.splitlines())
    return [json.loads(line.removeprefix("DLLL ")) for line in text.splitlines()]


def parse_logged(source: Path) -> list[dict[str, Any]]:
    """Return the lines of dllogger that hold figures."""
    return [line for line in parse_lines(convert(source, "dlll")) if line["type"] == "LOG"]


def test_the_report_of_mxnets_example(run: Path) -> None:
    text = convert(run, "nvidia-report")
    form = json.loads(text)
    # json.dump(report, f, indent=4).
    assert text.startswith('{\n    "model": "resnet50",\n    "ngpus": 2,')
    assert list(form) == ["model", "ngpus", "total_duration", "cmd", "metrics"]
    assert form["cmd"] == ["lockstep", "train"]
    assert form["total_duration"] == 3.5 + 5.5  # of both processes
    assert form["metrics"] == {
        "train.top1": [(10 * 32 + 60 * 8) / 40, 25.0],
        "train.top5": [50.0, 50.0],
        "train.loss": [(3 * 32 + 1 * 8) / 40, 2.0],
        "train.time": [2.5 / 5, 4.0 / 5],
        "train.total_ips": [40 / 2.5, 40 / 4.0],
        "val.top1": [60.0, 70.0],
        "val.top5": [90.0, 90.0],
        "val.loss": [1.5, 1.25],
        "val.time": [0.5 / 3, 0.25 / 3],  # 20 images are 3 batches
        "val.total_ips": [40.0, 80.0],
    }


def test_the_summary_of_timm(run: Path) -> None:
    text = convert(run, "timm")
    assert text.startswith("epoch,train_loss,eval_loss,eval_top1,eval_top5,lr\r\n")
    assert list(csv.reader(text.splitlines()[1:])) == [
        ["0", "2.6", "1.5", "60.0", "90.0", "0.75"],
        ["1", "2.0", "1.0", "75.0", "95.0", "0.125"],  # of the moving average, as in timm
    ]


def test_an_epoch_that_was_not_evaluated_has_no_values(run: Path) -> None:
    write_log(run, [entry for entry in LOG if (entry["kind"], entry["step"]) != ("evaluate", 5)])
    assert json.loads(convert(run, "nvidia-report"))["metrics"]["val.top1"] == [70.0]
    assert convert(run, "timm").splitlines()[1] == "0,2.6,,,,0.75"


def test_an_unfinished_epoch_counts_as_far_as_it_went(run: Path) -> None:
    write_log(run, LOG[:2])
    assert json.loads(convert(run, "nvidia-report"))["metrics"]["train.total_ips"] == [16.0]


def test_steps_under_a_profiler_have_no_speed(run: Path) -> None:
    write_log(
        run,
        [
            train(0, 4, 2.0),
            train(4, 5, 50.0, loss=7.0, traced=True),
            train(5, 6, 50.0, traced=True),
        ],
    )
    metrics = json.loads(convert(run, "nvidia-report"))["metrics"]
    assert metrics["train.loss"] == [(2 * 32 + 7 * 8) / 40, 2.0]
    assert metrics["train.time"] == [2.0 / 4]  # the second epoch has none
    assert metrics["train.total_ips"] == [32 / 2.0]
    logged = [line["data"] for line in parse_logged(run)]
    assert "train.total_ips" in logged[1]
    assert logged[2] == {"train.loss": 7.0, "train.lr": 0.5, "train.grad_scale": 128.0}


def test_lines_of_dllogger_of_a_run(run: Path) -> None:
    lines = parse_lines(convert(run, "dlll"))
    metadata = {line["metric"]: line["metadata"] for line in lines if line["type"] == "METADATA"}
    assert metadata["train.total_ips"] == {"unit": "images/s"}
    assert metadata["train.data_time"] == {"unit": "s"}
    assert "train.loss" not in metadata
    logged = [line for line in lines if line["type"] == "LOG"]
    assert [line["step"] for line in logged] == [
        "PARAMETER",
        *([0, 4], [0, 5], [0], [0]),  # the steps, all of the epoch, the evaluation
        *([1, 3], [1, 5], [1], [1], [1]),  # and the evaluation of the moving average
        [],
    ]
    assert logged[0]["data"]["model"] == "resnet50"
    assert logged[1]["data"] == {
        "train.loss": 3.0,
        "train.compute_ips": pytest.approx(32 / 1.5),
        "train.total_ips": 16.0,
        "train.data_time": 0.125,
        "train.compute_time": 0.375,
        "train.lr": 0.5,
        "train.grad_scale": 128.0,
    }
    trained = {"train.loss": 2.0, "train.total_ips": 10.0, "train.compute_ips": 40 / 3.0}
    trained |= {
        "train.lr": 0.125,
        "train.data_time": 0.2,
        "train.compute_time": 0.6,
        "train.grad_scale": 128.0,
    }
    assert logged[7]["data"] == pytest.approx(trained)  # 40 images in five steps and 4 s
    evaluated = {"val.top1": 70.0, "val.top5": 90.0, "val.loss": 1.25, "val.total_ips": 80.0}
    evaluated |= {"val.compute_ips": 100.0, "val.data_time": 0.01, "val.compute_latency": 0.04}
    assert logged[8]["data"] == pytest.approx(evaluated)  # 20 images in five batches and 0.25 s
    averaged = {"val_ema.top1": 75.0, "val_ema.top5": 95.0, "val_ema.loss": 1.0}
    averaged |= {"val_ema.total_ips": 40.0}
    assert logged[9]["data"] == averaged  # a log without batches
    assert logged[-1]["data"] == pytest.approx(trained | evaluated | averaged)
    assert list(logged[1]) == ["timestamp", "datetime", "elapsedtime", "type", "step", "data"]
    assert logged[1]["timestamp"] == str(ENDED - 9 + 2)
    assert logged[1]["elapsedtime"] == "2.0"


@pytest.mark.parametrize(
    ("backend", "interval", "evaluation"),
    [
        (
            "paddle",
            {"train.top1": 0.1, "train.batch_time": 0.5, "train.ips": 16.0, "train.lr": 0.5},
            {"val.top1": 0.6, "val.top5": 0.9, "val.loss": 1.5, "val.ips": 40.0},
        ),
        (
            "mxnet",
            {"train.loss": 3.0, "train.ips": 16.0},
            {"val.accuracy": 0.6, "val.top_k_accuracy_5": 0.9},
        ),
        (
            "tensorflow",
            {"imgs_per_sec": 16.0, "cross_entropy": 3.0, "learning_rate": 0.5},
            {"top1_accuracy": 0.6, "top5_accuracy": 0.9, "eval_throughput": 40.0},
        ),
        ("reference", {"train.total_ips": 16.0}, {"val.top1": 60.0}),
    ],
)
def test_keys_and_units_are_those_of_the_frameworks_example(
    backend: str, interval: dict[str, float], evaluation: dict[str, float], run: Path
) -> None:
    about = json.loads((run / "environment.json").read_text()) | {"execution": {"backend": backend}}
    (run / "environment.json").write_text(json.dumps(about))
    units = {str(line["step"]): line["data"] for line in parse_logged(run)}
    assert {name: units["[0, 4]"][name] for name in interval} == pytest.approx(interval)
    assert {name: units["[0]"][name] for name in evaluation} == pytest.approx(evaluation)


def test_the_grid_of_mxnets_benchmark(tmp_path: Path) -> None:
    cells = [
        {"ranks": n, "batch": b, "images_per_sec": float(n * b)} for n in (1, 4) for b in (64, 128)
    ]
    cells[3] = {"ranks": 4, "batch": 128, "status": "out of memory", "images_per_sec": None}
    cells.append({"ranks": 1, "batch": 64, "what": "inference"})
    text = convert(write_report(tmp_path, *cells), "nvidia-benchmark")
    assert text.startswith('{\n    "model": "",\n    "ngpus": [\n        1,\n')
    assert json.loads(text) == {
        "model": "",
        "ngpus": [1, 4],
        "bs": [64, 128],
        "metric_keys": ["train.total_ips", "val.total_ips"],
        "metrics": {
            "1": {
                "64": {"train.total_ips": 64.0, "val.total_ips": 721.3},
                "128": {"train.total_ips": 128.0},
            },
            "4": {"64": {"train.total_ips": 256.0}, "128": {}},
        },
    }


def test_a_grid_of_inference_alone_has_its_key_alone(tmp_path: Path) -> None:
    form = json.loads(convert(write_report(tmp_path, {"what": "inference"}), "nvidia-benchmark"))
    assert form["metric_keys"] == ["val.total_ips"]


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("backend", ("paddle", "torch")),
        ("dtype", ("bf16", "fp32")),
        ("compile", ("off", "on")),
        ("layout", ("nchw", "nhwc")),
    ],
)
def test_a_report_beyond_the_grid_is_refused(name: str, values: tuple, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"one {name}, the report has {', '.join(values)}"):
        convert(write_report(tmp_path, *({name: value} for value in values)), "nvidia-benchmark")


def test_lines_of_dllogger_of_a_benchmark(tmp_path: Path) -> None:
    cells = [
        {},
        {"what": "inference", "backend": "mxnet"},
        {"what": "inference", "backend": "tensorflow"},
        {"status": "failed"},
    ]
    lines = parse_logged(write_report(tmp_path, *cells))
    assert [line["step"] for line in lines] == ["PARAMETER", []] * 3
    assert lines[0]["data"]["batch"] == 208
    assert lines[1]["data"] == {"train.total_ips": 721.3}
    sec = {"avg": 0.5, "50": 0.25, "90": 0.9, "95": 0.95, "99": 0.99, "100": 1.0}
    latencies = {f"val.latency_{name}": value for name, value in sec.items()}
    assert lines[3]["data"] == pytest.approx({"val.ips": 721.3} | latencies)
    ms = {"avg": 500.0, "p90": 900.0, "p95": 950.0, "p99": 990.0}
    latencies = {f"eval_latency_{name}": value for name, value in ms.items()}
    assert lines[5]["data"] == {"eval_throughput": 721.3} | latencies
    assert [float(line["elapsedtime"]) for line in lines] == [0, 2, 2, 4, 4, 6]
    assert float(lines[-1]["timestamp"]) == ENDED


def test_what_cannot_be_made_is_refused(run: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"there is no form 'tim'\. Did you mean timm"):
        convert(run, "tim")
    with pytest.raises(UserError, match="nvidia-benchmark is made from a benchmark report"):
        convert(run, "nvidia-benchmark")
    with pytest.raises(UserError, match="timm is made from a run's folder"):
        convert(write_report(tmp_path, {}), "timm")


def test_a_folder_without_a_run_is_refused(tmp_path: Path, run: Path) -> None:
    with pytest.raises(CheckpointError, match=r"is not a run's folder: it has no recipe\.yaml"):
        convert(tmp_path, "timm")
    (run / "environment.json").unlink()
    with pytest.raises(CheckpointError, match="nothing was trained yet"):
        convert(run, "timm")


@pytest.mark.parametrize(
    ("left", "problem"),
    [
        (b"", "is not JSON; restore it"),
        (b'{"ranks": 2, "tra', "is not JSON; restore it"),
        (b"\xff\xfe", "is not JSON; restore it"),
        (b'{"ranks": 2, "train": {}}', "lacks the number of training images or of ranks"),
    ],
)
def test_a_damaged_environment_is_refused(left: bytes, problem: str, run: Path) -> None:
    (run / "environment.json").write_bytes(left)
    with pytest.raises(CheckpointError, match=rf"environment\.json {problem}"):
        convert(run, "timm")


def test_a_run_that_trained_nothing_is_refused(run: Path) -> None:
    write_log(run, LOG[:1])
    with pytest.raises(CheckpointError, match="nothing was trained yet"):
        convert(run, "timm")
