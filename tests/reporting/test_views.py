"""What an evaluation says about classes and images, and the images themselves."""

import base64
import io
import shutil
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from lockstep import backends
from lockstep.data.index import open_index
from lockstep.data.split import Sets
from lockstep.inference.grad_cam import overlay
from lockstep.models.state import State
from lockstep.recipes import Recipe, load_recipe
from lockstep.reporting.collect import open_runs
from lockstep.reporting.views import MOST_CELLS, View, add_images, build_views, image_key
from lockstep.runs.image_results import list_images, load_evaluated_images, write_results
from lockstep.runs.reading import Run
from lockstep.system.files import write_text
from lockstep.weights import checkpoint
from tests.inference.cases import random_tensors
from tests.reporting.cases import STEPS, write_run
from tests.reporting.conftest import write_finished_run


def open_run(folder: Path) -> Run:
    [run] = open_runs([folder])
    return run


def open_view(folder: Path) -> tuple[View, dict[str, str]]:
    runs = open_runs([folder])
    views, images = add_images(runs, build_views(runs))
    return views[0], images


def test_mistakes_are_explained_with_the_weights_that_made_them(
    data: Path, tiny_recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The last stage explains photos of 128 px and more.
    recipe = tiny_recipe.replace(ema_decay=0.9, image_size=128, eval_resize=128, eval_crop=128)
    folder = write_finished_run(data, recipe, tmp_path / "run")
    trained, average = (random_tensors(recipe, seed) for seed in (1, 2))
    about = {"recipe": recipe.fields(), "classes": [f"{i}" for i in range(10)]}
    checkpoint.save(
        folder / "checkpoints", State(STEPS, trained, {}, average), data_digest="", about=about
    )
    runs = open_runs([folder])
    loaded: list[str] = []
    load = backends.load
    monkeypatch.setattr(backends, "load", lambda name: loaded.append(name) or load(name))
    views, images = add_images(runs, build_views(runs), explain=True)
    assert {*loaded} == {"torch"}  # the default: others that compute Grad-CAM may be missing
    index = open_index(data / "val")
    for view, tensors in zip(views, (trained, average), strict=True):
        mistake = view.mistakes[3]
        pixels = load_evaluated_images(index, runs[0].recipe, np.array([mistake.sample]))
        # Between an average of features and a linear layer, Grad-CAM is the class activation map.
        kept: list[torch.Tensor] = []
        module = backends.load("torch").load_module(recipe, tensors)
        module.layer4.register_forward_hook(
            lambda _, inputs, output, kept=kept: kept.append(output)
        )
        normalised = (pixels - np.array(recipe.mean)) / np.array(recipe.std)
        module(torch.from_numpy(normalised.astype(np.float32).transpose(0, 3, 1, 2)))
        of_class = tensors["fc.weight"][index.classes.index(mistake.prediction)]
        heat = np.einsum("c,nchw->nhw", of_class, kept[0].detach().numpy()).clip(min=0)
        shown = Image.open(
            io.BytesIO(base64.b64decode(images[mistake.explanation].partition(",")[2]))
        )
        [wanted] = overlay(pixels, heat)
        assert np.abs(np.asarray(shown).astype(int) - wanted).mean() < 8  # JPEG
    assert views[0].mistakes[3].explanation != views[1].mistakes[3].explanation
    assert all(mistake.explanation in images for view in views for mistake in view.mistakes)


def test_a_checkpoint_that_is_gone_cannot_explain(run: Path) -> None:
    runs = open_runs([run])
    views, images = add_images(runs, build_views(runs), explain=True)
    assert {view.note for view in views} == {"Not explained: the checkpoint of step 120 is gone."}
    assert len(images) > 0
    assert not any(mistake.explanation for view in views for mistake in view.mistakes)


def test_there_is_a_view_for_each_run_and_its_weights(run: Path, four: list[Path]) -> None:
    result = [(view.run, view.weights) for view in build_views(open_runs([run, four[1]]))]
    assert result == [(0, "trained"), (0, "ema"), (1, "trained")]


def test_classes_are_counted_as_the_report_counts_them(run: Path) -> None:
    view, _ = open_view(run)
    counts = open_run(run).report["per_class"]["trained"]  # type: ignore[index]
    assert [row.top1 for row in view.classes] == counts["top1"]
    assert [row.images for row in view.classes] == [40] * 10
    assert [row.accuracy for row in view.worst] == sorted(top1 / 40 for top1 in counts["top1"])


def test_a_matrix_of_few_classes_has_a_cell_for_each_pair(run: Path) -> None:
    view, _ = open_view(run)
    assert view.matrix is not None
    scores = open_run(run).results.scores["trained"]  # type: ignore[union-attr]
    expected = np.zeros((10, 10), int)
    for label, prediction in zip(scores.labels, scores.predictions, strict=True):
        expected[label, prediction] += 1
    assert view.matrix.cells == expected.tolist()
    assert view.matrix.wrong_inside == [0] * 10
    label, other, times, share = view.pairs[0]
    names = view.matrix.names
    assert (
        times
        == expected[names.index(label), names.index(other)]
        == (expected - np.diag(np.diag(expected))).max()
    )
    assert share == times / 40
    assert next(row for row in view.classes if row.name == label).taken_for == f"{other} ({times})"


def test_a_matrix_of_a_thousand_classes_is_of_groups(recipe: Recipe, tmp_path: Path) -> None:
    folder = write_run(
        tmp_path / "run", recipe=recipe, classes=[f"class {i}" for i in range(1000)], images=5000
    )
    matrix = build_views(open_runs([folder]))[0].matrix
    assert matrix is not None
    assert (len(matrix.cells), matrix.group_classes, matrix.names[1]) == (
        MOST_CELLS,
        20,
        "class 20 … class 39",
    )
    scores = open_run(folder).results.scores["trained"]  # type: ignore[union-attr]
    inside = (scores.labels // 20 == 1) & (scores.predictions // 20 == 1)
    assert matrix.cells[1][1] == inside.sum()
    assert matrix.wrong_inside[1] == (inside & (scores.labels != scores.predictions)).sum()


def test_a_prediction_beyond_the_classes_has_a_name_too(run: Path) -> None:
    opened = open_run(run)
    assert opened.results is not None
    trained = opened.results.scores["trained"]
    predictions = trained.predictions.copy()
    predictions[0] = 10
    other = replace(opened.results, scores={"trained": replace(trained, predictions=predictions)})
    [view] = build_views([replace(opened, results=other)])
    assert view.matrix is not None
    assert view.matrix.names[-1] == "no class (10)"
    assert len(view.classes) == 10


def test_a_million_logits_take_no_more_memory(recipe: Recipe, tmp_path: Path) -> None:
    last = 2**20 - 1
    folder = write_run(tmp_path / "run", recipe=recipe, classes=["cat", "dog"], images=4)
    wide = load_recipe(folder).replace(model="resnet18", logits=last + 1)
    write_text(folder / "recipe.yaml", wide.format_yaml())
    results = open_run(folder).results
    assert results is not None
    trained = replace(results.scores["trained"], predictions=np.array([last] * 4, np.int32))
    write_results(folder, replace(results, scores={"trained": trained}))
    tracemalloc.start()
    [view] = build_views([open_run(folder)])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**22
    assert view.matrix is not None
    assert view.matrix.names[-1].endswith(f" … no class ({last})")
    assert sum(images for _, other, images, _ in view.pairs if str(last) in other) == 4


def test_mistakes_are_the_wrong_images_the_model_was_surest_of(run: Path) -> None:
    view, _ = open_view(run)
    scores = open_run(run).results.scores["trained"]  # type: ignore[union-attr]
    wrong = [i for i in range(400) if scores.labels[i] != scores.predictions[i]]
    surest = sorted(wrong, key=lambda i: -scores.confidences[i])[:24]
    assert [mistake.sample for mistake in view.mistakes] == surest
    assert sum(group.right for group in view.bins) == 400 - len(wrong)


def test_mistakes_are_shown_as_the_model_saw_them(run: Path, data: Path) -> None:
    view, images = open_view(run)
    assert view.note == ""
    confidences = [mistake.confidence for mistake in view.mistakes]
    assert confidences == sorted(confidences, reverse=True)
    first = view.mistakes[0]
    assert first.label != first.prediction
    assert first.place.startswith(f"{first.label}/")
    [address] = [address for key, address in images.items() if key.endswith(f".{first.sample}")]
    shown = Image.open(
        io.BytesIO(base64.b64decode(address.removeprefix("data:image/jpeg;base64,")))
    )
    recipe = load_recipe(run)
    size = recipe.eval_crop
    assert shown.size == (size, size)
    stored = Image.open(data / "val" / first.place).convert("RGB")
    stored = stored.resize(
        [round(recipe.eval_resize * side / min(stored.size)) for side in stored.size]
    )
    left, top = ((side - size) // 2 for side in stored.size)
    expected = np.asarray(stored.crop((left, top, left + size, top + size)), float)
    # Textures of other images differ by 60 and more.
    assert np.abs(np.asarray(shown, float) - expected).mean() < 25


def test_runs_that_saw_the_same_images_share_them(four: list[Path]) -> None:
    runs = open_runs(four[:2])
    views, images = add_images(runs, build_views(runs))
    samples = {mistake.sample for view in views for mistake in view.mistakes}
    assert len(images) == len(samples) < sum(len(view.mistakes) for view in views)


def test_runs_that_resized_images_differently_do_not_share_them(run: Path) -> None:
    opened = open_run(run)
    assert image_key(opened, 3) == image_key(replace(opened), 3)
    resizes = (
        {"interpolation": "bicubic"},
        {"eval_antialias": True},
        {"eval_sampling": "asymmetric"},
    )
    for changes in (*resizes, {"exif_orientation": True}):
        other = replace(opened, recipe=opened.recipe.replace(**changes))
        assert image_key(opened, 3) != image_key(other, 3)


@pytest.fixture
def own(data: Path, recipe: Recipe, tmp_path: Path) -> tuple[Path, Path]:
    """A run and its images, which tests may change."""
    copy = tmp_path / "data"
    shutil.copytree(data, copy)  # with its times, and so with its index
    return write_finished_run(copy, recipe, tmp_path / "run"), copy


def test_images_that_are_gone_are_not_shown_and_all_else_is(own: tuple[Path, Path]) -> None:
    folder, copy = own
    sets = Sets(open_index(copy / "train"), open_index(copy / "val"), copy, [])
    list_images(folder, sets, is_new=True)
    named, images = open_view(folder)
    assert images
    shutil.rmtree(copy)
    view, images = open_view(folder)
    assert "there is no folder" in view.note
    assert view.mistakes == named.mistakes
    assert (len(view.mistakes), images) == (24, {})


def test_other_images_are_not_shown_for_those_evaluated(own: tuple[Path, Path]) -> None:
    folder, copy = own
    next((copy / "val" / "dots").iterdir()).unlink()
    view, images = open_view(folder)
    assert "has changed since" in view.note
    assert images == {}


def test_an_image_written_over_is_noticed(own: tuple[Path, Path]) -> None:
    folder, copy = own
    place = open_view(folder)[0].mistakes[0].place
    (copy / "val" / place).write_bytes(b"something else")
    view, images = open_view(folder)
    assert "is not the image that was indexed" in view.note
    assert images == {}


def test_images_indexed_again_are_known_by_digest(own: tuple[Path, Path], data: Path) -> None:
    folder, copy = own
    shutil.rmtree(copy / "val" / "dots")
    write_finished_run(copy, open_run(folder).recipe, copy.parent / "other")  # indexes what is left
    view, _ = open_view(folder)
    assert "holds images other" in view.note


def test_old_runs_have_classes_alone_and_say_why(run: Path, recipe: Recipe, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "old", recipe=recipe, classes=["a", "b"], keeps_results=False)
    [view] = build_views(open_runs([folder]))
    assert "validation.npz" in view.note
    assert [row.images for row in view.classes] == [200, 200]
    assert (view.matrix, view.mistakes, view.bins) == (None, [], [])
