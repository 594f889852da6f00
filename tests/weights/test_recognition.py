"""Weights of other programs: their format is recognised, and opened as what they are."""

import dataclasses
import json
import os
import shutil
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

import lockstep
from lockstep.models.architectures import MODELS
from lockstep.models.state import State
from lockstep.recipes.initial_weights import initial_tensors
from lockstep.runs.starting_weights import StartSource, fit_start
from lockstep.system.errors import CheckpointError
from lockstep.weights import open_weights
from tests.weights.formats.cases import bits
from tests.weights.small_models import (
    Writer,
    hub,
    keras,
    keras_recipe,
    legacy_file,
    make_torch_tensors,
    mxnet,
    nvidia_pytorch,
    onnx,
    paddle,
    plain_state,
    recipe_of,
    safetensors_file,
    tensorflow,
    timm,
    zip_file,
)

pytestmark = pytest.mark.usefixtures("narrow")

FILES: list[tuple[str, str, Writer, str]] = [
    # the file's name, the path to open, how it is written, its origin
    ("resnet50-0676ba61.pth", "", zip_file, "torchvision"),
    ("any.pth", "", legacy_file, "PyTorch"),
    ("zip.safetensors", "", zip_file, "PyTorch"),
    ("legacy.h5", "", legacy_file, "PyTorch"),
    ("without a suffix", "", zip_file, "PyTorch"),
    ("checkpoint.pth.tar", "", nvidia_pytorch, "NVIDIA PyTorch"),
    ("checkpoint.pth.tar", "..", nvidia_pytorch, "NVIDIA PyTorch"),
    ("folder", "", timm, "timm"),
    ("folder", "config.json", timm, "timm"),
    ("folder", "model.safetensors", timm, "timm"),
    ("folder", "", hub, "timm"),
    ("folder", "pytorch_model.bin", hub, "timm"),
    ("module.safetensors", "", safetensors_file, "PyTorch"),
    ("safetensors.pth", "", safetensors_file, "PyTorch"),
    ("weights.h5", "", keras, "Keras"),
    ("keras.bin", "", keras, "Keras"),
    ("model.onnx", "", onnx, "ONNX"),
    ("onnx.pt", "", onnx, "ONNX"),
    ("model.ckpt-7", "", tensorflow, "NVIDIA TensorFlow"),
    ("model", "", paddle, "NVIDIA Paddle"),
    ("model", "", mxnet, "NVIDIA MXNet"),
]


@pytest.mark.parametrize(
    ("name", "named", "write", "origin"),
    FILES,
    ids=[f"{w.__name__} {n} {p}" for n, p, w, _ in FILES],
)
def test_a_file_is_recognised_by_its_content(
    name: str, named: str, write: Writer, origin: str, tmp_path: Path
) -> None:
    state = plain_state(keras_recipe() if write is keras else recipe_of())
    write(tmp_path / name, state)
    weights = open_weights(tmp_path / name / named if named != ".." else tmp_path)
    assert weights.origin == origin
    assert weights.recipe.model == ("resnet50-v1" if write is keras else "resnet50")
    assert bits(weights.tensors) == bits(state.tensors)


@pytest.mark.parametrize(
    ("write", "name"),
    [(keras, "a.h5"), (onnx, "a.onnx"), (zip_file, "a.pth"), (safetensors_file, "a.safetensors")],
)
@pytest.mark.parametrize("length", [1, -1])
def test_a_file_that_was_cut_off_is_called_by_the_format_of_its_name(
    write: Writer, name: str, length: int, tmp_path: Path
) -> None:
    write(tmp_path / name, plain_state(keras_recipe() if write is keras else recipe_of()))
    (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:length])
    expected = (
        "is damaged or not an? (Keras file|ONNX model|PyTorch file)|is not a safetensors file"
    )
    with pytest.raises(CheckpointError, match=rf"{name} ({expected})"):
        open_weights(tmp_path / name)


@pytest.mark.parametrize("named", ["", "model", "model.json", "model.pdiparams", "model.pdmodel"])
def test_a_program_is_refused_by_what_runs_it(named: str, tmp_path: Path) -> None:
    for name in ("model.json", "model.pdiparams", "model.pdmodel"):
        (tmp_path / name).write_text("{}")
    expected = r"model\.pdi?\w+ is .* Paddle Inference, not weights"
    with pytest.raises(CheckpointError, match=expected):
        open_weights(tmp_path / named)


@pytest.mark.parametrize(
    ("write", "file", "origin"),
    [(mxnet, "model-0000.params", "NVIDIA MXNet"), (paddle, "model.pdparams", "NVIDIA Paddle")],
)
@pytest.mark.parametrize("name", ["weights.pth", "weights"])
def test_a_file_is_recognised_whatever_its_name_is(
    write: Writer, file: str, origin: str, name: str, tmp_path: Path
) -> None:
    state = plain_state(recipe_of())
    write(tmp_path / "model", state)
    copy = Path(shutil.copy(tmp_path / file, tmp_path / name))
    weights = open_weights(copy, momentum=True)
    assert (weights.origin, weights.source) == (origin, copy)
    assert weights.tensors["fc.bias"].tobytes() == state.tensors["fc.bias"].tobytes()


def test_velocities_and_averages_of_nvidias_pytorch_are_read(tmp_path: Path) -> None:
    state = plain_state(recipe_of())
    nvidia_pytorch(tmp_path / "checkpoint.pth.tar", state)
    weights = open_weights(tmp_path, momentum=True)
    assert (weights.epochs, weights.state.ema.keys()) == (3, state.tensors.keys())
    trained = {name for name in state.tensors if "running_" not in name}
    assert weights.state.momentum.keys() == trained
    averages = open_weights(tmp_path, ema=True)
    assert averages.tensors["fc.bias"].tobytes() == (state.tensors["fc.bias"] + 1).tobytes()
    assert not averages.state.momentum


def test_two_formats_in_a_folder_are_an_error_that_lists_them(tmp_path: Path) -> None:
    state = plain_state(recipe_of())
    tensorflow(tmp_path / "model.ckpt-7", state)
    paddle(tmp_path / "model", state)
    with pytest.raises(CheckpointError, match=r"model \(Paddle\), .*ckpt-7 \(TensorFlow\)"):
        open_weights(tmp_path)


def test_a_file_in_a_folder_of_other_names_is_to_be_named(tmp_path: Path) -> None:
    safetensors_file(tmp_path / "model.safetensors", plain_state(recipe_of()))
    with pytest.raises(CheckpointError, match=r"name a file in it, .*/model\.safetensors$"):
        open_weights(tmp_path)


NO_WEIGHTS = {
    "text.txt": "text.txt holds no weights.* expected a run's",
    "zeros": "zeros holds no weights.* expected a run's",
    "link": "link holds no weights.* expected a run's",
    "pipe": "pipe cannot be read: it is a pipe, not a regular file",
    "/dev/zero": "zero cannot be read: it is a device, not a regular file",
    "/proc/self": "self holds no weights",
    "huge.pth": "has 8,589,934,593 bytes; expected at most 8,589,934,592 for weights",
    "a" * 300: "aaa cannot be read: File name too long",
    "a" * 5000: "aaa cannot be read: File name too long",
}


@pytest.mark.parametrize("name", NO_WEIGHTS)
def test_what_holds_no_weights_is_refused_at_once(name: str, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("hello\n")
    (tmp_path / "zeros").write_bytes(bytes(100))
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "again").symlink_to(tmp_path / "folder")
    (tmp_path / "link").symlink_to(tmp_path / "folder")
    os.mkfifo(tmp_path / "pipe")
    with (tmp_path / "huge.pth").open("wb") as file:
        file.truncate(2**33 + 1)
    with pytest.raises(CheckpointError, match=NO_WEIGHTS[name]):
        open_weights(tmp_path / name)


@pytest.mark.parametrize("suffix", ["pth", "safetensors"])
def test_a_file_that_cannot_be_read_is_a_clear_error(suffix: str, tmp_path: Path) -> None:
    file = tmp_path / f"weights.{suffix}"
    file.write_bytes(bytes(8))
    real = os.open

    def refuse(path: Path, *arguments: Any, **options: Any) -> int:  # even if root runs the tests
        if path == file:
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "open", refuse)
        with pytest.raises(CheckpointError, match=rf"weights\.{suffix} .*Permission denied"):
            open_weights(file)


@pytest.mark.parametrize("model", ["resnet50", "resnet50-v1"])
def test_of_two_models_the_named_one_is_read(model: str, tmp_path: Path) -> None:
    zip_file(tmp_path / "a.pth", plain_state(recipe_of()))
    weights, without = (open_weights(tmp_path / "a.pth", model=named) for named in (model, None))
    assert (weights.recipe.model, without.recipe.model) == (model, "resnet50")
    assert weights.remarks == without.remarks


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("resnet101", r"a\.pth .*closest model, resnet101, does not fit: "),
        ("resnet50_v1", "there is no model 'resnet50_v1'. Did you mean resnet50-v1"),
    ],
)
def test_a_wrong_model_is_refused(model: str, message: str, tmp_path: Path) -> None:
    zip_file(tmp_path / "a.pth", plain_state(recipe_of()))
    with pytest.raises(CheckpointError, match=message):
        open_weights(tmp_path / "a.pth", model=model)


@pytest.mark.parametrize(("write", "name"), [(onnx, "a.onnx"), (mxnet, "a-0000.params")])
def test_a_graph_refuses_another_model(write: Writer, name: str, tmp_path: Path) -> None:
    write(tmp_path / name, plain_state(recipe_of()))
    assert open_weights(tmp_path / name, model="resnet50").recipe.model == "resnet50"
    described = dataclasses.asdict(MODELS["resnet50"])
    for model, difference in (
        ("resnet50-v1", "resnet50, not resnet50-v1: stride_in is 3x3, not 1x1"),
        (json.dumps(described | {"blur": "after", "layers": [1, 1, 2, 1]}), "blur is none, not"),
    ):
        with pytest.raises(CheckpointError, match=difference):
            open_weights(tmp_path / name, model=model)
    assert open_weights(tmp_path / name, model=json.dumps(described)).recipe.model == "resnet50"


def without_classifier(path: Path) -> Path:
    state = plain_state(recipe_of())
    kept = {name: value for name, value in state.tensors.items() if not name.startswith("fc.")}
    zip_file(path, State(0, kept, {}))
    return path


def test_headless_weights_can_only_be_trained(textures: Path, tmp_path: Path) -> None:
    backbone = without_classifier(tmp_path / "backbone.pth")
    for use in (
        lambda: lockstep.load(backbone).evaluate(textures).to_json(),
        lambda: list(lockstep.load(backbone).predict(textures / "val")),
        lambda: lockstep.load(backbone).save(tmp_path / "new.safetensors"),
    ):
        with pytest.raises(CheckpointError, match=r"no classifier.*lockstep train"):
            use()
    assert fit_start(StartSource(backbone), recipe_of(), tmp_path / "run") is not None
    assert [path.name for path in tmp_path.iterdir()] == ["backbone.pth"]


def test_a_missing_classifier_is_the_initial_one(tmp_path: Path) -> None:
    recipe = recipe_of().replace(logits=7, seed=3)
    source = StartSource(without_classifier(tmp_path / "backbone.pth"))
    start = fit_start(source, recipe, tmp_path / "run")
    assert start is not None
    initial = initial_tensors(recipe)
    for name in ("fc.weight", "fc.bias"):
        assert start.tensors[name].tobytes() == initial[name].tobytes()
    assert (
        "the weights have no classifier: the classifier starts from the recipe's initial values"
        in start.notes
    )


# Preprocessing that a file does not say


def assumptions(remarks: tuple[str, ...]) -> list[str]:
    return [
        remark.partition("; ")[2].partition(" is assumed")[0]
        for remark in remarks
        if "is assumed" in remark
    ]


def test_an_assumed_preprocessing_is_remarked_upon(tmp_path: Path) -> None:
    zip_file(tmp_path / "a.pth", plain_state(recipe_of()))
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    weights = open_weights(tmp_path / "a.pth")
    assert assumptions(weights.remarks) == ["torchvision-v1"]
    assert weights.recipe.eval_resize == 256
    assert (weights.recipe.eval_crop, weights.recipe.antialias) == (224, True)


def test_names_of_modules_and_files_do_not_decide_how_images_are_prepared(tmp_path: Path) -> None:
    """safetensors files have no names of modules: the same tensors are prepared in the same way."""
    state = plain_state(recipe_of())
    module = OrderedDict(make_torch_tensors(state.tensors))
    modules = {"": {"version": 1}, "act1": {"version": 1}, "global_pool": {"version": 1}}
    setattr(module, "_metadata", modules)  # noqa: B010  # as `Module.state_dict` does
    torch.save(module, tmp_path / "module.pth")
    zip_file(tmp_path / "pytorch_model.bin", state)
    save_file(state.tensors, tmp_path / "model.safetensors")
    opened = [open_weights(path) for path in sorted(tmp_path.iterdir())]
    assert {weights.origin for weights in opened} == {"timm", "PyTorch"}
    for weights in opened:
        assert weights.recipe == opened[0].recipe
        assert weights.remarks == opened[0].remarks
        assert assumptions(weights.remarks) == ["torchvision-v1"]
        assert weights.remarks[-1].endswith("(timm's weights need bicubic: set interpolation)")


@pytest.mark.parametrize(
    ("write", "name"), [(tensorflow, "model.ckpt-7"), (timm, "folder"), (onnx, "a.onnx")]
)
def test_stated_values_are_not_assumed(write: Writer, name: str, tmp_path: Path) -> None:
    write(tmp_path / name, plain_state(recipe_of()))
    assert assumptions(open_weights(tmp_path / name).remarks) == []


def test_sizes_are_assumed_where_only_the_colours_are_known(tmp_path: Path) -> None:
    keras(tmp_path / "a.h5", plain_state(keras_recipe()))
    weights = open_weights(tmp_path / "a.h5")
    assert "keras" in assumptions(weights.remarks)
    sizes = "shorter side 256, crop 224, bilinear, preprocess_input's mean and standard deviation"
    assert any(remark.endswith(sizes) for remark in weights.remarks)


@pytest.mark.parametrize("write", [zip_file, paddle])
def test_infinite_values_are_counted(write: Writer, tmp_path: Path) -> None:
    state = plain_state(recipe_of())
    state.tensors["bn1.weight"][2] = np.inf
    state.tensors["fc.bias"][1:3] = np.nan
    name = "a.pth" if write is zip_file else "a"
    write(tmp_path / name, state)
    total = sum(value.size for value in state.tensors.values())
    tensors = len(state.tensors)
    [note] = [remark for remark in open_weights(tmp_path / name).remarks if "NaN" in remark]
    assert note.startswith(f"3 of {total:,} values are NaN or infinite, in 2 of {tensors} tensors")
    assert "; the first is bn1.weight, with 1: " in note


def test_only_runs_have_checkpoints_to_choose_from(tmp_path: Path) -> None:
    zip_file(tmp_path / "a.pth", plain_state(recipe_of()))
    with pytest.raises(CheckpointError, match=r"a\.pth is not a run and has no checkpoint 'best'"):
        open_weights(tmp_path / "a.pth", checkpoint="best")
