"""The recorder's events reach the log, TensorBoard's files and the listener."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.runs.recorder import Recorder
from lockstep.system.event_log import read_log
from tests.runs.cases import tensorboard_events, tensorboard_figures

RATES = np.linspace(0.1, 1.0, 10)


def train_event(step: int, **figures: Any) -> dict[str, Any]:
    return {
        "kind": "train",
        "step": step,
        "first_step": max(step - 2, 0),
        "images": 16,
        "images_per_sec": 4.0,
    } | figures


def test_an_event_is_in_the_log_as_soon_as_it_is_logged(tmp_path: Path) -> None:
    with Recorder(None) as recorder:
        recorder.open(tmp_path, 0, RATES)
        for step in (2, 4):
            recorder.log({"kind": "evaluate", "step": step, "weights": "trained", "class": "café"})
            lines = (tmp_path / "log.jsonl").read_text(encoding="utf-8").splitlines()
            assert json.loads(lines[-1])["step"] == step
            assert "café" in lines[-1]
            assert len(lines) == step // 2


def test_entries_keep_the_order_and_the_fields_of_the_events(tmp_path: Path) -> None:
    events = [
        {"kind": "start", "step": 0},
        train_event(2, loss=1.5),
        {"kind": "evaluate", "step": 2, "weights": "ema"},
    ]
    with Recorder(None) as recorder:
        recorder.open(tmp_path, 0, RATES)
        for event in events:
            recorder.log(event)
        assert recorder.evaluations == read_log(tmp_path / "log.jsonl")[2:]
    entries = read_log(tmp_path / "log.jsonl")
    for entry, event in zip(entries, events, strict=True):
        assert {name: entry[name] for name in event} == event
    times = [entry["elapsed_sec"] for entry in entries]
    assert times == sorted(times)
    assert times[0] >= 0


@pytest.mark.parametrize(("step", "rate"), [(1, 0.1), (2, 0.2), (10, 1.0)])
def test_an_interval_has_the_rate_of_its_last_step(step: int, rate: float, tmp_path: Path) -> None:
    with Recorder(None) as recorder:
        recorder.open(tmp_path, 0, RATES)
        recorder.log(train_event(step))
        recorder.log({"kind": "evaluate", "step": step, "weights": "trained"})
    train, evaluate = read_log(tmp_path / "log.jsonl")
    assert train["lr"] == pytest.approx(rate)
    assert "lr" not in evaluate


@pytest.mark.parametrize(
    "tail", ["", '{"kind": "tra', '{"kind": "train", "step": 4'], ids=["whole", "torn", "torn late"]
)
def test_reopening_drops_later_steps_and_a_torn_tail(tail: str, tmp_path: Path) -> None:
    with Recorder(None) as recorder:
        recorder.open(tmp_path, 0, RATES)
        for step in (2, 4, 6, 8):
            recorder.log(train_event(step))
    with (tmp_path / "log.jsonl").open("a") as file:
        file.write(tail)
    with Recorder(None) as recorder:
        recorder.open(tmp_path, 4, RATES)
        assert [entry["step"] for entry in read_log(tmp_path / "log.jsonl")] == [2, 4]
        recorder.log(train_event(5))
    assert [entry["step"] for entry in read_log(tmp_path / "log.jsonl")] == [2, 4, 5]


def test_reopening_drops_the_evaluations_of_a_step_that_is_evaluated_again(tmp_path: Path) -> None:
    with Recorder(None) as recorder:
        recorder.open(tmp_path, 0, RATES)
        for step in (2, 4):
            recorder.log(train_event(step))
            recorder.log({"kind": "evaluate", "step": step, "weights": "trained"})
    with Recorder(None) as recorder:
        recorder.open(tmp_path, 4, RATES, evaluates_again=True)
        assert [entry["step"] for entry in recorder.evaluations] == [2]
    logged = [(entry["kind"], entry["step"]) for entry in read_log(tmp_path / "log.jsonl")]
    assert logged == [("train", 2), ("evaluate", 2), ("train", 4)]


def test_tensorboard_shows_the_figures_of_the_log(tmp_path: Path) -> None:
    with Recorder(None) as recorder:
        recorder.open(tmp_path, 0, RATES)
        recorder.log({"kind": "start", "step": 0, "total": 10})
        recorder.log(train_event(2, loss=2.25, losses=[3.0, 1.5]))
        recorder.log(train_event(4, loss=0.1))
        for weights, percent in (("trained", 50.0), ("ema", 75.0)):
            event = {"kind": "evaluate", "step": 4, "weights": weights}
            recorder.log(event | {"top1_percent": percent, "images": 20})
    assert tensorboard_figures(tmp_path) == {
        ("train/loss", 2): 2.25,
        ("train/loss", 4): np.float32(0.1),
        ("train/images_per_sec", 2): 4.0,
        ("train/images_per_sec", 4): 4.0,
        ("train/lr", 2): np.float32(0.2),
        ("train/lr", 4): np.float32(0.4),
        ("val_trained/top1_percent", 4): 50.0,
        ("val_ema/top1_percent", 4): 75.0,
    }


def test_a_resumed_run_makes_tensorboard_forget_later_steps(tmp_path: Path) -> None:
    for step in (0, 4):
        with Recorder(None) as recorder:
            recorder.open(tmp_path, step, RATES)
            recorder.log(train_event(step + 2, loss=float(step)))
            recorder.log(train_event(step + 4, loss=float(step)))
    figures = tensorboard_figures(tmp_path)
    losses = {step: value for (tag, step), value in figures.items() if tag == "train/loss"}
    assert losses == {2: 0, 4: 0, 6: 4, 8: 4}
    events = tensorboard_events(tmp_path)
    assert [event.step for event in events if event.HasField("session_log")] == [1, 5]


def test_no_folder_sends_events_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    events: list[dict[str, Any]] = []
    with Recorder(events.append) as recorder:
        recorder.log(train_event(2, loss=1.0))
        recorder.send({"kind": "save"})
        assert recorder.evaluations == []
    assert [event["kind"] for event in events] == ["train", "save"]
    assert events[0]["loss"] == 1.0
    assert list(tmp_path.rglob("*")) == []


def test_what_is_only_sent_is_not_logged(tmp_path: Path) -> None:
    events: list[dict[str, Any]] = []
    with Recorder(events.append) as recorder:
        recorder.open(tmp_path, 0, RATES)
        recorder.send({"kind": "save", "step": 3})
    assert events == [{"kind": "save", "step": 3}]
    assert read_log(tmp_path / "log.jsonl") == []


def test_no_listener_is_needed() -> None:
    with Recorder(None) as recorder:
        recorder.send({"kind": "save"})
        recorder.progress("indexing")(1, 2)


def test_progress_is_sent_after_each_item_was_used() -> None:
    events: list[dict[str, Any]] = []
    with Recorder(events.append) as recorder:
        seen = [(item, len(events)) for item in recorder.watch("evaluating", iter("abc"), 3)]
    assert seen == [("a", 0), ("b", 1), ("c", 2)]
    assert [event["done"] for event in events] == [1, 2, 3]
    assert events[0] == {"kind": "progress", "what": "evaluating", "done": 1, "total": 3}


def test_training_time_is_that_of_all_logged_intervals(tmp_path: Path) -> None:
    with Recorder(None) as recorder:
        recorder.open(tmp_path, 0, RATES)
        recorder.log(train_event(2, images=16, images_per_sec=4.0))
        evaluation = {"kind": "evaluate", "step": 2, "weights": "trained"}
        recorder.log(evaluation | {"images": 20, "images_per_sec": 1.0})
    with Recorder(None) as recorder:
        recorder.open(tmp_path, 2, RATES)
        recorder.log(train_event(4, images=16, images_per_sec=8.0))
        assert recorder.train_sec == 6.0
