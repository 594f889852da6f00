"""MXNet's names and layouts, files with other ones, and checkpoints and epochs that are written.
Tests with MXNet itself are in test_peers_of_mxnet."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.models.state import State
from lockstep.system import files
from lockstep.system.errors import CheckpointError
from lockstep.weights.formats import BFLOAT16, mxnet_params
from lockstep.weights.formats.common import FOURTH_CHANNEL
from lockstep.weights.formats.nvidia_mxnet import find, read, write, write_epoch
from tests.lines import check_lines
from tests.weights.formats.cases import (
    RESNET,
    Variables,
    assert_canonical,
    assert_remarked,
    assert_state,
    check_nothing_is_overwritten,
    check_other_states,
    check_other_velocities,
    fill_disk,
    list_names,
    state_of,
)
from tests.weights.formats.mxnet_cases import (
    EPOCH,
    SPEEDS,
    find_node,
    graph_of,
    read_changed,
    read_with_graph,
    recipe_of,
)

pytestmark = pytest.mark.usefixtures("mxnet_models")

NO_GRAPH = (
    "there is no model-symbol.json: it is assumed that bottlenecks stride in their 3x3, and that"
    " batch norms add 1e-05"
)


def test_the_variables_of_resnet50_are_those_of_the_originals_symbol(tmp_path: Path) -> None:
    recipe = recipe_of("resnet50")
    state = state_of(recipe, 0)
    done = write(tmp_path / "model-0090.params", recipe, state)
    assert list_names(done.files) == [
        "model-symbol.json",
        "model-0090.momentum.params",
        "model-0090.params",
    ]
    check_lines(done.remarks, r"\*\.momentum\.params: .* velocities of 0$")
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
    assert_state(weights.state, state)


@pytest.mark.parametrize("model", ["small", "grouped", "basic", "square", "resnet50-v1"])
def test_a_state_is_read_as_written(model: str, tmp_path: Path) -> None:
    recipe = recipe_of(model, 10)
    state = state_of(recipe)
    write(tmp_path / "new" / "any", recipe, state)
    weights = read(tmp_path / "new" / "any-0000.params")
    assert weights.recipe == recipe
    check_lines(weights.remarks, "^no step is stored; .* epoch 0, counted from 1$")
    assert_state(weights.state, state)
    assert read(tmp_path / "new" / "any-0000.params", momentum=False).state.momentum == {}


@pytest.mark.parametrize("epsilon", [1e-5, 2e-5])
def test_what_batch_norms_add_is_as_the_graph_says(epsilon: float, tmp_path: Path) -> None:
    recipe = recipe_of().replace(bn_epsilon=epsilon)
    write(tmp_path / "model-0090.params", recipe, State(0, state_of(recipe).tensors, {}))
    weights = read(tmp_path / "model-0090.params", momentum=False)
    assert (weights.recipe, weights.remarks) == (recipe, ())


def test_the_graph_says_what_a_recipe_does(tmp_path: Path) -> None:
    recipe = recipe_of().replace(bn_momentum=0.3)
    write(tmp_path / "model", recipe, State(0, state_of(recipe).tensors, {}))
    nodes = json.loads((tmp_path / "model-symbol.json").read_text())["nodes"]
    assert find_node(nodes, "bn0")["attrs"] == {
        "axis": "1",
        "eps": "1e-05",
        "fix_gamma": "False",
        "momentum": "0.7",
    }
    assert find_node(nodes, "stage2_unit1_conv2")["attrs"]["stride"] == "(2, 2)"
    assert find_node(nodes, "stage2_unit1_conv1")["attrs"]["stride"] == "(1, 1)"
    assert find_node(nodes, "fc1")["attrs"] == {"num_hidden": "1000"}
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
        if node["op"] in ("Convolution", "Pooling"):
            node["attrs"]["layout"] = "NHWC"
        if node["op"] == "BatchNorm":
            node["attrs"]["axis"] = "3"


@pytest.mark.parametrize("channels", [3, 4])
@pytest.mark.parametrize("graph", [True, False])
def test_kernels_in_nhwc_are_turned(graph: bool, channels: int, mxnet_file: Path) -> None:
    if graph:
        with pytest.raises(CheckpointError, match=r"conv0_weight is \[8, 3, 7, 7\], .* NHWC"):
            read_with_graph(mxnet_file, set_layout)
    else:
        graph_of(mxnet_file).unlink()
    weights = read_changed(mxnet_file, lambda arrays: convert_to_nhwc(arrays, channels))
    graph_remark = () if graph else (NO_GRAPH,)
    channel = (FOURTH_CHANNEL,) if channels == 4 else ()
    assert weights.remarks == (EPOCH, *graph_remark, *channel, SPEEDS)
    assert_canonical(weights.state.tensors, state_of(recipe_of()).tensors)


def test_mxnet_does_not_compute_images_in_nhwc_on_cpus(mxnet_file: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        read_with_graph(mxnet_file, set_layout)
    weights = read_changed(mxnet_file, convert_to_nhwc)
    assert weights.original is not None
    assert weights.original.channels_last
    with pytest.raises(ValueError, match="does not compute Convolution 'conv0' on CPUs"):
        weights.original.write(tmp_path)


def test_a_fourth_channel_is_folded_in_nchw(mxnet_file: Path) -> None:
    stem = "arg:conv0_weight"
    weights = read_changed(
        mxnet_file, lambda a: a.update({stem: np.pad(a[stem], [(0, 0), (0, 1), (0, 0), (0, 0)])})
    )
    assert weights.remarks == (EPOCH, FOURTH_CHANNEL, SPEEDS)
    assert_canonical(weights.state.tensors, state_of(recipe_of()).tensors)


@pytest.mark.parametrize("graph", [True, False])
@pytest.mark.parametrize("by_rows", [True, False])
def test_ambiguous_kernels_lie_as_the_others(by_rows: bool, graph: bool, tmp_path: Path) -> None:
    recipe = recipe_of("square")
    file = tmp_path / "model-0090.params"
    write(file, recipe, State(0, state_of(recipe).tensors, {}))
    if not graph:
        graph_of(file).unlink()
    elif by_rows:
        with pytest.raises(CheckpointError):
            read_with_graph(file, set_layout)
    weights = read_changed(file, convert_to_nhwc if by_rows else lambda arrays: None)
    assert_canonical(weights.state.tensors, state_of(recipe).tensors)


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_other_floats_become_float32(dtype: type, mxnet_file: Path) -> None:
    name = "arg:stage1_unit1_conv2_weight"
    weights = read_changed(
        mxnet_file, lambda arrays: arrays.update({name: arrays[name].astype(dtype)})
    )
    odd = "1 variables, such as stage1_unit1_conv2_weight, are not float32 and were converted to it"
    assert weights.remarks == (EPOCH, odd, SPEEDS)
    expected = (
        state_of(recipe_of()).tensors["layer1.0.conv2.weight"].astype(dtype).astype(np.float32)
    )
    assert np.array_equal(weights.state.tensors["layer1.0.conv2.weight"], expected)


def test_bfloat16_is_read_from_its_bits(mxnet_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = dict(mxnet_params.load(mxnet_file))
    bits = arrays["arg:fc1_weight"].view(np.uint32)
    arrays["arg:fc1_weight"] = (bits >> 16).astype(np.uint16).view(BFLOAT16)
    monkeypatch.setattr(mxnet_params, "load", lambda path: arrays)
    expected = (bits & 0xFFFF0000).astype(np.uint32).view(np.float32)
    assert np.array_equal(read(mxnet_file).state.tensors["fc.weight"], expected)


# Writing


def test_what_is_unlike_the_original_is_remarked_when_it_is_written(tmp_path: Path) -> None:
    recipe = recipe_of(RESNET, 10).replace(padding="same")
    done = write(
        tmp_path / "odd", recipe, State(7, state_of(recipe).tensors, {}, {}, {"scale": 8.0})
    )
    assert list_names(done.files) == ["odd-symbol.json", "odd-0000.params"]
    assert_remarked(done.remarks, "not this one", "SAME padding", "have 10: --num-classes")
    assert_remarked(done.remarks, "step 7 cannot be stored", "loss scaling")
    assert len(done.remarks) == 5
    assert sorted(list_names(tmp_path.iterdir())) == ["odd-0000.params", "odd-symbol.json"]


def test_epochs_share_a_graph_and_another_is_not_touched(mxnet_file: Path) -> None:
    recipe = recipe_of()
    before = graph_of(mxnet_file).stat().st_mtime_ns
    done = write(
        mxnet_file.with_name("model-0091.params"), recipe, State(0, state_of(recipe).tensors, {})
    )
    assert done.files == (mxnet_file.with_name("model-0091.params"),)
    assert done.remarks[0] == f"{graph_of(mxnet_file)} existed already with the same contents"
    assert graph_of(mxnet_file).stat().st_mtime_ns == before
    other = recipe_of(logits=7)
    with pytest.raises(CheckpointError, match=r"model-symbol\.json .* a different graph"):
        write(mxnet_file.with_name("model-0092.params"), other, state_of(other))
    assert sorted(list_names(mxnet_file.parent.iterdir())) == [
        "model-0090.params",
        "model-0091.params",
        graph_of(mxnet_file).name,
    ]


def test_a_state_of_another_model_is_refused(tmp_path: Path) -> None:
    check_other_states(write, recipe_of(), recipe_of("basic"), tmp_path / "a")
    with pytest.raises(CheckpointError, match=r"weights: missing .*, unknown"):
        write_epoch(tmp_path / "a", 1, recipe_of(), state_of(recipe_of("basic")))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("target", ["weights.params", "a-90.params"])
def test_an_epoch_has_four_digits(target: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=rf"{target}: expected .*<prefix>-0090"):
        write(tmp_path / target, recipe_of(), state_of(recipe_of()))


def test_velocities_of_another_run_are_not_adopted(tmp_path: Path) -> None:
    check_other_velocities(write, tmp_path / "b", recipe_of(), "b-0000.momentum.params")


def test_nothing_is_overwritten_or_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = recipe_of()
    target = tmp_path / "model-0090.params"
    write(target, recipe, state_of(recipe))
    check_nothing_is_overwritten(
        write, target, recipe, target, tmp_path / "model-0090.momentum.params"
    )
    graph_of(target).unlink()
    fill_disk(monkeypatch, mxnet_params, "0090.params")
    with pytest.raises(CheckpointError, match=r"model .*No space left"):
        write(target, recipe, state_of(recipe))
    assert list(tmp_path.iterdir()) == []


def test_unflushed_files_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flush(path: Path) -> None:
        if path.is_dir():
            raise OSError(5, "Input/output error")

    monkeypatch.setattr(files, "flush", flush)
    with pytest.raises(CheckpointError, match=r"model .*Input/output error"):
        write(tmp_path / "model", recipe_of(), state_of(recipe_of()))
    assert list(tmp_path.iterdir()) == []


def test_a_run_writes_every_epoch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = recipe_of()
    prefix = tmp_path / "new" / "model"
    for epoch in (1, 2, 2):
        file = write_epoch(prefix, epoch, recipe, state_of(recipe, epoch))
        assert file == tmp_path / "new" / f"model-000{epoch}.params"
    assert sorted(list_names(prefix.parent.iterdir())) == [
        *("model-0001.momentum.params", "model-0001.params", "model-0002.momentum.params"),
        *("model-0002.params", "model-symbol.json"),
    ]
    state = read(prefix.parent / "model-0002.params").state
    assert_state(state, state_of(recipe, 2))
    fill_disk(monkeypatch, mxnet_params, "0002.params")
    with pytest.raises(CheckpointError, match=r"model-0002\.params .*No space left"):
        write_epoch(prefix, 2, recipe, state_of(recipe, 3))
    assert len(list(prefix.parent.iterdir())) == 5
    assert_canonical(
        read(prefix.parent / "model-0002.params").state.tensors, state_of(recipe, 2).tensors
    )
    with pytest.raises(CheckpointError, match="already exists with a different graph"):
        write_epoch(prefix, 3, recipe_of(logits=7), state_of(recipe_of(logits=7)))


def test_a_file_a_prefix_and_a_folder_name_the_last_epoch(mxnet_file: Path) -> None:
    for name in (
        *("model-9999.params", "model-10000.params", "model-0091.momentum.params"),
        *("model-91.params", "model_best.params"),
    ):
        mxnet_file.with_name(name).touch()
    last = mxnet_file.with_name("model-10000.params")
    assert find(mxnet_file.parent) == find(mxnet_file.with_name("model")) == find(last) == last
    for name in ("model-0090.params", "model-0090.momentum.params"):
        assert find(mxnet_file.with_name(name)) == mxnet_file
    best = mxnet_file.with_name("model_best.params")
    assert find(best) == best


def test_a_folder_of_several_prefixes_does_not_say_which(mxnet_file: Path) -> None:
    mxnet_file.with_name("b-0003.params").touch()
    with pytest.raises(CheckpointError, match="several prefixes: b, model"):
        find(mxnet_file.parent)
    assert find(mxnet_file.with_name("model")) == mxnet_file


def test_the_epochs_of_nvidias_later_code_count_from_0(mxnet_file: Path) -> None:
    """Its last epoch of 90 is `model_0089.params`, next to which it writes no graph."""
    graph_of(mxnet_file).unlink()
    later = mxnet_file.rename(mxnet_file.with_name("model_0089.params"))
    later.with_name("model_0088.params").touch()
    assert find(later.parent) == find(later.with_name("model")) == later
    weights = read(later)
    assert weights.epochs == 90
    assert weights.remarks[0] == "no step is stored; its name says epoch 89, counted from 0"
    assert weights.remarks[1].startswith("there is no model_0089-symbol.json: it is assumed")


def test_a_folder_with_two_ways_to_count_epochs_is_refused(mxnet_file: Path) -> None:
    mxnet_file.with_name("model_0090.params").touch()
    for path in (mxnet_file.parent, mxnet_file.with_name("model")):
        with pytest.raises(CheckpointError, match=r"model-0090\.params and model_0090\.params"):
            find(path)
    assert find(mxnet_file) == mxnet_file


def test_other_paths_name_no_checkpoint(tmp_path: Path) -> None:
    for name in ("model.safetensors", "best.params.txt", "a-symbol.json", "a-0001.momentum.params"):
        (tmp_path / name).touch()
    missing = [
        tmp_path / name
        for name in (
            *("missing", "missing.params", "a", "a-0001.momentum.params", "model.safetensors"),
        )
    ]
    for path in (tmp_path, Path(), *missing):
        assert find(path) is None
