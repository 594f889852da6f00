"""Weights are the same after conversion to any format; whatever is lost is reported."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import lockstep
from lockstep.models.architectures import MODELS, ModelSpec, narrow_model
from lockstep.models.state import State
from lockstep.recipes import Recipe
from lockstep.recipes.from_nvidia import (
    resnet50_mxnet_90ep,
    resnet50_paddle_90ep,
    resnet50_tensorflow_90ep,
)
from lockstep.recipes.initial_weights import initial_tensors, zero_momentum
from lockstep.system.errors import CheckpointError, DataError
from lockstep.weights import checkpoint, open_weights
from lockstep.weights.formats import nvidia_mxnet, nvidia_paddle, nvidia_tensorflow
from lockstep.weights.formats.tensor_bundle import Bundle
from tests.conftest import TINY_MODEL
from tests.lines import check_lines
from tests.weights.formats.cases import assert_remarked, bits
from tests.weights.small_models import converted

SPEC = ModelSpec(
    block="bottleneck",
    layers=(1, 1, 1, 1),
    stem_width=8,
    widths=(8, 16, 32, 64),
    groups=2,
    expansion=2,
)
LIKE_ORIGINAL = resnet50_tensorflow_90ep().replace(model=SPEC, precision="fp32")


def state_of(recipe: Recipe, step: int = 7) -> State:
    tensors = initial_tensors(recipe)
    velocity = {
        name: np.full_like(value, i)
        for i, (name, value) in enumerate(zero_momentum(recipe).items())
    }
    return State(step, tensors, velocity)


@pytest.fixture
def run(tiny_recipe: Recipe, tmp_path: Path) -> Path:
    """A run with checkpoints of two steps, moving averages and a loss scale."""
    for step in (3, 7):
        state = state_of(tiny_recipe, step)
        state.tensors["fc.bias"][:] = step
        averages = {name: value + 1 for name, value in state.tensors.items()}
        whole = State(
            step,
            state.tensors,
            state.momentum,
            averages,
            {"scale": 8.0, "good_steps": 1.0, "bad_steps": 0.0},
        )
        about = {"recipe": tiny_recipe.fields(), "classes": ["cat", "owl"]}
        checkpoint.save(tmp_path / "run" / "checkpoints", whole, data_digest="", about=about)
    return tmp_path / "run"


@pytest.fixture
def original(tmp_path: Path) -> Path:
    """A folder as NVIDIA's code writes it."""
    nvidia_tensorflow.write(
        tmp_path / "theirs" / "model.ckpt-9", LIKE_ORIGINAL, state_of(LIKE_ORIGINAL, 9)
    )
    return tmp_path / "theirs"


def test_a_checkpoint_of_tensorflow_becomes_a_file(original: Path, tmp_path: Path) -> None:
    target = tmp_path / "new" / "neutral.safetensors"
    result = converted(original, target)
    assert result == {
        "source": str(original / "model.ckpt-9"),
        "origin": "NVIDIA TensorFlow",
        "written": [str(target)],
        "model": LIKE_ORIGINAL.fields()["model"],
        "logits": 1001,
        "step": 9,
        "remarks": ["left out, since the file holds only weights: velocities, step 9"],
        "certificate": None,
    }
    assert [path.name for path in target.parent.iterdir()] == ["neutral.safetensors"]
    assert bits(load_file(target)) == bits(initial_tensors(LIKE_ORIGINAL))
    assert open_weights(target).recipe == LIKE_ORIGINAL
    # Other users may read it too.
    assert target.stat().st_mode == (tmp_path / "theirs" / "checkpoint").stat().st_mode


OF_RESNET18 = {"model": "resnet18", "logits": 10, "precision": "fp32"}
ORIGINALS: dict[str, tuple[Any, str, Recipe, list[str]]] = {
    "tensorflow": (
        nvidia_tensorflow.write,
        "model.ckpt-9",
        LIKE_ORIGINAL,
        ["", "model.ckpt-9", "model.ckpt-9.index"],
    ),
    "paddle": (
        nvidia_paddle.write,
        "ResNet50/4/resnet_50_paddle",
        resnet50_paddle_90ep().replace(**OF_RESNET18),
        ["", "ResNet50", "ResNet50/4", "ResNet50/4/resnet_50_paddle.pdparams"],
    ),
    "mxnet": (
        nvidia_mxnet.write,
        "model-0004.params",
        resnet50_mxnet_90ep().replace(**OF_RESNET18),
        ["", "model", "model-0004.params"],
    ),
}
"""How the programs of NVIDIA write checkpoints, and the paths that name them."""


@pytest.mark.parametrize(
    ("program", "named"), [(name, path) for name, row in ORIGINALS.items() for path in row[-1]]
)
def test_a_checkpoint_of_nvidia_is_opened_with_the_published_recipe(
    program: str, named: str, tmp_path: Path
) -> None:
    write, file, recipe, _ = ORIGINALS[program]
    write(tmp_path / "theirs" / file, recipe, state_of(recipe, 9))
    path = tmp_path / "theirs" / named
    weights = open_weights(path)
    assert (weights.recipe, weights.classes) == (recipe, ())
    assert weights.source == tmp_path / "theirs" / file
    assert bits(weights.tensors) == bits(initial_tensors(recipe))
    with pytest.raises(CheckpointError, match="has no moving average; leave out --ema"):
        open_weights(path, ema=True)
    with pytest.raises(CheckpointError, match="has no moving average"):
        converted(path, tmp_path / "a.safetensors", ema=True)


RUNS: list[tuple[str, str, list[str], tuple[str, ...]]] = [
    (
        "nvidia-tensorflow",
        "model.ckpt-7",
        ["model.ckpt-7.index", "model.ckpt-7.data-00000-of-00001", "checkpoint"],
        ("symmetric padding", "have 10", "loss scaling"),
    ),
    (
        "nvidia-paddle",
        "7/model",
        ["model.pdparams", "model.pdopt"],
        ("not this one", "have 10: --num-of-class"),
    ),
    (
        "nvidia-mxnet",
        "model-0090.params",
        ["model-symbol.json", "model-0090.momentum.params", "model-0090.params"],
        ("not this one", "have 10: --num-classes", "step 7 cannot be stored", "loss scaling"),
    ),
]


@pytest.mark.parametrize(("to", "name", "files", "remarks"), RUNS)
def test_a_run_becomes_a_checkpoint_of_nvidia(
    to: str,
    name: str,
    files: list[str],
    remarks: tuple[str, ...],
    run: Path,
    tiny_recipe: Recipe,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = tmp_path / "to" / name
    result = converted(run, target, to=to)
    assert (result["step"], result["written"]) == (7, [str(target.with_name(n)) for n in files])
    assert sorted(files) == sorted(path.name for path in target.parent.iterdir())
    assert_remarked(result["remarks"], *remarks, "--ema converts them")
    monkeypatch.setitem(MODELS, "tiny", TINY_MODEL)
    copy = open_weights(target, momentum=True)
    assert copy.tensors["fc.bias"].tolist() == [7] * 10
    assert bits(copy.state.momentum) == bits(state_of(tiny_recipe).momentum)
    averages = converted(run, tmp_path / "average" / name, to=to, ema=True)
    assert open_weights(tmp_path / "average" / name).tensors["fc.bias"].tolist() == [8] * 10
    assert len(averages["written"]) == len(files) - (to != "nvidia-tensorflow")
    is_noted = any("no velocities were written" in remark for remark in averages["remarks"])
    assert is_noted == (to != "nvidia-mxnet")


@pytest.mark.parametrize(("checkpoint", "ema", "bias"), [("3", False, 3), ("newest", True, 8)])
def test_weights_of_a_run_are_chosen(checkpoint: str, ema: bool, bias: int, run: Path) -> None:
    prefix = run.parent / "model"
    result = converted(run, prefix, to="nvidia-tensorflow", checkpoint=checkpoint, ema=ema)
    assert Bundle(prefix).read("resnet/output/dense/bias").tolist() == [bias] * 10
    assert any("no velocities were written" in remark for remark in result["remarks"]) == ema
    file = run.parent / "file.safetensors"
    converted(run, file, checkpoint=checkpoint, ema=ema)
    assert open_weights(file).tensors["fc.bias"].tolist() == [bias] * 10
    assert open_weights(file).classes == ("cat", "owl")


def test_given_names_of_classes_are_stored(run: Path, tmp_path: Path) -> None:
    target = tmp_path / "named.safetensors"
    names = tuple("abcdefghij")
    converted(run, target, classes=names)
    with safe_open(target, "numpy") as file:
        assert json.loads(file.metadata()["lockstep"])["classes"] == list(names)
    assert open_weights(target).classes == names


def test_names_that_do_not_fit_are_refused(run: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"3 names, .* 10 outputs; expected 2 or 10"):
        converted(run, tmp_path / "named.safetensors", classes=["a", "b", "c"])
    with pytest.raises(CheckpointError, match="nvidia-paddle holds no names of classes"):
        converted(run, tmp_path / "named", to="nvidia-paddle", classes=["a", "b"])
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODELS, "resnet18", narrow_model(MODELS["resnet18"]))


def test_there_and_back_a_state_is_the_same(original: Path, tmp_path: Path) -> None:
    converted(original, tmp_path / "a.safetensors")
    converted(tmp_path / "a.safetensors", tmp_path / "b", to="nvidia-tensorflow")
    converted(tmp_path / "b.index", tmp_path / "c.safetensors")
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "c.safetensors").read_bytes()


def test_a_file_of_another_program_is_converted(tmp_path: Path) -> None:
    recipe = Recipe(model="resnet18", logits=3)
    save_file(initial_tensors(recipe), tmp_path / "a.safetensors")
    result = converted(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    assert (result["model"], result["step"]) == ("resnet18", 0)
    check_lines(
        result["remarks"],
        "^the file does not say how its images were prepared",
        "^the weights name no classes",
    )
    with safe_open(tmp_path / "b.safetensors", framework="numpy") as file:
        assert json.loads(file.metadata()["lockstep"])["recipe"]["model"] == "resnet18"
    with pytest.raises(CheckpointError, match="bottleneck blocks only"):
        converted(tmp_path / "a.safetensors", tmp_path / "c", to="nvidia-tensorflow")


@pytest.mark.parametrize(("to", "count"), [("timm", 1), ("safetensors", 0)])
def test_assumed_names_are_not_written_and_a_note_says_how(
    to: str, count: int, tmp_path: Path
) -> None:
    save_file(initial_tensors(Recipe(model="resnet18", logits=1000)), tmp_path / "a.safetensors")
    target = tmp_path / "b.safetensors"
    result = converted(tmp_path / "a.safetensors", target, to=to)
    notes = [note for note in result["remarks"] if "assumes ImageNet's for 1000 outputs" in note]
    assert len(notes) == count
    assert all(f"{tmp_path / 'a.safetensors'} > names.txt" in note for note in notes)


ERRORS: list[tuple[str, dict[str, Any], str]] = [
    ("a.safetensors", {"to": "onnx"}, "there is no format 'onnx' to convert to"),
    ("a.pth", {}, r"a\.pth: the name of a safetensors file ends in \.safetensors"),
    ("there.safetensors", {}, r"there\.safetensors already exists"),
    ("theirs/model.ckpt-9", {"to": "nvidia-tensorflow"}, r"model\.ckpt-9\.index already exists"),
    ("link.safetensors", {}, r"link\.safetensors already exists"),
    ("a" * 300, {"to": "nvidia-paddle"}, "aaa.* cannot be written: File name too long"),
    ("there.safetensors/a.safetensors", {}, "cannot be written"),
    ("there.safetensors/model", {"to": "nvidia-tensorflow"}, "cannot be written"),
    ("there.safetensors/model", {"to": "nvidia-paddle"}, "cannot be written"),
    ("there.safetensors/model", {"to": "nvidia-mxnet"}, "cannot be written"),
    (
        "model.params",
        {"to": "nvidia-mxnet"},
        r"model\.params: expected a prefix, or <prefix>-0090.params with an epoch in four digits",
    ),
]


@pytest.mark.parametrize(("target", "arguments", "message"), ERRORS)
def test_what_cannot_be_written_is_an_error_and_changes_nothing(
    target: str, arguments: dict[str, Any], message: str, original: Path, tmp_path: Path
) -> None:
    (tmp_path / "there.safetensors").write_text("mine")
    (tmp_path / "link.safetensors").symlink_to("nothing")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(CheckpointError, match=message):
        converted(original, tmp_path / target, **arguments)
    assert sorted(tmp_path.rglob("*")) == before
    assert (tmp_path / "there.safetensors").read_text() == "mine"


def test_an_evaluation_repeats_the_remarks(textures: Path, tmp_path: Path) -> None:
    recipe = LIKE_ORIGINAL.replace(logits=10)
    nvidia_tensorflow.write(
        tmp_path / "model.ckpt-0", recipe, State(0, initial_tensors(recipe), {})
    )
    result = lockstep.load(tmp_path).evaluate(textures).to_json()
    assert result["images"] == 20
    check_lines(
        result["remarks"], "10 outputs; .* 1001", "^labels are matched by position: .* 10 folders"
    )
