"""MXNet's names and layouts, and files with other ones. Tests with MXNet itself are in
test_peers_of_mxnet."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.models.architectures import MODELS
from lockstep.models.state import State
from lockstep.recipes import Recipe
from lockstep.system.errors import CheckpointError
from lockstep.weights import Weights, open_weights
from lockstep.weights.formats import BFLOAT16, mxnet_params
from lockstep.weights.formats.mxnet_matching import name_tensors
from lockstep.weights.formats.nvidia_mxnet import read, write
from tests.weights.formats.cases import (
    RESNET,
    Variables,
    assert_canonical,
    rename_arrays,
    state_of,
    zeros,
)
from tests.weights.formats.mxnet_cases import graph_of, name_small_models, original_file, recipe_of

EPOCH = "no step is stored; its name says epoch 90, counted from 1"
SPEEDS = "there are no velocities (model-0090.momentum.params)"
CHANNEL = "the stem has a fourth input channel, which gets only zeros; it was left out"
NO_GRAPH = (
    "there is no model-symbol.json: it is assumed that bottlenecks stride in their 3x3, and that"
    " batch norms add 1e-05"
)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    name_small_models(monkeypatch)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return original_file(tmp_path)


def read_changed(file: Path, change: Callable[[Variables], object]) -> Weights:
    """Read the file again with other arrays."""
    arrays = dict(mxnet_params.load(file))
    change(arrays)
    mxnet_params.dump(file, arrays)
    return read(file)


def read_with_graph(file: Path, change: Callable[[list[dict[str, Any]]], object]) -> Weights:
    """Read the file again with another graph."""
    graph = json.loads(graph_of(file).read_text())
    change(graph["nodes"])
    graph_of(file).write_text(json.dumps(graph))
    return read(file)


def node(nodes: list[dict[str, Any]], name: str) -> dict[str, Any]:
    return next(node for node in nodes if node["name"] == name)


def test_the_variables_of_resnet50_are_those_of_the_originals_symbol(tmp_path: Path) -> None:
    recipe = recipe_of("resnet50")
    state = state_of(recipe, 0)
    done = write(tmp_path / "model-0090.params", recipe, state)
    written = done.files
    remarks = done.remarks
    assert [path.name for path in written] == [
        "model-symbol.json",
        "model-0090.momentum.params",
        "model-0090.params",
    ]
    assert remarks == (
        (
            "MXNet does not read the velocities in *.momentum.params: the original resumes with"
            " velocities of 0"
        ),
    )
    arrays = mxnet_params.load(tmp_path / "model-0090.params")
    velocities = mxnet_params.load(tmp_path / "model-0090.momentum.params")
    # 53 convolutions with four tensors of batch norm each, and the classifier's two
    assert (len(arrays), len(velocities)) == (267, 161)
    for ours, theirs in {
        "conv1.weight": "arg:conv0_weight",
        "bn1.weight": "arg:bn0_gamma",
        "bn1.running_mean": "aux:bn0_moving_mean",
        "layer1.0.conv1.weight": "arg:stage1_unit1_conv1_weight",
        "layer1.0.downsample.0.weight": "arg:stage1_unit1_conv1sc_weight",
        "layer1.0.downsample.1.bias": "arg:stage1_unit1_sc_beta",
        "layer1.0.downsample.1.running_var": "aux:stage1_unit1_sc_moving_var",
        "layer3.5.bn3.bias": "arg:stage3_unit6_bn3_beta",
        "layer4.2.conv3.weight": "arg:stage4_unit3_conv3_weight",
        "fc.weight": "arg:fc1_weight",
        "fc.bias": "arg:fc1_bias",
    }.items():
        assert np.array_equal(arrays[theirs], state.tensors[ours])
        if ours in state.momentum:
            assert np.array_equal(velocities[theirs.removeprefix("arg:")], state.momentum[ours])
    weights = read(tmp_path / "model-0090.params")
    assert (weights.recipe, weights.state.step, weights.remarks) == (recipe, 0, (EPOCH,))
    assert_canonical(weights.state.tensors, state.tensors)
    assert_canonical(weights.state.momentum, state.momentum)


@pytest.mark.parametrize("model", ["small", "grouped", "basic", "square", "resnet50-v1"])
def test_a_state_is_written_and_read_bit_for_bit(model: str, tmp_path: Path) -> None:
    recipe = recipe_of(model, 10)
    state = state_of(recipe)
    write(tmp_path / "new" / "any", recipe, state)
    weights = read(tmp_path / "new" / "any-0000.params")
    assert weights.recipe == recipe
    assert weights.remarks == ("no step is stored; its name says epoch 0, counted from 1",)
    assert_canonical(weights.state.tensors, state.tensors)
    assert_canonical(weights.state.momentum, state.momentum)
    assert read(tmp_path / "new" / "any-0000.params", momentum=False).state.momentum == {}


@pytest.mark.parametrize(
    ("epsilon", "remarks"), [(1e-5, ()), (2e-5, ("its batch norms add 2e-05 to the variance",))]
)
def test_what_batch_norms_add_is_as_the_graph_says(
    epsilon: float, remarks: tuple[str, ...], tmp_path: Path
) -> None:
    recipe = recipe_of().replace(bn_epsilon=epsilon)
    write(tmp_path / "model-0090.params", recipe, State(0, state_of(recipe).tensors, {}))
    weights = read(tmp_path / "model-0090.params", momentum=False)
    assert (weights.recipe, weights.remarks) == (recipe, remarks)


def test_the_graph_says_what_a_recipe_does(tmp_path: Path) -> None:
    recipe = recipe_of().replace(bn_momentum=0.3)
    write(tmp_path / "model", recipe, State(0, state_of(recipe).tensors, {}))
    nodes = json.loads((tmp_path / "model-symbol.json").read_text())["nodes"]
    assert node(nodes, "bn0")["attrs"] == {
        "axis": "1",
        "eps": "1e-05",
        "fix_gamma": "False",
        "momentum": "0.7",
    }
    assert node(nodes, "stage2_unit1_conv2")["attrs"]["stride"] == "(2, 2)"
    assert node(nodes, "stage2_unit1_conv1")["attrs"]["stride"] == "(1, 1)"
    assert node(nodes, "fc1")["attrs"] == {"num_hidden": "1000"}
    assert (nodes[0]["name"], nodes[-1]["op"]) == ("data", "SoftmaxOutput")


def convert_to_nhwc(arrays: Variables, channels: int = 3) -> None:
    """Change arrays as if the original was trained in fp16: OHWI kernels, and possibly a stem with
    more channels."""
    for name, value in arrays.items():
        if value.ndim == 4:
            more = [(0, 0), (0, channels - 3 if name == "arg:conv0_weight" else 0), (0, 0), (0, 0)]
            arrays[name] = np.pad(value, more, constant_values=5).transpose(0, 2, 3, 1)


def set_layout(nodes: list[dict[str, Any]]) -> None:
    for node in nodes:
        if node["op"] == "Convolution":
            node["attrs"]["layout"] = "NHWC"


OHWI = (
    "20 kernels, such as conv0_weight, are OHWI, as for images in NHWC; they were converted to OIHW"
)


@pytest.mark.parametrize("channels", [3, 4])
@pytest.mark.parametrize("graph", [True, False])
def test_kernels_in_nhwc_are_turned_and_a_fourth_channel_has_no_effect(
    graph: bool, channels: int, file: Path
) -> None:
    if graph:
        with pytest.raises(
            CheckpointError, match=r"conv0_weight is \[8, 3, 7, 7\], expected \[8, 7, 7, 3\]"
        ):
            read_with_graph(file, set_layout)
    else:
        graph_of(file).unlink()
    weights = read_changed(file, lambda arrays: convert_to_nhwc(arrays, channels))
    graph_remark = () if graph else (NO_GRAPH,)
    channel = (CHANNEL,) if channels == 4 else ()
    assert weights.remarks == (EPOCH, *graph_remark, *channel, OHWI, SPEEDS)
    assert_canonical(weights.state.tensors, state_of(recipe_of()).tensors)


def test_a_fourth_channel_is_folded_in_nchw(file: Path) -> None:
    stem = "arg:conv0_weight"
    weights = read_changed(
        file, lambda a: a.update({stem: np.pad(a[stem], [(0, 0), (0, 1), (0, 0), (0, 0)])})
    )
    assert weights.remarks == (EPOCH, CHANNEL, SPEEDS)
    assert_canonical(weights.state.tensors, state_of(recipe_of()).tensors)


@pytest.mark.parametrize("by_rows", [True, False])
def test_how_a_kernel_lies_that_fits_both_ways_is_told_by_the_graph_alone(
    by_rows: bool, tmp_path: Path
) -> None:
    recipe = recipe_of("square")
    file = tmp_path / "model-0090.params"
    write(file, recipe, State(0, state_of(recipe).tensors, {}))
    if by_rows:
        with pytest.raises(CheckpointError):
            read_with_graph(file, set_layout)
    weights = read_changed(file, convert_to_nhwc if by_rows else lambda arrays: None)
    assert_canonical(weights.state.tensors, state_of(recipe).tensors)
    graph_of(file).unlink()
    which = r"stage1_unit1_conv2_weight is \[24, 3, 3, 3\], which may be OIHW or OHWI; put"
    with pytest.raises(
        CheckpointError, match=rf"model-0090\.params: {which} model-symbol\.json next to it"
    ):
        read(file)
    file.rename(tmp_path / "best.params")
    with pytest.raises(
        CheckpointError, match=rf"best\.params: {which[:-4]} name it <prefix>-<epoch>\.params"
    ):
        read(tmp_path / "best.params")


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_other_floats_become_float32(dtype: type, file: Path) -> None:
    name = "arg:stage1_unit1_conv2_weight"
    weights = read_changed(file, lambda arrays: arrays.update({name: arrays[name].astype(dtype)}))
    odd = "1 variables, such as stage1_unit1_conv2_weight, are not float32 and were converted to it"
    assert weights.remarks == (EPOCH, odd, SPEEDS)
    expected = (
        state_of(recipe_of()).tensors["layer1.0.conv2.weight"].astype(dtype).astype(np.float32)
    )
    assert np.array_equal(weights.state.tensors["layer1.0.conv2.weight"], expected)


def test_bfloat16_is_read_from_its_bits(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = dict(mxnet_params.load(file))
    bits = arrays["arg:fc1_weight"].view(np.uint32)
    arrays["arg:fc1_weight"] = (bits >> 16).astype(np.uint16).view(BFLOAT16)
    monkeypatch.setattr(mxnet_params, "load", lambda path: arrays)
    expected = (bits & 0xFFFF0000).astype(np.uint32).view(np.float32)
    assert np.array_equal(read(file).state.tensors["fc.weight"], expected)


GLUON_LEAVES = {"moving_mean": "running_mean", "moving_var": "running_var"}


def gluon_layers(spec_names: dict[str, str]) -> list[tuple[str, str]]:
    """Return the original's names of convolutions and batch norms, in the order in which Gluon
    creates layers."""
    kernels = [
        theirs
        for ours, theirs in spec_names.items()
        if ours != "fc.weight" and theirs.endswith("_weight")
    ]
    norms = [theirs for theirs in spec_names.values() if theirs.endswith("_gamma")]
    return [
        (k.removesuffix("_weight"), n.removesuffix("_gamma"))
        for k, n in zip(kernels, norms, strict=True)
    ]


def count_layers(layers: list[tuple[str, str]], prefix: str, *, by_stage: bool) -> dict[str, str]:
    """Return names with counters. The model zoo counts within a stage, NVIDIA's Gluon code through
    the whole network."""
    table = {"fc1": f"{prefix}dense0"}
    counts = dict.fromkeys(("", "1", "2", "3", "4"), 0)
    for kernel, norm in layers:
        stage = kernel[5] if by_stage and kernel.startswith("stage") else ""
        scope = f"{prefix}stage{stage}_" if stage else prefix
        table |= {kernel: f"{scope}conv{counts[stage]}", norm: f"{scope}batchnorm{counts[stage]}"}
        counts[stage] += 1
    return table


def name_paths(layers: list[tuple[str, str]], *, fused: bool) -> dict[str, str]:
    """Return the names that Gluon's save_parameters gives NVIDIA's model, whose blocks end with a
    separate layer."""
    table = {"fc1": "_net.output", "conv0": "_net.features.0.1", "bn0": "_net.features.1.0"}
    for kernel, norm in layers[1:]:
        stage, unit, what = re.fullmatch(r"stage(\d)_unit(\d)_conv(\w+)", kernel).groups()  # type: ignore[union-attr]
        block = f"_net.features.{2 + int(stage)}.{int(unit) - 1}"
        conv, bn = {
            "1": ("body.0", "body.1.0"),
            "2": ("body.2", "body.3.0"),
            "3": ("body.4", "bn_add_relu" if fused else "bn_add_relu.bn"),
            "1sc": ("downsample.0", "downsample.1"),
        }[what]
        table |= {kernel: f"{block}.{conv}", norm: f"{block}.{bn}"}
    return table


def name_gluon(table: dict[str, str], joint: str) -> Callable[[str], str]:
    def change(name: str) -> str:
        bare = name.partition(":")[2]
        layer = max((known for known in table if bare.startswith(f"{known}_")), key=len)
        leaf = bare.removeprefix(f"{layer}_")
        return table[layer] + joint + GLUON_LEAVES.get(leaf, leaf)

    return change


LAYERS = gluon_layers(name_tensors(RESNET))
GLUON: dict[str, tuple[dict[str, str], str, str]] = {
    "the model zoo": (count_layers(LAYERS, "resnetv10_", by_stage=True), "_", "Gluon"),
    "the model zoo without its prefix": (count_layers(LAYERS, "", by_stage=True), "_", "Gluon"),
    "counters": (count_layers(LAYERS, "resnet0_", by_stage=False), "_", "NVIDIA MXNet"),
    "paths": (name_paths(LAYERS, fused=False), ".", "NVIDIA MXNet"),
    "paths to fused layers": (name_paths(LAYERS, fused=True), ".", "NVIDIA MXNet"),
}


@pytest.mark.parametrize(("table", "joint", "program"), GLUON.values(), ids=GLUON)
def test_layers_of_gluons_are_read_by_their_order(
    table: dict[str, str], joint: str, program: str, file: Path
) -> None:
    arrays = rename_arrays(mxnet_params.load(file), name_gluon(table, joint))
    path = file.with_name("best.params")
    mxnet_params.dump(path, {name: arrays[name] for name in sorted(arrays)})
    weights = read(path)
    assert weights.origin == program
    assert weights.recipe == (
        Recipe(model="small", precision="fp32") if program == "Gluon" else recipe_of()
    )
    assert weights.remarks == (
        "no step is stored",
        (
            "a file of this name has no graph: it is assumed that bottlenecks stride in their 3x3,"
            " and that batch norms add 1e-05"
        ),
        "there are no velocities (best.momentum.params)",
    )
    assert_canonical(weights.state.tensors, state_of(recipe_of()).tensors)


def add_biases(arrays: Variables, ending: str) -> dict[str, np.ndarray]:
    """Add biases to the outer 1x1 convolutions of blocks, as Gluon's resnet50_v1 has them; return
    them by kernel."""
    outer = [
        name
        for name in arrays
        if "unit" in name and name.endswith(("conv1_weight", "conv3_weight"))
    ]
    random = np.random.default_rng(3)
    biases = {name: random.standard_normal(len(arrays[name])).astype(np.float32) for name in outer}
    arrays |= {name.removesuffix("weight") + ending: value for name, value in biases.items()}
    return biases


def assert_folded(actual: Weights, expected: Variables, biases: dict[str, np.ndarray]) -> None:
    """Assert that only means differ: batch norm subtracts the mean from a convolution with its
    bias."""
    ours = {theirs: name for name, theirs in name_tensors(RESNET).items()}
    expected = dict(expected)
    for kernel, bias in biases.items():
        conv = ours[kernel.partition(":")[2]]
        mean = conv.replace("conv", "bn").removesuffix("weight") + "running_mean"
        expected[mean] = expected[mean] - bias
    assert_canonical(actual.state.tensors, expected)
    assert f"{len(biases)} convolutions have biases, such as " in "; ".join(actual.remarks)


def test_biases_of_gluons_resnet50_v1_are_folded_into_means(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MODELS, "small-v1", replace(RESNET, stride_in="1x1"))
    arrays = dict(mxnet_params.load(file))
    biases = add_biases(arrays, "bias")
    table, joint, _ = GLUON["the model zoo"]
    path = file.with_name("best.params")
    mxnet_params.dump(path, rename_arrays(arrays, name_gluon(table, joint)))
    weights = read(path, momentum=False)
    assert weights.recipe.model == "small-v1"
    assert "bottlenecks stride in their first 1x1, as Gluon's with biases do" in weights.remarks[0]
    assert_folded(weights, state_of(recipe_of()).tensors, biases)
    used = {
        array.name: array.tensors for array in weights.stored if array.name.endswith("conv0_bias")
    }
    assert used["resnetv10_stage1_conv0_bias"] == ("layer1.0.bn1.running_mean",)


def add_bias(nodes: list[dict[str, Any]], kernel: str) -> None:
    """Give a convolution a bias, which is a variable before all other nodes."""
    for node in nodes:
        node["inputs"] = [[i + 1, *more] for i, *more in node["inputs"]]
    conv = node(nodes, kernel)
    conv["inputs"].append([0, 0, 0])
    conv["attrs"]["no_bias"] = "False"
    nodes.insert(0, {"op": "null", "name": f"{kernel}_offset", "inputs": []})


def test_a_graph_names_the_bias_of_a_convolution(file: Path) -> None:
    kernel = "stage1_unit1_conv1"
    offset = np.arange(8, dtype=np.float32)
    with pytest.raises(CheckpointError, match=f"{kernel}_offset is missing"):
        read_with_graph(file, lambda nodes: add_bias(nodes, kernel))
    with pytest.raises(
        CheckpointError, match=rf"{kernel}_offset is float32 \[3\], expected float32 \[8\]"
    ):
        read_changed(file, lambda arrays: arrays.update({f"arg:{kernel}_offset": offset[:3]}))
    weights = read_changed(file, lambda arrays: arrays.update({f"arg:{kernel}_offset": offset}))
    assert weights.recipe.model == "small"
    assert_folded(weights, state_of(recipe_of()).tensors, {f"arg:{kernel}_weight": offset})


def test_weights_of_gluons_model_zoo_get_its_preprocessing(file: Path) -> None:
    """MXNet's documentation: images from 0 to 1, then mean 0.485, 0.456, 0.406 and std 0.229,
    0.224, 0.225."""
    table, joint, _ = GLUON["the model zoo"]
    mxnet_params.dump(file, rename_arrays(mxnet_params.load(file), name_gluon(table, joint)))
    graph_of(file).unlink()
    weights = open_weights(file)
    assert np.allclose(weights.recipe.mean, 255 * np.array([0.485, 0.456, 0.406]))
    assert np.allclose(weights.recipe.std, 255 * np.array([0.229, 0.224, 0.225]))
    assert "gluon is assumed: shorter side 256, crop 224, bilinear" in weights.remarks[-1]


def test_layers_that_several_scopes_count_are_not_ordered_by_them(file: Path) -> None:
    table, joint, _ = GLUON["counters"]
    table = {
        layer: re.sub("resnet0_(conv|batchnorm)([5-7])$", r"resnet0_b0_\1\2", name)
        for layer, name in table.items()
    }
    mxnet_params.dump(
        file.with_name("best.params"),
        rename_arrays(mxnet_params.load(file), name_gluon(table, joint)),
    )
    with pytest.raises(
        CheckpointError, match="is nearest, but the kernel of convolution 0 is missing"
    ):
        read(file.with_name("best.params"))


def test_any_names_are_read_where_a_graph_says_what_is_computed_with_them(file: Path) -> None:
    table = {
        name: f"v{i * 37 % 101}_{name.rpartition('_')[2]}"
        for i, name in enumerate(name_tensors(RESNET).values())
    }

    def rename(nodes: list[dict[str, Any]]) -> None:
        for node in nodes:
            node["name"] = table.get(node["name"], node["name"])

    arrays = {name: table[name.partition(":")[2]] for name in mxnet_params.load(file)}
    mxnet_params.dump(file, rename_arrays(mxnet_params.load(file), lambda name: arrays[name]))
    weights = read_with_graph(file, rename)
    assert weights.remarks == (EPOCH, SPEEDS)
    assert_canonical(weights.state.tensors, state_of(recipe_of()).tensors)


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
    change: Callable[[Variables], object], reason: str, graph: bool, file: Path
) -> None:
    if not graph:
        graph_of(file).unlink()
    with pytest.raises(CheckpointError, match=rf"model-0090\.params.*{reason}"):
        read_changed(file, change)


def attribute(name: str, key: str, value: str) -> Callable[[list[dict[str, Any]]], object]:
    return lambda nodes: node(nodes, name)["attrs"].update({key: value})


UNLIKE: dict[str, tuple[Callable[[list[dict[str, Any]]], object], str]] = {
    "another stride": (
        attribute("stage2_unit1_conv2", "stride", "(1, 1)"),
        r"in its graph, stage2_unit1_conv2_weight has the stride \(1, 1\), expected \(2, 2\)",
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
        lambda nodes: node(nodes, "bn0")["attrs"].pop("fix_gamma"),
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
        lambda nodes: node(nodes, "relu0").update(op="sigmoid"),
        "its graph has the operator sigmoid, which",
    ),
    "another batch norm": (
        lambda nodes: node(nodes, "bn0").update(
            inputs=[*node(nodes, "bn0")["inputs"][:1], *([[0, 0, 0]] * 4)]
        ),
        r"in its graph, the batch norm after conv0_weight has the variables \[\]",
    ),
    "no such convolution": (
        lambda nodes: node(nodes, "conv0_weight").update(name="conv7_weight"),
        "its graph has no convolution with conv0_weight",
    ),
    "another classifier": (
        lambda nodes: node(nodes, "fc1").update(op="null"),
        "the fully connected layers .*, expected one",
    ),
    "a kernel twice": (
        lambda nodes: node(nodes, f"{UNIT}_conv1").update(
            inputs=node(nodes, "stage1_unit1_conv1")["inputs"]
        ),
        "its graph has 20 convolutions of 19 kernels",
    ),
}


@pytest.mark.parametrize(("change", "reason"), UNLIKE.values(), ids=UNLIKE)
def test_a_graph_that_computes_something_else_is_refused(
    change: Callable[[list[dict[str, Any]]], object], reason: str, file: Path
) -> None:
    with pytest.raises(CheckpointError, match=f"small is nearest, but .*{reason}"):
        read_with_graph(file, change)


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
def test_a_damaged_graph_is_an_error(text: str, reason: str, file: Path) -> None:
    graph_of(file).write_text(text)
    with pytest.raises(
        CheckpointError, match=rf"model-symbol\.json is damaged or not an MXNet graph: {reason}"
    ):
        read(file)


def test_velocities_that_are_not_all_there_are_left_out(file: Path) -> None:
    recipe = recipe_of()
    velocities = {
        name_tensors(RESNET)[name]: value for name, value in state_of(recipe).momentum.items()
    }
    gone = velocities.pop("fc1_bias")
    side = file.with_name("model-0090.momentum.params")
    mxnet_params.dump(side, velocities)
    some = "1 of 62 velocities are missing, such as fc1_bias; the others were left out"
    assert (read(file).state.momentum, read(file).remarks) == ({}, (EPOCH, some))
    mxnet_params.dump(side, velocities | {"fc1_bias": gone[:3]})
    with pytest.raises(
        CheckpointError,
        match=r"momentum\.params: fc1_bias is float32 \[3\], expected float32 \[1000\]",
    ):
        read(file)
    side.write_text("garbage")
    assert read(file, momentum=False).remarks == ()
