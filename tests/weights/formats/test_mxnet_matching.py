"""MXNet's files and graphs that are no ResNet, or damaged, are refused with the reason."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.system.errors import CheckpointError
from lockstep.weights.formats import mxnet_params
from lockstep.weights.formats.mxnet_matching import name_tensors
from lockstep.weights.formats.nvidia_mxnet import read
from tests.weights.formats.cases import (
    RESNET,
    Variables,
    state_of,
    zeros,
)
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
REFUSED: dict[str, tuple[Callable[[Variables], object], str]] = {
    "no statistics": (
        lambda a: a.pop("aux:bn0_moving_var"),
        r"small is nearest, but bn0_moving_var is missing\.",
    ),
    "no bias": (lambda a: a.pop("arg:fc1_bias"), "fc1_bias is missing"),
    "a block more": (
        lambda a: a.update({f"arg:{UNIT}b_conv1_weight": zeros(4, 4, 1, 1)}),
        f"small is nearest, but {UNIT}b_conv1_weight is unexpected",
    ),
    "a projection in stage 1": (
        lambda a: a.update(
            {f"arg:{UNIT}_conv1sc_weight": zeros(32, 32, 1, 1), f"arg:{UNIT}_sc_gamma": zeros(32)}
        ),
        f"small is nearest, but {UNIT}_conv1sc_weight is unexpected; {UNIT}_sc_gamma is unexpected",
    ),
    "biases of convolutions": (
        lambda a: a.update({"arg:conv0_bias": zeros(8)}),
        "small is nearest, but conv0_bias is unexpected",
    ),
    "another shape": (
        lambda a: a.update({"arg:bn0_beta": zeros(3)}),
        r"bn0_beta is \[3\], expected \[8\]\. The first of its 102 arrays are \['bn0_beta'",
    ),
    "other numbers": (
        lambda a: a.update({"arg:bn0_beta": np.zeros(8, np.int64)}),
        r": bn0_beta is int64 \[8\], expected",
    ),
    "a variable of two kinds": (
        lambda a: a.update({"aux:bn0_beta": zeros(8)}),
        "has 103 arrays for 102 variables: some are both arg: and aux:",
    ),
    "nothing": (lambda a: a.clear(), "is not a complete ResNet as MXNet saves it"),
    "other things": (
        lambda a: [a.clear(), a.update(a=zeros(2))],
        "is not a complete ResNet as MXNet saves it",
    ),
}


@pytest.mark.parametrize("graph", [True, False])
@pytest.mark.parametrize(("change", "reason"), REFUSED.values(), ids=REFUSED)
def test_what_is_incomplete_or_more_is_refused(
    change: Callable[[Variables], object], reason: str, graph: bool, mxnet_file: Path
) -> None:
    if not graph:
        graph_of(mxnet_file).unlink()
    with pytest.raises(CheckpointError, match=rf"model-0090\.params.*{reason}"):
        read_changed(mxnet_file, change)


def attribute(name: str, key: str, value: str) -> Callable[[list[dict[str, Any]]], object]:
    return lambda nodes: find_node(nodes, name)["attrs"].update({key: value})


UNLIKE: dict[str, tuple[Callable[[list[dict[str, Any]]], object], str]] = {
    "another stride": (
        attribute("stage2_unit1_conv2", "stride", "(1, 1)"),
        r"stage2_unit1_conv2_weight has the stride \(1, 1\), expected \(2, 2\)",
    ),
    "another padding": (
        attribute("conv0", "pad", "(2, 2)"),
        r"conv0_weight has the pad \(2, 2\), expected \(3, 3\)",
    ),
    "dilated": (
        attribute("conv0", "dilate", "(2, 2)"),
        r"conv0_weight has the dilate \(2, 2\), expected \(1, 1\)",
    ),
    "groups": (
        attribute("stage1_unit1_conv2", "num_group", "2"),
        "stage1_unit1_conv2_weight has 2 groups, expected 1",
    ),
    "a fixed scale": (
        attribute("bn0", "fix_gamma", "True"),
        r"the scale of bn0 is fixed to 1 \(fix_gamma\)",
    ),
    "a fixed scale by default": (
        lambda nodes: find_node(nodes, "bn0")["attrs"].pop("fix_gamma"),
        "the scale of bn0 is fixed",
    ),
    "several epsilons": (
        attribute("bn0", "eps", "2e-05"),
        r"batch norms add \[1e-05, 2e-05\] to the variance, expected one",
    ),
    "no epsilon": (
        lambda nodes: [n["attrs"].update(eps="-1") for n in nodes if n["op"] == "BatchNorm"],
        r"add \[-1.0\] to",
    ),
    "another activation": (attribute("relu0", "act_type", "tanh"), "relu0 is tanh, expected relu"),
    "another pool": (
        attribute("pooling0", "pool_type", "avg"),
        r"it pools avg \(3, 3\) stride \(2, 2\) pad \(1, 1\) and",
    ),
    "a pool that rounds up": (
        attribute("pooling0", "pooling_convention", "full"),
        "with another convention and global avg",
    ),
    "squeeze and excitation": (
        lambda nodes: find_node(nodes, "relu0").update(op="sigmoid"),
        "its graph has the operator sigmoid, which",
    ),
    "another batch norm": (
        lambda nodes: find_node(nodes, "bn0").update(
            inputs=[*find_node(nodes, "bn0")["inputs"][:1], *([[0, 0, 0]] * 4)]
        ),
        r"the batch norm after conv0_weight has the variables \[\]",
    ),
    "no such convolution": (
        lambda nodes: find_node(nodes, "conv0_weight").update(name="conv7_weight"),
        "its graph has no convolution with conv0_weight",
    ),
    "another classifier": (
        lambda nodes: find_node(nodes, "fc1").update(op="null"),
        "the fully connected layers .*, expected one",
    ),
    "a kernel twice": (
        lambda nodes: find_node(nodes, f"{UNIT}_conv1").update(
            inputs=find_node(nodes, "stage1_unit1_conv1")["inputs"]
        ),
        "its graph has 20 convolutions of 19 kernels",
    ),
}


@pytest.mark.parametrize(("change", "reason"), UNLIKE.values(), ids=UNLIKE)
def test_a_graph_that_computes_something_else_is_refused(
    change: Callable[[list[dict[str, Any]]], object], reason: str, mxnet_file: Path
) -> None:
    with pytest.raises(CheckpointError, match=f"small is nearest, but .*{reason}"):
        read_with_graph(mxnet_file, change)


GARBAGE: dict[str, tuple[str, str]] = {
    "text": ("garbage", "JSONDecodeError"),
    "no graph": ("[1, 2]", "TypeError"),
    "no nodes": ("{}", "KeyError"),
    "a node without operator": ('{"nodes": [{"name": "a"}]}', "KeyError"),
    "deep": ("[" * 100_000, "RecursionError"),
    "an input of the future": (
        '{"nodes": [{"op": "Convolution", "name": "a", "inputs": [[0, 0, 0], [0, 0, 0]]}]}',
        "ValueError, node 0 has the input 0",
    ),
    "numbers for text": (
        '{"nodes": [{"op": "Pooling", "name": "a", "inputs": [], "attrs": {"kernel": 3}}]}',
        "TypeError, kernel of node 0 is 3, expected text",
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
