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
from lockstep.models.architectures import model_spec
from lockstep.recipes.from_nvidia import resnext101_32x4d_pytorch_90ep
from lockstep.system.errors import CheckpointError
from lockstep.weights import Weights
from lockstep.weights.formats.account import Part
from lockstep.weights.formats.torch_models import find, matches, read
from lockstep.weights.recognition import read_head
from lockstep.weights.weights_choice import WeightsChoice
from tests.lines import check_lines
from tests.soak import in_a_soak
from tests.weights.formats.cases import assert_canonical
from tests.weights.formats.torch_cases import (
    OfNvidia,
    Tensors,
    arrays,
    module_of,
    read_again,
    recipe_of,
)

pytestmark = pytest.mark.usefixtures("small_models")

NO_STEP = "no step is stored"


@pytest.mark.parametrize("model", ["small", "grouped", "basic", "modern"])
def test_a_state_dict_is_read_as_it_is(model: str, tmp_path: Path) -> None:
    tensors = module_of(model).state_dict()
    weights = read_again(tensors, tmp_path)
    assert_canonical(weights.state.tensors, arrays(tensors))
    assert weights.recipe == recipe_of(model)
    assert weights.state.momentum == {}
    assert (weights.state.ema, weights.epochs, weights.has_classifier) == ({}, None, True)


@pytest.mark.parametrize(
    ("key", "prefix"), [("state_dict", "_orig_mod.module."), ("model", "module._orig_mod.")]
)
def test_prefixes_of_ranks_and_compilers_are_read(prefix: str, key: str, tmp_path: Path) -> None:
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
    check_lines(restored.remarks[:1], f"'{taken_off}', which was removed")
    assert restored.remarks[1:] == plain.remarks


def test_a_tensor_outside_of_the_network_is_refused_or_ignored(tmp_path: Path) -> None:
    tensors = {f"model.{name}": tensor for name, tensor in module_of().state_dict().items()}
    tensors["loss.weight"] = torch.zeros(3)
    command = r"lockstep convert \S+any\.pth weights\.safetensors --ignore 'loss\.weight'$"
    expected = rf"PyTorch's small, but also has tensors .*: loss\.weight; .* {command}"
    with pytest.raises(CheckpointError, match=expected):
        read_again(tensors, tmp_path)
    for pattern in ("loss.weight", "loss.*"):
        weights = read(tmp_path / "any.pth", choice=WeightsChoice(ignore=(pattern,)))
        assert_canonical(weights.state.tensors, arrays(module_of().state_dict()))
        assert Part("loss.weight", "ignored") in weights.parts


def test_a_tensor_under_two_names_is_refused(tmp_path: Path) -> None:
    tensors = module_of().state_dict()
    with pytest.raises(CheckpointError, match=r"twice: as fc\.bias and as module\.fc\.bias"):
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


@pytest.mark.parametrize("axes", [4, 2], ids=["convolutions", "dense layers"])
def test_nvidias_squeeze_and_excitation_is_read(axes: int, tmp_path: Path) -> None:
    tensors = OfNvidia(module_of("squeezed")).state_dict()
    for name, tensor in tensors.items():
        if ".squeeze." in name and tensor.ndim == 4:
            tensors[name] = tensor.reshape(tensor.shape[:axes])
    weights = read_again(tensors, tmp_path)
    assert_canonical(weights.state.tensors, arrays(module_of("squeezed").state_dict()))
    assert (weights.origin, weights.recipe.model) == ("NVIDIA PyTorch", "squeezed")


def name_as_ffcv(tensors: Tensors) -> Tensors:
    """Return tensors with the names and the filters of FFCV's code, on one of several GPUs."""
    line = torch.tensor([0.25, 0.5, 0.25])
    renamed = {}
    for name, tensor in tensors.items():
        conv, _, kind = name.rpartition(".")
        is_blurred = re.fullmatch(r"layer[234]\.0\.(conv2|downsample\.0)", conv)
        renamed[f"module.{conv}.{'conv.' if is_blurred else ''}{kind}"] = tensor
        if is_blurred:
            filters = (line[:, None] * line).repeat(tensor.shape[1], 1, 1, 1)
            renamed[f"module.{conv}.blur_filter"] = filters
    return renamed


def test_ffcvs_blur_is_read(tmp_path: Path) -> None:
    tensors = module_of("blurred").state_dict()
    weights = read_again(name_as_ffcv(tensors), tmp_path)
    assert_canonical(weights.state.tensors, arrays(tensors))
    assert weights.recipe.model == "blurred"


def test_another_blur_is_refused(tmp_path: Path) -> None:
    tensors = name_as_ffcv(module_of("blurred").state_dict())
    tensors["module.layer2.0.conv2.blur_filter"][0, 0, 1, 1] = 1
    with pytest.raises(CheckpointError, match="blur_filter is a filter other than"):
        read_again(tensors, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["resnet50", pytest.param("resnext101-32x4d", marks=in_a_soak)])
def test_nvidias_published_files_get_the_published_recipe(model: str, tmp_path: Path) -> None:
    shapes = Model(model_spec(model), recipe_of(model, 1000)).state_dict()
    tensors = {f"module.{name}": torch.zeros_like(tensor).half() for name, tensor in shapes.items()}
    weights = read_again(tensors, tmp_path, f"nvidia_{model}_200821.pth.tar")
    assert weights.origin == "NVIDIA PyTorch"
    assert (weights.recipe.model, weights.recipe.logits) == (model, 1000)
    assert (
        weights.recipe.weight_decay == {"resnet50": 1 / 32768, "resnext101-32x4d": 1 / 16384}[model]
    )


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        (
            "layers.3.0.conv2.weight",
            torch.zeros(128, 128, 3, 3),
            "is [128, 128, 3, 3], expected [64, 64, 3, 3]",
        ),
        ("bn1.weight", None, "is missing"),
        ("fc.bias", None, "is missing"),
    ],
)
def test_other_networks_are_refused_with_what_differs(
    name: str, value: torch.Tensor | None, reason: str, tmp_path: Path
) -> None:
    tensors = OfNvidia(module_of()).state_dict() | {name: value}
    tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    expected = re.escape(f"{name} {reason}")
    expected = rf"PyTorch saves it\. The closest model, small, does not fit: .*{expected}"
    with pytest.raises(CheckpointError, match=expected) as refused:
        read_again(tensors, tmp_path)
    assert "expected [0" not in str(refused.value), "of a model without outputs"


@pytest.mark.parametrize(
    "value", [[1], {"a": 1}, {"state_dict": {"fc.bias": torch.zeros(3)}}, torch.zeros(3)]
)
def test_a_file_without_a_state_dict_is_refused(value: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"holds no state_dict"):
        read_again(value, tmp_path)


def test_several_networks_in_a_file_are_an_error_that_lists_them(tmp_path: Path) -> None:
    tensors = module_of().state_dict()
    with pytest.raises(CheckpointError, match="several networks: state_dict, model"):
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
        {"arch": "small", "epoch": 7, "version": 2, "args": ARGS, "metric": 76.5},
        "timm",
        8,
    ),
    "a hub": ("pytorch_model.bin", {}, "timm", None),
    "NVIDIA's download": ("nvidia_resnet50_200821.pth.tar", {}, "NVIDIA PyTorch", None),
    "the example": (
        "checkpoint.pth.tar",
        {"epoch": 7, "arch": "small", "best_acc1": np.float64(70)},
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
def test_module_names_tell_the_program(parts: tuple[str, ...], origin: str, tmp_path: Path) -> None:
    module = module_of()
    for part in parts:
        owner, _, last = part.rpartition(".")
        module.get_submodule(owner).add_module(last, nn.ReLU())
    assert read_again(module.state_dict(), tmp_path).origin == origin


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
