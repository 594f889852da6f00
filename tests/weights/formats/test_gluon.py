"""Weights of Gluon's models are read by the order of their layers' names, or by a graph."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.models.architectures import MODELS
from lockstep.recipes import Recipe
from lockstep.system.errors import CheckpointError
from lockstep.weights import Weights, open_weights
from lockstep.weights.formats import mxnet_params
from lockstep.weights.formats.mxnet_graph import name_tensors
from lockstep.weights.formats.nvidia_mxnet import read
from tests.lines import check_lines
from tests.weights.formats.cases import RESNET, Variables, assert_canonical, rename_arrays, state_of
from tests.weights.formats.mxnet_cases import (
    EPOCH,
    SPEEDS,
    find_node,
    read_changed,
    read_with_graph,
    recipe_of,
)

pytestmark = pytest.mark.usefixtures("mxnet_models")

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


def write_gluon(file: Path, table: dict[str, str], joint: str) -> Path:
    """Write a file's arrays with names of Gluon's, in their order, without a graph."""
    arrays = rename_arrays(mxnet_params.load(file), name_gluon(table, joint))
    path = file.with_name("best.params")
    mxnet_params.dump(path, {name: arrays[name] for name in sorted(arrays)})
    return path


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
    table: dict[str, str], joint: str, program: str, mxnet_file: Path
) -> None:
    weights = read(write_gluon(mxnet_file, table, joint))
    assert weights.origin == program
    assert weights.recipe == (
        Recipe(model="small", precision="fp32") if program == "Gluon" else recipe_of()
    )
    check_lines(
        weights.remarks,
        "^no step is stored$",
        "^there is no best-symbol.json: .* stride in their 3x3, .* 1e-05$",
        r"no velocities \(best\.momentum\.params\)$",
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
    assert "biases of convolutions were subtracted" in "; ".join(actual.remarks)


def test_biases_are_folded_into_means(mxnet_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODELS, "small-v1", replace(RESNET, stride_in="1x1"))
    arrays = dict(mxnet_params.load(mxnet_file))
    biases = add_biases(arrays, "bias")
    table, joint, _ = GLUON["the model zoo"]
    path = mxnet_file.with_name("best.params")
    mxnet_params.dump(path, rename_arrays(arrays, name_gluon(table, joint)))
    weights = read(path, momentum=False)
    assert weights.recipe.model == "small-v1"
    assert "bottlenecks stride in their first 1x1" in weights.remarks[0]
    assert_folded(weights, state_of(recipe_of()).tensors, biases)
    used = {
        array.name: array.tensors for array in weights.stored if array.name.endswith("conv0_bias")
    }
    assert used["resnetv10_stage1_conv0_bias"] == ("layer1.0.bn1.running_mean",)


def add_bias(nodes: list[dict[str, Any]], kernel: str) -> None:
    """Give a convolution a bias, which is a variable before all other nodes."""
    for node in nodes:
        node["inputs"] = [[i + 1, *more] for i, *more in node["inputs"]]
    conv = find_node(nodes, kernel)
    conv["inputs"].append([0, 0, 0])
    conv["attrs"]["no_bias"] = "False"
    nodes.insert(0, {"op": "null", "name": f"{kernel}_offset", "inputs": []})


def test_a_graph_names_the_bias_of_a_convolution(mxnet_file: Path) -> None:
    kernel = "stage1_unit1_conv1"
    offset = np.arange(8, dtype=np.float32)
    with pytest.raises(CheckpointError, match=f"{kernel}' needs '{kernel}_offset', which is not"):
        read_with_graph(mxnet_file, lambda nodes: add_bias(nodes, kernel))
    with pytest.raises(CheckpointError, match=f"'{kernel}' does not have a bias for each of its"):
        read_changed(mxnet_file, lambda arrays: arrays.update({f"arg:{kernel}_offset": offset[:3]}))
    weights = read_changed(
        mxnet_file, lambda arrays: arrays.update({f"arg:{kernel}_offset": offset})
    )
    assert weights.recipe.model == "small"
    assert_folded(weights, state_of(recipe_of()).tensors, {f"arg:{kernel}_weight": offset})


def test_weights_of_gluons_model_zoo_get_its_preprocessing(mxnet_file: Path) -> None:
    """MXNet's documentation: images from 0 to 1, then mean 0.485, 0.456, 0.406 and std 0.229,
    0.224, 0.225."""
    table, joint, _ = GLUON["the model zoo"]
    weights = open_weights(write_gluon(mxnet_file, table, joint))
    assert np.allclose(weights.recipe.mean, 255 * np.array([0.485, 0.456, 0.406]))
    assert np.allclose(weights.recipe.std, 255 * np.array([0.229, 0.224, 0.225]))
    assert "gluon is assumed: shorter side 256, crop 224, bilinear" in weights.remarks[-1]


def test_layers_that_several_scopes_count_are_not_ordered_by_them(mxnet_file: Path) -> None:
    table, joint, _ = GLUON["counters"]
    table = {
        layer: re.sub("resnet0_(conv|batchnorm)([5-7])$", r"resnet0_b0_\1\2", name)
        for layer, name in table.items()
    }
    path = write_gluon(mxnet_file, table, joint)
    with pytest.raises(CheckpointError, match="does not fit: resnet0_conv"):
        read(path)


def test_any_names_are_read_where_a_graph_says_what_is_computed_with_them(mxnet_file: Path) -> None:
    table = {
        name: f"v{i * 37 % 101}_{name.rpartition('_')[2]}"
        for i, name in enumerate(name_tensors(RESNET).values())
    }

    def rename(nodes: list[dict[str, Any]]) -> None:
        for node in nodes:
            node["name"] = table.get(node["name"], node["name"])

    arrays = {name: table[name.partition(":")[2]] for name in mxnet_params.load(mxnet_file)}
    mxnet_params.dump(
        mxnet_file, rename_arrays(mxnet_params.load(mxnet_file), lambda name: arrays[name])
    )
    weights = read_with_graph(mxnet_file, rename)
    assert weights.remarks == (EPOCH, SPEEDS)
    assert_canonical(weights.state.tensors, state_of(recipe_of()).tensors)
