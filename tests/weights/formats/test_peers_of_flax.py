"""Lockstep reads files of Flax's functions, and Flax reads Lockstep's, with equal values and
logits. The tests run where Flax is installed: `pip install flax`.
"""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from lockstep import backends
from lockstep.models.architectures import MODELS
from lockstep.weights import Weights, open_weights
from lockstep.weights.formats import flax_file
from tests.weights.formats.cases import BASIC, RESNET
from tests.weights.formats.peer_cases import assert_near, run_peer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("small_models"),
    pytest.mark.skipif(importlib.util.find_spec("flax") is None, reason="Flax is not installed"),
]
SIZE = 64
"""An even size, for which SAME and symmetric padding of the stem differ."""


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("flax")
    images = np.random.default_rng(5).standard_normal((4, SIZE, SIZE, 3)).astype(np.float32)
    np.save(folder / "images.npy", images)
    run_peer("with_flax.py", "save", folder, JAX_PLATFORMS="cpu")
    return folder


@pytest.fixture(scope="module")
def ours(theirs: Path) -> Path:
    """The folder with files of Lockstep's that Flax has loaded."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(MODELS, "small", RESNET)
        source = open_weights(theirs / "small.msgpack")
        for ending in ("msgpack", "npz", "safetensors"):
            flax_file.write_flax(theirs / f"ours.{ending}", source.recipe, source.state)
    run_peer("with_flax.py", "load", theirs, JAX_PLATFORMS="cpu")
    return theirs


def compute_logits(weights: Weights, folder: Path) -> np.ndarray:
    images = np.load(folder / "images.npy").transpose(0, 3, 1, 2)
    module = backends.load("reference").load_module(weights.recipe, weights.tensors)
    return np.asarray(module(images.astype(np.float64)))


@pytest.mark.parametrize("ending", ["msgpack", "npz", "safetensors"])
@pytest.mark.parametrize(("model", "spec"), [("small", RESNET), ("basic", BASIC)])
def test_files_of_flax_give_its_logits(model: str, spec: object, ending: str, theirs: Path) -> None:
    weights = open_weights(theirs / f"{model}.{ending}")
    assert (weights.origin, weights.recipe.model, weights.recipe.padding) == ("Flax", model, "flax")
    assert weights.recipe.logits == 10
    assert_near(compute_logits(weights, theirs), np.load(theirs / f"{model}-logits.npy"))


@pytest.mark.parametrize("ending", ["msgpack", "npz", "safetensors"])
def test_bfloat16_gives_logits_within_its_rounding(ending: str, theirs: Path) -> None:
    weights = open_weights(theirs / f"small-bf16.{ending}")
    assert any("not float32" in remark for remark in weights.remarks)
    assert_near(compute_logits(weights, theirs), np.load(theirs / "small-logits.npy"), 0.05)


def test_a_training_has_its_step_and_velocities(theirs: Path) -> None:
    weights = open_weights(theirs / "checkpoint_1", momentum=True)
    assert weights.state.step == 1
    for file, values in (("gradients", weights.state.momentum), ("trained", weights.tensors)):
        stored = np.load(theirs / f"{file}.npz")
        for name, path in (
            ("layer1.1.conv2.weight", "BottleneckResNetBlock_1/Conv_1/kernel"),
            ("layer2.0.downsample.0.weight", "BottleneckResNetBlock_2/conv_proj/kernel"),
        ):
            assert np.array_equal(values[name], stored[path].transpose(3, 2, 0, 1))
        assert np.array_equal(values["fc.weight"], stored["Dense_0/kernel"].T)
        assert np.array_equal(values["bn1.bias"], stored["bn_init/bias"])


def test_flax_loads_what_was_written_and_computes_the_same_logits(ours: Path) -> None:
    expected = np.load(ours / "small-logits.npy")
    for ending in ("msgpack", "npz", "safetensors"):
        assert np.array_equal(np.load(ours / f"ours-{ending}-logits.npy"), expected)


def test_a_file_of_flax_has_the_same_bytes(ours: Path) -> None:
    assert (ours / "ours.msgpack").read_bytes() == (ours / "small-in-order.msgpack").read_bytes()
