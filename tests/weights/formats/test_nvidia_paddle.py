"""Paddle's names and layouts, and files with other ones. Tests with Paddle itself are in
test_peers_of_paddle."""

import pickle
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from lockstep.models.architectures import ModelSpec
from lockstep.models.state import State
from lockstep.recipes import Recipe
from lockstep.recipes.from_nvidia import resnet50_paddle_90ep
from lockstep.system.errors import CheckpointError
from lockstep.weights import Weights
from lockstep.weights.formats import paddle_pickle
from lockstep.weights.formats.common import FOURTH_CHANNEL
from lockstep.weights.formats.nvidia_paddle import find, read, write
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
    rename_arrays,
    state_of,
    zeros,
)

pytestmark = pytest.mark.usefixtures("small_models")

STEP = "no step is stored"


def recipe_of(model: str | ModelSpec = "small", logits: int = 1000) -> Recipe:
    return resnet50_paddle_90ep().replace(model=model, logits=logits, precision="fp32")


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    """A checkpoint as the original writes it."""
    recipe = recipe_of()
    write(tmp_path / "ResNet50" / "7" / "resnet_50_paddle", recipe, state_of(recipe))
    return tmp_path / "ResNet50" / "7" / "resnet_50_paddle"


def files(prefix: Path) -> tuple[Variables, Variables]:
    return tuple(
        paddle_pickle.load(Path(f"{prefix}{ending}")).arrays for ending in (".pdparams", ".pdopt")
    )  # type: ignore[return-value]


def read_again(
    parameters: Variables, optimizer: Variables | None, folder: Path, *, momentum: bool = True
) -> Weights:
    paddle_pickle.dump(folder / "again.pdparams", parameters)
    if optimizer is not None:
        paddle_pickle.dump(folder / "again.pdopt", optimizer)
    return read(folder / "again", momentum=momentum)


def test_the_variables_of_resnet50_are_those_of_the_originals_program(tmp_path: Path) -> None:
    recipe = recipe_of("resnet50")
    state = state_of(recipe, 0)
    done = write(tmp_path / "a", recipe, state)
    assert done.files == (tmp_path / "a.pdparams", tmp_path / "a.pdopt")
    check_lines(done.remarks, "fourth input channel of zeros.*--image-shape 4,224,224")
    parameters, optimizer = files(tmp_path / "a")
    # 53 convolutions with four tensors of batch norm each, the classifier's two, and the learning
    # rate
    assert len(parameters) == 268
    assert len(optimizer) == 161 + 4
    assert parameters["conv2d_0.w_0"].shape == (64, 4, 7, 7)
    assert not parameters["conv2d_0.w_0"][:, 3].any()
    for ours, theirs in {
        **{"conv1.weight": "conv2d_0.w_0", "layer1.0.conv1.weight": "conv2d_1.w_0"},
        **{"layer1.0.conv3.weight": "conv2d_3.w_0", "layer1.0.downsample.0.weight": "conv2d_4.w_0"},
        "layer1.1.conv1.weight": "conv2d_5.w_0",
        "layer2.0.downsample.0.weight": "conv2d_14.w_0",
        **{"layer4.2.conv3.weight": "conv2d_52.w_0", "bn1.weight": "batch_norm_0.w_0"},
        "bn1.bias": "batch_norm_0.b_0",
        "layer1.0.downsample.1.running_mean": "batch_norm_4.w_1",
        **{"layer4.2.bn3.running_var": "batch_norm_52.w_2", "fc.bias": "linear_0.b_0"},
    }.items():
        value = parameters[theirs][:, :3] if ours == "conv1.weight" else parameters[theirs]
        assert np.array_equal(value, state.tensors[ours])
        if ours in state.momentum and ours != "conv1.weight":
            assert np.array_equal(optimizer[f"{theirs}_velocity_0"], state.momentum[ours])
    assert parameters["linear_0.w_0"][5, 700] == state.tensors["fc.weight"][700, 5]
    assert optimizer["linear_0.w_0_velocity_0"][5, 700] == state.momentum["fc.weight"][700, 5]
    weights = read(tmp_path / "a")
    assert weights.recipe == recipe
    assert (weights.state.step, weights.remarks) == (0, (STEP, FOURTH_CHANNEL))
    assert_state(weights.state, state)


@pytest.mark.parametrize("model", ["small", "basic"])
def test_a_state_is_read_as_written(model: str, tmp_path: Path) -> None:
    recipe = recipe_of(model, 10)
    state = state_of(recipe)
    write(tmp_path / "3" / "any", recipe, state)
    weights = read(tmp_path / "3" / "any")
    assert weights.recipe == recipe
    assert weights.remarks == (f"{STEP}; its folder names epoch 3, counted from 0", FOURTH_CHANNEL)
    assert_state(weights.state, state)


def test_what_the_fourth_channel_holds_has_no_effect(prefix: Path, tmp_path: Path) -> None:
    parameters, optimizer = (dict(values) for values in files(prefix))
    for values, name in ((parameters, "conv2d_0.w_0"), (optimizer, "conv2d_0.w_0_velocity_0")):
        values[name] = values[name].copy()
        values[name][:, 3] = 5
    weights = read_again(parameters, optimizer, tmp_path)
    assert_state(weights.state, state_of(recipe_of()))


def test_a_stem_of_three_channels_is_read_without_a_remark(prefix: Path, tmp_path: Path) -> None:
    parameters, optimizer = (
        {
            name: value[:, :3] if name.startswith("conv2d_0.") else value
            for name, value in values.items()
        }
        for values in files(prefix)
    )
    weights = read_again(parameters, optimizer, tmp_path)
    assert weights.remarks == (STEP,)
    assert_state(weights.state, state_of(recipe_of()))


def later(name: str) -> str:
    """Return a name as in the second program of a process, whose counters do not begin at 0."""
    return re.sub(
        r"(conv2d|batch_norm|linear)_(\d+)", lambda match: f"{match[1]}_{int(match[2]) + 97}", name
    )


def name_layer(name: str) -> str:
    return re.sub("batch_norm_", "batch_norm2d_", name)


@pytest.mark.parametrize("change", [later, name_layer])
def test_counters_may_begin_anywhere_and_batch_norms_have_two_names(
    change: Callable[[str], str], prefix: Path, tmp_path: Path
) -> None:
    parameters, optimizer = files(prefix)
    weights = read_again(
        rename_arrays(parameters, change), rename_arrays(optimizer, change), tmp_path
    )
    assert weights.remarks == (STEP, FOURTH_CHANNEL)
    assert_state(weights.state, state_of(recipe_of()))


def halve(parameters: Variables, optimizer: Variables) -> tuple[Variables, Variables]:
    """Change variables as with --use-pure-fp16: kernels and classifier are rounded, the optimizer
    keeps float32 copies."""
    kept = {
        name: value for name, value in parameters.items() if name.startswith(("conv2d", "linear"))
    }
    masters = {f"{name}_fp32_master_0": value for name, value in kept.items()}
    slots = {f"{name}_fp32_master_0_velocity_0": optimizer[f"{name}_velocity_0"] for name in kept}
    others = {
        name: value
        for name, value in optimizer.items()
        if name.removesuffix("_velocity_0") not in kept
    }
    return (
        parameters | {name: value.astype(np.float16) for name, value in kept.items()},
        masters | slots | others,
    )


@pytest.mark.parametrize("momentum", [True, False])
def test_rounded_weights_have_exact_copies(momentum: bool, prefix: Path, tmp_path: Path) -> None:
    weights = read_again(*halve(*files(prefix)), tmp_path, momentum=momentum)
    # 20 convolutions and the classifier's two
    remark = (
        "22 weights are the float32 copies that the optimizer keeps, such as"
        " conv2d_0.w_0_fp32_master_0"
    )
    assert weights.remarks == (*([STEP] if momentum else []), FOURTH_CHANNEL, remark)
    assert_canonical(weights.state.tensors, state_of(recipe_of()).tensors)
    assert_canonical(weights.state.momentum, state_of(recipe_of()).momentum if momentum else {})


def test_rounded_weights_alone_are_what_they_are(prefix: Path, tmp_path: Path) -> None:
    weights = read_again(halve(*files(prefix))[0], None, tmp_path, momentum=False)
    assert "22 variables, such as conv2d_0.w_0, are not float32" in weights.remarks[-1]
    expected = (
        state_of(recipe_of()).tensors["layer1.0.conv2.weight"].astype(np.float16).astype(np.float32)
    )
    assert np.array_equal(weights.state.tensors["layer1.0.conv2.weight"], expected)


def test_bfloat16_is_read_from_its_bits(prefix: Path, tmp_path: Path) -> None:
    parameters = dict(files(prefix)[0])
    bits = parameters["conv2d_1.w_0"].view(np.uint32)
    parameters["conv2d_1.w_0"] = (bits >> 16).astype(np.uint16)
    weights = read_again(parameters, None, tmp_path, momentum=False)
    expected = (bits & 0xFFFF0000).astype(np.uint32).view(np.float32)
    assert np.array_equal(weights.state.tensors["layer1.0.conv1.weight"], expected)
    assert "1 variables, such as conv2d_1.w_0, are not float32" in weights.remarks[-1]


REMARKED: dict[str, tuple[Callable[[Variables, Variables], object], str]] = {
    "no velocities": (lambda p, o: o.clear(), r"there are no velocities \(\*_velocity_0\)"),
    "some velocities": (
        lambda p, o: [o.pop(f"conv2d_{i}.w_0_velocity_0") for i in (3, 4)],
        "2 of 62 velocities are missing, such as conv2d_3.w_0_velocity_0; the others were left out",
    ),
    "another optimizer": (lambda p, o: o.update(beta1_pow_acc_0=np.ones(1)), "^$"),
    "other counters": (
        lambda p, o: o.update(learning_rate_1=np.ones(1), num_bad_steps_4=np.ones(1, np.int32)),
        "^$",
    ),
}


@pytest.mark.parametrize(("change", "remark"), REMARKED.values(), ids=REMARKED)
def test_what_a_reader_should_know_is_remarked(
    change: Callable[[Variables, Variables], object], remark: str, prefix: Path, tmp_path: Path
) -> None:
    parameters, optimizer = (dict(values) for values in files(prefix))
    change(parameters, optimizer)
    weights = read_again(parameters, optimizer, tmp_path)
    assert weights.remarks[:2] == (STEP, FOURTH_CHANNEL)
    assert re.search(remark, " ".join(weights.remarks[2:]))
    assert bool(weights.state.momentum) == ("velocities" not in remark)
    assert_canonical(weights.state.tensors, state_of(recipe_of()).tensors)


def test_without_momentum_asked_for_the_optimizers_file_is_not_even_opened(prefix: Path) -> None:
    prefix.with_name("resnet_50_paddle.pdopt").write_text("garbage")
    assert read(prefix, momentum=False).state.momentum == {}
    with pytest.raises(CheckpointError, match=r"resnet_50_paddle\.pdopt is damaged|asks for"):
        read(prefix)


REFUSED: dict[str, tuple[Callable[[Variables], object], str]] = {
    "no statistics": (
        lambda p: p.pop("batch_norm_3.w_2"),
        r"closest model, small, does not fit: batch_norm_3\.w_2 is missing\.",
    ),
    "no batch norm": (
        lambda p: [p.pop(f"batch_norm_19.{leaf}") for leaf in ("w_0", "b_0", "w_1", "w_2")],
        r"closest model, small, does not fit: batch_norm_19\.w_0 is missing",
    ),
    "no bias": (lambda p: p.pop("linear_0.b_0"), r"linear_0\.b_0 is missing"),
    "no classifier": (
        lambda p: [p.pop("linear_0.w_0"), p.pop("linear_0.b_0")],
        r"linear_0\.w_0 is missing; linear_0\.b_0",
    ),
    "a convolution less": (
        lambda p: p.pop("conv2d_19.w_0"),
        r"closest model, small, does not fit: conv2d_19\.w_0 is missing",
    ),
    "a block less": (
        lambda p: [
            p.pop(name) for i in (5, 6, 7) for name in list(p) if re.fullmatch(rf".*_{i}\..*", name)
        ],
        "does not fit:",
    ),
    "another shape": (
        lambda p: p.update({"batch_norm_3.b_0": zeros(3)}),
        (
            r"batch_norm_3\.b_0 is \[3\], expected \[32\]\. The first of its 102 arrays are"
            r" \['batch_norm_0\.b_0'"
        ),
    ),
    "other numbers": (
        lambda p: p.update({"batch_norm_3.b_0": np.zeros(32, np.int64)}),
        r": batch_norm_3\.b_0 is int64 \[32\], expected float32 \[32\]",
    ),
    "nothing": (lambda p: p.clear(), "is not a complete ResNet as Paddle saves it"),
    "other things": (
        lambda p: [p.clear(), p.update(a=zeros(2))],
        "is not a complete ResNet as Paddle saves it",
    ),
}


@pytest.mark.parametrize(("change", "reason"), REFUSED.values(), ids=REFUSED)
def test_what_is_incomplete_or_more_is_refused(
    change: Callable[[Variables], object], reason: str, prefix: Path, tmp_path: Path
) -> None:
    parameters = dict(files(prefix)[0])
    change(parameters)
    with pytest.raises(CheckpointError, match=f"again.*{reason}"):
        read_again(parameters, None, tmp_path)


def test_a_velocity_of_another_shape_is_refused(prefix: Path, tmp_path: Path) -> None:
    parameters, optimizer = files(prefix)
    with pytest.raises(CheckpointError, match=r"linear_0\.b_0_velocity_0 .*\[3\].*\[1000\]"):
        read_again(parameters, optimizer | {"linear_0.b_0_velocity_0": zeros(3)}, tmp_path)


def test_velocities_are_found_by_parameter_names(prefix: Path, tmp_path: Path) -> None:
    """Files from before Paddle 2.1 hold arrays by layer names, and a table of their parameters."""
    recipe = recipe_of("basic", 10)
    state = state_of(recipe)
    ends = {"running_mean": "_mean", "running_var": "_variance"}
    arrays = {
        re.sub("running_(mean|var)", lambda match: ends[match[0]], name): (
            value.T if name == "fc.weight" else value
        )
        for name, value in state.tensors.items()
    }
    table = {name: f"parameter_{i}" for i, name in enumerate(arrays)}
    (tmp_path / "a.pdparams").write_bytes(
        pickle.dumps(arrays | {"StructuredToParameterName@@": table}, 2)
    )
    velocities = {
        f"{table[n]}_velocity_0": v.T if n == "fc.weight" else v for n, v in state.momentum.items()
    }
    (tmp_path / "a.pdopt").write_bytes(
        pickle.dumps(velocities | {"LR_Scheduler": {"last_epoch": 3}}, 2)
    )
    weights = read(tmp_path / "a")
    assert (weights.recipe, weights.remarks) == (recipe, (STEP,))
    assert_state(weights.state, state)


def test_the_optimizer_finds_all_that_its_program_has(tmp_path: Path) -> None:
    recipe = recipe_of().replace(loss_scale=64.0)
    state = state_of(recipe)
    scaler = {"scale": 512.0, "good_steps": 3.0, "bad_steps": 1.0}
    for name, known, expected in (("a", {}, (64, 0, 0)), ("b", scaler, (512, 3, 1))):
        write(tmp_path / name, recipe, State(0, state.tensors, state.momentum, {}, known))
        optimizer = files(tmp_path / name)[1]
        values = [
            optimizer[f"{kind}_0"]
            for kind in ("loss_scaling", "num_good_steps", "num_bad_steps", "learning_rate")
        ]
        assert [value.dtype.name for value in values] == ["float32", "int32", "int32", "float32"]
        assert [value.tolist() for value in values] == [[number] for number in (*expected, 0)]


def test_what_is_unlike_the_original_is_remarked_when_it_is_written(tmp_path: Path) -> None:
    recipe = recipe_of(RESNET, 10).replace(padding="same")
    done = write(tmp_path / "odd.pdparams", recipe, State(7, state_of(recipe).tensors, {}))
    assert done.files == (tmp_path / "odd.pdparams",)
    assert_remarked(done.remarks, "fourth input channel", "not this one", "SAME padding")
    assert_remarked(done.remarks, "have 10: --num", "no velocities", "step 7 cannot be stored")
    assert list_names(tmp_path.iterdir()) == ["odd.pdparams"]


def test_a_state_of_another_model_is_refused(tmp_path: Path) -> None:
    check_other_states(write, recipe_of(), recipe_of("basic"), tmp_path / "a")


def test_velocities_of_another_run_are_not_adopted(tmp_path: Path) -> None:
    check_other_velocities(write, tmp_path / "b", recipe_of(), "b.pdopt")


def test_nothing_is_overwritten_or_left(prefix: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = recipe_of()
    files = (Path(f"{prefix}{ending}") for ending in (".pdparams", ".pdopt"))
    check_nothing_is_overwritten(write, prefix, recipe, *files)
    fill_disk(monkeypatch, paddle_pickle, "pdparams")
    with pytest.raises(CheckpointError, match=r"resnet_50_paddle .*No space left"):
        write(prefix, recipe, state_of(recipe))
    assert list(prefix.parent.iterdir()) == []


def test_a_file_a_prefix_an_epoch_and_the_folders_around_it_name_the_same(prefix: Path) -> None:
    files = (Path(f"{prefix}.pdparams"), Path(f"{prefix}.pdopt"))
    for path in (prefix, *files, *list(prefix.parents)[:3]):
        assert find(path) == prefix


def test_of_several_epochs_the_last_with_both_files_is_meant(prefix: Path) -> None:
    both = ("pdparams", "pdopt")
    for epoch, endings in {"9": both, "10": both, "11": ("pdparams",), "12": ()}.items():
        (prefix.parents[1] / epoch).mkdir()
        for ending in endings:
            (prefix.parents[1] / epoch / f"resnet_50_paddle.{ending}").touch()
    (prefix.parents[1] / "best").mkdir()
    (prefix.parents[1] / "13").touch()
    epochs = prefix.parents[1]
    assert find(epochs.parent) == find(epochs) == epochs / "10" / prefix.name
    assert find(epochs / "11") == epochs / "11" / prefix.name


def test_a_folder_of_several_does_not_say_which(prefix: Path) -> None:
    prefix.with_name("b.pdparams").touch()
    with pytest.raises(CheckpointError, match="several prefixes: b, resnet_50_paddle"):
        find(prefix.parent)


def test_other_paths_name_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    (tmp_path / "alone.pdopt").touch()
    missing = [
        tmp_path / name
        for name in ("missing", "missing.pdparams", "alone", "alone.pdopt", "model.safetensors")
    ]
    for path in (tmp_path, Path(), *missing):
        assert find(path) is None
