"""ResNets in files that PyTorch wrote become canonical, and PyTorch's modules and optimizers take
what is written."""

import re
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lockstep.backends.torch.model import Model
from lockstep.models.architectures import MODELS, ModelSpec, model_spec, tensors
from lockstep.models.state import State
from lockstep.recipes import Recipe
from lockstep.recipes.published import resnext101_32x4d_pytorch_90ep
from lockstep.system.errors import CheckpointError
from lockstep.weights import Weights
from lockstep.weights.formats import torch_file
from lockstep.weights.formats.torch_models import find, matches, read
from lockstep.weights.formats.torch_writing import write_nvidia_pytorch, write_torchvision
from lockstep.weights.recognition import read_head
from tests.weights.formats.cases import BASIC, RESNET, RESNEXT, assert_canonical, state_of

NO_STEP = "no step is stored"
Tensors = dict[str, torch.Tensor]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give small models a name."""
    for name, spec in (("small", RESNET), ("grouped", RESNEXT), ("basic", BASIC)):
        monkeypatch.setitem(MODELS, name, spec)


def recipe_of(model: str = "small", logits: int = 5) -> Recipe:
    return Recipe(model=model, logits=logits, precision="fp32")


def module_of(model: str = "small", seed: int = 0) -> nn.Module:
    """Return a module with torchvision's names, and random tensors that differ."""
    torch.manual_seed(seed)
    module = Model(model_spec(model), recipe_of(model))
    for name, tensor in module.state_dict().items():
        if not name.endswith("num_batches_tracked"):
            tensor.normal_()
    return module


class OfNvidia(nn.Module):
    """A module with NVIDIA's names and their order: `layers` in place of `layer1` to `layer4`."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.conv1 = module.conv1
        self.bn1 = module.bn1
        self.layers = nn.Sequential(module.layer1, module.layer2, module.layer3, module.layer4)
        self.fc = module.fc


def arrays(tensors: Tensors) -> dict[str, np.ndarray]:
    return {
        name: tensor.float().numpy()
        for name, tensor in tensors.items()
        if not name.endswith("num_batches_tracked")
    }


def read_again(
    value: Any, folder: Path, name: str = "any.pth", *, momentum: bool = True
) -> Weights:
    torch.save(value, folder / name)
    return read(folder / name, momentum=momentum)


@pytest.mark.parametrize("model", ["small", "grouped", "basic"])
def test_a_state_dict_is_read_as_it_is(model: str, tmp_path: Path) -> None:
    tensors = module_of(model).state_dict()
    weights = read_again(tensors, tmp_path)
    assert_canonical(weights.state.tensors, arrays(tensors))
    assert weights.recipe == recipe_of(model)
    assert (weights.state.momentum, weights.state.ema, weights.epochs, weights.has_classifier) == (
        {},
        {},
        None,
        True,
    )


@pytest.mark.parametrize("key", ["state_dict", "model"])
@pytest.mark.parametrize(
    "prefix", ["", "module.", "_orig_mod.", "_orig_mod.module.", "module._orig_mod."]
)
def test_names_may_begin_as_ranks_and_compilers_write_them(
    prefix: str, key: str, tmp_path: Path
) -> None:
    tensors = module_of().state_dict()
    weights = read_again(
        {key: {prefix + name: tensor for name, tensor in tensors.items()}}, tmp_path
    )
    assert_canonical(weights.state.tensors, arrays(tensors))


@pytest.mark.parametrize(
    "prefix", ["model.", "net.", "module.backbone.", "model._orig_mod.", "a.b.c."]
)
@pytest.mark.parametrize(
    "module", [module_of, lambda: OfNvidia(module_of())], ids=["torchvision", "NVIDIA"]
)
def test_a_prefix_of_all_names_is_taken_off_and_reported(
    module: Callable[[], nn.Module], prefix: str, tmp_path: Path
) -> None:
    tensors = module().state_dict()

    def read_with(prefix: str) -> Weights:
        averages = {f"module.{prefix}{name}": value for name, value in tensors.items()} | {
            "n_averaged": torch.tensor(3)
        }
        weights = {f"{prefix}{name}": value for name, value in tensors.items()}
        return read_again({"state_dict": weights, "state_dict_ema": averages}, tmp_path)

    plain = read_with("")
    restored = read_with(prefix)
    assert_canonical(restored.state.tensors, plain.state.tensors)
    assert restored.state.ema.keys() == plain.state.tensors.keys()
    assert restored.origin == plain.origin
    taken_off = prefix.removeprefix("module.")
    assert restored.remarks == (
        f"all names of tensors begin with '{taken_off}', which was taken off",
        *plain.remarks,
    )


def test_a_prefix_of_some_names_is_not_taken_off(tmp_path: Path) -> None:
    tensors = {f"model.{name}": tensor for name, tensor in module_of().state_dict().items()}
    with pytest.raises(
        CheckpointError, match=r"model\.fc\.bias is unexpected|conv1\.weight is missing"
    ):
        read_again(tensors | {"loss.weight": torch.zeros(3)}, tmp_path)


def test_a_tensor_under_two_names_is_refused(tmp_path: Path) -> None:
    tensors = module_of().state_dict()
    with pytest.raises(
        CheckpointError, match=r"the tensor fc\.bias twice: as fc\.bias and as module\.fc\.bias"
    ):
        read_again({**tensors, "module.fc.bias": tensors["fc.bias"]}, tmp_path)


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16, torch.float64])
def test_other_floats_become_float32_exactly(kind: torch.dtype, tmp_path: Path) -> None:
    tensors = {name: tensor.to(kind) for name, tensor in module_of().state_dict().items()}
    weights = read_again(tensors, tmp_path)
    assert_canonical(weights.state.tensors, arrays(tensors))
    assert any("are not float32 and were converted to it" in remark for remark in weights.remarks)


def test_integers_are_no_weights(tmp_path: Path) -> None:
    tensors = {name: tensor.to(torch.int8) for name, tensor in module_of().state_dict().items()}
    with pytest.raises(CheckpointError, match=r"conv1\.weight is int8 .* expected float32"):
        read_again(tensors, tmp_path)


def test_nvidias_names_give_nvidias_recipe(tmp_path: Path) -> None:
    tensors = {
        f"module.{name}": tensor for name, tensor in OfNvidia(module_of()).state_dict().items()
    }
    weights = read_again(
        {"epoch": 90, "best_prec1": torch.tensor(79.5), "state_dict": tensors}, tmp_path
    )
    assert_canonical(weights.state.tensors, arrays(module_of().state_dict()))
    assert (weights.origin, weights.epochs) == ("NVIDIA PyTorch", 90)
    assert (
        weights.remarks[0]
        == f"{NO_STEP}; it was saved after 90 epochs; the best top-1 until then was 79.50 %"
    )
    expected = resnext101_32x4d_pytorch_90ep().replace(model="small", logits=5, precision="fp32")
    assert weights.recipe == expected.replace(global_batch_images=2048, weight_decay=1 / 32768)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["resnet50", "resnext101-32x4d"])
def test_the_files_that_nvidia_published_get_the_published_recipe(
    model: str, tmp_path: Path
) -> None:
    shapes = Model(model_spec(model), recipe_of(model, 1000)).state_dict()
    tensors = {f"module.{name}": torch.zeros_like(tensor).half() for name, tensor in shapes.items()}
    weights = read_again(tensors, tmp_path, f"nvidia_{model}_200821.pth.tar")
    assert (weights.origin, weights.recipe.model, weights.recipe.logits) == (
        "NVIDIA PyTorch",
        model,
        1000,
    )
    assert (
        weights.recipe.weight_decay == {"resnet50": 1 / 32768, "resnext101-32x4d": 1 / 16384}[model]
    )


def squeeze(tensors: Tensors) -> Tensors:
    """Add what NVIDIA's se-resnext101-32x4d has in its first block."""
    return tensors | {"layers.0.0.squeeze.squeeze.weight": torch.zeros(16, 32, 1, 1)}


def widen(tensors: Tensors) -> Tensors:
    return tensors | {"layers.3.0.conv2.weight": torch.zeros(128, 128, 3, 3)}


def without_stem(tensors: Tensors) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if name != "bn1.weight"}


def halve(tensors: Tensors) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if name != "fc.bias"}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (squeeze, "layers.0.0.squeeze.squeeze.weight is unexpected"),
        (widen, "layers.3.0.conv2.weight is [128, 128, 3, 3], expected [64, 64, 3, 3]"),
        (without_stem, "bn1.weight is missing"),
        (halve, "fc.bias is missing"),
    ],
)
def test_other_networks_are_refused_with_what_differs(
    change: Callable[[Tensors], Tensors], reason: str, tmp_path: Path
) -> None:
    expected = rf"as PyTorch saves it. small is nearest, but .*{re.escape(reason)}"
    with pytest.raises(CheckpointError, match=expected) as refused:
        read_again(change(OfNvidia(module_of()).state_dict()), tmp_path)
    assert "expected [0" not in str(refused.value), "of a model without outputs"


@pytest.mark.parametrize(
    "value", [[1], {"a": 1}, {"state_dict": {"fc.bias": torch.zeros(3)}}, torch.zeros(3)]
)
def test_a_file_without_a_state_dict_is_refused(value: Any, tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError,
        match=r"holds no state_dict of a convolutional network, at its top or below state_dict",
    ):
        read_again(value, tmp_path)


def test_several_networks_in_a_file_are_an_error_that_lists_them(tmp_path: Path) -> None:
    tensors = module_of().state_dict()
    with pytest.raises(
        CheckpointError,
        match="holds several networks: state_dict, model; save the one to use alone",
    ):
        read_again({"model": tensors, "state_dict": tensors}, tmp_path)


def test_a_network_without_a_classifier_is_read_and_named(tmp_path: Path) -> None:
    tensors = {
        name: tensor
        for name, tensor in module_of().state_dict().items()
        if not name.startswith("fc.")
    }
    weights = read_again(tensors, tmp_path)
    assert_canonical(weights.state.tensors, arrays(tensors))
    assert (weights.has_classifier, weights.recipe.model) == (False, "small")
    assert any(remark.startswith("it has no classifier") for remark in weights.remarks)


def train(module: nn.Module, groups: Any, **options: Any) -> torch.optim.Optimizer:
    """Return an optimizer after two steps with random gradients."""
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9, **options)
    for _ in range(2):
        for parameter in module.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    return optimizer


def one_group(module: nn.Module) -> Any:
    return module.parameters()


def nvidias_groups(module: nn.Module) -> Any:
    named = list(module.named_parameters())
    return [
        {"params": [parameter for name, parameter in named if "bn" in name], "weight_decay": 0},
        {
            "params": [parameter for name, parameter in named if "bn" not in name],
            "weight_decay": 1e-4,
        },
    ]


def timms_groups(module: nn.Module) -> Any:
    flat = [parameter for parameter in module.parameters() if parameter.ndim <= 1]
    return [
        {"params": flat, "weight_decay": 0},
        {"params": [p for p in module.parameters() if p.ndim > 1]},
    ]


def torchvisions_groups(module: nn.Module) -> Any:
    norms = [
        p
        for part in module.modules()
        if isinstance(part, nn.BatchNorm2d)
        for p in part.parameters()
    ]
    others = [p for p in module.parameters() if not any(p is norm for norm in norms)]
    return [{"params": others}, {"params": norms, "weight_decay": 0}]


@pytest.mark.parametrize("groups", [one_group, nvidias_groups, timms_groups, torchvisions_groups])
@pytest.mark.parametrize("model", ["small", "basic"])
def test_velocities_belong_to_the_parameters_of_the_optimizers_groups(
    groups: Callable[[nn.Module], Any], model: str, tmp_path: Path
) -> None:
    module = module_of(model)
    optimizer = train(module, groups(module))
    weights = read_again(
        {"model": module.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path
    )
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
        (
            without_one,
            r"1 of \d+ velocities are missing, such as layer1.*; the others were left out",
        ),
        (
            change_shape,
            (
                r"velocities were left out: their order is unknown, conv1\.weight is \[3\],"
                r" expected \[8, 3, 7, 7\]"
            ),
        ),
        (
            split_groups,
            (
                r"velocities were left out: the optimizer's groups of \[1, 1, 1\] parameters are of"
                r" no known program"
            ),
        ),
        (
            add_square_averages,
            r"velocities were left out: the optimizer is not SGD, it also keeps square_avg",
        ),
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
    value = {
        "model": module.state_dict(),
        "optimizer": change(train(module, one_group(module)).state_dict()),
    }
    weights = read_again(value, tmp_path)
    assert weights.state.momentum == {}
    assert re.search(remark, "; ".join(weights.remarks))


def test_nesterov_momentum_is_remarked(tmp_path: Path) -> None:
    module = module_of()
    optimizer = train(module, one_group(module), nesterov=True)
    weights = read_again(
        {"model": module.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path
    )
    assert (
        "its optimizer used Nesterov momentum: resume it with --set nesterov=true"
        in weights.remarks
    )


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
    weights = read_again(
        {"model": module_of().state_dict(), "model_ema": module_of("basic").state_dict()}, tmp_path
    )
    assert weights.state.ema == {}
    assert (
        "the moving average (model_ema) has other tensors than the weights and was left out"
        in weights.remarks
    )


ARGS = Namespace(lr=0.1)
ORIGINS: dict[str, tuple[str, dict[str, Any], str, int | None]] = {
    "torchvision's download": ("resnet50-0676ba61.pth", {}, "torchvision", None),
    "torchvision's script": (
        "model_7.pth",
        {"model": {}, "lr_scheduler": {}, "epoch": 7, "args": ARGS},
        "torchvision",
        8,
    ),
    "timm": (
        "last.pth.tar",
        {"arch": "resnet50", "epoch": 7, "version": 2, "args": ARGS, "metric": 76.5},
        "timm",
        8,
    ),
    "a hub": ("pytorch_model.bin", {}, "timm", None),
    "NVIDIA's download": ("nvidia_resnet50_200821.pth.tar", {}, "NVIDIA PyTorch", None),
    "the example": (
        "checkpoint.pth.tar",
        {"epoch": 7, "arch": "resnet50", "best_acc1": np.float64(70)},
        "PyTorch",
        7,
    ),
    "another": ("a.pt", {"epoch": 7}, "PyTorch", None),
}


@pytest.mark.parametrize(("name", "values", "origin", "epochs"), ORIGINS.values(), ids=ORIGINS)
def test_the_program_and_its_epochs_are_recognised(
    name: str, values: dict[str, Any], origin: str, epochs: int | None, tmp_path: Path
) -> None:
    tensors = module_of().state_dict()
    key = "model" if "model" in values else "state_dict"
    weights = read_again({**values, key: tensors} if values else tensors, tmp_path, name)
    assert (weights.origin, weights.epochs) == (origin, epochs)


@pytest.mark.parametrize(
    ("parts", "origin"),
    [
        (("relu", "avgpool", "layer1.0.relu"), "torchvision"),
        (("act1", "global_pool"), "timm"),
        ((), "PyTorch"),
    ],
)
def test_the_program_is_recognised_by_the_names_of_its_modules(
    parts: tuple[str, ...], origin: str, tmp_path: Path
) -> None:
    module = module_of()
    for part in parts:
        owner, _, last = part.rpartition(".")
        module.get_submodule(owner).add_module(last, nn.ReLU())
    assert read_again(module.state_dict(), tmp_path).origin == origin


def test_a_loss_scale_is_read(tmp_path: Path) -> None:
    scaler = {
        "scale": 65536.0,
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": 2000,
        "_growth_tracker": 7,
    }
    weights = read_again({"model": module_of().state_dict(), "scaler": scaler, "rng": 1}, tmp_path)
    assert weights.state.scaler == {"scale": 65536.0, "good_steps": 7, "bad_steps": 0}
    assert "left over and not used: rng" in weights.remarks
    assert (
        read_again(
            {"model": module_of().state_dict(), "scaler": scaler | {"scale": -1.0}}, tmp_path
        ).state.scaler
        == {}
    )


def test_files_and_folders_are_found(tmp_path: Path) -> None:
    torch.save({}, tmp_path / "a.pth")
    torch.save({}, tmp_path / "no-ending")
    (tmp_path / "b").mkdir()
    torch.save({}, tmp_path / "b" / "checkpoint.pth.tar")
    (tmp_path / "text").write_text("text")
    assert find(tmp_path / "a.pth") == tmp_path / "a.pth"
    assert matches(read_head(tmp_path / "no-ending"), tmp_path / "no-ending")
    assert find(tmp_path / "b") == tmp_path / "b" / "checkpoint.pth.tar"
    assert [find(tmp_path / name) for name in (".", "text", "missing.pth")] == [None, None, None]


def load_nvidia(path: Path) -> Any:
    return torch.load(path, weights_only=True)


@pytest.mark.parametrize("model", ["small", "grouped", "basic"])
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


def test_nvidias_module_and_optimizer_take_what_is_written(tmp_path: Path) -> None:
    recipe = recipe_of()
    module = OfNvidia(module_of())
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
        re.sub(r"layers\.(\d)", lambda m: f"layer{int(m[1]) + 1}", name): value
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
    assert_canonical(weights.state.tensors, state.tensors)
    assert_canonical(weights.state.momentum, state.momentum)
    assert_canonical(weights.state.ema, state.ema)
    assert (weights.origin, weights.epochs) == ("NVIDIA PyTorch", 3)


@pytest.mark.parametrize("write", [write_torchvision, write_nvidia_pytorch])
def test_nothing_is_overwritten_and_nothing_is_left_after_an_error(
    write: Callable[..., Any], tmp_path: Path
) -> None:
    recipe = recipe_of()
    (tmp_path / "a.pth").write_text("mine")
    with pytest.raises(CheckpointError, match=r"a\.pth already exists"):
        write(tmp_path / "a.pth", recipe, state_of(recipe))
    with pytest.raises(CheckpointError, match=r"expected a name that ends in \.pth\.tar, \.pth"):
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
def test_what_a_state_dict_cannot_say_is_remarked(
    changes: dict[str, Any], remark: str, tmp_path: Path
) -> None:
    recipe = recipe_of().replace(**changes)
    remarks = write_torchvision(tmp_path / "a.pth", recipe, state_of(recipe)).remarks
    assert remark in "; ".join(remarks)


def test_all_that_a_state_dict_does_not_hold_is_named(tmp_path: Path) -> None:
    full = state_of(recipe_of())
    scaler = {"scale": 128.0, "good_steps": 0.0, "bad_steps": 0.0}
    whole = State(7, full.tensors, full.momentum, full.tensors, scaler)
    remarks = write_torchvision(tmp_path / "a.pth", recipe_of(), whole).remarks
    assert remarks == (
        (
            "left out, since the file holds only weights: velocities, moving averages, the loss"
            " scale, step 7"
        ),
    )
    remarks = write_torchvision(tmp_path / "b.pth", recipe_of(), State(0, full.tensors, {})).remarks
    assert remarks == ()


def test_the_builder_of_resnext_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = recipe_of("resnext101-32x4d")
    monkeypatch.setattr(torch_file, "save", lambda path, value: path.write_bytes(b""))
    expected = tensors(model_spec(recipe.model), recipe.logits)
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
    assert remarks == (
        (
            "a.pth is for --resume on one GPU; on several, the names in state_dict have to begin"
            " with module."
        ),
        "a.weights.pth is for --pretrained-from-file",
        "epoch 0 is stored, at which --resume begins; step 7 is not",
        "the original's code has only the models resnet50 and resnext101-32x4d; this is another",
        "the original's model has 1000 outputs; these weights have 5: --num_classes",
        "no velocities were written: after --resume they begin at 0",
    )
