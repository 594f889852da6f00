"""Counts, names and shapes against published ones: NVIDIA's pages and torchvision's model
documentation."""

import dataclasses
import math

import pytest

from lockstep.models.architectures import MODELS, ModelSpec, Tensor, model_spec
from lockstep.system.errors import RecipeError

SAME_TENSORS = {
    "resnetblur18": "resnet18",
    "resnetblur50": "resnet50",
    "resnetblur50d": "resnet50d",
    "resnetblur101d": "resnet101d",
    "resnet50-ffcv": "resnet50",
}
"""Models with the same tensors as another one, apart from v1."""


# torchvision's documentation, and the models that timm 1.0.31 builds. se-resnext101-32x4d has
# resnext101-32x4d's, and 2 * 16 * C + 16 + C for every block of C outputs.
@pytest.mark.parametrize(
    ("name", "logits", "parameters"),
    [
        ("resnet18", 1000, 11_689_512),
        ("resnet34", 1000, 21_797_672),
        ("resnet50", 1000, 25_557_032),
        ("resnet50", 1001, 25_559_081),
        ("resnet101", 1000, 44_549_160),
        ("resnet152", 1000, 60_192_808),
        ("resnet50-v1", 1000, 25_557_032),
        ("resnet101-v1", 1000, 44_549_160),
        ("resnet152-v1", 1000, 60_192_808),
        ("resnext101-32x4d", 1000, 44_177_704),
        ("se-resnext101-32x4d", 1000, 45_251_128),
        ("resnet26", 1000, 15_995_176),
        ("wide_resnet50_2", 1000, 68_883_240),
        ("wide_resnet101_2", 1000, 126_886_696),
        ("resnext50-32x4d", 1000, 25_028_904),
        ("resnext101-32x8d", 1000, 88_791_336),
        ("resnext101-64x4d", 1000, 83_455_272),
        ("resnet200", 1000, 64_673_832),
        ("resnet10t", 1000, 5_435_488),
        ("resnet14t", 1000, 10_081_632),
        ("resnet18d", 1000, 11_708_744),
        ("resnet26d", 1000, 16_014_408),
        ("resnet26t", 1000, 16_011_872),
        ("resnet34d", 1000, 21_816_904),
        ("resnet50d", 1000, 25_576_264),
        ("resnet101d", 1000, 44_568_392),
        ("resnet152d", 1000, 60_212_040),
        ("resnet200d", 1000, 64_693_064),
        ("resnet50t", 1000, 25_573_728),
        ("resnet50c", 1000, 25_576_264),
        ("resnet101c", 1000, 44_568_392),
        ("resnet152c", 1000, 60_212_040),
        ("resnet50s", 1000, 25_680_808),
        ("resnet101s", 1000, 44_672_936),
        ("resnet152s", 1000, 60_316_584),
        ("resnext50d-32x4d", 1000, 25_048_136),
        ("seresnet18", 1000, 11_779_624),
        ("seresnet34", 1000, 21_960_416),
        ("seresnet50", 1000, 28_088_024),
        ("seresnet101", 1000, 49_326_872),
        ("seresnet152", 1000, 66_821_848),
        ("seresnet50t", 1000, 28_104_720),
        ("seresnet152d", 1000, 66_841_080),
        ("seresnet200d", 1000, 71_855_096),
        ("seresnet269d", 1000, 113_672_760),
        ("seresnext26d-32x4d", 1000, 16_809_512),
        ("seresnext26t-32x4d", 1000, 16_806_976),
        ("seresnext50-32x4d", 1000, 27_559_896),
        ("seresnext101-32x4d", 1000, 48_955_416),
        ("seresnext101-64x4d", 1000, 88_232_984),
        ("seresnext101-32x8d", 1000, 93_569_048),
        ("seresnext101d-32x8d", 1000, 93_588_280),
        ("resnetblur18", 1000, 11_689_512),
        ("resnetblur50", 1000, 25_557_032),
        ("resnetblur50d", 1000, 25_576_264),
        ("resnetblur101d", 1000, 44_568_392),
        ("resnet50-ffcv", 1000, 25_557_032),
    ],
)
def test_models_have_their_published_parameters(name: str, logits: int, parameters: int) -> None:
    assert MODELS[name].count_parameters(logits) == parameters


def test_every_named_model_is_in_the_table_of_published_numbers() -> None:
    mark = test_models_have_their_published_parameters.pytestmark[0]
    assert {row[0] for row in mark.args[1]} == set(MODELS)


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("resnet18", 20),
        ("resnet34", 36),
        ("resnet50", 53),
        ("resnet101", 104),
        ("resnext101-32x4d", 104),
    ],
)
def test_a_model_has_its_published_number_of_convolutions(name: str, count: int) -> None:
    assert len(list(MODELS[name].list_convolutions())) == count


def test_resnet50_has_161_trained_tensors_and_statistics_beside_them() -> None:
    resnet50 = list(MODELS["resnet50"].list_tensors(1000))

    assert sum(tensor.is_trained for tensor in resnet50) == 161
    assert sum(tensor.role in ("bn_mean", "bn_var") for tensor in resnet50) == 2 * 53
    assert len(resnet50) == 161 + 2 * 53


@pytest.mark.parametrize("name", MODELS)
def test_no_name_of_a_tensor_occurs_twice(name: str) -> None:
    names = [tensor.name for tensor in MODELS[name].list_tensors(1000)]

    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("model", "name", "shape"),
    [
        ("resnet18", "layer1.1.conv2.weight", (64, 64, 3, 3)),
        ("resnet18", "layer2.0.conv1.weight", (128, 64, 3, 3)),
        ("resnet18", "layer4.0.downsample.0.weight", (512, 256, 1, 1)),
        ("resnet18", "fc.weight", (1000, 512)),
        ("resnet34", "layer3.5.bn2.running_var", (256,)),
        ("resnet50", "conv1.weight", (64, 3, 7, 7)),
        ("resnet50", "bn1.running_mean", (64,)),
        ("resnet50", "layer1.0.conv1.weight", (64, 64, 1, 1)),
        ("resnet50", "layer1.0.downsample.0.weight", (256, 64, 1, 1)),
        ("resnet50", "layer1.2.conv1.weight", (64, 256, 1, 1)),
        ("resnet50", "layer2.0.conv2.weight", (128, 128, 3, 3)),
        ("resnet50", "layer3.5.conv3.weight", (1024, 256, 1, 1)),
        ("resnet50", "layer4.0.downsample.1.weight", (2048,)),
        ("resnet50", "layer4.2.bn3.bias", (2048,)),
        ("resnet50", "fc.weight", (1000, 2048)),
        ("resnet50", "fc.bias", (1000,)),
        ("resnet101", "layer3.22.conv2.weight", (256, 256, 3, 3)),
        ("resnet152", "layer2.7.conv1.weight", (128, 512, 1, 1)),
        ("resnext101-32x4d", "layer1.0.conv2.weight", (128, 4, 3, 3)),
        ("resnext101-32x4d", "layer3.22.conv2.weight", (512, 16, 3, 3)),
        ("resnext101-32x4d", "layer4.2.conv3.weight", (2048, 1024, 1, 1)),
        ("resnet50d", "conv1.0.weight", (32, 3, 3, 3)),
        ("resnet50d", "conv1.4.running_mean", (32,)),
        ("resnet50d", "conv1.6.weight", (64, 32, 3, 3)),
        ("resnet50d", "layer1.0.downsample.1.weight", (256, 64, 1, 1)),
        ("resnet26t", "conv1.3.weight", (32, 24, 3, 3)),
        ("seresnet50", "layer2.0.se.fc1.weight", (32, 512, 1, 1)),
        ("seresnet50", "layer2.0.se.fc2.bias", (512,)),
        ("se-resnext101-32x4d", "layer4.0.se.fc1.weight", (16, 2048, 1, 1)),
    ],
)
def test_names_and_shapes_are_torchvisions(model: str, name: str, shape: tuple[int, ...]) -> None:
    shapes = {tensor.name: tensor.shape for tensor in MODELS[model].list_tensors(1000)}

    assert shapes[name] == shape


def test_the_biases_of_squeeze_and_excitation_count_as_the_classifiers() -> None:
    table = {tensor.name: tensor for tensor in MODELS["seresnet50"].list_tensors(1000)}
    bias = table["layer1.0.se.fc1.bias"]

    assert table["layer1.0.se.fc1.weight"].role == "conv_weight"
    assert bias.is_listed(["fc_bias"])
    assert bias.is_listed(["se_bias"])
    assert not bias.is_listed(["conv_weight", "fc_weight", "bn_bias"])


def test_tensors_come_in_torchvisions_order() -> None:
    names = [tensor.name for tensor in MODELS["resnet50"].list_tensors(1000)]

    assert names[:10] == [
        "conv1.weight",
        "bn1.weight",
        "bn1.bias",
        "bn1.running_mean",
        "bn1.running_var",
        "layer1.0.conv1.weight",
        "layer1.0.bn1.weight",
        "layer1.0.bn1.bias",
        "layer1.0.bn1.running_mean",
        "layer1.0.bn1.running_var",
    ]
    expected = ["layer1.0.conv3.weight", "layer1.0.downsample.0.weight", "layer1.1.conv1.weight"]
    assert names[15:26:5] == expected
    assert names[-2:] == ["fc.weight", "fc.bias"]


@pytest.mark.parametrize(
    ("model", "strides"),
    [
        ("resnet50", [1, 2, 1]),
        ("resnet50-v1", [2, 1, 1]),
        ("resnext101-32x4d", [1, 2, 1]),
        ("resnet34", [2, 1]),
    ],
)
def test_a_stage_halves_where_the_version_says(model: str, strides: list[int]) -> None:
    first = {block.name: block for block in MODELS[model].list_blocks()}

    for stage in ("layer2.0", "layer3.0", "layer4.0"):
        assert [conv.stride for conv in first[stage].convs] == strides
        assert first[stage].shortcut.stride == 2


@pytest.mark.parametrize("name", MODELS)
def test_nothing_else_than_stem_and_three_stages_has_a_stride(name: str) -> None:
    spec = MODELS[name]
    strides = [
        math.prod(conv.stride * (1 + conv.blurs_after) for conv in block.convs)
        for block in spec.list_blocks()
    ]

    first, *others = spec.list_stem()
    assert first.stride == 2
    assert {conv.stride for conv in others} <= {1}
    assert sorted(strides) == [1] * (sum(spec.layers) - 3) + [2, 2, 2]


def test_v1_and_v1_5_differ_in_strides_alone() -> None:
    for old, new in zip(
        MODELS["resnet50-v1"].list_convolutions(),
        MODELS["resnet50"].list_convolutions(),
        strict=True,
    ):
        assert dataclasses.replace(old, stride=new.stride) == new


def test_only_the_3x3_of_a_resnext_is_grouped() -> None:
    groups = {(conv.kernel, conv.groups) for conv in MODELS["resnext101-32x4d"].list_convolutions()}

    assert groups == {(7, 1), (1, 1), (3, 32)}


@pytest.mark.parametrize("name", MODELS)
def test_every_convolution_takes_what_the_one_before_it_gives(name: str) -> None:
    channels = 3
    for conv in MODELS[name].list_stem():
        assert conv.inputs == channels
        channels = conv.outputs
    for block in MODELS[name].list_blocks():
        assert block.shortcut is None or block.shortcut.inputs == channels
        for conv in block.convs:
            assert conv.inputs == channels
            channels = conv.outputs
        assert block.shortcut is None or block.shortcut.outputs == channels

    assert channels == MODELS[name].features


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("conv1.weight", "conv_weight"),
        ("bn1.weight", "bn_scale"),
        ("bn1.bias", "bn_bias"),
        ("bn1.running_mean", "bn_mean"),
        ("bn1.running_var", "bn_var"),
        ("layer2.0.downsample.0.weight", "conv_weight"),
        ("layer2.0.downsample.1.weight", "bn_scale"),
        ("layer2.0.downsample.1.bias", "bn_bias"),
        ("layer2.0.downsample.1.running_var", "bn_var"),
        ("fc.weight", "fc_weight"),
        ("fc.bias", "fc_bias"),
    ],
)
def test_a_tensors_role_is_what_it_does_and_not_what_it_is_called(name: str, role: str) -> None:
    roles = {tensor.name: tensor.role for tensor in MODELS["resnet50"].list_tensors(1000)}

    assert roles[name] == role


def test_the_first_of_models_with_equal_tensors_is_v1_5_without_blur() -> None:
    firsts: dict[tuple[Tensor, ...], str] = {}
    names = {}
    for name, spec in MODELS.items():
        names[name] = firsts.setdefault(tuple(spec.list_tensors(37)), name)
    assert names == {name: SAME_TENSORS.get(name, name.removesuffix("-v1")) for name in MODELS}


def test_an_unknown_model_is_answered_with_the_nearest_name() -> None:
    with pytest.raises(RecipeError, match=r"no model 'resnet-50'\. Did you mean resnet50"):
        model_spec("resnet-50")


def test_a_spec_stands_for_itself() -> None:
    spec = ModelSpec(block="basic", layers=(1, 1, 1, 1))

    assert model_spec(spec) is spec
    assert model_spec("resnet50") is MODELS["resnet50"]


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"groups": 3}, "64 channels does not divide into 3 groups"),
        (
            {"groups": 32, "widths": (64, 128, 256, 500)},
            "500 channels does not divide into 32 groups",
        ),
        ({"groups": 0}, "at least 1"),
        ({"stem_width": 0}, "at least 1"),
        ({"expansion": -1}, "at least 1"),
        ({"layers": (3, 4, 0, 3)}, "at least 1"),
        ({"layers": (3, 4)}, r"layers of a model is \[3, 4\]; expected four numbers"),
        ({"widths": (0, 0, 0, 0)}, "at least 1"),
        ({"block": "basic", "groups": 2}, "basic block has no grouped convolution"),
        ({"squeeze_widths": (4, -1, 4, 4)}, "squeeze_widths of a model must be at least 0"),
        ({"stem": "tiered", "stem_width": 12}, "multiple of 8, but it is 12"),
    ],
)
def test_numbers_that_make_no_model_are_refused(numbers: dict[str, object], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        ModelSpec(**{"block": "bottleneck", "layers": (3, 4, 6, 3)} | numbers)
