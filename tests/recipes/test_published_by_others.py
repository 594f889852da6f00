"""The recipes that others than NVIDIA published: values, learning rates and weight decay.

The tables are written from the sources and do not use the recipes, so that a mistake in a recipe is
not repeated here. A table has every field in which a recipe differs from the defaults.
"""

import inspect
import re
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch

from lockstep.models.architectures import Tensor, model_spec, tensors
from lockstep.recipes import Recipe, difference
from lockstep.recipes.published import NVIDIA_RECIPES, OWN_RECIPES, RECIPES, find_origin
from lockstep.recipes.published_accuracies import find_accuracies
from lockstep.recipes.schedule import learning_rates

# references/classification: train.py's defaults, and the transforms of presets.py.
TORCHVISION = {
    "conv_init_fan": "out",  # torchvision.models.resnet: kaiming_normal_(mode="fan_out")
    "fc_bias_init": "uniform",  # torch.nn.Linear
    "lr_unit": "epoch",
    "momentum": 0.9,
    "precision": "fp32",
    "crop_attempts": 10,  # RandomResizedCrop.get_params
    "antialias": True,  # Pillow's resize
    "eval_antialias": True,
}
PUBLISHED: dict[str, dict[str, Any]] = {
    "resnet50-torchvision-v1": TORCHVISION
    | {
        "lr": 0.1,
        "warmup_epochs": 0.0,
        "lr_decay": "step",
        "lr_step_epochs": (30, 60),
        "weight_decay": 1e-4,
        "weight_decay_roles": ("conv_weight", "bn_scale", "bn_bias", "fc_weight", "fc_bias"),
        "label_smoothing": 0.0,
    },
}
"""The fields that differ from the defaults."""
IMAGES_OF_A_STEP = {"resnet50-torchvision-v1": 8 * 32}
ACCURACIES = {"resnet50-torchvision-v1": ["76.13"]}


def test_the_tables_have_every_recipe_of_others() -> None:
    others = RECIPES.keys() - {*NVIDIA_RECIPES, *OWN_RECIPES}
    assert PUBLISHED.keys() == IMAGES_OF_A_STEP.keys() == ACCURACIES.keys() == others


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_recipe_has_the_values_its_source_states(name: str) -> None:
    recipe = RECIPES[name]()

    assert {field: new for field, (_, new) in difference(Recipe(), recipe).items()} == {
        field: list(value) if isinstance(value, tuple) else value
        for field, value in PUBLISHED[name].items()
    }
    assert recipe.global_batch_images == IMAGES_OF_A_STEP[name]


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_first_line_about_a_recipe_gives_its_published_accuracies(name: str) -> None:
    about = str(inspect.getdoc(RECIPES[name]))
    title = " ".join(about.partition("\n\n")[0].split())

    assert re.findall(r"\d\d\.\d+", title) == ACCURACIES[name]
    assert [row.figure() for row in find_accuracies(name)] == ACCURACIES[name]
    assert "Source:" in about or "Source and code:" in about
    assert "Cost:" in about


def torch_rates(
    schedulers: Callable[[torch.optim.Optimizer], Any], lr: float, epochs: int
) -> list[float]:
    """Return the learning rate of every epoch by PyTorch's schedulers, as torchvision steps them:
    once after every epoch."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)
    scheduler = schedulers(optimizer)
    rates = []
    for _ in range(epochs):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


def test_torchvisions_rates_are_those_of_pytorchs_schedulers() -> None:
    schedulers = torch.optim.lr_scheduler
    expected = torch_rates(lambda optimizer: schedulers.StepLR(optimizer, 30, 0.1), 0.1, 90)

    rates = learning_rates(RECIPES["resnet50-torchvision-v1"](), 3)

    np.testing.assert_allclose(rates, np.repeat(expected, 3), rtol=1e-12)


def is_decayed_by_torchvision(tensor: Tensor, norms_decay: bool) -> bool:
    """Return whether torchvision's `set_weight_decay` puts a parameter into the group that decays:
    all parameters, or those that belong to no batch norm."""
    return norms_decay or not tensor.role.startswith("bn_")


DECAYED: dict[str, Callable[[Tensor], bool]] = {
    "resnet50-torchvision-v1": lambda tensor: is_decayed_by_torchvision(tensor, norms_decay=True),
}


@pytest.mark.parametrize("name", DECAYED)
def test_weight_decay_applies_to_the_tensors_of_the_originals_groups(name: str) -> None:
    recipe = RECIPES[name]()
    trained: Iterable[Tensor] = filter(
        lambda tensor: tensor.is_trained, tensors(model_spec(recipe.model), recipe.logits)
    )

    for tensor in trained:
        assert recipe.decays(tensor) == DECAYED[name](tensor), tensor.name


def test_every_recipe_has_one_origin() -> None:
    assert {find_origin(name) for name in NVIDIA_RECIPES} == {"NVIDIA's Deep Learning Examples"}
    assert find_origin("resnet50-torchvision-v1") == "torchvision"
