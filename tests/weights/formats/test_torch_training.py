"""What checkpoints of PyTorch hold next to weights: velocities, averages, the loss scale."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lockstep.weights import Weights
from tests.weights.formats.cases import assert_canonical
from tests.weights.formats.torch_cases import arrays, module_of, nvidias_groups, read_again

pytestmark = pytest.mark.usefixtures("small_models")


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
        (change_shape, r"their order is unknown, conv1\.weight is \[3\], expected \[8, 3, 7, 7\]"),
        (split_groups, r"the optimizer's groups of \[1, 1, 1\] parameters are of no known program"),
        (add_square_averages, r"the optimizer is not SGD, it also keeps square_avg"),
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
    remark = "its optimizer used Nesterov momentum: resume it with --set nesterov=true"
    assert remark in weights.remarks


@pytest.mark.parametrize("key", ["state_dict_ema", "model_ema"])
def test_a_moving_average_next_to_the_weights_is_read(key: str, tmp_path: Path) -> None:
    average = torch.optim.swa_utils.AveragedModel(module_of(seed=1)).state_dict()
    weights = read_again({"state_dict": module_of().state_dict(), key: average}, tmp_path)
    assert_canonical(weights.state.tensors, arrays(module_of().state_dict()))
    assert_canonical(weights.state.ema, arrays(module_of(seed=1).state_dict()))


def test_a_moving_average_alone_is_read_and_named(tmp_path: Path) -> None:
    weights = read_again({"model_ema": module_of().state_dict()}, tmp_path)
    assert_canonical(weights.state.tensors, arrays(module_of().state_dict()))
    assert weights.state.ema == {}
    assert "its only weights are a moving average (model_ema)" in weights.remarks


def test_a_moving_average_of_another_model_is_left_out(tmp_path: Path) -> None:
    average = module_of("basic").state_dict()
    weights = read_trained(module_of(), None, tmp_path, model_ema=average)
    assert weights.state.ema == {}
    remark = "the moving average (model_ema) has other tensors than the weights and was left out"
    assert remark in weights.remarks


def test_a_loss_scale_is_read(tmp_path: Path) -> None:
    scaler = {"scale": 65536.0, "growth_factor": 2.0, "backoff_factor": 0.5}
    scaler |= {"growth_interval": 2000, "_growth_tracker": 7}
    weights = read_trained(module_of(), None, tmp_path, scaler=scaler, rng=1)
    assert weights.state.scaler == {"scale": 65536.0, "good_steps": 7, "bad_steps": 0}
    assert "rng" in {part.name for part in weights.parts if part.treatment == "without effect"}
    scaler["scale"] = -1.0
    assert read_trained(module_of(), None, tmp_path, scaler=scaler).state.scaler == {}
