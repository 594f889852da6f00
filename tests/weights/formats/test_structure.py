"""Models with unknown variable names: recognised by order and shapes, or refused."""

import random

import pytest

from lockstep.models.architectures import MODELS, ModelSpec
from lockstep.weights.formats.shape_matching import Shape, match

LEAVES = {
    "weight": "gamma",
    "bias": "beta",
    "running_mean": "moving_mean",
    "running_var": "moving_variance",
}


def variables_of(spec: ModelSpec, logits: int = 1001) -> dict[str, tuple[str, Shape]]:
    """Return by canonical name: another program's variable, with all of a layer in one scope, and
    its shape in HWIO."""
    scopes = {}
    for conv in spec.list_convolutions():
        scope = f"net/{conv.name.replace('.', '/').replace('downsample/0', 'projection')}"
        scopes |= {f"{conv.name}.weight": f"{scope}/w"}
        scopes |= {f"{conv.bn_name}.{suffix}": f"{scope}/{leaf}" for suffix, leaf in LEAVES.items()}
    scopes |= {"fc.weight": "net/top/w", "fc.bias": "net/top/b"}
    variables = {}
    for tensor in spec.list_tensors(logits):
        turned = (
            [tensor.shape[i] for i in (2, 3, 1, 0)]
            if len(tensor.shape) == 4
            else tensor.shape[::-1]
        )
        variables[tensor.name] = (scopes[tensor.name], tuple(turned))
    return variables


@pytest.mark.parametrize("model", ["resnet50", "resnet101", "resnet152", "resnext101-32x4d"])
def test_models_are_recognised_in_any_order_of_variables(model: str) -> None:
    expected = variables_of(MODELS[model])
    items = list(expected.values())
    random.Random(model).shuffle(items)
    spec, names = match(dict(items))
    assert spec == MODELS[model]
    assert names == {name: variable for name, (variable, _) in expected.items()}


def test_a_block_without_expansion_has_no_shortcut_to_find() -> None:
    spec = ModelSpec(
        block="bottleneck", layers=(2, 1, 1, 1), stem_width=8, widths=(8, 16, 32, 64), expansion=1
    )
    expected = variables_of(spec)
    model, names = match(dict(expected.values()))
    assert (model, names) == (spec, {name: variable for name, (variable, _) in expected.items()})


def test_stages_of_equal_width_cannot_be_told_apart() -> None:
    spec = ModelSpec(block="bottleneck", layers=(1, 1, 1, 1), stem_width=8, widths=(8, 16, 16, 32))
    with pytest.raises(ValueError, match=r"\[8, 16, 32\], expected four stages"):
        match(dict(variables_of(spec).values()))


def test_two_convolutions_with_one_batch_norm_are_named() -> None:
    variables = dict(variables_of(MODELS["resnet50"]).values())
    variables["net/layer2/1/conv2/another"] = (1, 1, 3, 3)
    expected = r"^net/layer2/1/conv2/another, net/layer2/1/conv2/w without all of gamma, beta"
    with pytest.raises(ValueError, match=expected):
        match(variables)


def test_a_convolution_without_all_of_its_batch_norm_is_named() -> None:
    variables = dict(variables_of(MODELS["resnet50"]).values())
    del variables["net/layer2/1/conv2/moving_mean"]
    expected = r"^net/layer2/1/conv2/w without all of gamma, beta, moving_mean, moving_variance"
    with pytest.raises(ValueError, match=expected):
        match(variables)


def test_blocks_in_an_order_that_does_not_fit_are_refused() -> None:
    swap = {"net/layer1": "net/layer4", "net/layer4": "net/layer1"}
    variables = {
        next(
            (name.replace(old, new) for old, new in swap.items() if name.startswith(old)), name
        ): shape
        for name, shape in variables_of(MODELS["resnet50"]).values()
    }
    with pytest.raises(ValueError, match="net/layer1/0 with convolutions of"):
        match(variables)


def test_a_classifier_may_be_a_kernel() -> None:
    variables = dict(variables_of(MODELS["resnet50"]).values())
    variables["net/top/w"] = (1, 1, 2048, 1001)
    assert match(variables)[1]["fc.weight"] == "net/top/w"


def test_tf_slims_networks_have_their_strides_elsewhere() -> None:
    variables = {
        name.replace("net/layer1/0/", "net/block1/unit_1/bottleneck_v1/"): shape
        for name, shape in variables_of(MODELS["resnet50"]).values()
    }
    with pytest.raises(ValueError, match="TF-Slim's ResNet v1, whose stages have their stride in"):
        match(variables)
