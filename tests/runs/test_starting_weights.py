"""Runs that start from given weights, dense and pruned: what they start from, how they resume, and
what they refuse."""

import json
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import lockstep
from lockstep.models.architectures import MODELS, narrow_model, tensors
from lockstep.models.state import State
from lockstep.recipes import Execution, Recipe
from lockstep.recipes.initial_weights import initial_tensors
from lockstep.runs.starting_weights import StartSource, fit_start, hash_tensors, read_masks
from lockstep.system.errors import CheckpointError, Interrupted, RecipeError
from lockstep.system.event_log import read_log
from lockstep.weights import checkpoint
from lockstep.weights.sparsity import make_masks

EXECUTION = Execution(log_every_steps=1, save_every_steps=3, keep_checkpoints=99)
STEPS = 14  # 60 images, 8 per step, 2 epochs
Arrays = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def dense(tiny_recipe: Recipe, textures: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of one epoch, with a moving average."""
    out = tmp_path_factory.mktemp("dense") / "a dense run"
    lockstep.train(tiny_recipe.replace(epochs=1, ema_decay=0.9), textures, out)
    return out


@pytest.fixture(scope="module")
def sparse_recipe(tiny_recipe: Recipe) -> Recipe:
    return tiny_recipe.replace(sparsity="mask_1d", ema_decay=0.9)


@pytest.fixture(scope="module")
def sparse(
    sparse_recipe: Recipe, dense: Path, textures: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A pruned run that was never interrupted. Tests only read it."""
    out = tmp_path_factory.mktemp("sparse") / "run"
    lockstep.train(sparse_recipe, textures, out, weights=dense, execution=EXECUTION)
    return out


def state(run: Path, step: int) -> State:
    return checkpoint.load(checkpoint.checkpoint_path(run / "checkpoints", step))[0]


def trained(run: Path) -> Arrays:
    found = checkpoint.newest_intact(run / "checkpoints")[0]
    assert found is not None
    return found.tensors


def bits(arrays: Arrays) -> dict[str, bytes]:
    return {name: value.tobytes() for name, value in arrays.items()}


def stop_at(step: int) -> Callable[[dict[str, Any]], None]:
    """Return a listener that asks this process to stop after a step."""
    sent: list[int] = []

    def listener(event: dict[str, Any]) -> None:
        if event["kind"] == "train" and event["step"] >= step and not sent:
            sent.append(step)
            os.kill(os.getpid(), signal.SIGTERM)

    return listener


def notes(events: list[dict[str, Any]]) -> str:
    return "\n".join(next(event for event in events if event["kind"] == "start")["notes"])


# Given weights


def newest(run: Path) -> Path:
    return checkpoint.checkpoint_path(run / "checkpoints", 7)


def converted(run: Path, folder: Path) -> Path:
    lockstep.convert(run, folder / "w.safetensors", certificate=False)
    return folder / "w.safetensors"


def as_tensorflows(run: Path, folder: Path) -> Path:
    lockstep.convert(run, folder / "model.ckpt-7", to="nvidia-tensorflow", certificate=False)
    return folder / "model.ckpt-7"


SOURCES: dict[str, Callable[[Path, Path], Path]] = {
    "run": lambda run, _: run,
    "checkpoint": lambda run, _: newest(run),
    "file in a checkpoint": lambda run, _: newest(run) / "model.safetensors",
    "converted": converted,
    "of TensorFlow's": as_tensorflows,
}


@pytest.mark.parametrize("source", SOURCES)
def test_a_run_starts_at_step_0_with_given_weights_and_no_velocity(
    source: str, dense: Path, textures: Path, tiny_recipe: Recipe, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    given = SOURCES[source](dense, tmp_path)
    recipe = tiny_recipe.replace(epochs=1, ema_decay=0.9)
    lockstep.train(recipe, textures, run, weights=given, execution=EXECUTION)
    begin = state(run, 0)
    assert bits(begin.tensors) == bits(begin.ema) == bits(trained(dense))
    assert not any(value.any() for value in begin.momentum.values())
    noted = json.loads((run / "start.json").read_text())
    assert noted == {
        "weights": "step-00000007" if given.is_dir() else given.name,
        "weights_sha256": hash_tensors(trained(dense)),
    }
    assert [
        entry["first_step"] for entry in read_log(run / "log.jsonl") if entry["kind"] == "train"
    ] == list(range(7))


def test_a_run_trains_from_the_weights_that_it_was_given(
    dense: Path, textures: Path, tiny_recipe: Recipe, tmp_path: Path
) -> None:
    # At this learning rate updates are below half a unit in the last place, except where a
    # parameter is almost 0.
    recipe = tiny_recipe.replace(epochs=1, lr=1e-30, weight_decay=0.0)
    lockstep.train(recipe, textures, tmp_path / "run", weights=dense)
    begin = trained(dense)
    end = trained(tmp_path / "run")
    assert all(
        np.abs(end[name] - begin[name]).max() < 1e-25 for name in begin if "running" not in name
    )


def test_a_moving_average_can_be_started_from(
    dense: Path, textures: Path, tiny_recipe: Recipe, tmp_path: Path
) -> None:
    averages = newest(dense) / "ema.safetensors"
    lockstep.train(
        tiny_recipe.replace(epochs=1),
        textures,
        tmp_path / "run",
        weights=averages,
        execution=EXECUTION,
    )
    assert bits(state(tmp_path / "run", 0).tensors) == bits(load_file(averages))


def test_weights_of_half_precision_become_float32(
    dense: Path, textures: Path, tiny_recipe: Recipe, tmp_path: Path
) -> None:
    halves = {name: value.astype(np.float16) for name, value in trained(dense).items()}
    about = {"recipe": tiny_recipe.fields(), "classes": []}
    checkpoint.write_weights(tmp_path / "w.safetensors", halves, about)
    recipe = tiny_recipe.replace(epochs=1)
    lockstep.train(
        recipe, textures, tmp_path / "run", weights=tmp_path / "w.safetensors", execution=EXECUTION
    )
    expected = {name: value.astype(np.float32) for name, value in halves.items()}
    assert bits(state(tmp_path / "run", 0).tensors) == bits(expected)


@pytest.mark.parametrize("sparsity", ["none", "mask_1d"])
def test_the_classifier_is_drawn_afresh_for_another_number_of_logits_and_a_line_says_so(
    sparsity: str, dense: Path, textures: Path, tiny_recipe: Recipe, tmp_path: Path
) -> None:
    recipe = tiny_recipe.replace(epochs=1, logits=11, sparsity=sparsity)
    events: list[dict[str, Any]] = []
    lockstep.train(
        recipe,
        textures,
        tmp_path / "run",
        weights=dense,
        execution=EXECUTION,
        listener=events.append,
    )
    begin = state(tmp_path / "run", 0).tensors
    given = trained(dense)
    drawn = initial_tensors(recipe)
    assert begin["fc.weight"].tobytes() == drawn["fc.weight"].tobytes()
    assert begin["fc.bias"].tobytes() == drawn["fc.bias"].tobytes()
    assert begin["conv1.weight"].tobytes() == given["conv1.weight"].tobytes()
    assert (
        "the weights have 10 logits, not 11: the classifier starts from the recipe's initial values"
        in notes(events)
    )


def test_what_is_told_of_given_weights_is_told_once(
    dense: Path, textures: Path, tiny_recipe: Recipe, tmp_path: Path
) -> None:
    recipe = tiny_recipe.replace(padding="same")
    told: list[dict[str, Any]] = []
    with pytest.raises(Interrupted):
        lockstep.train(
            recipe,
            textures,
            tmp_path / "run",
            weights=dense,
            listener=lambda e: (told.append(e), stop_at(4)(e)),
        )
    assert notes(told).splitlines() == [
        "starts from the weights of step-00000007",
        "the weights have padding symmetric, not same",
    ]
    told.clear()
    lockstep.train(recipe, textures, tmp_path / "run", weights=dense, listener=told.append)
    assert notes(told) == ""


def test_weights_of_another_model_are_refused_before_there_is_a_folder(
    dense: Path, textures: Path, tiny_recipe: Recipe, tmp_path: Path
) -> None:
    recipe = tiny_recipe.replace(model="resnet18")
    with pytest.raises(CheckpointError, match="do not fit the recipe's model: missing"):
        lockstep.train(recipe, textures, tmp_path / "run", weights=dense)
    with pytest.raises(CheckpointError, match="there is no run, no file"):
        lockstep.train(tiny_recipe, textures, tmp_path / "run", weights=tmp_path / "nothing")
    assert not (tmp_path / "run").exists()


def test_a_file_of_another_named_model_says_which_model_to_set(tmp_path: Path) -> None:
    given = Recipe(model="resnet18", logits=10, precision="fp32")
    zeros = {
        each.name: np.zeros(each.shape, np.float32)
        for each in tensors(MODELS["resnet18"], given.logits)
    }
    save_file(zeros, tmp_path / "w.safetensors")
    with pytest.raises(
        CheckpointError, match=r"w\.safetensors holds resnet18, .*resnet50: --set model=resnet18$"
    ):
        fit_start(
            StartSource(tmp_path / "w.safetensors"),
            given.replace(model="resnet50"),
            tmp_path / "run",
        )


def test_without_a_recipe_the_weights_decide_the_model_and_its_preprocessing(
    textures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(
        MODELS, "resnet18", replace(narrow_model(MODELS["resnet18"]), layers=(1, 1, 1, 1))
    )
    of_weights = {
        "model": "resnet18",
        "mean": [9.0, 8.0, 7.0],
        "std": [6.0, 5.0, 4.0],
        "interpolation": "bicubic",
    }
    given = Recipe.of(of_weights | {"logits": 3})
    file = tmp_path / "w.safetensors"
    checkpoint.write_weights(
        file, initial_tensors(given), {"recipe": given.fields(), "classes": []}
    )
    events: list[dict[str, Any]] = []
    changes = {"epochs": 1, "image_size": 32, "precision": "fp32", "std": [3.0, 2.0, 1.0]}
    read: list[Path] = []
    real = checkpoint.read_weights
    monkeypatch.setattr(
        checkpoint,
        "read_weights",
        lambda path, **options: (read.append(path), real(path, **options))[1],
    )
    lockstep.train(
        data=textures, out=tmp_path / "run", weights=file, changes=changes, listener=events.append
    )
    assert read == [file], "weights are read once"
    fields = lockstep.load_recipe(tmp_path / "run").fields()
    assert {name: fields[name] for name in of_weights} == of_weights | {"std": [3.0, 2.0, 1.0]}, (
        "what is set goes before"
    )
    assert fields["logits"] == 10
    assert (
        state(tmp_path / "run", 0).tensors["conv1.weight"].tobytes()
        == initial_tensors(given)["conv1.weight"].tobytes()
    )
    lines = next(event for event in events if event["kind"] == "settled")["lines"]
    assert lines[2:] == [
        "  as the given weights need it: model resnet18, mean [9.0, 8.0, 7.0], interpolation"
        " bicubic"
    ]


# Pruning


def test_a_sparse_recipe_asks_for_trained_weights_before_there_is_a_folder(
    textures: Path, sparse_recipe: Recipe, tmp_path: Path
) -> None:
    with pytest.raises(
        RecipeError, match=r"prunes trained weights.*sparsity=none first.*--weights"
    ):
        lockstep.train(sparse_recipe, textures, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def assert_masked(found: State, kept: Arrays) -> None:
    for name, mask in kept.items():
        for values in (found.tensors, found.momentum, found.ema):
            assert not values[name][~mask].any(), name


def test_what_was_pruned_stays_0_in_every_checkpoint(sparse: Path, dense: Path) -> None:
    kept = make_masks(trained(dense), "mask_1d", ("fc.weight",))
    assert bits(read_masks(sparse)) == bits(kept)
    assert "layer3.0.conv2.weight" in kept  # a grouped one
    steps = checkpoint.steps(sparse / "checkpoints")
    assert steps == [0, 3, 6, 7, 9, 12, 14]
    for step in steps:
        assert_masked(state(sparse, step), kept)
    end = state(sparse, STEPS).tensors
    assert end["fc.weight"].all()
    assert end["conv1.weight"].all()
    for name, mask in kept.items():
        assert (end[name][mask] != trained(dense)[name][mask]).mean() > 0.9


def test_what_is_kept_starts_as_it_was_given(sparse: Path, dense: Path) -> None:
    begin = state(sparse, 0)
    kept = read_masks(sparse)
    expected = {
        name: np.where(kept.get(name, True), value, np.float32(0))
        for name, value in trained(dense).items()
    }
    assert bits(begin.tensors) == bits(begin.ema) == bits(expected)


def test_a_sparse_run_says_how_much_is_0(
    dense: Path, textures: Path, sparse_recipe: Recipe, tmp_path: Path
) -> None:
    events: list[dict[str, Any]] = []
    lockstep.train(
        sparse_recipe.replace(epochs=1),
        textures,
        tmp_path / "run",
        weights=dense,
        listener=events.append,
    )
    kept = read_masks(tmp_path / "run")
    zeros = sum(mask.size for mask in kept.values()) // 2
    assert f"mask_1d sets {zeros:,} weights in 16 tensors to 0 and keeps them there" in notes(
        events
    )


@pytest.mark.parametrize(("algorithm", "channels"), [("mask_2d_greedy", 3), ("mask_2d_best", 4)])
def test_masks_are_those_of_the_recipes_algorithm_and_leave_out_what_it_excludes(
    algorithm: str, channels: int, dense: Path, textures: Path, tiny_recipe: Recipe, tmp_path: Path
) -> None:
    excluded = ("layer1.0.conv1.weight", "layer4.0.conv2.weight")
    recipe = tiny_recipe.replace(
        epochs=1, sparsity=algorithm, sparsity_excluded=excluded, stem_channels=channels
    )
    lockstep.train(recipe, textures, tmp_path / "run", weights=dense)
    kept = read_masks(tmp_path / "run")
    assert bits(kept) == bits(make_masks(trained(dense), algorithm, excluded, channels))
    assert "fc.weight" in kept
    assert ("conv1.weight" in kept) == (channels == 4)
    assert not kept.keys() & set(excluded)
    assert not any(trained(tmp_path / "run")[name][~mask].any() for name, mask in kept.items())


def test_a_sparse_run_is_evaluated_and_converted_as_any_other(
    sparse: Path, textures: Path, tmp_path: Path
) -> None:
    report = json.loads((sparse / "report.json").read_text())
    lockstep.convert(sparse, tmp_path / "w.safetensors", certificate=False)
    for source in (sparse, tmp_path / "w.safetensors"):
        result = lockstep.evaluate(source, textures)
        assert result["per_class"] == report["per_class"]["trained"]
        assert result["loss"] == pytest.approx(report["final"]["trained"]["loss"], rel=1e-6)


# Resuming


@pytest.mark.parametrize("again", [True, False], ids=["given again", "left out"])
@pytest.mark.parametrize("step", [1, 5, 7])
def test_a_sparse_run_goes_on_bit_for_bit(
    step: int,
    again: bool,
    sparse: Path,
    dense: Path,
    textures: Path,
    sparse_recipe: Recipe,
    tmp_path: Path,
) -> None:
    run = tmp_path / "run"
    with pytest.raises(Interrupted):
        lockstep.train(
            sparse_recipe, textures, run, weights=dense, execution=EXECUTION, listener=stop_at(step)
        )
    lockstep.train(
        sparse_recipe, textures, run, weights=dense if again else None, execution=EXECUTION
    )
    ends = [state(folder, STEPS) for folder in (run, sparse)]
    for part in ("tensors", "momentum", "ema"):
        assert bits(getattr(ends[0], part)) == bits(getattr(ends[1], part))


def test_a_run_that_was_killed_before_its_first_checkpoint_goes_on_from_its_start(
    sparse: Path, textures: Path, sparse_recipe: Recipe, tmp_path: Path
) -> None:
    # A killed run leaves its start and a log, but no later checkpoint.
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    for name in ("recipe.yaml", "start.json", "masks.safetensors", "log.jsonl"):
        (run / name).write_bytes((sparse / name).read_bytes())
    begin = checkpoint.checkpoint_path(Path("checkpoints"), 0)
    (run / begin).mkdir()
    for file in (sparse / begin).iterdir():
        (run / begin / file.name).write_bytes(file.read_bytes())
    lockstep.train(sparse_recipe, textures, run, execution=EXECUTION)
    assert bits(trained(run)) == bits(trained(sparse))


def test_a_finished_sparse_run_needs_no_weights(
    sparse: Path, textures: Path, sparse_recipe: Recipe
) -> None:
    report = lockstep.train(sparse_recipe, textures, sparse, execution=EXECUTION)
    assert report == json.loads((sparse / "report.json").read_text())


def test_a_run_does_not_go_on_from_other_weights_than_it_started_from(
    sparse: Path, dense: Path, textures: Path, tiny_recipe: Recipe, sparse_recipe: Recipe
) -> None:
    averages = newest(dense) / "ema.safetensors"
    with pytest.raises(
        CheckpointError, match=r"from other weights \(step-00000007\) than those of ema.safetensors"
    ):
        lockstep.train(sparse_recipe, textures, sparse, weights=averages)
    with pytest.raises(
        CheckpointError, match="started from its recipe's initial weights, not from ema"
    ):
        lockstep.train(
            tiny_recipe.replace(epochs=1, ema_decay=0.9), textures, dense, weights=averages
        )


def test_a_start_that_was_killed_leaves_nothing_to_the_command_that_is_corrected(
    sparse: Path, textures: Path, tiny_recipe: Recipe, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    for name in ("recipe.yaml", "start.json", "masks.safetensors"):
        (run / name).write_bytes((sparse / name).read_bytes())
    (run / ".masks.safetensors.partial").write_bytes(b"")
    lockstep.train(tiny_recipe.replace(epochs=1), textures, run)
    assert [path.name for part in ("start", "masks") for path in run.glob(f"*{part}*")] == []


# Damaged files


@pytest.mark.parametrize("name", ["masks.safetensors", "start.json"])
@pytest.mark.parametrize("damage", ["missing", "cut off", "changed"])
def test_a_sparse_run_whose_masks_are_damaged_does_not_go_on(
    name: str, damage: str, dense: Path, textures: Path, sparse_recipe: Recipe, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    with pytest.raises(Interrupted):
        lockstep.train(sparse_recipe, textures, run, weights=dense, listener=stop_at(2))
    whole = (run / name).read_bytes()
    if damage == "missing":
        (run / name).unlink()
    else:
        (run / name).write_bytes(
            whole[:-40] if damage == "cut off" else whole[:-20] + b"\0" + whole[-19:]
        )
    with pytest.raises(CheckpointError, match=name):
        lockstep.train(sparse_recipe, textures, run)


def test_a_digest_is_of_names_types_shapes_and_values() -> None:
    values = np.arange(6, dtype=np.float32)
    others: list[Arrays] = [
        {"a": values},
        {"b": values},
        {"a": values.reshape(2, 3)},
        {"a": values.view(np.int32)},
        {"a": -values},
        {"a": values, "b": values},
    ]
    assert len({hash_tensors(each) for each in others}) == len(others)
    assert hash_tensors({"a": values, "b": -values}) == hash_tensors({"b": -values, "a": values})
    assert hash_tensors({"a": np.asfortranarray(values.reshape(2, 3))}) == hash_tensors(
        {"a": values.reshape(2, 3)}
    )
