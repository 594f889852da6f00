"""MXNet's files and graphs that are no ResNet, or damaged, are refused with the reason."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.system.errors import CheckpointError
from lockstep.weights.formats import mxnet_params
from lockstep.weights.formats.account import Part
from lockstep.weights.formats.mxnet_graph import name_tensors
from lockstep.weights.formats.nvidia_mxnet import read
from lockstep.weights.weights_choice import WeightsChoice
from tests.weights.formats.cases import RESNET, Variables, assert_canonical, state_of, zeros
from tests.weights.formats.mxnet_cases import (
    EPOCH,
    find_node,
    graph_of,
    read_changed,
    read_with_graph,
    recipe_of,
)

pytestmark = pytest.mark.usefixtures("mxnet_models")

UNIT = "stage1_unit2"
MORE = "but also has tensors that Lockstep would ignore: "
REFUSED: dict[str, tuple[Callable[[Variables], object], str, str]] = {
    "no statistics": (
        lambda a: a.pop("aux:bn0_moving_var"),
        "'bn0' needs 'bn0_moving_var', which is not among its arrays",
        r"closest model, small, does not fit: bn0_moving_var is missing\.",
    ),
    "no bias": (
        lambda a: a.pop("arg:fc1_bias"),
        "'fc1' needs 'fc1_bias', which is not among its arrays",
        "fc1_bias is missing",
    ),
    "a block more": (
        lambda a: a.update({f"arg:{UNIT}b_conv1_weight": zeros(4, 4, 1, 1)}),
        f"{MORE}{UNIT}b_conv1_weight; .* --ignore '{UNIT}b_conv1_weight'",
        f"small, {MORE}{UNIT}b_conv1_weight; .* --ignore '{UNIT}b_conv1_weight'",
    ),
    "a projection in stage 1": (
        lambda a: a.update(
            {f"arg:{UNIT}_conv1sc_weight": zeros(32, 32, 1, 1), f"arg:{UNIT}_sc_gamma": zeros(32)}
        ),
        f"{MORE}{UNIT}_conv1sc_weight and 1 more",
        f"small, {MORE}{UNIT}_conv1sc_weight and 1 more",
    ),
    "biases of convolutions": (
        lambda a: a.update({"arg:conv0_bias": zeros(8)}),
        f"{MORE}conv0_bias",
        f"small, {MORE}conv0_bias",
    ),
    "another shape": (
        lambda a: a.update({"arg:bn0_beta": zeros(3)}),
        "BatchNormalization 'bn0' does not have one value for each of its channels",
        r"bn0_beta is \[3\], expected \[8\]\. The first of its 102 arrays are \['bn0_beta'",
    ),
    "other numbers": (
        lambda a: a.update({"arg:bn0_beta": np.zeros(8, np.int64)}),
        r"\('bn0_beta of bn0'\) is int64, expected constant floats",
        r"\('bn0_beta of bn0'\) is int64, expected constant floats",
    ),
    "a variable of two kinds": (
        lambda a: a.update({"aux:bn0_beta": zeros(8)}),
        "has 103 arrays for 102 variables: some are arg: and aux:",
        "has 103 arrays for 102 variables: some are arg: and aux:",
    ),
    "one output": (
        lambda a: a.update({"arg:fc1_weight": zeros(1, 256), "arg:fc1_bias": zeros(1)}),
        "classifier has one output, whose softmax is always 100 %",
        "has one output; expected at least 2",
    ),
    "nothing": (
        lambda a: a.clear(),
        "'conv0' needs 'conv0_weight'",
        "is not a complete ResNet as MXNet saves it",
    ),
    "other things": (
        lambda a: [a.clear(), a.update(a=zeros(2))],
        "'conv0' needs 'conv0_weight'",
        "is not a complete ResNet as MXNet saves it",
    ),
}


@pytest.mark.parametrize("graph", [True, False])
@pytest.mark.parametrize(("change", "reason", "alone"), REFUSED.values(), ids=REFUSED)
def test_what_is_incomplete_or_more_is_refused(
    change: Callable[[Variables], object], reason: str, alone: str, graph: bool, mxnet_file: Path
) -> None:
    if not graph:
        graph_of(mxnet_file).unlink()
    with pytest.raises(CheckpointError, match=rf"model-0090\.params.*{reason if graph else alone}"):
        read_changed(mxnet_file, change)


@pytest.mark.parametrize("graph", [True, False])
def test_the_user_leaves_out_what_is_more(graph: bool, mxnet_file: Path) -> None:
    if not graph:
        graph_of(mxnet_file).unlink()
    mxnet_params.dump(mxnet_file, dict(mxnet_params.load(mxnet_file)) | {"arg:extra": zeros(3)})
    weights = read(mxnet_file, choice=WeightsChoice(ignore=("ext*",)))
    assert weights.parts == (Part("extra", "ignored"),)
    assert weights.recipe.model == "small"
    assert [stored.tensors for stored in weights.stored if stored.name == "arg:extra"] == [()]


def test_without_a_graph_the_user_names_the_network(mxnet_file: Path) -> None:
    graph_of(mxnet_file).unlink()
    v1 = replace(RESNET, stride_in="1x1")
    assert read(mxnet_file, choice=WeightsChoice(model=v1)).recipe.spec == v1
    with pytest.raises(CheckpointError, match="closest model, basic, does not fit:"):
        read(mxnet_file, choice=WeightsChoice(model="basic"))


def put(name: str, key: str, value: str) -> Callable[[list[dict[str, Any]]], object]:
    return lambda nodes: find_node(nodes, name)["attrs"].update({key: value})


UNLIKE: dict[str, tuple[Callable[[list[dict[str, Any]]], object], str]] = {
    "another stride": (
        put("stage2_unit1_conv2", "stride", "(1, 1)"),
        "its 5 blocks .* halve the image in 2 places",
    ),
    "another padding": (put("conv0", "pad", "(2, 2)"), r"'conv0' is padded by \[2, 2, 2, 2\]"),
    "dilated": (put("conv0", "dilate", "(2, 2)"), r"'conv0' has .* dilations \[2, 2\]"),
    "groups": (
        put("stage1_unit1_conv2", "num_group", "2"),
        r"groups of layer1\.0\.conv2 are \(8, 16, 3, 1, 2\), but",
    ),
    "another kernel": (
        put("conv0", "kernel", "(5, 5)"),
        r"conv0_weight is \[8, 3, 7, 7\], expected a kernel of \[5, 5\] in NCHW",
    ),
    "a bias that is not there": (put("conv0", "no_bias", "False"), "Convolution 'conv0'"),
    "images in another order": (put("conv0", "layout", "NHWC"), "conv0_weight is .* in NHWC"),
    "features in another order": (
        put("stage1_unit1_conv1", "layout", "NHWC"),
        "Convolution 'stage1_unit1_conv1'",
    ),
    "batch norm of rows": (put("bn0", "axis", "2"), "MXNet's BatchNorm 'bn0'"),
    "an axis that is not there": (put("bn0", "axis", "7"), "MXNet's BatchNorm 'bn0'"),
    "an attribute of another version": (put("bn0", "scale", "2"), "MXNet's BatchNorm 'bn0'"),
    "several epsilons": (
        put("bn0", "eps", "2e-05"),
        r"its batch norms have the epsilons \[1e-05, 2e-05\], expected one for all",
    ),
    "no epsilon": (
        lambda nodes: [n["attrs"].update(eps="-1") for n in nodes if n["op"] == "BatchNorm"],
        "bn_epsilon: Input should be greater than 0",
    ),
    "another activation": (
        put("relu0", "act_type", "tanh"),
        r"MXNet's Activation \(tanh\) 'relu0'",
    ),
    "another pool": (put("pooling0", "pool_type", "avg"), "AveragePool 'pooling0'"),
    "a pool that rounds up": (
        put("pooling0", "pooling_convention", "full"),
        "'pooling0' is not a 3x3 pool of stride 2 that rounds sizes down",
    ),
    "a sum of all": (put("pool1", "pool_type", "sum"), r"MXNet's Pooling \(sum\) 'pool1'"),
    "an operator instead of another": (
        lambda nodes: find_node(nodes, "relu0").update(op="sigmoid", attrs={}),
        "Sigmoid 'relu0'",
    ),
    "another batch norm": (
        lambda nodes: find_node(nodes, "bn0").update(
            inputs=[*find_node(nodes, "bn0")["inputs"][:1], *([[0, 0, 0]] * 4)]
        ),
        "'bn0' needs 'data', which is not among its arrays",
    ),
    "no such convolution": (
        lambda nodes: find_node(nodes, "conv0_weight").update(name="conv7_weight"),
        "'conv0' needs 'conv7_weight', which is not among its arrays",
    ),
    "another classifier": (
        lambda nodes: find_node(nodes, "fc1").update(op="null"),
        "Softmax 'softmax'",
    ),
    "a kernel twice": (
        lambda nodes: find_node(nodes, f"{UNIT}_conv1").update(
            inputs=find_node(nodes, "stage1_unit1_conv1")["inputs"]
        ),
        "a ResNet has two branches there that one Add joins",
    ),
    "another output of a batch norm": (
        lambda nodes: find_node(nodes, "relu0")["inputs"][0].__setitem__(1, 1),
        r"MXNet's BatchNorm 'bn0 \(output 1\)'",
    ),
}


@pytest.mark.parametrize(("change", "reason"), UNLIKE.values(), ids=UNLIKE)
def test_a_graph_that_computes_something_else_is_refused(
    change: Callable[[list[dict[str, Any]]], object], reason: str, mxnet_file: Path
) -> None:
    with pytest.raises(CheckpointError, match=f"is not a ResNet that can be read: .*{reason}"):
        read_with_graph(mxnet_file, change)


@pytest.mark.parametrize(
    "change",
    [
        put("bn0", "fix_gamma", "True"),
        lambda nodes: find_node(nodes, "bn0")["attrs"].pop("fix_gamma"),
    ],
    ids=["said", "by default"],
)
def test_a_fixed_scale_is_1(
    change: Callable[[list[dict[str, Any]]], object], mxnet_file: Path
) -> None:
    weights = read_with_graph(mxnet_file, change)
    expected = state_of(recipe_of()).tensors
    assert_canonical(weights.tensors, expected | {"bn1.weight": np.ones(8, np.float32)})
    part = Part("bn0_gamma", "without effect", "no output is computed from it")
    assert weights.parts == (part,)


GARBAGE: dict[str, tuple[str, str]] = {
    "text": ("garbage", "JSONDecodeError"),
    "no graph": ("[1, 2]", "TypeError"),
    "no nodes": ("{}", "KeyError"),
    "a node without operator": ('{"nodes": [{"name": "a"}]}', "KeyError"),
    "deep": ("[" * 100_000, "ValueError, nested too deep"),
    "an input of the future": (
        '{"nodes": [{"op": "Convolution", "name": "a", "inputs": [[0, 0, 0], [0, 0, 0]]}]}',
        "ValueError, node 0 has the input 0",
    ),
    "an endless number": (
        '{"nodes": [{"op": "null", "name": "a", "inputs": []}], "heads": [[0, Infinity]]}',
        "OverflowError",
    ),
    "numbers for text": (
        '{"nodes": [{"op": "Pooling", "name": "a", "inputs": [], "attrs": {"kernel": 3}}]}',
        "TypeError, kernel of node 0 is 3, expected a string",
    ),
}


@pytest.mark.parametrize(("text", "reason"), GARBAGE.values(), ids=GARBAGE)
def test_a_damaged_graph_is_an_error(text: str, reason: str, mxnet_file: Path) -> None:
    graph_of(mxnet_file).write_text(text)
    with pytest.raises(CheckpointError, match=rf"model-symbol\.json is damaged .*: {reason}"):
        read(mxnet_file)


def test_velocities_that_are_not_all_there_are_left_out(mxnet_file: Path) -> None:
    recipe = recipe_of()
    velocities = {
        name_tensors(RESNET)[name]: value for name, value in state_of(recipe).momentum.items()
    }
    gone = velocities.pop("fc1_bias")
    side = mxnet_file.with_name("model-0090.momentum.params")
    mxnet_params.dump(side, velocities)
    some = "1 of 62 velocities are missing, such as fc1_bias; the others were left out"
    assert (read(mxnet_file).state.momentum, read(mxnet_file).remarks) == ({}, (EPOCH, some))
    mxnet_params.dump(side, velocities | {"fc1_bias": gone[:3]})
    with pytest.raises(CheckpointError, match=r"momentum\.params: fc1_bias .*\[3\].*\[1000\]"):
        read(mxnet_file)
    side.write_text("garbage")
    assert read(mxnet_file, momentum=False).remarks == ()


@pytest.mark.parametrize("place", [1, 3])
def test_batch_norms_may_include_the_sum_and_relu(place: int, mxnet_file: Path) -> None:
    """NVIDIA's versions of MXNet have the addend at different places among the inputs."""

    def fuse(nodes: list[dict[str, Any]]) -> None:
        for node in nodes:
            source = nodes[node["inputs"][0][0]] if node["op"] == "Activation" else {"op": ""}
            if source["op"] == "BatchNorm":
                source["attrs"]["act_type"] = "relu"
                node.update(op="identity", attrs={})
            elif source["op"] == "elemwise_add":
                norm = nodes[source["inputs"][0][0]]
                inputs = [*norm["inputs"]]
                inputs.insert(place, source["inputs"][1])
                node.update(op="BatchNormAddRelu", attrs=norm["attrs"], inputs=inputs)

    weights = read_with_graph(mxnet_file, fuse)
    assert_canonical(weights.tensors, state_of(recipe_of()).tensors)
    assert weights.parts == ()


def test_graphs_of_older_versions_are_read(mxnet_file: Path) -> None:
    def age(nodes: list[dict[str, Any]]) -> None:
        for node in nodes:
            node["param"] = node.pop("attrs", {})
            node["attr"] = {"ctx_group": "stage1", "weight_lr_mult": "2.0"}
            node["op"] = {"elemwise_add": "_Plus", "BatchNorm": "BatchNorm_v1"}.get(
                node["op"], node["op"]
            )

    weights = read_with_graph(mxnet_file, age)
    assert_canonical(weights.tensors, state_of(recipe_of()).tensors)


@pytest.mark.parametrize(("dtype", "is_bytes"), [("3", True), ("4", True), ("0", False)])
def test_images_of_integers_are_bytes(dtype: str, is_bytes: bool, mxnet_file: Path) -> None:
    """A variable may have MXNet's number of a type, 3 for uint8 and 4 for int32."""
    weights = read_with_graph(mxnet_file, lambda nodes: nodes[0].update(attrs={"__dtype__": dtype}))
    assert (weights.stated == {"mean", "std"}) == is_bytes
    assert (weights.recipe.mean == (0, 0, 0)) == is_bytes


def test_images_that_do_not_hold_255_are_refused(mxnet_file: Path) -> None:
    with pytest.raises(CheckpointError, match="its images are int8"):
        read_with_graph(mxnet_file, lambda nodes: nodes[0].update(attrs={"__dtype__": "5"}))


def test_the_preprocessing_of_other_names_is_an_assumption(mxnet_file: Path) -> None:
    arrays = mxnet_params.load(mxnet_file)
    mxnet_file.unlink()
    mxnet_params.dump(
        mxnet_file, {name.replace("fc1_", "fc2_"): value for name, value in arrays.items()}
    )

    def rename(nodes: list[dict[str, Any]]) -> None:
        for node in nodes:
            node["name"] = node["name"].replace("fc1_", "fc2_")

    assert read_with_graph(mxnet_file, rename).assumed_as == "nvidia-mxnet"
