"""Lockstep reads files of Paddle's functions, and Paddle reads Lockstep's, with equal values and
logits.

Paddle runs in separate processes, once with the programs of Paddle 3 and once with those of Paddle
2.
"""

import re
from pathlib import Path

import numpy as np
import pytest

from lockstep.models.architectures import MODELS
from lockstep.models.state import State
from lockstep.recipes import Recipe
from lockstep.recipes.from_nvidia import resnet50_paddle_90ep
from lockstep.weights import Weights
from lockstep.weights.formats import nvidia_paddle
from lockstep.weights.formats.common import FOURTH_CHANNEL
from tests.weights.formats.cases import RESNET
from tests.weights.formats.peer_cases import (
    assert_near,
    logits,
    run_peer,
    save_images,
    state_of_peers,
)

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("small_models")]
IN_FP16 = pytest.mark.parametrize("programs", ["old"], indirect=True)
"""Runs a test only with Paddle 2's programs, since Paddle 3's do not support fp16 on a CPU."""
EPOCH = "no step is stored; its folder names epoch 7, counted from 0"


def recipe_of(model: str = "small") -> Recipe:
    return resnet50_paddle_90ep().replace(model=model, logits=10, precision="fp32")


def state() -> State:
    return state_of_peers(recipe_of())


def paddle(command: str, folder: Path, programs: str) -> None:
    flags = {"GLOG_minloglevel": "2", "FLAGS_enable_pir_api": str(int(programs == "new"))}
    run_peer("with_paddle.py", command, folder, **flags)


@pytest.fixture(scope="module", params=["old", "new"])
def programs(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def layers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_files("layers", tmp_path_factory.mktemp("layers"), "new")


@pytest.fixture(scope="module")
def theirs(programs: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_files("programs", tmp_path_factory.mktemp("programs"), programs)


def make_files(what: str, folder: Path, programs: str) -> Path:
    save_images(folder, 4, 64, 64, 3)
    paddle(what, folder, programs)
    return folder


@pytest.fixture(scope="module")
def ours(theirs: Path, programs: str) -> Path:
    """The folder with a state of Lockstep's that Paddle has loaded."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(MODELS, "small", RESNET)
        nvidia_paddle.write(theirs / "ours" / "resnet_50_paddle", recipe_of(), state())
        nvidia_paddle.write(
            theirs / "pretrained" / "any", recipe_of(), State(0, state().tensors, {})
        )
    paddle("load", theirs, programs)
    return theirs


def layer_of(name: str) -> str:
    """Return the original's name of a layer's tensor, independently of the code under test."""
    first = {"1": 0, "2": 2, "3": 3, "4": 4}
    name = name.replace("running_mean", "_mean").replace("running_var", "_variance")
    name = re.sub(r"^conv1\.", "stem.0.conv.", re.sub(r"^bn1\.", "stem.0.bn.", name))
    name = re.sub(
        r"^layer(\d)\.(\d)", lambda match: f"blocks.{first[match[1]] + int(match[2])}", name
    )
    name = re.sub(r"\.(conv|bn)(\d)\.", lambda match: f".conv{int(match[2]) - 1}.{match[1]}.", name)
    return name.replace("downsample.0", "short.conv").replace("downsample.1", "short.bn")


def theirs_as_ours(name: str, value: np.ndarray) -> np.ndarray:
    return value[:, :3] if name == "conv1.weight" else value.T if name == "fc.weight" else value


def assert_values(
    actual: dict[str, np.ndarray], stored: dict[str, np.ndarray], ending: str = ""
) -> None:
    assert actual
    for name, value in actual.items():
        layer = layer_of(name)
        expected = stored.get(f"{layer}_fp32_master_0{ending}", stored.get(f"{layer}{ending}"))
        assert expected is not None, layer
        assert np.array_equal(value, theirs_as_ours(name, expected)), name


def check_logits(original: Weights, folder: Path, name: str) -> None:
    """Check that weights have the logits that Paddle has written."""
    actual = logits(original, np.load(folder / "images.npy").transpose(0, 3, 1, 2))
    assert_near(actual, np.load(folder / name)["logits"], 1e-4)


def open_file(folder: Path, name: str) -> Weights:
    prefix = nvidia_paddle.find(folder / name)
    assert prefix == folder / name / "ResNet50" / "7" / "resnet_50_paddle"
    return nvidia_paddle.read(prefix)


@pytest.mark.parametrize("name", ["static", "protocol2"])
def test_a_checkpoint_gives_values_velocities_and_logits(name: str, theirs: Path) -> None:
    original = open_file(theirs, name)
    stored = dict(np.load(theirs / f"{name}.npz"))
    assert (original.recipe, original.remarks) == (recipe_of(), (EPOCH, FOURTH_CHANNEL))
    assert_values(original.state.tensors, stored)
    assert_values(original.state.momentum, stored, "_velocity_0")
    assert len(original.state.momentum) == 62
    check_logits(original, theirs, "static-logits.npz")


@IN_FP16
def test_a_scaled_loss_changes_nothing(theirs: Path) -> None:
    original = open_file(theirs, "amp")
    stored = dict(np.load(theirs / "amp.npz"))
    assert original.remarks == (EPOCH, FOURTH_CHANNEL)
    assert_values(original.state.tensors, stored)
    assert_values(original.state.momentum, stored, "_velocity_0")


@IN_FP16
def test_of_a_program_in_fp16_the_masters_are_read(theirs: Path) -> None:
    original = open_file(theirs, "half")
    stored = dict(np.load(theirs / "half.npz"))
    assert stored["stem.0.conv.weight"].dtype == np.float16
    assert_values(original.state.tensors, stored)
    assert_values(original.state.momentum, stored, "_velocity_0")
    assert original.remarks == (
        EPOCH,
        (
            "22 weights are the float32 copies that the optimizer keeps, such as"
            " conv2d_0.w_0_fp32_master_0"
        ),
    )


@pytest.mark.parametrize(
    ("name", "model"),
    [("layers", "small"), ("resnet18", "resnet18"), ("resnet50", "resnet50")],
    ids=lambda name: str(name),
)
def test_layers_that_paddle_saved_give_their_logits(name: str, model: str, layers: Path) -> None:
    original = nvidia_paddle.read(layers / name, momentum=False)
    assert original.recipe == recipe_of(model)
    assert original.remarks == ()
    check_logits(original, layers, f"{name}-logits.npz")


def test_paddles_own_models_count_shortcuts_first(theirs: Path) -> None:
    original = open_file(theirs, "vision")
    assert (original.recipe.model, original.remarks) == ("resnet18", (EPOCH,))
    assert len(original.state.momentum) == 62
    check_logits(original, theirs, "vision-logits.npz")


def test_velocities_of_layers_are_those_of_their_parameters(layers: Path) -> None:
    """After one step from velocities of 0, the velocity is the gradient."""
    momentum = nvidia_paddle.read(layers / "trained").state.momentum
    stored = np.load(layers / "trained.npz")
    assert np.array_equal(momentum["fc.weight"], stored["fc"].T)
    assert np.array_equal(momentum["conv1.weight"], stored["stem"])


def test_paddle_loads_what_was_written_and_computes_the_same_logits(ours: Path) -> None:
    written = nvidia_paddle.read(ours / "ours" / "resnet_50_paddle")
    assert_values(state().tensors, dict(np.load(ours / "ours.npz")))
    assert_values(state().momentum, dict(np.load(ours / "ours.npz")), "_velocity_0")
    check_logits(written, ours, "ours-logits.npz")
    check_logits(written, ours, "ours-pretrained-logits.npz")


def test_paddle_goes_on_training_from_what_was_written(ours: Path) -> None:
    """The gradient of the classifier's bias is known: the loss is the mean of ten logits."""
    after = np.load(ours / "ours-after.npz")
    bias = 0.9 * state().momentum["fc.bias"] + 0.1 + 1e-4 * state().tensors["fc.bias"]
    assert np.allclose(after["fc.bias_velocity_0"], bias, rtol=1e-5, atol=1e-6)
    assert np.allclose(
        after["fc.bias"], state().tensors["fc.bias"] - 0.1 * bias, rtol=1e-5, atol=1e-6
    )


@IN_FP16
def test_a_program_with_a_scaled_loss_finds_all_it_looks_for(ours: Path) -> None:
    arrays = np.load(ours / "ours-amp.npz")
    assert arrays["loss_scaling_0"] == 128
    assert arrays["num_good_steps_0"] == arrays["num_bad_steps_0"] == 0
    assert np.array_equal(
        arrays["conv2d_1.w_0_velocity_0"], state().momentum["layer1.0.conv1.weight"]
    )
