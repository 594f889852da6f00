"""Test sets with other labels than their folders: each figure is computed a second time as the
authors of the set do it, from the logits of single images."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import lockstep
from lockstep.inference.evaluation_result import Evaluation
from lockstep.inference.evaluation_sets import _ALEXNET_ERRORS, average_sets
from lockstep.models.accuracy_interval import wilson
from lockstep.system.errors import DataError, UserError
from lockstep.weights.class_names import imagenet_synsets

SaveWeights = Callable[..., Path]
WNIDS = sorted(imagenet_synsets()[output] for output in (6, 11, 281, 500, 988))


def draw(root: Path, folders: list[str], count: int = 6) -> list[Path]:
    """Write images of coarse noise, named as ImageNet's validation images; return their paths in
    the order of `ImageFolder`."""
    random = np.random.default_rng(len(folders))
    paths = []
    for folder in folders:
        (root / folder).mkdir(parents=True)
    for folder in sorted(folders):
        for _ in range(count):
            path = root / folder / f"ILSVRC2012_val_{len(paths) + 1:08d}.JPEG"
            coarse = random.integers(0, 256, (4, 4, 3), np.uint8)
            Image.fromarray(coarse).resize((40, 40)).save(path)
            paths.append(path)
    return paths


def predict(weights: Path, paths: list[Path]) -> np.ndarray:
    return np.array(list(lockstep.load(weights).logits(paths)), np.float64)


def spread(logits: int, save_weights: SaveWeights) -> Path:
    """Return weights without names of classes, whose predictions are of many classes."""
    return save_weights(classes=(), logits=logits)


@pytest.mark.parametrize("where", ["torch", "reference", "onnxruntime"])
def test_restricted_logits_are_those_of_imagenet_a_and_r(
    where: str, save_weights: SaveWeights, tmp_path: Path
) -> None:
    """natural-adv-examples/eval.py and imagenet-r/eval.py: `output = net(data)[:, indices_in_1k]`,
    `pred = output.data.max(1)[1]`, and `F.softmax(output, dim=1).max(1)[0]`."""
    paths = draw(tmp_path / "set", WNIDS)
    weights = spread(1000, save_weights)
    logits = predict(weights, paths)
    indices = [imagenet_synsets().index(wnid) for wnid in WNIDS]
    output = logits[:, indices]
    target = np.repeat(np.arange(5), 6)
    right = output.argmax(axis=1) == target
    softmax = np.exp(output) / np.exp(output).sum(axis=1, keepdims=True)
    assert 0 < right.sum() < 30
    assert not set(logits.argmax(axis=1)) <= set(indices)
    model = lockstep.load(weights).on(where, batch=7)
    result = model.evaluate(tmp_path / "set", labels={"restrict": True})
    assert result.top1 == pytest.approx(100 * right.mean())
    assert result.metrics["loss"] == pytest.approx(-np.log(softmax[range(30), target]).mean())
    assert result.interval == pytest.approx([100 * bound for bound in wilson(right.sum(), 30)])
    predicted = np.bincount(output.argmax(axis=1), minlength=5)
    assert result.per_class["predicted"] == predicted.tolist()
    hits = np.bincount(target[right], minlength=5)
    assert result.metrics["balanced_accuracy_percent"] == pytest.approx(100 * (hits / 6).mean())
    f1 = 2 * hits / (6 + predicted)
    assert result.metrics["macro_f1_percent"] == pytest.approx(100 * f1.mean())
    assert "30 of 30 images count, and the model chooses from 5" in str(result.remarks)


def test_numeric_folders_of_imagenet_v2_are_outputs(
    save_weights: SaveWeights, tmp_path: Path
) -> None:
    """ImageNetV2_pytorch: `label = int(self.fnames[i].parent.name)`."""
    names = list(map(str, range(12)))
    paths = draw(tmp_path / "set", names, 4)
    weights = save_weights(classes=(), logits=12)
    labels = [int(path.parent.name) for path in paths]
    right = predict(weights, paths).argmax(axis=1) == labels
    assert right.any()
    outputs = {name: int(name) for name in names}
    (tmp_path / "labels.json").write_text(json.dumps(outputs))
    result = lockstep.load(weights).evaluate(tmp_path / "set", labels=tmp_path / "labels.json")
    assert result.top1 == pytest.approx(100 * right.mean())
    assert result.class_orders == []


@pytest.mark.parametrize("batch", [4, 32])
def test_real_labels_count_images_with_right_answers(
    batch: int, save_weights: SaveWeights, tmp_path: Path
) -> None:
    """reassessed-imagenet: `is_correct = [pred in real_labels[f] for f, pred in ... if
    real_labels[f]]`; timm's RealLabelsImagenet has the same with `pred[:k]`."""
    paths = draw(tmp_path / "val", WNIDS)
    weights = spread(1000, save_weights)
    order = np.argsort(-predict(weights, paths), axis=1)
    random = np.random.default_rng(5)
    real = [
        random.choice(guess[:8], i % 4, replace=False).tolist() for i, guess in enumerate(order)
    ]
    real += [[0]] * 3
    named = {f"ILSVRC2012_val_{i + 1:08d}.JPEG": labels for i, labels in enumerate(real)}
    pairs = [(guess, named[path.name]) for guess, path in zip(order, paths, strict=True)]
    top1 = [guess[0] in labels for guess, labels in pairs if labels]
    top5 = [any(p in labels for p in guess[:5]) for guess, labels in pairs if labels]
    assert 0 < np.mean(top1) < np.mean(top5) < 1
    model = lockstep.load(weights).on(batch=batch)
    result = model.evaluate(tmp_path, labels=real)
    assert result.images == len(top1) == 22
    assert result.top1 == pytest.approx(100 * np.mean(top1))
    assert result.metrics["top5_percent"] == pytest.approx(100 * np.mean(top5))
    by_name = model.evaluate(tmp_path, labels={name: named[name] for name in list(named)[:30]})
    assert by_name.metrics == result.metrics


def test_a_class_can_stand_for_several_outputs_or_none(
    save_weights: SaveWeights, tmp_path: Path
) -> None:
    """ObjectNet: an object is right if the prediction is one of its ImageNet classes; objects
    without one are left out."""
    paths = draw(tmp_path / "set", ["chair", "nothing", "lamp", "tabby"])
    classes = tuple(f"c{output}" for output in range(20))
    weights = save_weights(classes=classes, logits=20)
    logits = predict(weights, paths)
    outputs = {
        "chair": [3, "c4", 5, 7, 9],
        "lamp": "c8",
        "nothing": [],
        "tabby": list(range(10, 17)),
    }
    right = {"chair": {3, 4, 5, 7, 9}, "lamp": {8}, "tabby": set(range(10, 17))}
    counted = sorted(set().union(*right.values()))
    for restrict, among in ((False, range(20)), (True, counted), ([*counted, "c0"], [0, *counted])):
        allowed = np.full(20, -np.inf)
        allowed[list(among)] = 0
        hits = []
        losses = []
        for row, path in zip(logits + allowed, paths, strict=True):
            if path.parent.name != "nothing":
                answers = right[path.parent.name]
                hits.append(int(row.argmax()) in answers)
                shares = np.exp(row) / np.exp(row).sum()
                losses.append(-np.log(sum(shares[output] for output in answers)))
        labels = {"labels": outputs, "restrict": restrict}
        result = lockstep.load(weights).evaluate(tmp_path / "set", labels=labels)
        assert result.images == 18
        assert result.top1 == pytest.approx(100 * np.mean(hits))
        assert result.metrics["loss"] == pytest.approx(np.mean(losses), rel=1e-5)
        assert result.per_class["images"] == [6, 6, 0, 6]


FIRST = "chair/ILSVRC2012_val_00000001.JPEG"
WRONG: list[tuple[Any, str]] = [
    ({"labels": {"sofa": 1}}, "names 'sofa', which is not a class or an image"),
    ({"labels": {"chair/9.jpg": 1}}, "names 'chair/9.jpg', which is not a class or an image"),
    ({"labels": {f"./{FIRST}": 1}}, "names './chair/.*01.JPEG', which is not a class or an image"),
    ({"labels": {FIRST[:-5]: 1}}, "names 'chair/.*01', which is not a class or an image"),
    (
        {"labels": {FIRST: 1, FIRST[6:]: 2, "lamp": 1}},
        "'chair/.*01.JPEG' twice, as 'chair/.*01.JPEG' and as 'ILSVRC.*01.JPEG'",
    ),
    ({"labels": {"chair": 20}}, "'chair' has the output 20, .* from 0 to 19"),
    ({"labels": {"chair": -1}}, "'chair' has the output -1"),
    ({"labels": {"chair": True}}, "'chair' has the output True"),
    ({"labels": {"chair": [1.0]}}, "'chair' has the output 1.0"),
    ({"labels": {"chair": [[1]]}}, r"'chair' has the output \[1\]"),
    ({"labels": {"chair": None}}, "'chair' has the output None"),
    ({"labels": {"chair": "c20"}}, "'chair' has the output 'c20'"),
    ({"labels": {"chair": 10**400}}, "'chair' has the output 1000"),
    ({"labels": {"chair": 1}}, "has no entry for the class 'lamp'"),
    ({"labels": {"chair": [], "lamp": []}}, "no right output for any image"),
    ({"labels": {"chair": 1, "lamp": 2}, "restrict": [1]}, "restrict leaves out output 2"),
    ({"labels": {"chair": 1, "lamp": 2}, "restrict": "yes"}, "restrict is 'yes'; expected true"),
    ({"labels": {"chair": 1, "lamp": 2}, "restrict": [20]}, "restrict has the output 20"),
    ({"label": {"chair": 1}}, r"has the field 'label'; expected .*\. Did you mean labels\?"),
    ({"labels": {"chair": 1}, "restict": [1]}, "has the field 'restict'.* Did you mean restrict"),
    ({"labels": 3}, "is neither an object nor a list"),
    ("text", "is neither an object nor a list"),
    ([1, 2, 3], "lists images by number, but .*00000004.JPEG"),
    ([1] * 11 + ["sofa"], "item 11 has the output 'sofa'"),
]


def test_wrong_labels_are_refused_by_name(save_weights: SaveWeights, tmp_path: Path) -> None:
    draw(tmp_path / "set", ["chair", "lamp"])
    model = lockstep.load(save_weights(classes=tuple(f"c{i}" for i in range(20)), logits=20))
    file = tmp_path / "labels.json"
    for labels, message in WRONG:
        file.write_text(json.dumps(labels))
        with pytest.raises(DataError, match=f"labels.json.*{message}") as caught:
            model.evaluate(tmp_path / "set", labels=file)
        assert len(str(caught.value)) < 800
    for data, message in (
        (b"{", "cannot be read as JSON"),
        (b"\xff", "cannot be read as JSON"),
        (b"[" * 9999, "deep"),
        (b'{"chair": 1, "lamp": 2, "chair": 0}', "an object has the key 'chair' twice"),
    ):
        file.write_bytes(data)
        with pytest.raises(DataError, match=f"labels.json.*{message}"):
            model.evaluate(tmp_path / "set", labels=file)
    with file.open("wb") as sparse:
        sparse.truncate(2**40)
    for path, message in ((file, "expected at most"), (tmp_path / "none", "No such file")):
        with pytest.raises(DataError, match=message):
            model.evaluate(tmp_path / "set", labels=path)
    with pytest.raises(UserError, match="leave out --labels"):
        model.evaluate(tmp_path / "set", labels={}, calibrate=True)
    (tmp_path / "set/lamp/ILSVRC2012_val_00000001.JPEG").write_bytes(
        (tmp_path / "set/chair/ILSVRC2012_val_00000001.JPEG").read_bytes()
    )
    with pytest.raises(DataError, match=r"chair/.*00001.JPEG' and 'lamp/.* have the same"):
        model.evaluate(tmp_path / "set", labels=[1] * 12)
    with pytest.raises(DataError, match="is the name of 2 images of"):
        model.evaluate(tmp_path / "set", labels={"ILSVRC2012_val_00000001.JPEG": 1})


def test_a_folder_of_data_sets_has_their_means(save_weights: SaveWeights, tmp_path: Path) -> None:
    names = ["blur/defocus_blur/1", "blur/defocus_blur/2", "noise/shot_noise/1"]
    for number, name in enumerate(names):
        draw(tmp_path / "c" / name, WNIDS[: 4 - number % 2], 3 + number)
        (tmp_path / "c" / name / WNIDS[number] / "broken.JPEG").write_bytes(b"no image")
    (tmp_path / "c/README").touch()
    model = lockstep.load(spread(1000, save_weights))
    labels = {"restrict": True}
    singles = [model.evaluate(tmp_path / "c" / name, labels=labels) for name in names]
    result = model.evaluate(tmp_path / "c", labels=labels)
    assert list(result.sets) == names
    assert result.class_summary["macro_f1_percent"] == result.metrics["macro_f1_percent"]
    assert "labels come from the argument labels: 20 of 20 images count" in str(result.remarks)
    for name, single in zip(names, singles, strict=True):
        assert result.sets[name].metrics == single.metrics
    for key in ("top1_percent", "top5_percent", "loss", "macro_f1_percent"):
        expected = np.mean([single.metrics[key] for single in singles])
        assert result.metrics[key] == pytest.approx(expected)
    assert result.interval[0] == pytest.approx(np.mean([single.interval[0] for single in singles]))
    assert result.images == 12 + 12 + 20
    printed = result.to_json()
    bad = [f"{name}/{WNIDS[number]}/broken.JPEG" for number, name in enumerate(names)]
    assert [image["file"] for image in printed["quarantined"]] == bad
    assert printed["sets"][names[1]]["top1_percent"] == singles[1].top1
    assert "corruption_errors" not in printed
    json.dumps(printed, allow_nan=False)


def test_mce_is_that_of_augmix() -> None:
    """augmix/imagenet.py: `avg_err = 1 - np.mean(corruption_accs[c])`, `ce = 100 * avg_err /
    ALEXNET_ERR[i]`, `mce += ce / 15`."""
    random = np.random.default_rng(0)
    alexnet_err = list(_ALEXNET_ERRORS.values())
    accuracies = random.uniform(0.1, 0.9, (15, 5))
    sets = {}
    for place, name in enumerate([*_ALEXNET_ERRORS, "speckle_noise"]):
        for severity in range(5):
            top1 = 100 * accuracies[place % 15, severity]
            sets[f"{name}/{severity + 1}"] = make_result(top1)
    mce = 0.0
    for place in range(15):
        mce += 100 * (1 - np.mean(accuracies[place])) / alexnet_err[place] / 15
    result = average_sets("c", sets)
    assert result.corruption_errors["mean"] == pytest.approx(mce)
    del sets["fog/3"]
    assert average_sets("c", sets).corruption_errors == {}


def make_result(top1: float) -> Evaluation:
    counts = [1] * 1000
    return Evaluation(
        source="",
        data="",
        runtime="native",
        precision="fp32",
        metrics={"top1_percent": top1, "images": 1000},
        interval=(0.0, 100.0),
        classes=list(imagenet_synsets()),
        per_class={"images": counts, "top1": counts, "top5": counts, "predicted": counts},
        class_summary={},
        class_orders=[],
        published=None,
        quarantined=[],
        trained_images=0,
        speed={"images_per_sec": 1.0, "batch_images": 1, "latency_ms": None},
        remarks=[],
    )
