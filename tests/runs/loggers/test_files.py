"""The files of NVIDIA's examples, while a run trains. What they hold is compared with the
conversion of its log, whose figures `tests/benchmark/test_foreign_reports.py` computes by hand."""

import json
from pathlib import Path
from typing import Any

import pytest

import lockstep
from lockstep.benchmark.foreign_reports import convert
from lockstep.recipes import Execution, Recipe
from lockstep.runs.loggers import Loggers, Opening
from tests.runs.cases import Event, stop_at, train_until

BOTH = Execution(log_every_steps=1, save_every_steps=1, loggers=("dlll", "nvidia-report"))


def parse(text: str) -> list[dict[str, Any]]:
    assert text.endswith("\n")
    return [json.loads(line.removeprefix("DLLL ")) for line in text.splitlines()]


def remove_times(text: str) -> list[dict[str, Any]]:
    times = ("timestamp", "datetime", "elapsedtime")
    lines = parse(text)
    for line in lines:
        for name in times:
            line.pop(name, None)
    return lines


@pytest.fixture(scope="module")
def run(
    tiny_recipe: Recipe, textures: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """A run of two epochs of three steps, in three parts. The first one writes nothing but the
    report. The second one was interrupted and left lines behind as a killed process does."""
    folder = tmp_path_factory.mktemp("files") / "run"
    recipe = tiny_recipe.replace(global_batch_images=20, ema_decay=0.9)
    first = BOTH.replace(loggers=["nvidia-report"], stop_after_steps=1)
    lockstep.train(recipe, textures, folder, execution=first)
    notes: dict[str, Any] = {"folder": folder, "steps": [], "epochs": []}

    stop = stop_at("train", 4)

    def watch(event: Event) -> None:
        if event["kind"] == "train":
            notes["steps"].append(parse((folder / "dlll.json").read_text())[-1]["step"])
        if event["kind"] == "evaluate":
            report = json.loads((folder / "nvidia-report.json").read_text())
            notes["epochs"].append(report["metrics"]["val.top1"])
        stop(event)

    train_until(watch, recipe, textures, folder, execution=BOTH)
    notes["before"] = text = (folder / "dlll.json").read_text()
    later = text.splitlines()[-1].replace('"step": [1, ', '"step": [1, 1')
    (folder / "dlll.json").write_text(f"{text}{later}\n{later[:40]}")
    lockstep.train(recipe, textures, folder, execution=BOTH)
    return notes


def test_every_line_is_written_before_the_next_step_is_logged(run: dict[str, Any]) -> None:
    # the last line at every step; [0] is all of an epoch
    assert run["steps"][:3] == [[0, 2], [0], [1, 1]]
    assert [len(accuracies) for accuracies in run["epochs"]] == [1, 1]


def test_after_a_kill_the_lines_are_those_of_the_log_each_once(run: dict[str, Any]) -> None:
    text = (run["folder"] / "dlll.json").read_text()
    assert remove_times(text) == remove_times(convert(run["folder"], "dlll"))
    steps = [line["step"] for line in parse(text) if line["type"] == "LOG"]
    epochs = [[[0, 1], [0, 2], [0, 3], [0], [0], [0]], [[1, 1], [1, 2], [1, 3], [1], [1], [1]]]
    assert steps == ["PARAMETER", *epochs[0], *epochs[1], []]


def test_lines_that_were_there_keep_their_times(run: dict[str, Any]) -> None:
    text = (run["folder"] / "dlll.json").read_text()
    assert text.startswith(run["before"])
    times = [float(line["timestamp"]) for line in parse(text)]
    assert times == sorted(times)


def test_an_evaluation_has_the_times_of_computing(run: dict[str, Any]) -> None:
    lines = parse((run["folder"] / "dlll.json").read_text())
    data = next(line["data"] for line in lines if "val.top1" in line.get("data", {}))
    assert data["val.data_time"] > 0
    batch_sec = data["val.data_time"] + data["val.compute_latency"]
    assert batch_sec == pytest.approx(20 / data["val.total_ips"])
    assert data["val.compute_latency"] == pytest.approx(20 / data["val.compute_ips"])


def test_the_report_is_that_of_the_log(run: dict[str, Any]) -> None:
    report = json.loads((run["folder"] / "nvidia-report.json").read_text())
    assert report == json.loads(convert(run["folder"], "nvidia-report"))
    assert [len(report["metrics"][name]) for name in ("train.loss", "val.top1")] == [2, 2]


@pytest.mark.parametrize(
    ("name", "field"), [("dlll", "dlll_file"), ("nvidia-report", "nvidia_report_file")]
)
def test_a_file_of_something_else_is_never_replaced(
    name: str, field: str, tmp_path: Path, tiny_recipe: Recipe
) -> None:
    (tmp_path / "mine").write_text('{"my": "notes"}')
    execution = Execution(**{field: str(tmp_path / "mine")})
    assert execution.loggers_used == ("tensorboard", name), "the path turns it on"
    warned: list[str] = []
    about = tiny_recipe.fields() | {"ranks": 1}
    several = Loggers([name], Opening(tmp_path, 0, about, None), warned.append)
    environment = {"execution": execution.fields(), "command": ["lockstep"]}
    start: Any = {"kind": "start", "steps_per_epoch": 3, "environment": environment}
    several.entry(start)
    assert len(warned) == 1
    assert f"{tmp_path / 'mine'} " in warned[0]
    assert f"remove it, or use a different file: --set {field}=FILE" in warned[0]
    assert (tmp_path / "mine").read_text() == '{"my": "notes"}'
