import dataclasses
import math

import numpy as np
import pytest

from lockstep.models.architectures import ModelSpec
from lockstep.recipes import Recipe
from lockstep.recipes.initial_weights import initial_tensors

SPEC = ModelSpec(
    block="bottleneck",
    layers=(1, 2, 1, 1),
    stem_width=32,
    widths=(32, 32, 64, 64),
    groups=2,
    expansion=2,
)
RECIPE = Recipe(model=SPEC, logits=300)

# As in torch.nn.init.kaiming_normal_: inputs of a group times kernel area, and outputs times kernel
# area.
FANS = {
    "conv1.weight": (3 * 49, 32 * 49),
    "layer1.0.conv1.weight": (32, 32),
    "layer1.0.conv2.weight": (32 // 2 * 9, 32 * 9),
    "layer3.0.conv2.weight": (64 // 2 * 9, 64 * 9),
    "layer4.0.conv3.weight": (64, 128),
    "layer4.0.downsample.0.weight": (128, 128),
}


def deviation(values: np.ndarray) -> float:
    return math.sqrt((values.astype(np.float64) ** 2).mean())


def test_there_is_a_float32_array_for_every_tensor_in_the_models_order() -> None:
    values = initial_tensors(RECIPE)

    result = [(name, value.shape) for name, value in values.items()]
    assert result == [(tensor.name, tensor.shape) for tensor in SPEC.list_tensors(300)]
    assert {value.dtype for value in values.values()} == {np.dtype(np.float32)}


@pytest.mark.parametrize("distribution", ["normal", "truncated_normal"])
@pytest.mark.parametrize("fan", ["in", "out"])
@pytest.mark.parametrize("name", FANS)
def test_a_convolution_has_he_variance(name: str, fan: str, distribution: str) -> None:
    values = initial_tensors(RECIPE.replace(conv_init=distribution, conv_init_fan=fan))[name]

    expected = math.sqrt(2 / FANS[name][fan == "out"])
    # Of a standard deviation estimated from values.size numbers.
    tolerance = 4 / math.sqrt(2 * values.size)
    assert deviation(values) == pytest.approx(expected, rel=tolerance)
    assert abs(values.mean()) < 4 * expected / math.sqrt(values.size)


def test_a_stem_of_four_channels_has_a_fan_of_196_and_no_other_kernel_changes() -> None:
    three, four = (initial_tensors(RECIPE.replace(stem_channels=channels)) for channels in (3, 4))

    np.testing.assert_allclose(
        four["conv1.weight"], three["conv1.weight"] * math.sqrt(147 / 196), rtol=1e-6
    )
    result = [name for name in three if not np.array_equal(three[name], four[name])]
    assert result == ["conv1.weight"]


def test_a_truncated_normal_is_cut_at_two_deviations_and_widened_to_he_variance() -> None:
    values = initial_tensors(RECIPE.replace(conv_init="truncated_normal"))["layer4.0.conv2.weight"]

    density = math.exp(-2) / math.sqrt(2 * math.pi)
    inside = math.erf(2 / math.sqrt(2))
    shrunk = math.sqrt(1 - 2 * 2 * density / inside)
    border = 2 * math.sqrt(2 / (64 // 2 * 9)) / shrunk
    assert 0.99 * border < np.abs(values).max() <= border * (1 + 1e-6)


def test_a_normal_is_not_cut() -> None:
    values = initial_tensors(RECIPE)["layer4.0.conv2.weight"]

    beyond = (np.abs(values) > 2 * math.sqrt(2 / (64 // 2 * 9))).mean()
    assert beyond == pytest.approx(math.erfc(2 / math.sqrt(2)), rel=0.15)


def test_a_truncated_normal_has_enough_numbers_for_tensors_of_any_size() -> None:
    for width in (1, 2, 3, 50):
        spec = ModelSpec(
            block="basic", layers=(1, 1, 1, 1), stem_width=width, widths=(width,) * 4, expansion=1
        )
        values = initial_tensors(Recipe(model=spec, conv_init="truncated_normal"))
        assert all(np.isfinite(value).all() for value in values.values())


@pytest.mark.parametrize(
    ("name", "setting"), [("fc.weight", "fc_init"), ("fc.bias", "fc_bias_init")]
)
def test_a_uniform_classifier_is_even_within_its_bound(name: str, setting: str) -> None:
    border = 1 / math.sqrt(128)
    values = np.sort(
        initial_tensors(RECIPE.replace(**{setting: "uniform"}))[name].reshape(-1)
    ).astype(np.float64)

    assert np.abs(values).max() <= border
    expected = (values / border + 1) / 2
    result = np.abs(expected - np.arange(1, values.size + 1) / values.size).max()
    assert result < 1.95 / math.sqrt(values.size)


def test_squeeze_and_excitation_starts_as_convolutions_with_the_classifiers_biases() -> None:
    recipe = RECIPE.replace(
        model=dataclasses.replace(SPEC, squeeze_widths=(64, 64, 64, 64)), fc_bias_init="uniform"
    )
    values = initial_tensors(recipe)
    # The kernel has 64 channels as inputs and 64 as outputs, so that fan in and fan out are equal.
    assert deviation(values["layer1.0.se.fc1.weight"]) == pytest.approx(math.sqrt(2 / 64), rel=0.05)
    bias = values["layer1.0.se.fc1.bias"]
    assert 0.8 / 8 < np.abs(bias).max() <= 1 / 8
    assert not initial_tensors(recipe.replace(fc_bias_init="zero"))["layer1.0.se.fc1.bias"].any()


def test_the_bias_of_the_classifier_is_zero_unless_it_is_drawn() -> None:
    assert not initial_tensors(RECIPE)["fc.bias"].any()


@pytest.mark.parametrize(("fan", "inputs"), [("in", 128), ("out", 300)])
def test_a_classifier_drawn_as_the_convolutions_has_he_variance(fan: str, inputs: int) -> None:
    recipe = RECIPE.replace(fc_init="as_conv", conv_init="truncated_normal", conv_init_fan=fan)

    values = initial_tensors(recipe)["fc.weight"]

    result = deviation(values)
    assert result == pytest.approx(math.sqrt(2 / inputs), rel=4 / math.sqrt(2 * values.size))


@pytest.mark.parametrize(
    ("role", "value"), [("bn_scale", 1), ("bn_bias", 0), ("bn_mean", 0), ("bn_var", 1)]
)
def test_a_batch_norm_starts_as_the_identity(role: str, value: float) -> None:
    values = initial_tensors(RECIPE)

    names = [tensor.name for tensor in SPEC.list_tensors(300) if tensor.role == role]
    assert "layer2.0.downsample.1.weight" in names or role != "bn_scale"
    assert all((values[name] == value).all() for name in names)


@pytest.mark.parametrize(
    ("spec", "last"),
    [
        (SPEC, "bn3"),
        (
            ModelSpec(
                block="basic", layers=(1, 1, 1, 2), widths=(8, 8, 8, 8), stem_width=8, expansion=1
            ),
            "bn2",
        ),
    ],
)
def test_only_a_blocks_last_scale_is_zero_if_asked(spec: ModelSpec, last: str) -> None:
    values = initial_tensors(Recipe(model=spec, zero_init_last_bn=True))

    zero = {
        tensor.name
        for tensor in spec.list_tensors(1000)
        if tensor.role == "bn_scale" and not values[tensor.name].any()
    }
    assert zero == {f"{block.name}.{last}.weight" for block in spec.list_blocks()}


def test_a_zero_scale_changes_no_other_tensor() -> None:
    plain = initial_tensors(RECIPE)
    zeroed = initial_tensors(RECIPE.replace(zero_init_last_bn=True))

    changed = {name for name in plain if not np.array_equal(plain[name], zeroed[name])}
    assert changed == {f"{block.name}.bn3.weight" for block in SPEC.list_blocks()}


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("conv1.weight", [0.066773996, -0.18527316, -0.091146186]),
        ("layer1.0.conv1.weight", [0.12785211, 0.42189685, 0.54396969]),
        ("layer2.0.conv2.weight", [0.21505229, 0.16179103, 0.14900215]),
        ("fc.weight", [0.094904125, -0.0038297046, 0.070307702]),
    ],
)
def test_a_seed_keeps_its_values(tiny_recipe: Recipe, name: str, values: list[float]) -> None:
    assert initial_tensors(tiny_recipe)[name].reshape(-1)[:3] == pytest.approx(values, rel=1e-6)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("conv1.weight", [0.05796567, -0.16827014, 0.10825858]),
        ("layer4.0.conv3.weight", [-0.26839635, 0.18638153, 0.74608248]),
        ("fc.weight", [-0.047845118, -0.071129411, -0.012785729]),
        ("fc.bias", [-0.076907724, -0.042775702, -0.15954679]),
    ],
)
def test_a_last_seed_keeps_its_values(tiny_recipe: Recipe, name: str, values: list[float]) -> None:
    recipe = tiny_recipe.replace(
        conv_init="truncated_normal", fc_bias_init="uniform", seed=2**63 - 1
    )

    assert initial_tensors(recipe)[name].reshape(-1)[:3] == pytest.approx(values, rel=1e-6)


@pytest.mark.parametrize("distribution", ["normal", "truncated_normal"])
def test_another_seed_changes_every_tensor_that_is_drawn(distribution: str) -> None:
    recipe = RECIPE.replace(conv_init=distribution, fc_bias_init="uniform")
    first = initial_tensors(recipe)
    second = initial_tensors(recipe.replace(seed=1))

    drawn = {
        tensor.name
        for tensor in SPEC.list_tensors(300)
        if tensor.role in ("conv_weight", "fc_weight", "fc_bias")
    }
    assert {name for name in first if not np.array_equal(first[name], second[name])} == drawn


def test_the_number_of_logits_changes_nothing_before_the_classifier() -> None:
    many = initial_tensors(RECIPE)
    few = initial_tensors(RECIPE.replace(logits=7))

    assert all(np.array_equal(many[name], few[name]) for name in many if not name.startswith("fc."))
