"""Evaluate known weights; compare the results with predictions and counts by hand."""

import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import lockstep
from lockstep.inference.evaluation_images import find_run_data
from lockstep.recipes import Execution, Recipe
from lockstep.runs.trust import remember
from lockstep.system.errors import CheckpointError, DataError, DivergedError, UserError
from lockstep.weights import checkpoint
from lockstep.weights.run_identity import settle_identity
from tests.inference.cases import CLASSES

SaveWeights = Callable[..., Path]


def test_an_evaluation_agrees_with_predictions(save_weights: SaveWeights, textures: Path) -> None:
    # Evaluation resizes otherwise than training.
    source = save_weights(
        antialias=True, eval_antialias=False, eval_sampling="asymmetric", eval_offset_rounding="up"
    )
    images = sorted((textures / "val").rglob("*.jpg"))
    model = lockstep.load(source).on(execution=Execution(metrics=("mrr", "top3")))
    evaluation = model.evaluate(textures)
    result = evaluation.to_json()
    assert re.match(r"Evaluation\(top-1 \d+\.00 % \(.*\) of 20 images of ", repr(evaluation))
    losses = []
    ranks = []
    guesses = []
    for prediction in lockstep.load(source).predict(images, top=10):
        place = prediction.classes.index(prediction.path.parent.name)
        losses.append(-math.log(prediction.probabilities[place]))
        ranks.append(place)
        guesses.append(prediction.classes[0])
    assert result["images"] == len(images) == 20
    assert result["loss"] == pytest.approx(sum(losses) / 20, rel=1e-4)
    assert result["top1_percent"] == 5 * sum(rank == 0 for rank in ranks)
    assert result["top5_percent"] == 5 * sum(rank < 5 for rank in ranks)
    assert result["top3_percent"] == 5 * sum(rank < 3 for rank in ranks)
    assert result["mrr"] == pytest.approx(sum(1 / (rank + 1) for rank in ranks) / 20)
    assert result["classes"] == CLASSES
    by_class = {
        name: [r for r, image in zip(ranks, images, strict=True) if image.parent.name == name]
        for name in CLASSES
    }
    assert result["per_class"] == {
        "images": [2] * 10,
        "top1": [sum(rank == 0 for rank in by_class[name]) for name in CLASSES],
        "top5": [sum(rank < 5 for rank in by_class[name]) for name in CLASSES],
        "predicted": [guesses.count(name) for name in CLASSES],
    }
    hits = sum(result["per_class"]["top1"])
    assert result["class_summary"]["balanced_accuracy_percent"] == pytest.approx(5 * hits)
    low, high = result["top1_interval_percent"]
    assert low <= result["top1_percent"] <= high


@pytest.mark.parametrize("batch", [1, 7, 19, 20, 21, 64])
def test_every_image_counts_once(batch: int, save_weights: SaveWeights, textures: Path) -> None:
    source = save_weights()
    whole, parts = (
        lockstep.load(source).on(batch=images).evaluate(textures).to_json()
        for images in (20, batch)
    )
    assert parts["images"] == 20
    assert parts["per_class"] == whole["per_class"]
    assert parts["loss"] == pytest.approx(whole["loss"], rel=1e-5)


def test_a_folder_of_classes_is_a_val_folder(save_weights: SaveWeights, textures: Path) -> None:
    source = save_weights()
    classes = lockstep.load(source).evaluate(textures / "val").to_json()
    whole = lockstep.load(source).evaluate(textures).to_json()
    assert classes | {"speed": None} == whole | {"speed": None}


def test_labels_follow_the_names_of_the_weights_where_only_some_classes_are_there(
    save_weights: SaveWeights, textures: Path, tmp_path: Path
) -> None:
    for name in ("stripes", "dots"):
        shutil.copytree(textures / "val" / name, tmp_path / "some" / name)
    source = save_weights()
    whole = lockstep.load(source).evaluate(textures).to_json()["per_class"]
    some = lockstep.load(source).evaluate(tmp_path / "some").to_json()
    assert some["images"] == 4
    for name in ("images", "top1", "top5"):
        kept = [
            count if CLASSES[i] in ("stripes", "dots") else 0 for i, count in enumerate(whole[name])
        ]
        assert some["per_class"][name] == kept


def test_a_part_of_imagenet_has_imagenets_labels_if_the_weights_name_no_classes(
    save_weights: SaveWeights, textures: Path, tmp_path: Path
) -> None:
    # Tabby, 281, and goldfish, 1.
    for name, synset in (("stripes", "n02123045"), ("dots", "n01443537")):
        shutil.copytree(textures / "val" / name, tmp_path / "some" / synset)
    result = (
        lockstep.load(save_weights(classes=(), logits=1000, favourite=281))
        .evaluate(tmp_path / "some")
        .to_json()
    )
    assert [(i, n) for i, n in enumerate(result["per_class"]["images"]) if n] == [(1, 2), (281, 2)]
    assert result["per_class"]["top1"][281] == 2
    assert any("ImageNet" in remark for remark in result["remarks"])


def test_folders_are_numbered_with_a_remark(save_weights: SaveWeights, textures: Path) -> None:
    remarks = (
        lockstep.load(save_weights(classes=(), logits=10)).evaluate(textures).to_json()["remarks"]
    )
    assert any(
        "10 folders, in alphabetical order, stand for the 10 outputs" in remark
        for remark in remarks
    )


def test_bad_images_are_left_out_and_reported(
    save_weights: SaveWeights, textures: Path, tmp_path: Path
) -> None:
    shutil.copytree(textures / "val", tmp_path / "val", ignore=shutil.ignore_patterns(".*"))
    (tmp_path / "val" / "dots" / "broken.jpg").write_bytes(b"no image")
    result = lockstep.load(save_weights()).evaluate(tmp_path).to_json()
    assert result["images"] == 20
    assert [bad["file"] for bad in result["quarantined"]] == ["dots/broken.jpg"]
    assert result["quarantined"][0]["reason"]
    part = lockstep.load(save_weights()).evaluate(tmp_path / "val", split=0.5)
    assert (part.images, part.quarantined) == (10, result["quarantined"])
    assert any("--split 0 evaluates all" in remark for remark in part.remarks)


def test_outputs_beyond_classes_are_wrong(save_weights: SaveWeights, textures: Path) -> None:
    result = lockstep.load(save_weights(logits=12, favourite=11)).evaluate(textures).to_json()
    assert result["per_class"]["images"] == [2] * 10
    assert result["per_class"]["top1"] == [0] * 10
    assert result["top5_percent"] > 0


@pytest.mark.parametrize("logits", [4, 12])
def test_positions_of_other_numbers_of_classes_are_not_guessed(
    logits: int, save_weights: SaveWeights, textures: Path
) -> None:
    model = lockstep.load(save_weights(classes=(), logits=logits))
    advice = rf"names all {logits} outputs \(in evaluate, also --labels FILE, such as .*blobs"
    with pytest.raises(DataError, match=f"val has 10 classes.* {logits} outputs .*{advice}"):
        model.evaluate(textures)
    with pytest.raises(UserError, match=r"data is a list; .* lockstep.pack"):
        model.evaluate([textures])  # type: ignore[arg-type]


def test_classes_that_are_all_unknown_are_refused(
    save_weights: SaveWeights, textures: Path
) -> None:
    names = tuple(name.upper() for name in CLASSES)
    with pytest.raises(DataError, match="blobs"):
        lockstep.load(save_weights(classes=names)).evaluate(textures).to_json()


def test_a_folder_with_a_name_that_is_not_utf8_is_the_class_of_that_name(
    save_weights: SaveWeights, textures: Path, tmp_path: Path
) -> None:
    data = tmp_path / "images"
    for name, folder in zip(CLASSES, ("b\udcff", *CLASSES[1:]), strict=True):
        shutil.copytree(textures / "val" / name, data / folder)
    source = save_weights(classes=("b\udcff", *CLASSES[1:]))
    expected = lockstep.load(source, classes=CLASSES).evaluate(textures).to_json()["per_class"]
    assert lockstep.load(source).evaluate(data).to_json()["per_class"] == expected


def test_labels_follow_given_names(save_weights: SaveWeights, textures: Path) -> None:
    """Other programs' weights may list the classes in another order than that of the folders."""
    source = save_weights(classes=(), favourite=0)
    expected = {"images": [2] * 10, "top1": [2, *[0] * 9]}
    result = lockstep.load(source, classes=CLASSES[::-1]).evaluate(textures).to_json()
    assert result["classes"] == CLASSES[::-1]
    assert {name: result["per_class"][name] for name in expected} == expected


def test_progress_of_an_evaluation_is_told(save_weights: SaveWeights, textures: Path) -> None:
    heard: list[dict[str, object]] = []
    lockstep.load(save_weights()).on(batch=8, listener=heard.append).evaluate(textures).to_json()
    progress = [(event["done"], event["total"]) for event in heard if event["what"] == "evaluating"]
    assert progress == [(1, 3), (2, 3), (3, 3)]


def test_weights_with_nan_are_named_where_the_loss_is_not_finite(
    save_weights: SaveWeights, textures: Path, tmp_path: Path
) -> None:
    tensors, about = checkpoint.read_weights(save_weights() / "model.safetensors")
    tensors["bn1.weight"][0] = np.nan
    checkpoint.write_weights(tmp_path / "nan.safetensors", tensors, about)
    with pytest.raises(DivergedError, match=r"bn1\.weight"):
        lockstep.load(tmp_path / "nan.safetensors").evaluate(textures).to_json()


def test_a_run_and_its_checkpoints_know_their_data(tmp_path: Path) -> None:
    run = tmp_path / "run"
    step = run / "checkpoints" / "step-00000007"
    step.mkdir(parents=True)
    (run / "recipe.yaml").write_text(Recipe().format_yaml())
    (run / "environment.json").write_text(json.dumps({"data": str(tmp_path)}))
    with pytest.raises(CheckpointError, match="which no command on this machine has used"):
        find_run_data(run)
    settle_identity(run)
    remember(run, [f"data={tmp_path}"])
    assert find_run_data(run) == find_run_data(step) == tmp_path
    with pytest.raises(DataError, match=r"w\.pth does not say which images .*; add --data DATA"):
        find_run_data(tmp_path / "w.pth")
    (run / "environment.json").write_text(json.dumps({"data": str(tmp_path / "gone")}))
    with pytest.raises(DataError, match=r"was trained on .*gone, which does not exist"):
        find_run_data(run)
