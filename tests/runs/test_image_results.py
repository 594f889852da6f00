"""The results for every image that a finished run keeps."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lockstep
from lockstep.data.index import open_index
from lockstep.models.metrics import Scores
from lockstep.recipes import Execution, Recipe
from lockstep.runs.image_results import FILE, Results, read_results, write_results
from lockstep.system.errors import CheckpointError

COLUMNS = ("losses", "ranks", "predictions", "labels", "confidences")


@pytest.fixture(scope="module")
def finished(
    tiny_recipe: Recipe, textures: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Any]]:
    out = tmp_path_factory.mktemp("finished") / "run"
    report = lockstep.train(
        tiny_recipe.replace(ema_decay=0.9), textures, out, execution=Execution(accumulation_steps=2)
    )
    return out, report


def results_of(run: Path) -> Results:
    results = read_results(run)
    assert results is not None
    return results


def images_in_order(data: Path) -> list[Path]:
    """Return the validation images in the index's order: by class, then by name."""
    return [
        file for folder in sorted((data / "val").glob("[!.]*")) for file in sorted(folder.iterdir())
    ]


@pytest.mark.parametrize("weights", ["trained", "ema"])
def test_row_i_is_what_the_model_says_of_the_ith_image(
    finished: tuple[Path, dict[str, Any]], textures: Path, weights: str
) -> None:
    run, report = finished
    images = images_in_order(textures)
    scores = results_of(run).scores[weights]
    predicted = lockstep.predict(run, images, top=10, ema=weights == "ema")
    classes = report["classes"]
    assert [classes[label] for label in scores.labels] == [image.parent.name for image in images]
    assert [classes[label] for label in scores.predictions] == [
        found.classes[0] for found in predicted
    ]
    assert scores.confidences == pytest.approx(
        [found.probabilities[0] for found in predicted], rel=1e-4
    )
    places = [
        found.classes.index(image.parent.name)
        for found, image in zip(predicted, images, strict=True)
    ]
    assert scores.ranks.tolist() == places
    own = [found.probabilities[place] for found, place in zip(predicted, places, strict=True)]
    assert np.exp(-scores.losses) == pytest.approx(own, rel=1e-4)


def test_results_agree_with_the_report_and_name_the_images(
    finished: tuple[Path, dict[str, Any]], textures: Path
) -> None:
    run, report = finished
    results = results_of(run)
    assert results.step == 14
    assert results.digest == open_index(textures / "val").digest
    for weights in ("trained", "ema"):
        assert results.scores[weights].per_class(10) == report["per_class"][weights]
        assert (
            results.scores[weights].counts().summary()["loss"] == report["final"][weights]["loss"]
        )


def test_a_finished_run_started_again_keeps_its_results(
    finished: tuple[Path, dict[str, Any]], textures: Path, tiny_recipe: Recipe
) -> None:
    run, _ = finished
    before = (run / FILE).read_bytes()
    lockstep.train(tiny_recipe.replace(ema_decay=0.9), textures, run)
    assert (run / FILE).read_bytes() == before


def random_scores() -> Scores:
    random = np.random.default_rng(4)
    integers = {
        name: random.integers(0, 9, 30).astype(np.int32)
        for name in ("ranks", "predictions", "labels")
    }
    floats = {name: random.random(30).astype(np.float32) for name in ("losses", "confidences")}
    return Scores(**integers, **floats)


def test_what_is_read_is_what_was_written(tmp_path: Path) -> None:
    scores = random_scores()
    write_results(tmp_path, Results(7, "a digest", {"trained": scores}))
    results = results_of(tmp_path)
    assert (results.step, results.digest, list(results.scores)) == (7, "a digest", ["trained"])
    for name in COLUMNS:
        found = getattr(results.scores["trained"], name)
        expected = getattr(scores, name)
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found, expected)
    assert [path.name for path in tmp_path.iterdir()] == [FILE]


def test_a_folder_without_results_has_none(tmp_path: Path) -> None:
    assert read_results(tmp_path) is None


def overwritten(data: bytes, at: int, by: bytes) -> bytes:
    return data[:at] + by + data[at + len(by) :]


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"no file of NumPy's",
        lambda data: b"",
        lambda data: data[: len(data) // 2],
        lambda data: overwritten(
            data, data.index(b"labels.npy") + 40, b"\xff" * 10
        ),  # within a stream
        lambda data: overwritten(
            data, data.index(b"PK\x01\x02") + 10, b"c"
        ),  # an unknown compression method
    ],
)
def test_results_that_cannot_be_read_are_named(damage: Any, tmp_path: Path) -> None:
    write_results(tmp_path, Results(7, "a digest", {"trained": random_scores()}))
    (tmp_path / FILE).write_bytes(damage((tmp_path / FILE).read_bytes()))
    with pytest.raises(CheckpointError, match=rf"{FILE} cannot be read.*remove it"):
        read_results(tmp_path)
