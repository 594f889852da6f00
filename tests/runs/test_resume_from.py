"""Runs that resume where another program stopped: from a converted checkpoint they give the weights
of the run that was not interrupted.

The oracle is that run. Its checkpoint is converted to each of NVIDIA's formats, and a new run
resumes from it.
"""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import lockstep
from lockstep.data.textures import draw_data_set
from lockstep.models.architectures import MODELS, ModelSpec
from lockstep.models.state import State
from lockstep.recipes import Execution, Recipe
from lockstep.recipes.initial_weights import initial_state
from lockstep.runs.starting_weights import Start, build_first_state
from lockstep.system.errors import CheckpointError, UserError
from lockstep.weights import Weights, checkpoint, open_weights
from lockstep.weights.formats import nvidia_paddle, torch_file
from tests.runs.cases import (
    copy_bytes,
    find_same_parts,
    newest_step,
    read_entries,
    read_notes,
    read_state,
    stop_at,
    train_and_listen,
    train_until,
)

EXECUTION = Execution(
    backend="reference",
    reference_dtype="float32",
    log_every_steps=1,
    save_every_steps=1,
    keep_checkpoints=99,
)
STEPS = 6  # 20 images, 8 per step, 2 steps an epoch, 3 epochs
NAMES = {
    "nvidia-pytorch": "checkpoint.pth.tar",
    "nvidia-tensorflow": "model.ckpt-2",
    "nvidia-paddle": "ResNet50/0/resnet_50_paddle",
    "nvidia-mxnet": "model-0001.params",
}
NO_AVERAGE = "the checkpoint has no moving average: it starts at the weights"


@pytest.fixture(scope="module", autouse=True)
def named_model(tiny_recipe: Recipe) -> Iterator[None]:
    """Give the tiny model a name."""
    assert isinstance(tiny_recipe.model, ModelSpec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(MODELS, "tiny", tiny_recipe.model)
        yield


@pytest.fixture(scope="module")
def recipe(tiny_recipe: Recipe) -> Recipe:
    return tiny_recipe.replace(model="tiny", epochs=3, ema_decay=0.9)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("images")
    draw_data_set(root, train_images=20, val_images=10)
    return root


@pytest.fixture(scope="module")
def whole(recipe: Recipe, images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was never interrupted. Tests only read it."""
    out = tmp_path_factory.mktemp("whole") / "run"
    lockstep.train(recipe, images, out, execution=EXECUTION)
    return out


@pytest.fixture(scope="module")
def converted(whole: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function that returns a checkpoint of the run in a format. Tests only read it."""

    def convert(to: str, step: int = 2) -> Path:
        target = tmp_path_factory.mktemp(to) / NAMES[to]
        lockstep.load(whole, checkpoint=str(step)).save(target, to=to, certificate=False)
        return target

    return convert


def list_steps(run: Path) -> list[int]:
    """Return the steps that a run has trained."""
    return [entry["first_step"] for entry in read_entries(run, "train")]


@pytest.mark.parametrize("to", NAMES)
def test_a_run_that_resumes_from_a_checkpoint_of_nvidias_code_is_the_whole_run(
    to: str,
    whole: Path,
    converted: Callable[..., Path],
    images: Path,
    recipe: Recipe,
    tmp_path: Path,
) -> None:
    file = converted(to)
    events = train_and_listen(
        recipe, images, tmp_path / "run", resume_from=file, execution=EXECUTION
    )
    assert list_steps(tmp_path / "run") == [2, 3, 4, 5]
    assert "step 2 of 6 is done, epoch 1 of 3" in read_notes(events)
    has_averages = to == "nvidia-pytorch"
    averages = ["ema"] if has_averages else []
    assert find_same_parts(tmp_path / "run", whole) == ["tensors", "momentum", *averages]
    assert (NO_AVERAGE in read_notes(events)) != has_averages
    assert not any("velocities" in note for note in read_notes(events))
    if not has_averages:
        begun = read_state(tmp_path / "run", 2)
        assert copy_bytes(begun.ema) == copy_bytes(begun.tensors)


@pytest.mark.parametrize("kind", ["run", "checkpoint of TensorFlow within an epoch"])
def test_a_run_resumes_at_the_step_of_a_checkpoint(
    kind: str,
    whole: Path,
    converted: Callable[..., Path],
    images: Path,
    recipe: Recipe,
    tmp_path: Path,
) -> None:
    folder = checkpoint.checkpoint_path(whole / "checkpoints", 3)
    file = folder if kind == "run" else converted("nvidia-tensorflow", 3)
    lockstep.train(recipe, images, tmp_path / "run", resume_from=file, execution=EXECUTION)
    assert list_steps(tmp_path / "run") == [3, 4, 5]
    assert find_same_parts(tmp_path / "run", whole)[:2] == ["tensors", "momentum"]


def test_what_mxnet_does_not_store_is_noted(
    converted: Callable[..., Path], images: Path, recipe: Recipe, tmp_path: Path
) -> None:
    file = converted("nvidia-mxnet")
    file.with_name("model-0001.momentum.params").unlink()  # the original never writes it
    events = train_and_listen(
        recipe, images, tmp_path / "run", resume_from=file, execution=EXECUTION
    )
    notes = read_notes(events)
    assert {"there are no velocities (model-0001.momentum.params)", NO_AVERAGE} <= set(notes)
    assert not any(value.any() for value in read_state(tmp_path / "run", 2).momentum.values())


def test_a_run_from_a_checkpoint_that_was_stopped_resumes(
    whole: Path, converted: Callable[..., Path], images: Path, recipe: Recipe, tmp_path: Path
) -> None:
    file = converted("nvidia-pytorch")
    run = tmp_path / "run"
    how = {"resume_from": file, "execution": EXECUTION}
    train_until(stop_at("train", 3), recipe, images, run, **how)
    assert newest_step(run) < STEPS
    report = lockstep.train(recipe, images, run, **how)
    assert find_same_parts(run, whole) == ["tensors", "momentum", "ema"]
    assert lockstep.train(recipe, images, run, **how)["final"] == report["final"]
    message = r"was started from other weights \(checkpoint\.pth\.tar\)"
    with pytest.raises(CheckpointError, match=message):
        lockstep.train(recipe, images, run, resume_from=whole, execution=EXECUTION)


def test_a_checkpoint_at_the_end_of_the_run_is_only_evaluated(
    whole: Path, images: Path, recipe: Recipe, tmp_path: Path
) -> None:
    report = lockstep.train(
        recipe, images, tmp_path / "run", resume_from=whole, execution=EXECUTION
    )
    assert list_steps(tmp_path / "run") == []
    trained, _ = [entry for entry in read_entries(whole, "evaluate") if entry["step"] == STEPS]
    assert report["final"]["trained"]["loss"] == trained["loss"]


def test_a_checkpoint_beyond_the_end_is_refused_and_more_epochs_help(
    whole: Path, images: Path, recipe: Recipe, tmp_path: Path
) -> None:
    train = partial(
        lockstep.train, data=images, out=tmp_path / "run", resume_from=whole, execution=EXECUTION
    )
    message = "has done step 6, but this run ends at step 4: 2 epochs of 2 steps"
    with pytest.raises(CheckpointError, match=message):
        train(recipe.replace(epochs=2))
    with pytest.raises(CheckpointError, match="does not have the state of the optimizer lamb"):
        train(recipe.replace(optimizer="lamb", nesterov=False))
    train(recipe.replace(epochs=4))
    assert list_steps(tmp_path / "run") == [6, 7]


def test_a_run_cannot_resume_from_weights_without_a_step_or_an_epoch(
    whole: Path, images: Path, recipe: Recipe, tmp_path: Path
) -> None:
    file = tmp_path / "weights.pth"
    tensors = {name: torch.from_numpy(value) for name, value in read_state(whole).tensors.items()}
    torch.save(tensors, file)
    train = partial(lockstep.train, data=images, out=tmp_path / "run", execution=EXECUTION)
    message = r"weights\.pth does not say how many steps or epochs are done.*--weights"
    with pytest.raises(CheckpointError, match=message):
        train(recipe, resume_from=file)
    train(recipe.replace(epochs=1), weights=file)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"logits": 11},
            "has 10 logits, but the recipe has 11, so training cannot resume from it: "
            "--set logits=10",
        ),
        ({"model": "resnet18"}, "which does not fit the recipe's model resnet18: --set model="),
    ],
)
def test_a_checkpoint_of_another_model_is_refused_before_there_is_a_folder(
    change: dict[str, Any], message: str, whole: Path, images: Path, recipe: Recipe, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=message):
        lockstep.train(recipe.replace(**change), images, tmp_path / "run", resume_from=whole)
    assert not (tmp_path / "run").exists()


def test_a_run_does_not_start_from_weights_and_a_checkpoint(
    whole: Path, images: Path, recipe: Recipe, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="--weights and --resume-from exclude each other"):
        lockstep.train(recipe, images, tmp_path / "run", weights=whole, resume_from=whole)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("scaler", [{}, {"scale": 512.0, "good_steps": 3.0, "bad_steps": 0.0}])
def test_a_loss_scale_is_the_checkpoints(scaler: dict[str, float], recipe: Recipe) -> None:
    recipe = recipe.replace(precision="fp16", loss_scaling="dynamic")
    begun = initial_state(recipe)
    state = State(0, begun.tensors, begun.momentum, {}, scaler)
    weights = Weights(recipe, state, (), Path("a.pth"), "torchvision", epochs=2)
    start = Start("a.pth", "", begun.tensors, (), weights)
    first, notes = build_first_state(recipe, begun.tensors, start, per_epoch=2)
    assert (first.step, first.scaler) == (4, scaler)
    assert ("the checkpoint has no loss scale: it starts at the recipe's" in notes) == (not scaler)


def test_the_loss_scale_of_a_checkpoint_of_paddle_is_opened(recipe: Recipe, tmp_path: Path) -> None:
    scaler = {"scale": 512.0, "good_steps": 3.0, "bad_steps": 1.0}
    begun = initial_state(recipe)
    for name, scale in (("a", 512.0), ("b", np.nan)):
        state = State(0, begun.tensors, begun.momentum, {}, scaler | {"scale": scale})
        nvidia_paddle.write(tmp_path / name, recipe, state)
    assert open_weights(tmp_path / "a", momentum=True).state.scaler == scaler
    assert open_weights(tmp_path / "a").state.scaler == {}
    assert open_weights(tmp_path / "b", momentum=True).state.scaler == {}


def test_a_resumed_run_refuses_a_checkpoint_with_other_velocities(
    converted: Callable[..., Path], images: Path, recipe: Recipe, tmp_path: Path
) -> None:
    file = converted("nvidia-pytorch")
    lockstep.train(recipe, images, tmp_path / "run", resume_from=file, execution=EXECUTION)
    stored = torch_file.load(file)
    for slot in stored["optimizer"]["state"].values():
        slot["momentum_buffer"] = slot["momentum_buffer"] * np.float32(2)
    other = tmp_path / "other.pth.tar"
    torch_file.save(other, stored)
    message = r"started from other weights .*: leave out --resume-from"
    with pytest.raises(CheckpointError, match=message):
        lockstep.train(recipe, images, tmp_path / "run", resume_from=other, execution=EXECUTION)
