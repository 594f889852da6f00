"""Variables of Flax's example for ImageNet are read from all files, and written as Flax has them.

The names are spelled out here, independently of the code under test. test_peers_of_flax compares
both with Flax itself.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from lockstep.models.architectures import ModelSpec
from lockstep.models.state import State
from lockstep.recipes import Recipe
from lockstep.system.errors import CheckpointError
from lockstep.weights import open_weights
from lockstep.weights.fingerprints import compute_fingerprints
from lockstep.weights.formats import flax_file, msgpack_tree
from tests.lines import check_lines
from tests.weights.formats.cases import (
    BASIC,
    RESNET,
    RESNEXT,
    Variables,
    assert_canonical,
    assert_remarked,
    assert_state,
    nest,
    rename_arrays,
    state_of,
)

pytestmark = pytest.mark.usefixtures("small_models")
ASSUMED = "flax is assumed: shorter side 256, crop 224, bicubic, ImageNet's mean and standard"
LEAVES = {"weight": "scale", "bias": "bias", "running_mean": "mean", "running_var": "var"}
MODELS = {"small": RESNET, "basic": BASIC, "grouped": RESNEXT}


def recipe_of(model: str = "small") -> Recipe:
    return Recipe(model=model, logits=10, precision="fp32", padding="flax")


def name_layer(name: str, spec: ModelSpec) -> str:
    """Return Flax's name of a layer or batch norm."""
    match = re.fullmatch(r"layer(\d)\.(\d)\.(.*)", name)
    if match is None:
        return {"conv1": "conv_init", "bn1": "bn_init", "fc": "Dense_0"}[name]
    number = sum(spec.layers[: int(match[1]) - 1]) + int(match[2])
    block = "BottleneckResNetBlock" if spec.block == "bottleneck" else "ResNetBlock"
    part = {"downsample.0": "conv_proj", "downsample.1": "norm_proj"}.get(match[3])
    if part is None:
        kind = {"conv": "Conv", "bn": "BatchNorm"}[match[3][:-1]]
        part = f"{kind}_{int(match[3][-1]) - 1}"
    return f"{block}_{number}/{part}"


def convert(values: Variables, spec: ModelSpec) -> Variables:
    """Return canonical tensors with Flax's paths and layouts, below params and batch_stats."""
    variables = {}
    for name, value in values.items():
        layer, _, suffix = name.rpartition(".")
        leaf = LEAVES[suffix]
        if value.ndim == 4:
            value, leaf = np.einsum("oihw->hwio", value), "kernel"
        elif name == "fc.weight":
            value, leaf = value.T, "kernel"
        tree = "batch_stats" if leaf in ("mean", "var") else "params"
        variables[f"{tree}/{name_layer(layer, spec)}/{leaf}"] = np.ascontiguousarray(value)
    return variables


def variables_of(model: str = "small") -> Variables:
    return convert(state_of(recipe_of(model)).tensors, MODELS[model])


def save_npz(path: Path, variables: Variables) -> None:
    with path.open("wb") as file:
        np.savez(file, **variables)


WRITERS: dict[str, Callable[[Path, Variables], object]] = {
    "msgpack": lambda path, variables: msgpack_tree.dump(path, nest(variables)),
    "npz": save_npz,
    "safetensors": lambda path, variables: save_file(variables, path),
}
SEPARATORS = {
    "paths": lambda name: name,
    "points": lambda name: name.replace("/", "."),
    "a scope": lambda name: name.replace("/", "/resnet/", 1),
    "one tree": lambda name: name.split("/", 1)[1],
}


@pytest.mark.parametrize("form", WRITERS)
@pytest.mark.parametrize("model", MODELS)
def test_files_of_any_name_give_the_weights(model: str, form: str, tmp_path: Path) -> None:
    WRITERS[form](tmp_path / "any", variables_of(model))
    weights = open_weights(tmp_path / "any")
    assert_canonical(weights.tensors, state_of(recipe_of(model)).tensors)
    recipe = weights.recipe
    assert (recipe.model, recipe.logits) == (model, 10)
    assert (recipe.padding, recipe.bn_epsilon) == ("flax", 1e-5)
    assert (weights.origin, recipe.eval_antialias, weights.state.momentum) == ("Flax", False, {})
    check_lines(weights.remarks, ASSUMED)
    assert {name for array in weights.stored for name in array.tensors} == weights.tensors.keys()


@pytest.mark.parametrize("form", WRITERS)
@pytest.mark.parametrize("separator", SEPARATORS)
def test_names_may_be_joined_otherwise(separator: str, form: str, tmp_path: Path) -> None:
    variables = rename_arrays(variables_of(), SEPARATORS[separator])
    WRITERS[form](tmp_path / f"a.{form}", variables)
    weights = open_weights(tmp_path / f"a.{form}")
    assert_canonical(weights.tensors, state_of(recipe_of()).tensors)
    assert {array.name for array in weights.stored} == variables.keys()


def training(folder: Path, **other: Any) -> Path:
    """Write a state of a training as Flax does, with velocities."""
    state = state_of(recipe_of())
    velocities = nest(convert(state.momentum, RESNET))["params"]
    tree = nest(variables_of())
    tree["opt_state"] = {"0": {"trace": velocities}, "1": {"count": np.array(9, np.int32)}}
    tree["step"] = np.array(7, np.int32)
    msgpack_tree.dump(folder / "checkpoint_7", tree | other)
    return folder / "checkpoint_7"


def test_a_training_has_its_step_and_velocities(tmp_path: Path) -> None:
    weights = open_weights(training(tmp_path), momentum=True)
    assert_state(weights.state, state_of(recipe_of()))
    assert weights.state.step == 7
    check_lines(weights.remarks, ASSUMED)
    without = open_weights(tmp_path / "checkpoint_7")
    assert (without.state.step, without.state.momentum) == (0, {})


def test_of_a_folder_of_checkpoints_the_last_is_read(tmp_path: Path) -> None:
    training(tmp_path).rename(tmp_path / "checkpoint_21")
    training(tmp_path, step=np.array(3)).rename(tmp_path / "checkpoint_3")
    weights = open_weights(tmp_path, momentum=True)
    assert (weights.source.name, weights.state.step) == ("checkpoint_21", 7)


def test_without_velocities_a_remark_says_so(tmp_path: Path) -> None:
    msgpack_tree.dump(tmp_path / "a", nest(variables_of()))
    weights = flax_file.read(tmp_path / "a", momentum=True)
    assert weights.remarks == ("there are no velocities (opt_state/*/trace)",)


@pytest.mark.parametrize("name", ["_CHECKPOINT_METADATA", "checkpoint_7/manifest.ocdbt"])
def test_a_checkpoint_of_orbax_is_refused_with_what_to_do(name: str, tmp_path: Path) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).touch()
    with pytest.raises(CheckpointError, match=r"Orbax checkpoint, which cannot be read\. Restore"):
        open_weights(tmp_path)


@pytest.mark.parametrize("average", ["ema", "params_ema"])
def test_trained_weights_take_precedence_over_averages(average: str, tmp_path: Path) -> None:
    tree = nest(variables_of())
    averages = nest({name: value + 1 for name, value in variables_of().items()})
    state = tree | {"opt_state": {"0": {"count": np.array(3)}}, "step": np.array(3)}
    msgpack_tree.dump(tmp_path / "a", {"training": state | {average: averages["params"]}})
    weights = open_weights(tmp_path / "a")
    assert_canonical(weights.tensors, state_of(recipe_of()).tensors)
    unused = f"moving averages, such as training/{average}/.* not used"
    check_lines(weights.remarks, unused, ASSUMED)
    msgpack_tree.dump(tmp_path / "b", {"ema": averages})
    alone = open_weights(tmp_path / "b")
    assert np.array_equal(alone.tensors["bn1.bias"], weights.tensors["bn1.bias"] + 1)


def drop(name: str) -> Callable[[Variables], Variables]:
    return lambda variables: {own: value for own, value in variables.items() if own != name}


ODD: dict[str, tuple[Callable[[Variables], Variables], str]] = {
    "a kernel is missing": (
        drop("params/BottleneckResNetBlock_0/Conv_1/kernel"),
        "params/BottleneckResNetBlock_0/Conv_1/kernel is missing",
    ),
    "no statistics": (drop("batch_stats/bn_init/var"), "batch_stats/bn_init/var is missing"),
    "another layer": (
        lambda variables: variables | {"params/Dense_1/kernel": np.zeros((9, 9), np.float32)},
        "would ignore: params/Dense_1/kernel;",
    ),
    "a copy for every device": (
        lambda variables: {name: np.stack([value] * 2) for name, value in variables.items()},
        r"conv_init/kernel is \[2, 7, 7, 3, 8\], expected \[7, 7, 3, 8\]",
    ),
    "no floats": (
        lambda variables: variables | {"params/Dense_0/bias": np.zeros(10, np.int32)},
        r"params/Dense_0/bias is int32 \[10\], expected float32 \[10\]",
    ),
    "other names": (
        lambda variables: {f"x/{i}/kernel": value for i, value in enumerate(variables.values())},
        "is not a complete ResNet as Flax saves it",
    ),
}


@pytest.mark.parametrize(("change", "reason"), ODD.values(), ids=ODD)
def test_what_is_no_model_is_refused(
    change: Callable[[Variables], Variables], reason: str, tmp_path: Path
) -> None:
    save_npz(tmp_path / "a.npz", change(variables_of()))
    with pytest.raises(CheckpointError, match=reason):
        open_weights(tmp_path / "a.npz")


def test_a_file_that_is_no_dict_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.msgpack").write_bytes(b"\x91\x01")
    with pytest.raises(CheckpointError, match="holds a list; expected a dict of variables"):
        open_weights(tmp_path / "a.msgpack")


@pytest.mark.parametrize("model", MODELS)
def test_what_is_written_has_flax_names_and_layouts(model: str, tmp_path: Path) -> None:
    expected = variables_of(model)
    state = State(0, state_of(recipe_of(model)).tensors, {})
    for ending in WRITERS:
        written = flax_file.write_flax(tmp_path / f"a.{ending}", recipe_of(model), state)
        assert written.remarks == (
            "Flax's example has only the models resnet18, resnet34, resnet50, resnet101,"
            " resnet152, not this one",
        )
    arrays = flax_file.load(tmp_path / "a.msgpack")
    for stored in (
        dict(np.load(tmp_path / "a.npz")),
        load_file(tmp_path / "a.safetensors"),
        arrays,
    ):
        assert stored.keys() == expected.keys()
        assert all(np.array_equal(stored[name], value) for name, value in expected.items())
    tree = msgpack_tree.load(tmp_path / "a.msgpack")
    assert tree.keys() == {"params", "batch_stats"}
    assert tree["params"].keys() == nest(expected)["params"].keys()


def test_what_differs_from_the_example_is_remarked_upon(tmp_path: Path) -> None:
    recipe = recipe_of().replace(padding="symmetric", bn_epsilon=1e-3)
    written = flax_file.write_flax(tmp_path / "a.npz", recipe, state_of(recipe))
    assert_remarked(written.remarks, "not this one", "trained with symmetric padding")
    assert_remarked(written.remarks, "trained with 0.001", "velocities, step 7")


def test_another_ending_is_refused(tmp_path: Path) -> None:
    for write in (flax_file.write_flax, flax_file.write_torchax):
        with pytest.raises(CheckpointError, match=r"ends in \.msgpack, \.npz, \.safetensors"):
            write(tmp_path / "a.pth", recipe_of(), state_of(recipe_of()))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("ending", ["npz", "safetensors"])
@pytest.mark.parametrize("write", [flax_file.write_flax, flax_file.write_torchax])
def test_jax_reads_what_is_written_as_lockstep_does(
    write: Callable[..., object], ending: str, tmp_path: Path
) -> None:
    """As a certificate compares them."""
    pytest.importorskip("jax")
    from lockstep.backends.jax.certificate import read

    recipe = recipe_of()
    write(tmp_path / f"a.{ending}", recipe, State(0, state_of(recipe).tensors, {}))
    theirs = compute_fingerprints(read(tmp_path / f"a.{ending}", recipe))
    assert theirs == compute_fingerprints(flax_file.load(tmp_path / f"a.{ending}"))
    assert len(theirs) > 100


def test_flax_is_not_needed_to_read_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("jax")
    from lockstep.backends.jax import certificate

    monkeypatch.setattr(certificate.importlib.util, "find_spec", lambda name: None)
    assert certificate.read(tmp_path / "a.msgpack", recipe_of()) is None


@pytest.mark.parametrize("form", ["msgpack", "npz"])
def test_arrays_with_torch_names_are_left_unchanged(form: str, tmp_path: Path) -> None:
    recipe = recipe_of("modern").replace(padding="symmetric")
    state = State(0, state_of(recipe).tensors, {})
    target = tmp_path / f"a.{form}"
    written = flax_file.write_torchax(target, recipe, state)
    stored = flax_file.load(target)
    counters = {name for name in stored if name.endswith("num_batches_tracked")}
    assert len(counters) == sum(name.endswith("running_var") for name in state.tensors)
    kept = {name: np.array(value) for name, value in stored.items() if name not in counters}
    assert_canonical(kept, state.tensors)
    weights = open_weights(target)
    assert (weights.origin, weights.recipe.model) == ("torchax", "modern")
    assert weights.recipe.padding == "symmetric"
    assert_canonical(weights.tensors, state.tensors)
    assert written.remarks == ()
    check_lines(weights.remarks, "torchvision-v1 is assumed")
