"""The results for every image that a finished run keeps."""

import json
import warnings
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lockstep
from lockstep.data.index import open_index
from lockstep.models.metrics import Scores, measure
from lockstep.recipes import Execution, Recipe
from lockstep.reporting.views import build_views, select_data
from lockstep.runs.image_results import FILE, Results, read_results, write_results
from lockstep.runs.reading import _check_indexes, read_run
from lockstep.system.errors import CheckpointError
from tests.runs.cases import read_entries

COLUMNS = ("losses", "ranks", "predictions", "labels", "confidences")


@pytest.fixture(scope="module")
def run_with_report(
    tiny_recipe: Recipe, textures: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Any]]:
    out = tmp_path_factory.mktemp("run with report") / "run"
    recipe = tiny_recipe.replace(ema_decay=0.9, selection="mrr")
    execution = Execution(accumulation_steps=2, metrics=("top3",))
    report = lockstep.train(recipe, textures, out, execution=execution)
    return out, report


def require_results(run: Path) -> Results:
    results = read_results(run)
    assert results is not None
    return results


def list_images(data: Path) -> list[Path]:
    """Return the validation images in the index's order: by class, then by name."""
    images: list[Path] = []
    for folder in sorted((data / "val").glob("[!.]*")):
        images += sorted(folder.iterdir())
    return images


@pytest.mark.parametrize("weights", ["trained", "ema"])
def test_row_i_is_what_the_model_predicts_for_image_i(
    run_with_report: tuple[Path, dict[str, Any]], textures: Path, weights: str
) -> None:
    run, report = run_with_report
    images = list_images(textures)
    scores = require_results(run).scores[weights]
    predictions = list(
        lockstep.load(run, checkpoint="newest", ema=weights == "ema").predict(images, top=10)
    )
    classes = report["classes"]
    rows = zip(images, predictions, strict=True)
    for i, (image, prediction) in enumerate(rows):
        own = image.parent.name
        assert classes[scores.labels[i]] == own
        assert classes[scores.predictions[i]] == prediction.classes[0]
        assert scores.confidences[i] == pytest.approx(prediction.probabilities[0], rel=1e-4)
        rank = prediction.classes.index(own)
        assert scores.ranks[i] == rank
        assert np.exp(-scores.losses[i]) == pytest.approx(prediction.probabilities[rank], rel=1e-4)


def test_results_agree_with_the_report_and_name_the_images(
    run_with_report: tuple[Path, dict[str, Any]], textures: Path
) -> None:
    run, report = run_with_report
    results = require_results(run)
    assert results.step == 14
    assert results.classes == tuple(report["classes"])
    assert results.digest == open_index(textures / "val").digest
    for weights in ("trained", "ema"):
        scores = results.scores[weights]
        assert scores.per_class(10) == report["per_class"][weights]
        final = report["final"][weights]
        assert measure(scores, 10).items() <= final.items()
        assert final["top3_percent"] == 5 * sum(scores.ranks < 3)
        assert final["mrr"] == pytest.approx(np.mean(1 / (1 + scores.ranks)))
    assert report["best"]["mrr"] == max(entry["mrr"] for entry in read_entries(run, "evaluate"))


def test_a_finished_run_started_again_keeps_its_results(
    run_with_report: tuple[Path, dict[str, Any]], textures: Path, tiny_recipe: Recipe
) -> None:
    run, _ = run_with_report
    before = (run / FILE).read_bytes()
    lockstep.train(tiny_recipe.replace(ema_decay=0.9, selection="mrr"), textures, run)
    assert (run / FILE).read_bytes() == before


def random_scores() -> Scores:
    random = np.random.default_rng(4)
    integers = {
        name: random.integers(0, 9, 30).astype(np.int32)
        for name in ("ranks", "predictions", "labels")
    }
    floats = {name: random.random(30).astype(np.float32) for name in ("losses", "confidences")}
    return Scores(**integers, **floats)


def test_results_are_read_as_they_were_written(tmp_path: Path) -> None:
    scores = random_scores()
    write_results(tmp_path, Results(7, "a digest", {"trained": scores}))
    results = require_results(tmp_path)
    assert (results.step, results.digest, list(results.scores)) == (7, "a digest", ["trained"])
    for name in COLUMNS:
        column = getattr(results.scores["trained"], name)
        expected = getattr(scores, name)
        assert column.dtype == expected.dtype
        np.testing.assert_array_equal(column, expected)
    assert [path.name for path in tmp_path.iterdir()] == [FILE]


def test_a_folder_without_results_has_none(tmp_path: Path) -> None:
    assert read_results(tmp_path) is None


def overwrite(data: bytes, at: int, by: bytes) -> bytes:
    return data[:at] + by + data[at + len(by) :]


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"no file of NumPy's",
        lambda data: b"",
        lambda data: data[: len(data) // 2],
        # within a stream
        lambda data: overwrite(data, data.index(b"labels.npy") + 40, b"\xff" * 10),
        # an unknown compression method
        lambda data: overwrite(data, data.index(b"PK\x01\x02") + 10, b"c"),
    ],
)
def test_results_that_cannot_be_read_are_named(damage: Any, tmp_path: Path) -> None:
    write_results(tmp_path, Results(7, "a digest", {"trained": random_scores()}))
    (tmp_path / FILE).write_bytes(damage((tmp_path / FILE).read_bytes()))
    with pytest.raises(CheckpointError, match=rf"{FILE} cannot be read.*remove it"):
        read_results(tmp_path)


def test_results_that_expand_to_gigabytes_are_refused(tmp_path: Path) -> None:
    write_results(tmp_path, Results(7, "a digest", {"trained": random_scores()}))
    data = (tmp_path / FILE).read_bytes()
    size = data.index(b"PK\x01\x02") + 24  # what the directory says of the first array
    (tmp_path / FILE).write_bytes(overwrite(data, size, b"\xff\xff\xff\x7f"))

    with pytest.raises(CheckpointError, match=r"expands to 2,147,\d{3},\d{3} bytes"):
        read_results(tmp_path)


@pytest.mark.parametrize("name", ["labels", "trained.ranks", "step"])
def test_results_of_other_lengths_are_refused(name: str, tmp_path: Path) -> None:
    write_results(tmp_path, Results(7, "a digest", {"trained": random_scores()}))
    with np.load(tmp_path / FILE) as file:
        arrays = dict(file)
    arrays[name] = np.arange(3)
    np.savez(tmp_path / FILE, **arrays)  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match=rf"{FILE} cannot be read.*remove it"):
        read_results(tmp_path)


GOOD: dict[str, Any] = {
    "step": np.int64(1),
    "digest": np.str_("x"),
    "classes": np.array(["ant", "bee"]),
    "labels": np.array([0, 1, 1], np.int32),
    **{"trained.ranks": np.array([0, 1, 1], np.int32), "trained.losses": np.ones(3, np.float32)},
    "trained.predictions": np.array([0, 0, 0], np.int32),
    "trained.confidences": np.array([0.5, 0.6, 0.7], np.float32),
}
NUMBERS = (np.nan, np.inf, -np.inf, -1, -(2**31), 1.5, 2, 2**20 - 1, 2**31 - 1, 2**63, 1e38, "x")
LOG = {"kind": "evaluate", "step": 1, "epoch": 1, "weights": "trained", "loss": 1.0, "images": 3}
LOG |= {"top1_percent": 33.3, "top5_percent": 100.0, "elapsed_sec": 1.0, "images_per_sec": 1.0}


def list_hostile(good: Any) -> Iterator[Any]:
    """Yield arrays in the place of a good one: each number in its type where there is one and in
    the number's own, and other shapes."""
    for number in NUMBERS:
        own = np.full(np.shape(good), number)
        yield own
        with warnings.catch_warnings(), suppress(ArithmeticError, ValueError, RuntimeWarning):
            warnings.simplefilter("error")
            yield own.astype(np.asarray(good).dtype)
    for shape in ((), (0,), (1,), (2,), (4,), (3, 1), (2, 3)):
        yield np.resize(good, shape)


@pytest.mark.filterwarnings("error")
def test_hostile_arrays_are_refused_or_shown(tmp_path: Path, tiny_recipe: Recipe) -> None:
    (tmp_path / "recipe.yaml").write_text(tiny_recipe.replace(logits=3).format_yaml())
    (tmp_path / "log.jsonl").write_text(json.dumps(LOG) + "\n")
    np.savez(tmp_path / FILE, **GOOD)
    run = read_run(tmp_path)
    assert len(build_views([run])) == 1
    refused = dict.fromkeys(GOOD, 0)
    for name, good in GOOD.items():
        for hostile in list_hostile(good):
            np.savez(tmp_path / FILE, **(GOOD | {name: hostile}))
            try:
                results = require_results(tmp_path)
                hostile_run = replace(run, results=results)
                _check_indexes(hostile_run, results)
            except CheckpointError:
                refused[name] += 1
                continue
            views = build_views([hostile_run])
            json.dumps([select_data(view) for view in views], allow_nan=False)
    assert all(refused.values())
