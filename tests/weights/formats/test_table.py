"""Formats that are tables of names: every array of a file is read, known to have no effect, or left
out by the user. Any other array refuses the file by its name."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.recipes import Recipe
from lockstep.system.errors import CheckpointError
from lockstep.weights import Weights
from lockstep.weights.formats import (
    flax_file,
    msgpack_tree,
    nvidia_paddle,
    nvidia_tensorflow,
    paddle_pickle,
    tensor_bundle,
)
from lockstep.weights.formats.account import Part
from lockstep.weights.formats.tensor_bundle import Bundle
from lockstep.weights.weights_choice import WeightsChoice
from tests.weights.formats.cases import (
    BASIC,
    MODERN,
    RESNET,
    Variables,
    assert_canonical,
    nest,
    state_of,
    zeros,
)

ONE = np.ones((), np.int64)
KERNEL = np.ones((1, 1, 8, 8), np.float32)


@dataclass(frozen=True)
class Case:
    """A format, and arrays that may be in its files next to those of a network."""

    write: Callable[..., Any]
    load: Callable[[Path], Variables]
    save: Callable[[Path, Variables], Any]
    read: Callable[..., Weights]
    leftover: Variables
    """Each of these may change the results."""
    known: dict[str, tuple[np.ndarray, str]]
    """Each of these has no effect, for a reason."""


def name_as_vision(tensors: Variables) -> Variables:
    """Return tensors as `paddle.vision.models.resnet50().state_dict()` names them."""
    named = {}
    for name, value in tensors.items():
        place = name.replace("running_mean", "_mean").replace("running_var", "_variance")
        named[place] = value.T if name == "fc.weight" else value
    return named


def read_bundle(prefix: Path) -> Variables:
    bundle = Bundle(prefix)
    return {name: bundle.read(name) for name in bundle.entries}


def save_tree(path: Path, variables: Variables) -> None:
    msgpack_tree.dump(path, nest(variables))


SCOPE = "resnet/conv2d"
CASES = {
    "tensorflow": Case(
        nvidia_tensorflow.write,
        read_bundle,
        tensor_bundle.write,
        nvidia_tensorflow.read,
        {
            "resnet/bn_head/gamma": zeros(256),
            "resnet/bn_head/moving_mean": zeros(256),
            "resnet/logits/kernel": zeros(10, 10),
            "resnet/act_quant/max": zeros(),
            "resnet/thresholds": np.ones(10, np.int32),
            "resnet/temperature": ONE,
            "resnet/aux/conv2d/kernel": KERNEL,
            f"{SCOPE}/conv2d/kernel/mask": zeros(7, 7, 3, 8),
            "resnet/other/kernel/Momentum": KERNEL,
            "resnet/loss_scale": zeros(10),
        },
        {
            "global_step": (ONE, "a counter"),
            "current_loss_scale": (ONE, "a counter"),
            "beta1_power_1": (zeros(), "a counter"),
            f"{SCOPE}/conv2d/kernel/Adam_1": (zeros(7, 7, 3, 8), "of the optimizer"),
            f"{SCOPE}/conv2d/kernel/LARSOptimizer": (zeros(7, 7, 3, 8), "of the optimizer"),
            f"{SCOPE}/BatchNorm/gamma/RMSProp": (zeros(8), "of the optimizer"),
            f"{SCOPE}/BatchNorm/moving_mean/local_step": (zeros(), "of the optimizer"),
            f"{SCOPE}/BatchNorm/gamma/ExponentialMovingAverage": (zeros(8), "a moving average"),
        },
    ),
    "paddle": Case(
        nvidia_paddle.write,
        lambda prefix: paddle_pickle.load(Path(f"{prefix}.pdparams")).arrays,
        lambda prefix, arrays: paddle_pickle.dump(Path(f"{prefix}.pdparams"), arrays),
        nvidia_paddle.read,
        {
            "batch_norm_20.w_0": zeros(256),
            "batch_norm1d_0.w_2": zeros(256),
            "linear_1.w_0": zeros(10, 10),
            "conv2d_20.w_0": KERNEL,
            "layer_norm_0.b_0": zeros(256),
            "create_parameter_0.w_0": ONE,
            "thresholds": np.ones(10, np.int64),
            "is_multi_label": np.ones(1, bool),
            "other_velocity_0": zeros(8),
            "learning_rate_1": zeros(10),
        },
        {
            "learning_rate_0": (zeros(1), "a counter"),
            "num_good_steps_4": (np.ones(1, np.int32), "a counter"),
            "@LR_DECAY_COUNTER@": (np.ones(1, np.int64), "a counter"),
            "conv2d_1.w_0_asp_mask": (zeros(8, 8, 1, 1), "of the optimizer"),
            "conv2d_1.w_0_velocity_0": (zeros(8, 8, 1, 1), "of the optimizer"),
            "conv2d_1.w_0_fp32_master_0_moment1_0": (zeros(8, 8, 1, 1), "of the optimizer"),
            "linear_0.b_0_beta2_pow_acc_0": (zeros(1), "of the optimizer"),
        },
    ),
    "flax": Case(
        flax_file.write_flax,
        flax_file.load,
        save_tree,
        flax_file.read,
        {
            "params/BatchNorm_0/scale": zeros(256),
            "batch_stats/BatchNorm_0/mean": zeros(256),
            "params/Dense_1/kernel": zeros(10, 10),
            "params/temperature": zeros(),
            "params/opt_state/kernel": zeros(8),
            "temperature": ONE,
            "cache/index": ONE,
            "thresholds": np.ones(10, np.int32),
            "is_multi_label": np.ones((), bool),
            "target_params/conv_init/kernel": zeros(7, 7, 3, 8),
            "keys/kernel": zeros(64, 8),
            "step": zeros(10),
        },
        {
            "step": (ONE, "a counter"),
            "epoch": (ONE, "a counter"),
            "opt_state/1/count": (ONE, "of the optimizer"),
            "opt_state/0/trace/conv_init/kernel": (zeros(7, 7, 3, 8), "of the optimizer"),
            "dynamic_scale/scale": (zeros(), "of the loss scale"),
            "dropout_rng": (np.ones(2, np.uint32), "a key of random numbers"),
            "ema_params/conv_init/kernel": (zeros(7, 7, 3, 8), "a moving average"),
            "ema/batch_stats/bn_init/mean": (zeros(8), "a moving average"),
        },
    ),
    "paddle.vision": Case(
        lambda path, recipe, state: paddle_pickle.dump(path, name_as_vision(state.tensors)),
        lambda path: paddle_pickle.load(path).arrays,
        paddle_pickle.dump,
        nvidia_paddle.read,
        {
            "bn_head.weight": zeros(256),
            "bn_head._mean": zeros(256),
            "fc2.weight": zeros(10, 10),
            "layer1.0.scale": zeros(),
            "se.fc1.weight": KERNEL,
            "num_classes": ONE,
        },
        {"epoch": (ONE, "a counter")},
    ),
}
NAMES = pytest.mark.parametrize("name", CASES)
LEFTOVER = [(name, array) for name, case in CASES.items() for array in case.leftover]


def recipe_of(spec: Any = RESNET, logits: int = 10) -> Recipe:
    return Recipe(model=spec, logits=logits, precision="fp32")


def open_case(
    name: str, folder: Path, added: Variables, *, logits: int = 10, **choice: Any
) -> Weights:
    """Return the weights of a network of a format, with these arrays added to its file."""
    case = CASES[name]
    recipe = recipe_of(logits=logits)
    state = replace(state_of(recipe), step=0, momentum={})
    written = folder / f"{len(list(folder.iterdir()))}.msgpack"
    case.write(written, recipe, state)
    changed = folder / f"changed-{written.name}"
    case.save(changed, case.load(written) | added)
    return case.read(changed, momentum=False, choice=WeightsChoice(**{"model": RESNET} | choice))


@pytest.mark.parametrize(("name", "array"), LEFTOVER)
def test_an_array_that_may_matter_refuses_the_file(name: str, array: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="tensors that Lockstep would ignore") as caught:
        open_case(name, tmp_path, {array: CASES[name].leftover[array]})
    assert f"--ignore '{array}'" in str(caught.value)


@NAMES
def test_the_user_can_leave_it_out(name: str, tmp_path: Path) -> None:
    leftover = CASES[name].leftover
    patterns = (*list(leftover)[1:], f"*{next(iter(leftover))[1:]}")
    weights = open_case(name, tmp_path, leftover, ignore=patterns)
    ignored = {part.name for part in weights.parts if part.treatment == "ignored"}
    assert ignored == leftover.keys()
    assert_canonical(weights.tensors, state_of(recipe_of()).tensors)


@NAMES
def test_what_has_no_effect_is_in_the_account(name: str, tmp_path: Path) -> None:
    known = CASES[name].known
    added = {array: value for array, (value, _) in known.items()}
    weights = open_case(name, tmp_path, added)
    expected = {Part(array, "without effect", reason) for array, (_, reason) in known.items()}
    assert expected <= set(weights.parts)
    assert_canonical(weights.tensors, state_of(recipe_of()).tensors)
    stored = {array.name: array.tensors for array in weights.stored}
    assert all(stored.values())
    assert stored.keys().isdisjoint(added)
    averages = [array for array, (_, reason) in known.items() if "average" in reason]
    for remark in weights.remarks:
        assert "moving averages" not in remark or averages[0] in remark
    assert any("were not used; the weights" in remark for remark in weights.remarks) == bool(
        averages
    )


@NAMES
def test_a_described_network_alone_is_looked_for(name: str, tmp_path: Path) -> None:
    assert open_case(name, tmp_path, {}).recipe.model == RESNET
    with pytest.raises(CheckpointError, match="closest model, the described model, does not fit:"):
        open_case(name, tmp_path, {}, model=replace(RESNET, layers=(2, 1, 2, 1)))
    with pytest.raises(CheckpointError, match="is not a complete ResNet"):
        open_case(name, tmp_path, {}, model="resnet50")
    with pytest.raises(CheckpointError, match="has no network the described model"):
        open_case(name, tmp_path, {}, model=MODERN)


def test_tensorflow_has_no_basic_blocks(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="has no network the described model"):
        open_case("tensorflow", tmp_path, {}, model=BASIC)


@NAMES
def test_one_output_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="has one output; expected at least 2"):
        open_case(name, tmp_path, {}, logits=1)


@NAMES
def test_a_classifier_of_other_size_than_its_bias_is_refused(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    recipe = recipe_of()
    written = tmp_path / "a.msgpack"
    case.write(written, recipe, replace(state_of(recipe), momentum={}))
    (bias,) = [place for place, value in case.load(written).items() if value.shape == (10,)]
    for size, shape in ((0, "0"), (9, "9")):
        with pytest.raises(CheckpointError, match=rf"expected (float32 )?\[256, {shape}\]"):
            open_case(name, tmp_path, {bias: zeros(size)})
