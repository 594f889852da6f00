"""Runs with a sparse recipe: what is pruned, how they resume, and what they refuse."""

import json
from pathlib import Path

import numpy as np
import pytest

import lockstep
from lockstep.models.state import State
from lockstep.recipes import Execution, Recipe
from lockstep.runs.starting_weights import read_masks
from lockstep.system.errors import CheckpointError, RecipeError
from lockstep.weights import checkpoint
from lockstep.weights.sparsity import make_masks
from tests.runs.cases import (
    copy_bytes,
    find_same_parts,
    read_notes,
    read_state,
    stop_at,
    train_and_listen,
    train_until,
)

EXECUTION = Execution(log_every_steps=1, save_every_steps=3, keep_checkpoints=99)


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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sparsity": "mask_1d"}, r"prunes trained weights.*sparsity=none first.*--weights"),
        ({"frozen": "backbone"}, r"frozen \(backbone\) keeps trained weights.*--weights"),
    ],
)
def test_a_recipe_asks_for_trained_weights_before_there_is_a_folder(
    textures: Path, tiny_recipe: Recipe, tmp_path: Path, changes: dict[str, str], message: str
) -> None:
    with pytest.raises(RecipeError, match=message):
        lockstep.train(tiny_recipe.replace(**changes), textures, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def assert_masked(state: State, kept: dict[str, np.ndarray]) -> None:
    for name, mask in kept.items():
        for values in (state.tensors, state.momentum, state.ema):
            assert not values[name][~mask].any(), name


def test_what_was_pruned_stays_0_in_every_checkpoint(sparse: Path, dense: Path) -> None:
    kept = make_masks(read_state(dense).tensors, "mask_1d", ("fc.weight",))
    assert copy_bytes(read_masks(sparse)) == copy_bytes(kept)
    assert "layer3.0.conv2.weight" in kept  # a grouped one
    steps = checkpoint.steps(sparse / "checkpoints")
    assert steps == [0, 3, 6, 7, 9, 12, 14]
    for step in steps:
        assert_masked(read_state(sparse, step), kept)
    end = read_state(sparse).tensors
    assert end["fc.weight"].all()
    assert end["conv1.weight"].all()
    for name, mask in kept.items():
        assert (end[name][mask] != read_state(dense).tensors[name][mask]).mean() > 0.9


def test_what_is_kept_starts_as_it_was_given(sparse: Path, dense: Path) -> None:
    begin = read_state(sparse, 0)
    expected = dict(read_state(dense).tensors)
    for name, mask in read_masks(sparse).items():
        expected[name] = np.where(mask, expected[name], np.float32(0))
    assert copy_bytes(begin.tensors) == copy_bytes(begin.ema) == copy_bytes(expected)


def test_a_sparse_run_says_how_much_is_0(
    dense: Path, textures: Path, sparse_recipe: Recipe, tmp_path: Path
) -> None:
    events = train_and_listen(
        sparse_recipe.replace(epochs=1), textures, tmp_path / "run", weights=dense
    )
    kept = read_masks(tmp_path / "run")
    zeros = sum(mask.size for mask in kept.values()) // 2
    note = f"mask_1d sets {zeros:,} weights in 16 tensors to 0 and keeps them there"
    assert note in read_notes(events)


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
    expected = copy_bytes(make_masks(read_state(dense).tensors, algorithm, excluded, channels))
    assert copy_bytes(kept) == expected
    assert "fc.weight" in kept
    assert ("conv1.weight" in kept) == (channels == 4)
    assert not kept.keys() & set(excluded)
    tensors = read_state(tmp_path / "run").tensors
    assert not any(tensors[name][~mask].any() for name, mask in kept.items())


def test_a_sparse_run_is_used_as_any_other(sparse: Path, textures: Path, tmp_path: Path) -> None:
    report = json.loads((sparse / "report.json").read_text())
    lockstep.load(sparse, checkpoint="newest").save(tmp_path / "w.safetensors", certificate=False)
    for source in (sparse, tmp_path / "w.safetensors"):
        result = lockstep.load(source, checkpoint="newest").evaluate(textures).to_json()
        assert result["per_class"] == report["per_class"]["trained"]
        assert result["loss"] == pytest.approx(report["final"]["trained"]["loss"], rel=1e-6)


@pytest.mark.parametrize("again", [True, False], ids=["given again", "left out"])
@pytest.mark.parametrize("step", [1, 5, 7])
def test_a_sparse_run_resumes_bit_for_bit(
    step: int,
    again: bool,
    sparse: Path,
    dense: Path,
    textures: Path,
    sparse_recipe: Recipe,
    tmp_path: Path,
) -> None:
    run = tmp_path / "run"
    train_until(
        stop_at("train", step), sparse_recipe, textures, run, weights=dense, execution=EXECUTION
    )
    weights = dense if again else None
    lockstep.train(sparse_recipe, textures, run, weights=weights, execution=EXECUTION)
    assert find_same_parts(run, sparse) == ["tensors", "momentum", "ema"]


def test_a_run_that_was_killed_before_its_first_checkpoint_resumes_from_its_start(
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
    assert copy_bytes(read_state(run).tensors) == copy_bytes(read_state(sparse).tensors)


def test_finished_runs_need_no_weights(sparse: Path, textures: Path, sparse_recipe: Recipe) -> None:
    report = lockstep.train(sparse_recipe, textures, sparse, execution=EXECUTION)
    assert report.items() >= json.loads((sparse / "report.json").read_text()).items()


def test_a_run_does_not_resume_with_other_weights_than_it_started_from(
    sparse: Path, dense: Path, textures: Path, tiny_recipe: Recipe, sparse_recipe: Recipe
) -> None:
    averages = dense / "checkpoints/step-00000007/ema.safetensors"
    message = r"from other weights \(step-00000007\) than those of ema.safetensors"
    with pytest.raises(CheckpointError, match=message):
        lockstep.train(sparse_recipe, textures, sparse, weights=averages)
    recipe = tiny_recipe.replace(epochs=1, ema_decay=0.9)
    with pytest.raises(CheckpointError, match="its recipe's initial weights, not from ema"):
        lockstep.train(recipe, textures, dense, weights=averages)


def test_a_start_that_was_killed_leaves_nothing_to_the_corrected_command(
    sparse: Path, textures: Path, tiny_recipe: Recipe, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    for name in ("recipe.yaml", "start.json", "masks.safetensors"):
        (run / name).write_bytes((sparse / name).read_bytes())
    (run / ".masks.safetensors.partial").write_bytes(b"")
    lockstep.train(tiny_recipe.replace(epochs=1), textures, run)
    assert [*run.glob("*start*"), *run.glob("*masks*")] == []


@pytest.mark.parametrize("name", ["masks.safetensors", "start.json"])
@pytest.mark.parametrize("damage", ["missing", "cut off", "changed"])
def test_a_sparse_run_whose_masks_are_damaged_does_not_resume(
    name: str, damage: str, dense: Path, textures: Path, sparse_recipe: Recipe, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    train_until(stop_at("train", 2), sparse_recipe, textures, run, weights=dense)
    whole = (run / name).read_bytes()
    if damage == "missing":
        (run / name).unlink()
    else:
        changed = whole[:-20] + b"\0" + whole[-19:]
        (run / name).write_bytes(whole[:-40] if damage == "cut off" else changed)
    with pytest.raises(CheckpointError, match=name):
        lockstep.train(sparse_recipe, textures, run)
