"""Runs from weights without a recipe: they fine-tune, and lose nothing."""

import shlex
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import lockstep
from lockstep.data.index import find_cache_folder, open_index, subset
from lockstep.data.loading.loaders import make_loader
from lockstep.data.sources import find_split
from lockstep.data.textures import draw_data_set
from lockstep.inference.label_errors import check_labels
from lockstep.models.accuracy_interval import wilson
from lockstep.models.logistic_regression import fit_classifier
from lockstep.recipes import Execution, Recipe
from lockstep.recipes.order import evaluation_plans
from lockstep.runs import linear_probe
from lockstep.runs.folder import suggest_run
from lockstep.system.errors import CheckpointError, DataError, LockstepError, RecipeError
from lockstep.weights import checkpoint
from tests.runs.cases import (
    Event,
    copy_bytes,
    read_entries,
    read_notes,
    read_state,
    stop_when,
    train_and_listen,
    train_until,
)

KINDS = ("checks", "dots", "rays", "stripes")
OTHERS = ("blobs", "grid", "rings")
SELDOM = Execution(evaluate_every_epochs=20, loggers=())
PAUSE = Execution(stop_after_steps=1, loggers=())
CHANGES = {"precision": "fp32", "seed": 5}


@pytest.fixture(scope="module")
def weights(tiny_recipe: Recipe, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has learnt to distinguish four textures."""
    root = tmp_path_factory.mktemp("weights")
    draw_data_set(root / "data", train_images=240, val_images=40, kinds=KINDS)
    recipe = tiny_recipe.replace(
        logits=4, epochs=8, lr=0.1, global_batch_images=16, crop_area=(0.5, 1.0)
    )
    lockstep.train(recipe, root / "data", root / "run", execution=SELDOM)
    return root / "run"


@pytest.fixture(scope="module")
def few_images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """20 other training images of each of the four textures."""
    data = tmp_path_factory.mktemp("few") / "data"
    draw_data_set(data, train_images=80, val_images=160, kinds=KINDS, seed=1)
    return data


def test_the_defaults_lose_nothing(weights: Path, few_images: Path, tmp_path: Path) -> None:
    report = lockstep.train(
        data=few_images,
        out=tmp_path / "run",
        weights=weights,
        changes={"precision": "fp32"},
        execution=SELDOM,
    )
    recipe = lockstep.load_recipe(tmp_path / "run")
    assert (recipe.based_on, recipe.image_size, recipe.eval_resize) == ("fine-tune", 32, 36)
    first = read_entries(tmp_path / "run", "evaluate")[0]
    right = round(first["top1_percent"] * first["images"] / 100)
    low, _ = wilson(right, first["images"])
    assert first["step"] == 0
    assert first["top1_percent"] > 60, "the weights are good"
    assert report["final"]["trained"]["top1_percent"] >= 100 * low


def test_a_recipe_that_a_user_names_wins(weights: Path, few_images: Path, tmp_path: Path) -> None:
    lockstep.train(
        "my-images",
        few_images,
        tmp_path / "run",
        weights=weights,
        changes={"epochs": 1, "precision": "fp32", "image_size": 32},
    )
    assert lockstep.load_recipe(tmp_path / "run").based_on == "my-images"


def test_fine_tuning_needs_weights(few_images: Path, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"fine-tune starts from trained weights.*--weights"):
        lockstep.train("fine-tune", few_images, tmp_path / "run")


def test_a_named_recipe_gets_the_folders_logits(
    few_images: Path, tiny_recipe: Recipe, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    model = tiny_recipe.fields()["model"]
    changes = {"model": model, "epochs": 1, "image_size": 32, "precision": "fp32"}
    pause = Execution(stop_after_steps=1, loggers=())
    events = train_and_listen("demo", few_images, run, changes=changes, execution=pause)
    assert lockstep.load_recipe(run).logits == 4
    assert any("one logit per class, 4" in note for note in read_notes(events))
    again = train_and_listen("demo", few_images, run, changes=changes, execution=pause)
    assert not any("logits" in note for note in read_notes(again))


@pytest.fixture
def other_images(tmp_path: Path) -> Path:
    """20 training images of each of three textures that the weights do not know."""
    draw_data_set(tmp_path / "other", train_images=60, val_images=60, kinds=OTHERS)
    return tmp_path / "other"


def start(
    data: Path, run: Path, weights: Path, changes: dict[str, Any] | None = None
) -> list[Event]:
    """Fine-tune for one step; return the events."""
    options = {"weights": weights, "changes": changes or CHANGES, "execution": PAUSE}
    return train_and_listen(None, data, run, **options)


def compute_features(weights: Path, data: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return the features of the training images by PyTorch's own layers, and the labels."""
    recipe = lockstep.load_recipe(weights)
    module = lockstep.load(weights).module()
    module.fc = torch.nn.Identity()
    index = open_index(data / "train")
    features = []
    with make_loader(index, recipe, Execution(), evaluation=True) as loader:
        for batch in loader.batches(evaluation_plans(recipe, index.sizes, 1)):
            pixels = (batch.pixels - np.array(recipe.mean)) / np.array(recipe.std)
            values = torch.from_numpy(pixels.astype(np.float32).transpose(0, 3, 1, 2).copy())
            features.append(module(values).detach().numpy())
    return np.concatenate(features), index.labels(np.arange(len(index)))


def find_features(data: Path) -> list[Path]:
    """Return the files of features, complete or not."""
    return list(find_cache_folder(find_split(data, "train")).glob("*features-*"))


def is_computing(event: Event) -> bool:
    return bool(event["kind"] == "progress" and event["what"] == "computing features")


def test_a_probe_starts_other_classes(weights: Path, other_images: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    events = start(other_images, run, weights)
    tensors = read_state(run, 0).tensors
    for name, value in read_state(weights).tensors.items():
        assert name.startswith("fc.") or tensors[name].tobytes() == value.tobytes()
    features, labels = compute_features(weights, other_images)
    weight, bias = fit_classifier(features, labels, 3, 0.005 / 3)
    np.testing.assert_allclose(tensors["fc.weight"], weight, rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(tensors["fc.bias"], bias, rtol=1e-3, atol=1e-3)
    first = read_entries(run, "evaluate")[0]
    (answer,) = [event for event in events if event["kind"] == "linear_probe"]
    assert first["step"] == 0
    assert (answer["top1_percent"], answer["images"]) == (first["top1_percent"], 60)
    assert first["top1_percent"] > 50, "a third would be chance"
    assert "the classifier starts from a linear probe of 60 training images" in read_notes(events)


def test_classes_known_by_name_keep_their_outputs(weights: Path, tmp_path: Path) -> None:
    """Three classes are kept from few images, in another order; one is gone and one new."""
    kinds = ("dots", "grid", "rays", "stripes")
    draw_data_set(tmp_path / "data", train_images=16, val_images=120, kinds=kinds, seed=3)
    events = start(tmp_path / "data", tmp_path / "run", weights)
    notes = read_notes(events)
    assert any("3 kept (dots, rays, stripes), 1 new (grid), 1 gone (checks)" in n for n in notes)
    assert any("which begins at the kept outputs" in note for note in notes)
    unnamed = {"recipe": lockstep.load_recipe(weights).fields(), "classes": (*OTHERS, "zigzag")}
    checkpoint.write_weights(tmp_path / "w.safetensors", read_state(weights).tensors, unnamed)
    start(tmp_path / "data", tmp_path / "alone", tmp_path / "w.safetensors")
    kept, alone = (read_entries(tmp_path / run, "evaluate")[0] for run in ("run", "alone"))
    assert kept["loss"] < alone["loss"]


def test_a_better_probe_replaces_kept_outputs(weights: Path, tmp_path: Path) -> None:
    """The names of the weights' classes are those of other classes."""
    draw_data_set(tmp_path / "data", train_images=120, val_images=4, kinds=KINDS)
    (tmp_path / "data/train/rays").rename(tmp_path / "data/train/grid")
    (tmp_path / "data/val/rays").rename(tmp_path / "data/val/grid")
    swapped = ("dots", "rays", "stripes", "checks")
    tensors = read_state(weights).tensors
    tensors = tensors | {name: 30 * tensors[name] for name in ("fc.weight", "fc.bias")}
    about = {"recipe": lockstep.load_recipe(weights).fields(), "classes": swapped}
    checkpoint.write_weights(tmp_path / "w.safetensors", tensors, about)
    notes = read_notes(start(tmp_path / "data", tmp_path / "run", tmp_path / "w.safetensors"))
    assert any("starts without the kept outputs" in note for note in notes)
    features, labels = compute_features(weights, tmp_path / "data")
    weight, _ = fit_classifier(features, labels, 4, 0.005 / 4)
    started = read_state(tmp_path / "run", 0).tensors
    np.testing.assert_allclose(started["fc.weight"], weight, rtol=1e-2, atol=1e-2)


def test_known_classes_in_another_order_need_no_probe(
    weights: Path, few_images: Path, tmp_path: Path
) -> None:
    tensors = read_state(weights).tensors
    turned = {name: tensors[name][::-1].copy() for name in ("fc.weight", "fc.bias")}
    about = {"recipe": lockstep.load_recipe(weights).fields(), "classes": KINDS[::-1]}
    checkpoint.write_weights(tmp_path / "w.safetensors", tensors | turned, about)
    events = start(few_images, tmp_path / "run", tmp_path / "w.safetensors")
    assert not any(event["kind"] == "linear_probe" for event in events)
    started = read_state(tmp_path / "run", 0).tensors
    assert np.array_equal(started["fc.weight"], tensors["fc.weight"])
    assert lockstep.load_recipe(tmp_path / "run").lr < 0.004, "the rate of known classes"


def test_refusals_name_the_command_for_other_images(
    weights: Path, few_images: Path, other_images: Path, tmp_path: Path
) -> None:
    """Of more classes, of fewer, of another number of logits; and the doctor of labels, which names
    runs that know none of its images."""
    grown = tmp_path / "grown images"
    draw_data_set(grown, train_images=10, val_images=10, kinds=(*KINDS, "grid"))
    calls = [
        (grown, partial(lockstep.train, data=grown, out=weights)),
        (grown, partial(lockstep.train, data=grown, out=weights, changes={"logits": 5})),
        (grown, partial(lockstep.train, "fine-tune", grown, weights, weights=weights)),
        (other_images, partial(lockstep.train, data=other_images, out=weights)),
        (few_images, partial(lockstep.train, data=few_images, out=weights)),
    ]
    for data, call in calls:
        with pytest.raises(LockstepError) as caught:
            call()
        (line,) = [line for line in str(caught.value).splitlines() if line.startswith("  lock")]
        command = ["train", "--weights", weights, "--data", data, "--out", f"{weights}2"]
        assert shlex.split(line) == ["lockstep", *map(str, command)]
    command = f"lockstep train --data {few_images} --folds 5 --out {weights}2"
    with pytest.raises(LockstepError, match=command):
        check_labels(few_images, [weights])


def test_a_new_run_sets_the_same_share_apart(weights: Path, tmp_path: Path) -> None:
    """The weights were not trained on these images."""
    draw_data_set(tmp_path / "data", train_images=4, val_images=4, kinds=KINDS)
    data = tmp_path / "data/train"
    (tmp_path / "data/val").rename(tmp_path / "other")
    (tmp_path / "run").mkdir()
    recipe = lockstep.load_recipe(weights).replace(validation_share=0.25)
    (tmp_path / "run/recipe.yaml").write_text(recipe.format_yaml())
    assert suggest_run(tmp_path / "run", data).endswith("/run2 --split 0.25")
    assert "--split" not in suggest_run(tmp_path / "run", "https://host/data")
    assert "host" not in suggest_run(tmp_path / "run", "https://host/data")


def test_features_are_computed_once(weights: Path, other_images: Path, tmp_path: Path) -> None:
    assert any(map(is_computing, start(other_images, tmp_path / "first", weights)))
    (file,) = find_features(other_images)
    assert not any(map(is_computing, start(other_images, tmp_path / "second", weights)))
    whole = file.read_bytes()
    file.write_bytes(whole[:-4])  # as a full disk of another system could leave it
    assert any(map(is_computing, start(other_images, tmp_path / "third", weights)))
    huge = whole.replace(b"'shape': (60,", b"'shape': (60000000000,")
    assert huge != whole
    file.write_bytes(huge)  # more than fits into memory
    assert any(map(is_computing, start(other_images, tmp_path / "huge", weights)))
    next((other_images / "train" / "grid").glob("*.jpg")).unlink()
    assert any(map(is_computing, start(other_images, tmp_path / "fourth", weights)))
    states = [copy_bytes(read_state(tmp_path / run, 1).tensors) for run in ("first", "second")]
    assert states[0] == states[1] == copy_bytes(read_state(tmp_path / "third", 1).tensors)


def test_a_stopped_probe_resumes(weights: Path, other_images: Path, tmp_path: Path) -> None:
    start(other_images, tmp_path / "whole", weights)
    for file in find_features(other_images):
        file.unlink()
    listener = stop_when(is_computing)
    options = {"weights": weights, "changes": CHANGES, "execution": PAUSE}
    train_until(listener, None, other_images, tmp_path / "run", **options)
    assert not find_features(other_images)
    start(other_images, tmp_path / "run", weights)
    whole = read_state(tmp_path / "whole")
    assert copy_bytes(read_state(tmp_path / "run").tensors) == copy_bytes(whole.tensors)


def test_a_classifier_as_good_as_a_probe_stays(weights: Path, tmp_path: Path) -> None:
    """That which a probe of all images found is as good as one of some of them."""
    draw_data_set(tmp_path / "data", train_images=80, val_images=40, kinds=KINDS)
    others = ("blobs", "grid", "rings", "zigzag")
    draw_data_set(tmp_path / "others", train_images=80, val_images=40, kinds=others)
    unnamed = tmp_path / "w.safetensors"
    about = {"recipe": lockstep.load_recipe(weights).fields(), "classes": []}
    checkpoint.write_weights(unnamed, read_state(weights).tensors, about)
    for data, out in (("others", "probe"), ("others", "kept"), ("data", "replaced")):
        events = start(tmp_path / data, tmp_path / out, unnamed)
        answers = [event for event in events if event["kind"] == "linear_probe"]
        assert len(answers) == (out != "kept")
        before = checkpoint.read_weights(unnamed)[0]["fc.weight"]
        after = read_state(tmp_path / out, 0).tensors
        assert (after["fc.weight"].tobytes() == before.tobytes()) == (out == "kept")
        unnamed.unlink()
        checkpoint.write_weights(unnamed, after, about)
    assert lockstep.load_recipe(tmp_path / "kept").lr == 0.004, "the rate of other classes"


def test_frozen_backbones_are_a_probe(weights: Path, other_images: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    options = {"weights": weights, "changes": CHANGES | {"frozen": ["backbone"]}}
    report = lockstep.train(data=other_images, out=run, **options)
    assert report["steps"] == 0
    assert "linear probe" in report["stopped_early"]
    assert report["top1_percent"] == read_entries(run, "evaluate")[0]["top1_percent"]
    assert read_entries(run, "train") == []
    assert lockstep.train(out=run)["top1_percent"] == report["top1_percent"]
    augmented = {**options["changes"], "flip_probability": 0.5}
    start(other_images, tmp_path / "augmented", weights, augmented)
    assert len(read_entries(tmp_path / "augmented", "train")) == 1


@pytest.mark.parametrize("outputs", [2, 3, 4], ids="{} outputs".format)
@pytest.mark.parametrize("classes", ["named", "unnamed"])
def test_one_image_is_enough(outputs: int, classes: str, weights: Path, tmp_path: Path) -> None:
    """Weights of fewer, as many and more classes, which are others than those of the images."""
    draw_data_set(tmp_path / "data", train_images=3, val_images=3, kinds=OTHERS)
    tensors = read_state(weights).tensors
    tensors |= {name: tensors[name][:outputs] for name in ("fc.weight", "fc.bias")}
    recipe = lockstep.load_recipe(weights).replace(logits=outputs)
    about = {"recipe": recipe.fields(), "classes": KINDS[:outputs] if classes == "named" else []}
    checkpoint.write_weights(tmp_path / "w.safetensors", tensors, about)
    events = start(tmp_path / "data", tmp_path / "run", tmp_path / "w.safetensors")
    assert any(event["kind"] == "linear_probe" for event in events)


def test_a_classifier_of_other_classes_is_noted(weights: Path, tmp_path: Path) -> None:
    others = ("blobs", "grid", "rings", "zigzag")
    draw_data_set(tmp_path / "data", train_images=8, val_images=4, kinds=others)
    recipe = lockstep.load_recipe(weights).replace(epochs=1, global_batch_images=8)
    events = train_and_listen(recipe, tmp_path / "data", tmp_path / "run", weights=weights)
    (note,) = [note for note in read_notes(events) if "classes differently" in note]
    assert "(checks, dots, rays)" in note


def test_a_class_that_only_validation_has_is_named(weights: Path, tmp_path: Path) -> None:
    draw_data_set(tmp_path / "data", train_images=9, val_images=9, kinds=OTHERS)
    for path in (tmp_path / "data/train/grid").iterdir():
        path.unlink()
    with pytest.raises(DataError, match=r"grid.*(?s:.)*remove"):
        lockstep.train(data=tmp_path / "data", out=tmp_path / "run", weights=weights)


def test_a_probe_sees_all_classes(monkeypatch: pytest.MonkeyPatch, few_images: Path) -> None:
    monkeypatch.setattr(linear_probe, "MOST_PROBE_IMAGES", 10)
    index = open_index(find_split(few_images, "train"))
    small = index.rows["label"] == 2
    rare = subset(index, np.flatnonzero(~small | (np.cumsum(small) == 1)))
    labels = linear_probe.choose_images(rare).rows["label"]
    assert np.bincount(labels).tolist() == [4, 3, 1, 3]


def test_features_of_nan_are_refused(weights: Path, other_images: Path, tmp_path: Path) -> None:
    tensors = read_state(weights).tensors
    tensors = tensors | {"conv1.weight": np.full_like(tensors["conv1.weight"], np.nan)}
    about = {"recipe": lockstep.load_recipe(weights).fields(), "classes": list(KINDS)}
    checkpoint.write_weights(tmp_path / "w.safetensors", tensors, about)
    with pytest.raises(CheckpointError, match=r"features .* not finite"):
        start(other_images, tmp_path / "run", tmp_path / "w.safetensors")


def test_a_linear_probe_needs_weights(weights: Path, other_images: Path, tmp_path: Path) -> None:
    start(other_images, tmp_path / "run", weights)
    with pytest.raises(RecipeError, match=r"linear_probe .* --weights"):
        lockstep.train(tmp_path / "run" / "recipe.yaml", other_images, tmp_path / "new")
