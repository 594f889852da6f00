"""Which tensors are trained, and the factors of their learning rates."""

from typing import Any

import pytest

from lockstep.recipes import Recipe
from lockstep.recipes.recipe_files import parse_settings
from lockstep.recipes.trained_tensors import (
    changing_tensors,
    frozen_norms,
    lowest_trained_section,
    rate_factors,
)
from lockstep.system.errors import RecipeError


def test_all_parameters_are_trained_at_the_full_rate_by_default() -> None:
    factors = rate_factors(Recipe())
    assert len(factors) == 161  # of torchvision's resnet50
    assert set(factors.values()) == {1.0}
    assert len(changing_tensors(Recipe())) == 161 + 2 * 53
    assert not frozen_norms(Recipe())


def test_rates_fall_with_the_distance_from_the_classifier() -> None:
    factors = rate_factors(Recipe(model="resnet18", lr_depth_decay=0.5))
    kernels = [
        *("fc.weight", "layer4.1.conv2.weight", "layer4.0.downsample.0.weight"),
        *("layer3.1.bn1.bias", "layer1.0.conv1.weight", "conv1.weight", "bn1.weight"),
    ]
    assert [factors[name] for name in kernels] == [0.5**n for n in (0, 1, 2, 3, 8, 9, 9)]


def test_the_longest_prefix_counts_in_whole_parts() -> None:
    multipliers = {"backbone": 0.1, "layer3": 2, "layer3.1": 3, "layer3.1.bn1.weight": 4}
    factors = rate_factors(Recipe(model="resnet101", lr_multipliers=multipliers, lr_depth_decay=1))
    assert factors["fc.bias"] == 1
    assert factors["conv1.weight"] == 0.1
    assert factors["layer3.11.conv1.weight"] == 2
    assert factors["layer3.1.bn1.bias"] == 3
    assert factors["layer3.1.bn1.weight"] == 4


@pytest.mark.parametrize(
    ("frozen", "lowest", "trained"),
    [
        ("backbone", "fc", 2),
        (["conv1", "bn1"], "layer1.0", 158),
        (["conv1", "bn1", "layer1", "layer2", "layer3"], "layer4.0", 32),
        (["layer2", "fc"], "stem", 120),
        (["conv1", "bn1.weight"], "stem", 159),
    ],
)
def test_what_is_frozen_is_not_trained(frozen: Any, lowest: str, trained: int) -> None:
    recipe = Recipe(frozen=frozen)
    assert len(rate_factors(recipe)) == trained
    assert lowest_trained_section(recipe) == lowest


def test_a_batch_norm_is_frozen_with_its_scale_and_bias() -> None:
    recipe = Recipe(frozen=["bn1", "layer1.0.bn1.bias", "layer1.0.bn2.bias", "layer1.0.bn2.weight"])
    assert frozen_norms(recipe) == {"bn1", "layer1.0.bn2"}
    changing = changing_tensors(recipe)
    assert "layer1.0.bn1.running_mean" in changing
    assert "layer1.0.bn2.running_var" not in changing


def test_the_fields_are_set_from_text_and_survive_a_file() -> None:
    settings = ["frozen=backbone", "lr_multipliers={fc.bias: 2, layer4: 0.5}", "lr_depth_decay=0.8"]
    recipe = Recipe(**parse_settings(settings)[0])
    assert recipe.frozen == ("backbone",)
    assert Recipe.of(recipe.fields()) == recipe
    assert recipe.fields()["lr_multipliers"] == {"fc.bias": 2.0, "layer4": 0.5}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"frozen": ["layr4"]}, "frozen: no trained tensor .* 'layr4'. Did you mean layer4"),
        ({"frozen": "layer"}, "Did you mean layer4 or layer3"),
        ({"frozen": "bn1.running_mean"}, "Known: backbone, conv1, bn1, layer1"),
        ({"lr_multipliers": {"head": 2}}, "lr_multipliers: no trained tensor .* 'head'. Known: b"),
        ({"lr_multipliers": {"layer4.9": 2}}, "Did you mean layer4"),
        ({"lr_multipliers": {"fc": 0}}, "lr_multipliers.fc: .* greater than 0"),
        ({"lr_depth_decay": 1.5}, "lr_depth_decay: "),
        ({"frozen": ["backbone", "fc.bias", "fc.weight"]}, "no tensor is left to train"),
    ],
)
def test_what_fits_no_tensor_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        Recipe(**fields)
