"""Tests of PyTorch's module, for people's own loops."""

import copy

import pytest
import torch

from lockstep.backends import torch as torch_backend
from lockstep.backends.torch.model import Model
from lockstep.models.architectures import MODELS
from lockstep.recipes import Recipe
from tests.backends import autograd
from tests.backends.drawing import draw_images, draw_state


def build_empty_model(model: str, recipe: Recipe) -> Model:
    """Return a model whose tensors have no memory."""
    with torch.device("meta"):
        return Model(MODELS[model], recipe.replace(model=model))


@pytest.mark.parametrize("model", MODELS)
def test_a_module_has_the_tensors_of_the_table(tiny_recipe: Recipe, model: str) -> None:
    state = build_empty_model(model, tiny_recipe.replace(logits=1001)).state_dict()
    shapes = {
        name: tuple(tensor.shape)
        for name, tensor in state.items()
        if not name.endswith("num_batches_tracked")
    }
    assert shapes == {tensor.name: tensor.shape for tensor in MODELS[model].list_tensors(1001)}


def torchvisions_names(
    depths: tuple[int, ...], convolutions: int, first_projects: bool
) -> list[str]:
    """Return the keys of torchvision's `resnet*().state_dict()`, in order."""

    def list_normalised(conv: str, bn: str) -> list[str]:
        parts = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
        return [f"{conv}.weight", *(f"{bn}.{part}" for part in parts)]

    names = list_normalised("conv1", "bn1")
    for stage, depth in enumerate(depths, start=1):
        for i in range(depth):
            block = f"layer{stage}.{i}"
            for j in range(1, convolutions + 1):
                names += list_normalised(f"{block}.conv{j}", f"{block}.bn{j}")
            if i == 0 and (stage > 1 or first_projects):
                names += list_normalised(f"{block}.downsample.0", f"{block}.downsample.1")
    return [*names, "fc.weight", "fc.bias"]


@pytest.mark.parametrize(
    ("model", "names"),
    [
        ("resnet18", torchvisions_names((2, 2, 2, 2), 2, first_projects=False)),
        ("resnet50", torchvisions_names((3, 4, 6, 3), 3, first_projects=True)),
        ("resnext101-32x4d", torchvisions_names((3, 4, 23, 3), 3, first_projects=True)),
    ],
)
def test_a_module_has_torchvisions_names(tiny_recipe: Recipe, model: str, names: list[str]) -> None:
    assert list(build_empty_model(model, tiny_recipe).state_dict()) == names


@pytest.fixture
def module(tiny_recipe: Recipe) -> torch.nn.Module:
    return torch_backend.load_module(tiny_recipe, draw_state(tiny_recipe).tensors)


def test_a_loaded_module_can_be_trained(module: torch.nn.Module, tiny_recipe: Recipe) -> None:
    module.train()(
        autograd.normalise(draw_images(4), tiny_recipe).float()
    ).square().sum().backward()
    assert all(
        parameter.grad is not None and parameter.grad.any() for parameter in module.parameters()
    )


def test_a_state_dict_is_loaded_strictly(module: torch.nn.Module, tiny_recipe: Recipe) -> None:
    other = {
        name: torch.tensor(value) for name, value in draw_state(tiny_recipe, seed=3).tensors.items()
    }
    counts = {
        name: torch.tensor(7)
        for name in module.state_dict()
        if name.endswith("num_batches_tracked")
    }
    module.load_state_dict(other | counts, strict=True)
    assert torch.equal(module.get_parameter("fc.bias"), other["fc.bias"])


def test_a_loaded_module_can_be_copied(module: torch.nn.Module) -> None:
    twin = copy.deepcopy(module)
    twin.get_parameter("fc.bias").data.zero_()
    assert module.get_parameter("fc.bias").any()


@pytest.mark.parametrize("padding", ["symmetric", "same"])
def test_a_module_can_be_traced_and_gives_its_features(tiny_recipe: Recipe, padding: str) -> None:
    # torchvision.models.feature_extraction traces a module with torch.fx, in both modes.
    recipe = tiny_recipe.replace(padding=padding)
    module = torch_backend.load_module(recipe, draw_state(recipe).tensors)
    images = autograd.normalise(draw_images(2), recipe).float()
    traced = torch.fx.symbolic_trace(module)
    torch.fx.symbolic_trace(module.train())
    logits = module.eval()(images)
    assert torch.equal(traced(images), logits)
    assert torch.equal(module.fc(module.forward_features(images).mean(dim=(2, 3))), logits)
