"""PyTorch's modules and optimizers take what is written for them. What checkpoints hold next to
weights is read: velocities, averages, the loss scale."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lockstep.models.architectures import ModelSpec
from lockstep.models.state import State
from lockstep.system.errors import CheckpointError
from lockstep.weights import Weights, open_weights
from lockstep.weights.formats import torch_file
from lockstep.weights.formats.torch_models import read
from lockstep.weights.formats.torch_writer import write_nvidia_pytorch, write_torchvision
from tests.lines import check_lines
from tests.weights.formats.cases import assert_canonical, assert_state, state_of
from tests.weights.formats.torch_cases import (
    OfNvidia,
    arrays,
    module_of,
    nvidias_groups,
    read_again,
    recipe_of,
)

pytestmark = pytest.mark.usefixtures("small_models")


def load_nvidia(path: Path) -> Any:
    return torch.load(path, weights_only=True)


@pytest.mark.parametrize("model", ["small", "grouped", "basic", "modern"])
def test_a_module_takes_what_is_written_in_its_own_order(model: str, tmp_path: Path) -> None:
    recipe = recipe_of(model)
    module = module_of(model)
    state = State(0, state_of(recipe).tensors, {})
    files = write_torchvision(tmp_path / "a.pth", recipe, state).files
    tensors = load_nvidia(tmp_path / "a.pth")
    assert files == (tmp_path / "a.pth",)
    assert list(tensors) == list(module.state_dict())
    assert tensors["bn1.num_batches_tracked"].dtype == torch.int64
    module.load_state_dict(tensors, strict=True)
    assert_canonical(state.tensors, arrays(module.state_dict()))


@pytest.mark.parametrize("model", ["small", "squeezed"])
def test_nvidias_module_and_optimizer_take_what_is_written(model: str, tmp_path: Path) -> None:
    recipe = recipe_of(model)
    module = OfNvidia(module_of(model))
    state = state_of(recipe)
    files = write_nvidia_pytorch(tmp_path / "a.pth.tar", recipe, state, epochs=3).files
    assert files == (tmp_path / "a.pth.tar", tmp_path / "a.weights.pth.tar")
    checkpoint, weights = (load_nvidia(path) for path in files)
    assert (checkpoint["epoch"], checkpoint["best_prec1"]) == (3, 0.0)
    assert list(checkpoint["state_dict"]) == list(weights) == list(module.state_dict())
    module.load_state_dict(checkpoint["state_dict"], strict=True)
    optimizer = torch.optim.SGD(nvidias_groups(module), lr=0.1, momentum=0.9)
    optimizer.load_state_dict(checkpoint["optimizer"])
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.0, recipe.weight_decay]
    buffers = {
        name: optimizer.state[parameter]["momentum_buffer"]
        for name, parameter in module.named_parameters()
    }
    bare = {
        re.sub(r"layers\.(\d)", lambda m: f"layer{int(m[1]) + 1}", name)
        .replace("squeeze.squeeze", "se.fc1")
        .replace("squeeze.expand", "se.fc2"): value
        for name, value in buffers.items()
    }
    assert_canonical(state.momentum, arrays(bare))
    optimizer.step()


def test_a_checkpoint_that_was_written_is_read_as_it_was(tmp_path: Path) -> None:
    recipe = recipe_of()
    state = State(
        0, state_of(recipe).tensors, state_of(recipe).momentum, state_of(recipe, 8).tensors
    )
    write_nvidia_pytorch(tmp_path / "a.pth.tar", recipe, state, epochs=3)
    weights = read(tmp_path / "a.pth.tar")
    assert_state(weights.state, state)
    assert_canonical(weights.state.ema, state.ema)
    assert (weights.origin, weights.epochs) == ("NVIDIA PyTorch", 3)


@pytest.mark.parametrize("write", [write_torchvision, write_nvidia_pytorch])
def test_nothing_is_overwritten_or_left_behind(write: Callable[..., Any], tmp_path: Path) -> None:
    recipe = recipe_of()
    (tmp_path / "a.pth").write_text("mine")
    with pytest.raises(CheckpointError, match=r"a\.pth already exists"):
        write(tmp_path / "a.pth", recipe, state_of(recipe))
    with pytest.raises(CheckpointError, match=r"ends in \.pth\.tar, \.pth"):
        write(tmp_path / "a.safetensors", recipe, state_of(recipe))
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"a.pth": "mine"}


V1 = ModelSpec(
    block="bottleneck", layers=(1, 1, 1, 1), stem_width=8, widths=(8, 8, 8, 8), stride_in="1x1"
)


@pytest.mark.parametrize(
    ("changes", "remark"),
    [
        ({"model": V1}, "this is a v1 model, with the stride in the 1x1"),
        ({"padding": "same"}, "trained with TensorFlow's SAME padding"),
        ({"bn_epsilon": 2e-5}, "batch norm adds 2e-05 to the variance"),
        ({}, "left out, since the file holds only weights: velocities, step 7"),
    ],
)
def test_what_is_lost_is_remarked(changes: dict[str, Any], remark: str, tmp_path: Path) -> None:
    recipe = recipe_of().replace(**changes)
    remarks = write_torchvision(tmp_path / "a.pth", recipe, state_of(recipe)).remarks
    assert remark in "; ".join(remarks)


def test_all_that_a_state_dict_does_not_hold_is_named(tmp_path: Path) -> None:
    full = state_of(recipe_of())
    scaler = {"scale": 128.0, "good_steps": 0.0, "bad_steps": 0.0}
    whole = State(7, full.tensors, full.momentum, full.tensors, scaler)
    remarks = write_torchvision(tmp_path / "a.pth", recipe_of(), whole).remarks
    check_lines(remarks, "^left out.*: velocities, moving averages, the loss scale, step 7$")
    remarks = write_torchvision(tmp_path / "b.pth", recipe_of(), State(0, full.tensors, {})).remarks
    assert remarks == ()


def test_the_builder_of_resnext_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = recipe_of("resnext101-32x4d")
    monkeypatch.setattr(torch_file, "save", lambda path, value: path.write_bytes(b""))
    expected = recipe.list_tensors()
    state = State(
        0, {tensor.name: np.broadcast_to(np.float32(0), tensor.shape) for tensor in expected}, {}
    )
    remarks = write_torchvision(tmp_path / "a.pth", recipe, state).remarks
    assert remarks == (
        (
            "torchvision's class needs ResNet(Bottleneck, [3, 4, 23, 3], groups=32,"
            " width_per_group=4, num_classes=5)"
        ),
    )


def test_what_nvidias_code_needs_to_know_is_remarked(tmp_path: Path) -> None:
    recipe = recipe_of()
    remarks = write_nvidia_pytorch(
        tmp_path / "a.pth", recipe, State(7, state_of(recipe).tensors, {})
    ).remarks
    check_lines(
        remarks,
        r"^a\.pth is for --resume on one GPU; .* module\.$",
        r"^a\.weights\.pth is for --pretrained-from-file$",
        "^epoch 0 is stored, .*--resume.* step 7 is not$",
        "resnet50, resnext101-32x4d, se-resnext101-32x4d, not this one$",
        "1000 outputs; .* 5: --num_classes$",
        "^no velocities .*--resume",
    )


def train(module: nn.Module, groups: Any, **options: Any) -> torch.optim.Optimizer:
    """Return an optimizer after two steps with random gradients."""
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9, **options)
    for _ in range(2):
        for parameter in module.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    return optimizer


def read_trained(module: nn.Module, optimizer: Any, folder: Path, **others: Any) -> Weights:
    return read_again({"model": module.state_dict(), "optimizer": optimizer, **others}, folder)


def one_group(module: nn.Module) -> Any:
    return module.parameters()


def timms_groups(module: nn.Module) -> Any:
    flat = [p for p in module.parameters() if p.ndim <= 1]
    others = [p for p in module.parameters() if p.ndim > 1]
    return [{"params": flat, "weight_decay": 0}, {"params": others}]


def torchvisions_groups(module: nn.Module) -> Any:
    parts = [part for part in module.modules() if isinstance(part, nn.BatchNorm2d)]
    norms = [p for part in parts for p in part.parameters()]
    others = [p for p in module.parameters() if not any(p is norm for norm in norms)]
    return [{"params": others}, {"params": norms, "weight_decay": 0}]


@pytest.mark.parametrize("groups", [one_group, nvidias_groups, timms_groups, torchvisions_groups])
@pytest.mark.parametrize("model", ["small", "basic"])
def test_velocities_belong_to_the_parameters_of_the_optimizers_groups(
    groups: Callable[[nn.Module], Any], model: str, tmp_path: Path
) -> None:
    module = module_of(model)
    optimizer = train(module, groups(module))
    weights = read_trained(module, optimizer.state_dict(), tmp_path)
    expected = {
        name: optimizer.state[parameter]["momentum_buffer"]
        for name, parameter in module.named_parameters()
    }
    assert_canonical(weights.state.momentum, arrays(expected))
    assert weights.origin == ("NVIDIA PyTorch" if groups is nvidias_groups else "PyTorch")


def test_velocities_and_a_moving_average_that_are_not_wanted_are_not_read(tmp_path: Path) -> None:
    module = module_of()
    value = {
        "model": module.state_dict(),
        "optimizer": train(module, one_group(module)).state_dict(),
    }
    weights = read_again(
        value | {"model_ema": module_of(seed=1).state_dict()}, tmp_path, momentum=False
    )
    assert_canonical(weights.state.tensors, arrays(module.state_dict()))
    assert (weights.state.momentum, weights.state.ema) == ({}, {})


def without_one(state: Any) -> Any:
    state["state"].pop(3)
    return state


def change_shape(state: Any) -> Any:
    state["state"][0]["momentum_buffer"] = torch.zeros(3)
    return state


def split_groups(state: Any) -> Any:
    first = state["param_groups"][0]
    state["param_groups"] = [{**first, "params": [i]} for i in range(3)]
    return state


def add_square_averages(state: Any) -> Any:
    state["state"][0]["square_avg"] = torch.zeros(3)
    return state


@pytest.mark.parametrize(
    ("change", "remark"),
    [
        (without_one, r"1 of \d+ velocities are missing, such as layer1.*; the others were left"),
        (change_shape, r"their order is unknown: conv1\.weight is \[3\], expected \[8, 3, 7, 7\]"),
        (split_groups, r"the optimizer's groups of \[1, 1, 1\] parameters fit no known program"),
        (add_square_averages, r"the optimizer is not SGD: it also keeps square_avg"),
        (
            lambda state: {"state": {}, **{"param_groups": state["param_groups"]}},
            r"there are no velocities \(optimizer\)",
        ),
        (lambda state: "text", r"there are no velocities \(optimizer\)"),
    ],
)
def test_velocities_that_do_not_fit_are_left_out(
    change: Callable[[Any], Any], remark: str, tmp_path: Path
) -> None:
    module = module_of()
    optimizer = train(module, one_group(module)).state_dict()
    weights = read_trained(module, change(optimizer), tmp_path)
    assert weights.state.momentum == {}
    assert re.search(remark, "; ".join(weights.remarks))


def test_nesterov_momentum_is_remarked(tmp_path: Path) -> None:
    module = module_of()
    optimizer = train(module, one_group(module), nesterov=True)
    weights = read_trained(module, optimizer.state_dict(), tmp_path)
    remark = "its optimizer used Nesterov momentum: the recipe needs nesterov: true"
    assert remark in weights.remarks


@pytest.mark.parametrize("key", ["state_dict_ema", "model_ema"])
def test_a_moving_average_next_to_the_weights_is_read(key: str, tmp_path: Path) -> None:
    average = torch.optim.swa_utils.AveragedModel(module_of(seed=1)).state_dict()
    weights = read_again({"state_dict": module_of().state_dict(), key: average}, tmp_path)
    assert_canonical(weights.state.tensors, arrays(module_of().state_dict()))
    assert_canonical(weights.state.ema, arrays(module_of(seed=1).state_dict()))
    remark = f"the moving average ({key}) is not used"
    assert remark not in "; ".join(weights.remarks)
    file = next(tmp_path.glob("*.*"))
    assert remark in "; ".join(open_weights(file).remarks)
    assert remark not in "; ".join(open_weights(file, ema=True).remarks)


def test_a_moving_average_alone_is_read_and_named(tmp_path: Path) -> None:
    weights = read_again({"model_ema": module_of().state_dict()}, tmp_path)
    assert_canonical(weights.state.tensors, arrays(module_of().state_dict()))
    assert weights.state.ema == {}
    assert "its only weights are a moving average (model_ema)" in weights.remarks


def test_a_moving_average_of_another_model_is_left_out(tmp_path: Path) -> None:
    average = module_of("basic").state_dict()
    weights = read_trained(module_of(), None, tmp_path, model_ema=average)
    assert weights.state.ema == {}
    remark = "the moving average (model_ema) does not match the weights and was left out"
    assert remark in weights.remarks


def test_a_loss_scale_is_read(tmp_path: Path) -> None:
    scaler = {"scale": 65536.0, "growth_factor": 2.0, "backoff_factor": 0.5}
    scaler |= {"growth_interval": 2000, "_growth_tracker": 7}
    weights = read_trained(module_of(), None, tmp_path, scaler=scaler, rng=1)
    assert weights.state.scaler == {"scale": 65536.0, "good_steps": 7, "bad_steps": 0}
    assert "rng" in {part.name for part in weights.parts if part.treatment == "without effect"}
    scaler["scale"] = -1.0
    assert read_trained(module_of(), None, tmp_path, scaler=scaler).state.scaler == {}
