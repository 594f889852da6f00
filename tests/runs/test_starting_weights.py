"""Runs that start from given weights: what they start from, and what they refuse."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import lockstep
from lockstep.models.architectures import MODELS, narrow_model
from lockstep.recipes import Execution, Recipe
from lockstep.recipes.initial_weights import initial_tensors
from lockstep.runs.kept_classes import describe_positions, name_classifier
from lockstep.runs.starting_weights import Start, StartSource, fit_start, hash_tensors, write_start
from lockstep.system.errors import CheckpointError, DataError
from lockstep.weights import checkpoint
from tests.runs.cases import (
    Event,
    copy_bytes,
    read_entries,
    read_notes,
    read_state,
    stop_at,
    train_and_listen,
    train_until,
)

EXECUTION = Execution(log_every_steps=1, save_every_steps=3, keep_checkpoints=99)
NEWEST = "checkpoints/step-00000007"


def convert(run: Path, folder: Path) -> Path:
    lockstep.load(run).save(folder / "w.safetensors", certificate=False)
    return folder / "w.safetensors"


def convert_to_tensorflow(run: Path, folder: Path) -> Path:
    lockstep.load(run).save(folder / "model.ckpt-7", to="nvidia-tensorflow", certificate=False)
    return folder / "model.ckpt-7"


def test_errors_of_the_data_come_before_a_download(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no folder"):
        lockstep.train(
            data=tmp_path / "none", weights="https://127.0.0.1:9/w.pth", out=tmp_path / "run"
        )


SOURCES: dict[str, Callable[[Path, Path], Path]] = {
    "run": lambda run, _: run,
    "checkpoint": lambda run, _: run / NEWEST,
    "file in a checkpoint": lambda run, _: run / NEWEST / "model.safetensors",
    "converted": convert,
    "of TensorFlow's": convert_to_tensorflow,
}


@pytest.mark.parametrize("source", SOURCES)
def test_a_run_starts_at_step_0_with_given_weights_and_no_velocity(
    source: str, dense: Path, textures: Path, tiny_recipe: Recipe, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    weights = SOURCES[source](dense, tmp_path)
    recipe = tiny_recipe.replace(epochs=1, ema_decay=0.9)
    lockstep.train(recipe, textures, run, weights=weights, execution=EXECUTION)
    begin = read_state(run, 0)
    assert (
        copy_bytes(begin.tensors) == copy_bytes(begin.ema) == copy_bytes(read_state(dense).tensors)
    )
    assert not any(value.any() for value in begin.momentum.values())
    assert json.loads((run / "start.json").read_text()) == {
        "weights": "step-00000007" if weights.is_dir() else weights.name,
        "weights_sha256": hash_tensors(read_state(dense).tensors),
        "is_classifier": True,
    }
    assert [entry["first_step"] for entry in read_entries(run, "train")] == list(range(7))


def test_a_run_trains_from_the_weights_that_it_was_given(
    dense: Path, textures: Path, tiny_recipe: Recipe, tmp_path: Path
) -> None:
    # At this learning rate updates are below half a unit in the last place, except where a
    # parameter is almost 0.
    recipe = tiny_recipe.replace(epochs=1, lr=1e-30, weight_decay=0.0)
    lockstep.train(recipe, textures, tmp_path / "run", weights=dense)
    begin = read_state(dense).tensors
    end = read_state(tmp_path / "run").tensors
    for name, value in begin.items():
        assert "running" in name or np.abs(end[name] - value).max() < 1e-25


def test_a_moving_average_can_be_started_from(
    dense: Path, textures: Path, tiny_recipe: Recipe, tmp_path: Path
) -> None:
    averages = dense / NEWEST / "ema.safetensors"
    recipe = tiny_recipe.replace(epochs=1)
    lockstep.train(recipe, textures, tmp_path / "run", weights=averages, execution=EXECUTION)
    assert copy_bytes(read_state(tmp_path / "run", 0).tensors) == copy_bytes(load_file(averages))


def test_weights_of_half_precision_become_float32(
    dense: Path, textures: Path, tiny_recipe: Recipe, tmp_path: Path
) -> None:
    halves = {name: value.astype(np.float16) for name, value in read_state(dense).tensors.items()}
    about = {"recipe": tiny_recipe.fields(), "classes": []}
    checkpoint.write_weights(tmp_path / "w.safetensors", halves, about)
    how = {"weights": tmp_path / "w.safetensors", "execution": EXECUTION}
    lockstep.train(tiny_recipe.replace(epochs=1), textures, tmp_path / "run", **how)
    expected = {name: value.astype(np.float32) for name, value in halves.items()}
    assert copy_bytes(read_state(tmp_path / "run", 0).tensors) == copy_bytes(expected)


@pytest.mark.parametrize("sparsity", ["none", "mask_1d"])
def test_the_classifier_is_reinitialised_for_another_number_of_logits_with_a_note(
    sparsity: str, dense: Path, textures: Path, tiny_recipe: Recipe, tmp_path: Path
) -> None:
    recipe = tiny_recipe.replace(epochs=1, logits=11, sparsity=sparsity)
    unnamed = tmp_path / "w.safetensors"
    about = {"recipe": tiny_recipe.fields(), "classes": []}
    checkpoint.write_weights(unnamed, read_state(dense).tensors, about)
    events = train_and_listen(
        recipe, textures, tmp_path / "run", weights=unnamed, execution=EXECUTION
    )
    begin = read_state(tmp_path / "run", 0).tensors
    initial = initial_tensors(recipe)
    assert begin["fc.weight"].tobytes() == initial["fc.weight"].tobytes()
    assert begin["fc.bias"].tobytes() == initial["fc.bias"].tobytes()
    trained = read_state(dense).tensors
    assert begin["conv1.weight"].tobytes() == trained["conv1.weight"].tobytes()
    note = "the weights have 10 logits, not 11: the classifier starts from the recipe's initial"
    assert any(note in line for line in read_notes(events))


def test_notes_on_starting_weights_come_once(
    dense: Path, textures: Path, tiny_recipe: Recipe, tmp_path: Path
) -> None:
    recipe = tiny_recipe.replace(padding="same")
    run = tmp_path / "run"
    train_until(stop_at("train", 4), recipe, textures, run, weights=dense)
    (start,) = read_entries(run, "start")
    assert start["details"] == [f"starts from the weights of step-00000007 of {dense.name}"]
    assert start["notes"] == ["the weights have padding=symmetric, this run padding=same"]
    assert read_notes(train_and_listen(recipe, textures, run, weights=dense)) == []


def test_weights_of_another_model_are_refused_before_there_is_a_folder(
    dense: Path, textures: Path, tiny_recipe: Recipe, tmp_path: Path
) -> None:
    recipe = tiny_recipe.replace(model="resnet18")
    with pytest.raises(CheckpointError, match=r"network.* resnet18: --set model='{.block"):
        lockstep.train(recipe, textures, tmp_path / "run", weights=dense)
    with pytest.raises(CheckpointError, match="there is no run, no file"):
        lockstep.train(tiny_recipe, textures, tmp_path / "run", weights=tmp_path / "nothing")
    assert not (tmp_path / "run").exists()


def test_a_file_of_another_named_model_says_which_model_to_set(tmp_path: Path) -> None:
    recipe = Recipe(model="resnet18", logits=10, precision="fp32")
    zeros = {}
    for tensor in MODELS["resnet18"].list_tensors(recipe.logits):
        zeros[tensor.name] = np.zeros(tensor.shape, np.float32)
    file = tmp_path / "w.safetensors"
    save_file(zeros, file)
    message = r"w\.safetensors holds resnet18, .*resnet50: --set model=resnet18$"
    with pytest.raises(CheckpointError, match=message):
        fit_start(StartSource(file), recipe.replace(model="resnet50"), tmp_path / "run")


def test_without_a_recipe_the_weights_decide_the_model_and_its_preprocessing(
    textures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    narrow = replace(narrow_model(MODELS["resnet18"]), layers=(1, 1, 1, 1))
    monkeypatch.setitem(MODELS, "resnet18", narrow)
    decided = {
        "model": "resnet18",
        "mean": [9.0, 8.0, 7.0],
        "std": [6.0, 5.0, 4.0],
        "interpolation": "bicubic",
    }
    recipe = Recipe.of(decided | {"logits": 3})
    initial = initial_tensors(recipe)
    file = tmp_path / "w.safetensors"
    checkpoint.write_weights(file, initial, {"recipe": recipe.fields(), "classes": []})
    paths: list[Path] = []
    read_weights = checkpoint.read_weights

    def note_path(path: Path, **options: Any) -> Any:
        paths.append(path)
        return read_weights(path, **options)

    monkeypatch.setattr(checkpoint, "read_weights", note_path)
    std = {"std": [3.0, 2.0, 1.0]}
    changes = {"epochs": 1, "image_size": 32, "precision": "fp32"} | std
    run = tmp_path / "run"
    events: list[Event] = []
    lockstep.train(data=textures, out=run, weights=file, changes=changes, listener=events.append)
    assert paths == [file], "weights are read once"
    fields = lockstep.load_recipe(run).fields()
    assert {name: fields[name] for name in decided} == decided | std, "changes take precedence"
    assert fields["logits"] == 10
    first = read_state(run, 0).tensors["conv1.weight"]
    assert first.tobytes() == initial["conv1.weight"].tobytes()
    lines = next(event for event in events if event["kind"] == "settled")["lines"]
    assert lines[2:] == [
        "  required by the weights: model resnet18, mean [9.0, 8.0, 7.0], interpolation bicubic"
    ]


def test_a_digest_is_of_names_types_shapes_and_values() -> None:
    values = np.arange(6, dtype=np.float32)
    others: list[dict[str, np.ndarray]] = [
        {"a": values},
        {"b": values},
        {"a": values.reshape(2, 3)},
        {"a": values.view(np.int32)},
        {"a": -values},
        {"a": values, "b": values},
    ]
    assert len(set(map(hash_tensors, others))) == len(others)
    assert hash_tensors({"a": values, "b": -values}) == hash_tensors({"b": -values, "a": values})
    square = values.reshape(2, 3)
    assert hash_tensors({"a": np.asfortranarray(square)}) == hash_tensors({"a": square})


def test_the_order_is_named_only_of_folders_that_programs_sort_differently() -> None:
    classes = ["M10", "M4"]
    assert "text order (1, 10, 2; torchvision, Keras)" in describe_positions(
        classes, in_folders=True
    )
    assert "order" not in describe_positions(classes, in_folders=False)
    assert "order" not in describe_positions(["ape", "bee"], in_folders=True)


@pytest.mark.parametrize(
    ("own", "rows", "note"),
    [
        (("0", "1", "10", "2"), [0, 1, 3, 2], "reordered by class name"),
        (("0", "1", "2", "10"), [0, 1, 2, 3], ""),
        (("w", "x", "y", "z"), [0, 1, 2, 3], "name their classes differently"),
        ((), [0, 1, 2, 3], "to the 4 classes of the images, in natural order (1, 2, 10; timm); if"),
    ],
)
def test_outputs_of_weights_that_know_the_classes_follow_their_names(
    own: tuple[str, ...], rows: list[int], note: str, tiny_recipe: Recipe, tmp_path: Path
) -> None:
    recipe = tiny_recipe.replace(logits=4)
    tensors = initial_tensors(recipe) | {"fc.bias": np.arange(4, dtype=np.float32)}
    named = name_classifier(own, tensors, recipe.spec.features)
    start = Start("w.safetensors", "digest", tensors, (), classes=own, named=named)
    values, notes = write_start(tmp_path, recipe, start, ("0", "1", "2", "10"), in_folders=True)
    assert values["fc.bias"].tolist() == rows
    assert np.array_equal(values["fc.weight"], tensors["fc.weight"][rows])
    assert note in " ".join(notes)
    assert len(notes) == bool(note)
    is_classifier = json.loads((tmp_path / "start.json").read_text())["is_classifier"]
    assert is_classifier == ("x" not in own)


@pytest.mark.parametrize(
    ("own", "classes", "rows", "note"),
    [
        ("abcd", "dxb", [3, None, 1], "2 kept (d, b), 1 new (x), 2 gone (a, c)"),
        ("abcd", "abcd", [0, 1, 2, 3], ""),
        ("abcd", "ca", [2, 0], "2 kept (c, a), 0 new, 2 gone (b, d)"),
        ("aabc", "abac", [None, 2, None, 3], "2 kept (b, c), 2 new (a, a), 1 gone (a)"),
        ("abcd", "xyz", [None, None, None], "starts from the recipe's initial values"),
        ("abcd", "abx", [0, 1, None, None], "2 kept (a, b), 1 new (x), 2 gone (c, d)"),
    ],
)
def test_outputs_of_known_classes_are_kept_without_a_probe(
    own: str, classes: str, rows: list[int | None], note: str, tiny_recipe: Recipe, tmp_path: Path
) -> None:
    trained = initial_tensors(tiny_recipe.replace(logits=4, seed=9))
    trained["fc.bias"] = np.arange(4, dtype=np.float32) + 5
    about = {"recipe": tiny_recipe.replace(logits=4).fields(), "classes": list(own)}
    checkpoint.write_weights(tmp_path / "w.safetensors", trained, about)
    recipe = tiny_recipe.replace(logits=len(rows), seed=3)
    start = fit_start(StartSource(tmp_path / "w.safetensors"), recipe, tmp_path)
    assert start is not None
    values, notes = write_start(tmp_path, recipe, start, tuple(classes))
    initial = initial_tensors(recipe)
    for place, row in enumerate(rows):
        for name in ("fc.weight", "fc.bias"):
            wanted = initial[name][place] if row is None else trained[name][row]
            assert np.array_equal(values[name][place], wanted)
    assert note in " ".join(notes)
    is_classifier = json.loads((tmp_path / "start.json").read_text())["is_classifier"]
    assert is_classifier == (None not in rows)
