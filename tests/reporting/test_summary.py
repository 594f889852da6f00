"""Runs compared with each other."""

import json
from pathlib import Path

import numpy as np
import pytest

from lockstep.models.accuracy_interval import wilson
from lockstep.recipes import Recipe, load_recipe
from lockstep.reporting import summary
from lockstep.reporting.collect import open_runs
from lockstep.reporting.curves import build_charts
from lockstep.runs.image_results import read_results
from lockstep.system.event_log import read_log
from tests.reporting.cases import write_run


def test_results_are_counts_of_images_with_their_intervals(run: Path) -> None:
    trained, average = summary.list_results(open_runs([run]))
    scores = read_results(run).scores["trained"]  # type: ignore[union-attr]
    hits = int((scores.ranks == 0).sum())
    assert (trained.weights, average.weights) == ("trained", "ema")
    assert trained.top1 == pytest.approx(hits / 400)
    assert trained.interval() == wilson(hits, 400)
    assert trained.calibration_error == pytest.approx(0.0707, abs=1e-3)


def read_predictions(folder: Path) -> np.ndarray:
    results = read_results(folder)
    assert results is not None
    return results.scores["trained"].predictions


def test_agreement_is_the_share_of_images_with_the_same_prediction(four: list[Path]) -> None:
    shares = summary.compare_predictions(open_runs(four))
    a, b = (read_predictions(folder) for folder in four[:2])
    assert shares[0][1] == shares[1][0] == np.mean(a == b)
    assert shares[2][2] == 1.0


def test_runs_on_other_images_have_no_agreement(run: Path, recipe: Recipe, tmp_path: Path) -> None:
    other = write_run(tmp_path / "other", recipe=recipe, classes=["a", "b"], digest="of others")
    assert summary.compare_predictions(open_runs([run, other])) == [[1.0, None], [None, 1.0]]


def test_speed_leaves_out_the_first_steps_of_every_process(recipe: Recipe, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", recipe=recipe, classes=["a", "b"], steps=60)
    [speed] = summary.measure_speeds(open_runs([folder]))
    entries = [
        entry
        for entry in read_log(folder / "log.jsonl")
        if entry["kind"] == "train" and entry["step"] > 10
    ]
    seconds = [entry["images"] / entry["images_per_sec"] for entry in entries]
    assert speed.intervals == len(entries) == 10
    assert speed.images_per_sec == pytest.approx(1600 / sum(seconds))
    assert speed.step_ms[100] == pytest.approx(1000 * max(seconds) / 5)
    assert list(speed.step_ms.values()) == sorted(speed.step_ms.values())
    assert speed.evaluated_images_per_sec == 300.0


def test_steps_under_a_profiler_are_no_speed(recipe: Recipe, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", recipe=recipe, classes=["a", "b"], steps=60)
    entries = read_log(folder / "log.jsonl")
    slow = {"images_per_sec": 0.01, "data_wait_share": 0.9, "traced": True}
    traced = [entry | slow if entry.get("first_step") == 30 else entry for entry in entries]
    (folder / "log.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in traced))
    [run] = open_runs([folder])
    [speed] = summary.measure_speeds([run])
    assert speed.intervals == 9
    assert speed.images_per_sec is not None
    assert speed.images_per_sec > 99  # build_log draws 100 to 110
    assert max(speed.step_ms.values()) < 1000 * 32 / 99
    drawn = {chart.name: chart.curves[0].steps for chart in build_charts([run])}
    assert 35 in drawn["loss"]
    assert 35 in drawn["lr"]
    assert 35 not in drawn["throughput"]
    assert 35 not in drawn["wait"]


def paddle_run(folder: Path, **about: object) -> Path:
    """Return the folder of a run of Paddle's recipe: 2048 images a step, 100 to 110 images/s."""
    write_run(folder, recipe=load_recipe("resnet50-paddle-90ep"), classes=list("abcdefghij"))
    (folder / "recipe.yaml").write_text(
        "based_on: resnet50-paddle-90ep\n" + (folder / "recipe.yaml").read_text()
    )
    environment = json.loads((folder / "environment.json").read_text())
    (folder / "environment.json").write_text(json.dumps(environment | about))
    return folder


def test_a_speed_stands_beside_those_published_for_the_same_hardware(tmp_path: Path) -> None:
    # NGC 22.05.1 prints 20267 images/s on 8 A100 with 256 images each; PyTorch's 16621 has no
    # batch.
    runs = open_runs([paddle_run(tmp_path / "run", device="NVIDIA A100-SXM4-80GB", ranks=8)])
    speeds = summary.measure_speeds(runs)
    ratios = {row.images_per_sec: ratio for _, row, ratio in summary.compare_speeds(runs, speeds)}
    assert ratios.keys() == {26673.72, 20267, 20144, 23874, 16621}
    assert speeds[0].images_per_sec is not None
    assert ratios[20267] == pytest.approx(speeds[0].images_per_sec / 20267)
    assert (ratios[26673.72], ratios[16621]) == (None, None)


@pytest.mark.parametrize(
    "about",
    [
        {"device": "CPU, 2 threads", "ranks": 8},
        {"device": "NVIDIA H100 80GB HBM3", "ranks": 8},
        {"device": "NVIDIA A100-SXM4-80GB", "ranks": 2},
        {"device": "NVIDIA A100-SXM4-80GB", "ranks": "8"},
    ],
)
def test_unpublished_hardware_stands_alone(about: dict[str, object], tmp_path: Path) -> None:
    runs = open_runs([paddle_run(tmp_path / "run", **about)])
    assert summary.compare_speeds(runs, summary.measure_speeds(runs)) == []


def test_a_run_that_is_all_warm_up_has_no_speed(recipe: Recipe, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", recipe=recipe, classes=["a", "b"], steps=10)
    [speed] = summary.measure_speeds(open_runs([folder]))
    assert (speed.images_per_sec, speed.data_wait_share, speed.step_ms) == (None, None, {})


def test_fields_and_environments_tell_where_runs_differ(four: list[Path]) -> None:
    runs = open_runs(four[:2])
    differing = [name for name, _, _, differ in summary.list_recipe_fields(runs) if differ]
    assert differing == ["seed"]
    environments = {
        name: (values, differ) for name, values, differ in summary.list_environments(runs)
    }
    assert environments["execution.backend"] == (["torch", "tensorflow"], True)
    assert environments["memory"] == (["16.0 GiB", "16.0 GiB"], False)
    assert environments["tensorflow"] == (["", "1.2.3"], True)


def test_differences_from_the_published_recipe_say_what_the_field_means(run: Path) -> None:
    [opened] = open_runs([run])
    [epochs, _] = summary.list_published_differences(opened)
    assert (epochs[0], epochs[2], epochs[3]) == ("epochs", f"{load_recipe('demo').epochs}", "4")
