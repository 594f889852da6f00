"""Logs as curves."""

from pathlib import Path

import numpy as np
import pytest

from lockstep.models.state import State
from lockstep.recipes import Recipe
from lockstep.reporting.collect import open_runs
from lockstep.reporting.curves import Chart, build_charts, thin_curve
from lockstep.reporting.same_images import group_runs
from lockstep.system.event_log import read_log
from lockstep.weights import checkpoint
from tests.reporting.cases import EPOCHS, STEPS, write_run


def draw_charts(folders: list[Path]) -> dict[str, Chart]:
    return {chart.name: chart for chart in build_charts(open_runs(folders))}


def test_few_points_stay_as_they_are_and_gaps_stay_gaps() -> None:
    result = thin_curve(np.array([1, 2, 5]), np.array([0.5, np.nan, np.inf]))
    assert result == ([1, 2, 5], [0.5, None, None])


def test_many_points_become_means_of_neighbours_at_the_last_step_of_each() -> None:
    steps, values = thin_curve(np.arange(1, 8), np.array([1.0, 3, 5, 7, 9, 11, 100]), most=4)
    assert (steps, values) == ([2, 4, 6, 7], [2.0, 6.0, 10.0, 100.0])


@pytest.mark.parametrize("count", [0, 1, 1500, 1501, 56_000])
def test_no_curve_has_more_points_than_a_plot_can_show(count: int) -> None:
    steps, values = thin_curve(np.arange(count), np.zeros(count))
    assert len(steps) == len(values) <= 1500
    assert not count or steps[-1] == count - 1


def test_a_run_has_the_loss_of_every_step_and_the_accuracy_of_every_evaluation(run: Path) -> None:
    drawn = draw_charts([run])
    assert list(drawn) == ["loss", "accuracy", "lr", "throughput", "wait"]
    losses = [loss for entry in read_log(run / "log.jsonl") for loss in entry.get("losses", [])]
    training, validation, average = drawn["loss"].curves
    assert (training.steps, training.values) == (list(range(1, STEPS + 1)), losses)
    assert [curve.kind for curve in (validation, average)] == ["validation", "moving average"]
    assert validation.steps == [STEPS // EPOCHS * epoch for epoch in range(1, EPOCHS + 1)]


def test_the_difference_is_that_of_the_losses_from_the_first_run(four: list[Path]) -> None:
    curves = draw_charts(four)["difference"].curves
    assert [curve.run for curve in curves] == [1, 2, 3]
    first, third = (
        [loss for e in read_log(four[i] / "log.jsonl") for loss in e.get("losses", [])]
        for i in (0, 2)
    )
    result = curves[1].values
    assert result == pytest.approx([abs(b / a - 1) for a, b in zip(first, third, strict=True)])


def test_other_lengths_are_compared(recipe: Recipe, data: Path, run: Path, tmp_path: Path) -> None:
    part = write_run(tmp_path / "part", recipe=recipe, classes=["a", "b"], data=data, steps=20)
    assert draw_charts([run, part])["difference"].curves[0].steps == list(range(1, 21))


def test_a_loss_scale_is_drawn_if_there_is_one(run: Path, recipe: Recipe, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "scaled", recipe=recipe, classes=["a", "b"], steps=20)
    log = (folder / "log.jsonl").read_text()
    (folder / "log.jsonl").write_text(log.replace('"loss_scale": 1.0', '"loss_scale": 128.0'))
    [curve] = draw_charts([folder])["scale"].curves
    assert curve.values == [128.0] * 4


def test_losses_of_other_images_have_another_axis(
    recipe: Recipe, data: Path, four: list[Path], tmp_path: Path
) -> None:
    """The third run has the training images of the others, by its data set, the fourth has not."""
    about = {"recipe": recipe, "classes": ["a", "b"], "digest": "other"}
    third = write_run(tmp_path / "third", data=data, **about)
    fourth = write_run(tmp_path / "fourth", data=tmp_path, **about)
    drawn = draw_charts([*four[:2], third, fourth])
    axes = {}
    for name, chart in drawn.items():
        if name.startswith("loss"):
            axes[chart.title] = {(curve.run, curve.kind) for curve in chart.curves}
    assert list(axes.values()) == [
        {(0, "training"), (1, "training"), (2, "training")},
        {(3, "training")},
        {(0, "validation"), (1, "validation")},
        {(2, "validation"), (3, "validation")},
    ]
    assert list(axes)[2] == "Loss, validation: torch, tensorflow"
    assert [curve.run for curve in drawn["difference"].curves] == [1, 2]


def test_runs_of_folds_share_their_axes(recipe: Recipe, tmp_path: Path) -> None:
    runs = []
    for fold in (1, 2):
        folder = tmp_path / f"fold-{fold}"
        about = {"classes": ["a", "b"], "digest": f"of fold {fold}"}
        runs.append(write_run(folder, recipe=recipe.replace(folds=2, fold=fold), **about))
    assert len(draw_charts(runs)["loss"].curves) == 4


def test_checkpoints_stand_for_missing_results(recipe: Recipe, data: Path, tmp_path: Path) -> None:
    runs = []
    for number, digest in enumerate(("training validation", "training validation", "training v")):
        about = {"recipe": recipe, "classes": ["a"], "data": data, "keeps_results": False}
        runs.append(write_run(tmp_path / f"{number}", **about))
        state = State(1, {"fc.bias": np.zeros(1, np.float32)}, {})
        checkpoint.save(runs[-1] / "checkpoints", state, data_digest=digest, about={})
    opened = open_runs(runs)
    assert group_runs(opened, "val") == [[0, 1], [2]]
    assert group_runs(opened, "train") == [[0, 1, 2]]
