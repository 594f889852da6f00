"""Runs that go on where another program stopped: from a converted checkpoint they continue as the
run that went on.

The oracle is that run. Its checkpoint is converted to each of NVIDIA's formats, and a new run
resumes from it.
"""

import os
import signal
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
from lockstep.system.errors import CheckpointError, Interrupted, UserError
from lockstep.system.event_log import read_log
from lockstep.weights import Weights, checkpoint, open_weights
from lockstep.weights.formats import nvidia_paddle, torch_file

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
NO_AVERAGE = "there is no moving average: it starts at the weights"
Arrays = dict[str, np.ndarray]


@pytest.fixture(scope="module", autouse=True)
def named(tiny_recipe: Recipe) -> Iterator[None]:
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
        lockstep.convert(whole, target, to=to, checkpoint=str(step), certificate=False)
        return target

    return convert


def bits(arrays: Arrays) -> dict[str, bytes]:
    return {name: value.tobytes() for name, value in arrays.items()}


def state(run: Path, step: int = STEPS) -> State:
    return checkpoint.load(checkpoint.checkpoint_path(run / "checkpoints", step))[0]


def same_parts(run: Path, other: Path) -> list[str]:
    """Return which parts of the last states are the same, bit for bit."""
    ours = state(run)
    theirs = state(other)
    return [
        part
        for part in ("tensors", "momentum", "ema")
        if bits(getattr(ours, part)) == bits(getattr(theirs, part))
    ]


def steps_of(run: Path) -> list[int]:
    return [
        event["first_step"] for event in read_log(run / "log.jsonl") if event["kind"] == "train"
    ]


def notes(events: list[dict[str, Any]]) -> list[str]:
    return [note for event in events if event["kind"] == "start" for note in event["notes"]]


@pytest.mark.parametrize("to", NAMES)
def test_a_run_that_goes_on_from_a_checkpoint_of_nvidias_code_is_the_run_that_went_on(
    to: str,
    whole: Path,
    converted: Callable[..., Path],
    images: Path,
    recipe: Recipe,
    tmp_path: Path,
) -> None:
    events: list[dict[str, Any]] = []
    given = converted(to)
    lockstep.train(
        recipe,
        images,
        tmp_path / "run",
        resume_from=given,
        execution=EXECUTION,
        listener=events.append,
    )
    assert steps_of(tmp_path / "run") == [2, 3, 4, 5]
    assert "step 2 of 6 is done, 1 of 3 epochs" in notes(events)
    has_averages = to == "nvidia-pytorch"
    assert same_parts(tmp_path / "run", whole) == [
        "tensors",
        "momentum",
        *(["ema"] if has_averages else []),
    ]
    assert (NO_AVERAGE in notes(events)) != has_averages
    assert not any("velocities" in note for note in notes(events))
    if not has_averages:
        begun = state(tmp_path / "run", 2)
        assert bits(begun.ema) == bits(begun.tensors)


@pytest.mark.parametrize("kind", ["run", "checkpoint of TensorFlow within an epoch"])
def test_a_checkpoint_with_a_step_goes_on_at_that_step(
    kind: str,
    whole: Path,
    converted: Callable[..., Path],
    images: Path,
    recipe: Recipe,
    tmp_path: Path,
) -> None:
    folder = checkpoint.checkpoint_path(whole / "checkpoints", 3)
    given = folder if kind == "run" else converted("nvidia-tensorflow", 3)
    lockstep.train(recipe, images, tmp_path / "run", resume_from=given, execution=EXECUTION)
    assert steps_of(tmp_path / "run") == [3, 4, 5]
    assert same_parts(tmp_path / "run", whole)[:2] == ["tensors", "momentum"]


def test_what_mxnet_does_not_store_is_noted(
    converted: Callable[..., Path], images: Path, recipe: Recipe, tmp_path: Path
) -> None:
    given = converted("nvidia-mxnet")
    given.with_name("model-0001.momentum.params").unlink()  # the original never writes it
    events: list[dict[str, Any]] = []
    lockstep.train(
        recipe,
        images,
        tmp_path / "run",
        resume_from=given,
        execution=EXECUTION,
        listener=events.append,
    )
    assert {"there are no velocities (model-0001.momentum.params)", NO_AVERAGE} <= set(
        notes(events)
    )
    assert not any(value.any() for value in state(tmp_path / "run", 2).momentum.values())


def test_a_run_that_went_on_from_a_checkpoint_and_was_stopped_resumes(
    whole: Path, converted: Callable[..., Path], images: Path, recipe: Recipe, tmp_path: Path
) -> None:
    def stop(event: dict[str, Any]) -> None:
        if event["kind"] == "train" and event["step"] == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    given = converted("nvidia-pytorch")
    run = tmp_path / "run"
    with pytest.raises(Interrupted):
        lockstep.train(recipe, images, run, resume_from=given, execution=EXECUTION, listener=stop)
    assert max(checkpoint.steps(run / "checkpoints")) < STEPS
    report = lockstep.train(recipe, images, run, resume_from=given, execution=EXECUTION)
    assert same_parts(run, whole) == ["tensors", "momentum", "ema"]
    again = lockstep.train(
        recipe, images, run, resume_from=given, execution=EXECUTION
    )  # it is finished
    assert again["final"] == report["final"]
    with pytest.raises(
        CheckpointError, match=r"was started from other weights \(checkpoint\.pth\.tar\)"
    ):
        lockstep.train(recipe, images, run, resume_from=whole, execution=EXECUTION)


def test_a_checkpoint_at_the_end_of_the_run_is_only_evaluated(
    whole: Path, images: Path, recipe: Recipe, tmp_path: Path
) -> None:
    report = lockstep.train(
        recipe, images, tmp_path / "run", resume_from=whole, execution=EXECUTION
    )
    assert steps_of(tmp_path / "run") == []
    [expected] = [
        e for e in read_log(whole / "log.jsonl") if e["kind"] == "evaluate" and e["step"] == STEPS
    ][:1]
    assert report["final"]["trained"]["loss"] == expected["loss"]


def test_a_checkpoint_beyond_the_end_is_refused_and_more_epochs_help(
    whole: Path, images: Path, recipe: Recipe, tmp_path: Path
) -> None:
    train = partial(
        lockstep.train, data=images, out=tmp_path / "run", resume_from=whole, execution=EXECUTION
    )
    with pytest.raises(
        CheckpointError, match="has done 6 steps, but this run ends at step 4: 2 epochs of 2 steps"
    ):
        train(recipe.replace(epochs=2))
    train(recipe.replace(epochs=4))
    assert steps_of(tmp_path / "run") == [6, 7]


def test_weights_without_a_step_or_an_epoch_cannot_be_gone_on_from(
    whole: Path, images: Path, recipe: Recipe, tmp_path: Path
) -> None:
    torch.save(
        {name: torch.from_numpy(value) for name, value in state(whole).tensors.items()},
        tmp_path / "weights.pth",
    )
    with pytest.raises(
        CheckpointError,
        match=r"weights\.pth does not say how many steps or epochs are done.*--weights",
    ):
        lockstep.train(
            recipe,
            images,
            tmp_path / "run",
            resume_from=tmp_path / "weights.pth",
            execution=EXECUTION,
        )
    lockstep.train(
        recipe.replace(epochs=1),
        images,
        tmp_path / "run",
        weights=tmp_path / "weights.pth",
        execution=EXECUTION,
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"logits": 11},
            "has 10 logits, but the recipe has 11, so training cannot resume from it: set logits",
        ),
        ({"model": "resnet18"}, "which does not fit the recipe's model resnet18: --set model="),
    ],
)
def test_a_checkpoint_of_another_model_is_refused_before_there_is_a_folder(
    change: dict[str, Any], message: str, whole: Path, images: Path, recipe: Recipe, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=message):
        lockstep.train(
            recipe.replace(**change),
            images,
            tmp_path / "run",
            resume_from=whole,
            execution=EXECUTION,
        )
    assert not (tmp_path / "run").exists()


def test_a_run_does_not_start_from_weights_and_a_checkpoint(
    whole: Path, images: Path, recipe: Recipe, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="--weights and --resume-from are both given"):
        lockstep.train(recipe, images, tmp_path / "run", weights=whole, resume_from=whole)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("scaler", [{}, {"scale": 512.0, "good_steps": 3.0, "bad_steps": 0.0}])
def test_a_loss_scale_is_the_checkpoints_if_it_has_one(
    scaler: dict[str, float], recipe: Recipe
) -> None:
    recipe = recipe.replace(precision="fp16", loss_scaling="dynamic")
    begun = initial_state(recipe)
    found = Weights(
        recipe,
        State(0, begun.tensors, begun.momentum, {}, scaler),
        (),
        Path("a.pth"),
        "torchvision",
        epochs=2,
    )
    first, told = build_first_state(
        recipe, begun.tensors, Start("a.pth", "", begun.tensors, (), found), per_epoch=2
    )
    assert (first.step, first.scaler) == (4, scaler)
    assert ("there is no loss scale: it starts at the recipe's" in told) == (not scaler)


def test_the_loss_scale_of_a_checkpoint_of_paddle_is_opened(recipe: Recipe, tmp_path: Path) -> None:
    scaler = {"scale": 512.0, "good_steps": 3.0, "bad_steps": 1.0}
    begun = initial_state(recipe)
    nvidia_paddle.write(tmp_path / "a", recipe, State(0, begun.tensors, begun.momentum, {}, scaler))
    assert open_weights(tmp_path / "a", momentum=True).state.scaler == scaler
    assert open_weights(tmp_path / "a").state.scaler == {}
    nvidia_paddle.write(
        tmp_path / "b",
        recipe,
        State(0, begun.tensors, begun.momentum, {}, scaler | {"scale": np.nan}),
    )
    assert open_weights(tmp_path / "b", momentum=True).state.scaler == {}


def test_a_resumed_run_refuses_a_checkpoint_with_other_velocities(
    converted: Callable[..., Path], images: Path, recipe: Recipe, tmp_path: Path
) -> None:
    given = converted("nvidia-pytorch")
    lockstep.train(recipe, images, tmp_path / "run", resume_from=given, execution=EXECUTION)
    stored = torch_file.load(given)
    for slot in stored["optimizer"]["state"].values():
        slot["momentum_buffer"] = slot["momentum_buffer"] * np.float32(2)
    torch_file.save(tmp_path / "other.pth.tar", stored)
    with pytest.raises(
        CheckpointError, match=r"started from other weights .*: leave out --resume-from"
    ):
        lockstep.train(
            recipe,
            images,
            tmp_path / "run",
            resume_from=tmp_path / "other.pth.tar",
            execution=EXECUTION,
        )
