"""Lockstep reads checkpoints of TensorFlow's Saver, and TensorFlow reads Lockstep's, with equal
values and logits.

TensorFlow runs in separate processes.
"""

from pathlib import Path

import numpy as np
import pytest

from lockstep.backends.reference.model import Network
from lockstep.recipes.from_nvidia import resnet50_tensorflow_90ep
from lockstep.system.errors import CheckpointError
from lockstep.weights import Weights
from lockstep.weights.formats import nvidia_tensorflow, tensor_bundle, tensorflow_weights
from lockstep.weights.formats.tensor_bundle import Bundle
from tests.weights.formats.cases import EVALUATION, RESNET, RESNEXT, assert_canonical
from tests.weights.formats.peer_cases import run_peer, save_images

pytestmark = pytest.mark.slow
NAMES = ("resnet", "resnext")


def tensorflow(command: str, folder: Path) -> None:
    run_peer("with_tensorflow.py", command, folder, TF_CPP_MIN_LOG_LEVEL="3")


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("peers")
    # TensorFlow does not create this folder.
    for name in ("sharded", "types", "partitioned", "many"):
        (folder / name).mkdir()
    save_images(folder, 4, 64, 64, 3)
    tensorflow("make", folder)
    return folder


@pytest.fixture(scope="module")
def ours(theirs: Path) -> Path:
    """The folder after Lockstep has read and written its checkpoints and TensorFlow has read them
    again."""
    for name in NAMES:
        original = open_file(theirs, name)
        nvidia_tensorflow.write(theirs / "ours" / name, original.recipe, original.state)
    tensor_bundle.write(theirs / "ours" / "types", types())
    tensor_bundle.write(theirs / "ours" / "many", many())
    tensorflow("restore", theirs)
    return theirs


def open_file(folder: Path, name: str) -> Weights:
    prefix = tensor_bundle.find(folder / name)
    assert prefix == folder / name / "model.ckpt-2"
    return nvidia_tensorflow.read(prefix)


def types() -> dict[str, np.ndarray]:
    numbers = np.random.default_rng(1).standard_normal((2, 3, 4)) * 100
    values = {
        f"as/{kind}": numbers.astype(kind)
        for kind in ("float16", "float32", "float64", "int32", "int64")
    }
    odd = {
        "zero": np.float32(-0.0),
        "nan": np.array([np.nan, np.inf], np.float32),
        "empty": np.zeros((0, 2), np.float32),
    }
    return (
        values
        | odd
        | {"transposed": numbers.astype(np.float32).T, "big endian": numbers.astype(">f4")}
    )  # type: ignore[return-value]


def many() -> dict[str, np.ndarray]:
    return {f"a/{i % 7}/{'long' * 50}/{i}": np.array(i, np.float32) for i in range(1500)}


def logits(original: Weights, folder: Path) -> np.ndarray:
    tensors = {name: value.astype(np.float64) for name, value in original.state.tensors.items()}
    images = np.load(folder / "images.npy").astype(np.float64)
    return Network(original.recipe, tensors, training=False).logits(images)[0]


@pytest.mark.parametrize(("name", "spec"), [("resnet", RESNET), ("resnext", RESNEXT)])
def test_a_checkpoint_gives_the_logits_of_its_graph(name: str, spec: object, theirs: Path) -> None:
    original = open_file(theirs, name)
    assert original.recipe == resnet50_tensorflow_90ep().replace(
        model=spec, logits=1001, precision="fp32"
    )
    assert original.state.step == 2
    actual = logits(original, theirs)
    expected = np.load(theirs / f"{name}-logits.npz")["logits"]
    assert np.abs(expected).max() > 10
    assert np.abs(actual - expected).max() < 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("export", ["frozen graph", "SavedModel"])
def test_exports_hold_the_weights_of_the_checkpoint(name: str, export: str, theirs: Path) -> None:
    path = tensorflow_weights.find(
        theirs / (f"{name}.pb" if export == "frozen graph" else f"{name}-saved")
    )
    assert path is not None
    original = tensorflow_weights.read(path)
    expected = open_file(theirs, name)
    recipe = original.recipe.replace(**EVALUATION)  # theirs is for images of 40 pixels
    assert (original.origin, recipe) == (expected.origin, expected.recipe)
    assert_canonical(original.state.tensors, expected.state.tensors)
    reason = (
        "the graph does not normalise its images, so the mean and std of NVIDIA's recipe are used"
    )
    assert original.remarks == ((reason,) if export == "frozen graph" else ())


@pytest.mark.parametrize("name", NAMES)
def test_velocities_are_the_accumulators_of_the_variables(name: str, theirs: Path) -> None:
    state = open_file(theirs, name).state
    stored = np.load(theirs / f"{name}.npz")
    scope = {"resnet": "resnet50", "resnext": "resnext101-32x4d"}[name]
    kernel = stored[f"{scope}/btlnck_block_1_0/shortcut/conv2d/conv2d/kernel/Momentum"]
    assert state.momentum["layer2.0.downsample.0.weight"][5, 3, 0, 0] == kernel[0, 0, 3, 5] != 0
    head = stored[f"{scope}/output/dense/kernel/Momentum"].reshape(-1, 1001)
    assert np.array_equal(state.momentum["fc.weight"], head.T)
    gamma = stored[f"{scope}/btlnck_block_3_0/bottleneck_2/BatchNorm/gamma/Momentum"]
    assert np.array_equal(state.momentum["layer4.0.bn2.weight"], gamma)
    assert len(state.momentum) == len([key for key in stored if key.endswith("/Momentum")])


@pytest.mark.parametrize("name", NAMES)
def test_tensorflow_computes_the_same_logits_from_our_files(name: str, ours: Path) -> None:
    expected = np.load(ours / f"{name}-logits.npz")["logits"]
    actual = np.load(ours / f"ours-{name}-logits.npz")["logits"]
    assert np.abs(actual - expected).max() <= 1e-6 * np.abs(expected).max()


@pytest.mark.parametrize("name", NAMES)
def test_variables_survive_reading_and_writing_bit_for_bit(name: str, ours: Path) -> None:
    first = np.load(ours / f"{name}.npz")
    again = np.load(ours / f"ours-{name}.npz")
    scope = {"resnet": "resnet50", "resnext": "resnext101-32x4d"}[name]
    renamed = {key.replace(scope, "resnet", 1): key for key in first}
    assert set(again) == set(renamed)
    for key in again:
        assert again[key].dtype == first[renamed[key]].dtype
        assert again[key].tobytes() == first[renamed[key]].tobytes()


def test_tensorflow_finds_the_newest_of_the_folder(ours: Path) -> None:
    assert (ours / "newest.txt").read_text() == str(ours / "ours" / "resnet")


@pytest.mark.parametrize("name", ["types", "many"])
def test_tensorflow_reads_every_tensor_that_was_written(name: str, ours: Path) -> None:
    expected = {"types": types, "many": many}[name]()
    arrays = np.load(ours / f"ours-{name}.npz")
    assert set(arrays) == set(expected)
    for key, value in expected.items():
        assert arrays[key].dtype == value.dtype.newbyteorder("=")
        assert arrays[key].shape == value.shape
        assert arrays[key].tobytes() == np.asarray(value, value.dtype.newbyteorder("=")).tobytes()


def test_all_types_and_shapes_of_tensorflow_are_read(theirs: Path) -> None:
    bundle = Bundle(theirs / "types" / "types")
    expected = np.load(theirs / "types.npz")
    for name in expected:
        array = bundle.read("types/bfloat16" if name == "bfloat16" else name)
        assert (array.dtype, array.shape) == (expected[name].dtype, expected[name].shape)
        assert np.array_equal(array, expected[name])
    assert len(bundle.entries) == len(expected.files) + 2


@pytest.mark.parametrize("kind", ["bool", "string"])
def test_types_that_no_weights_have_are_refused(kind: str, theirs: Path) -> None:
    with pytest.raises(CheckpointError, match=f"types/{kind} is of type {kind}"):
        Bundle(theirs / "types" / "types").read(f"types/{kind}")


def test_of_several_data_files_a_missing_one_is_named(theirs: Path, tmp_path: Path) -> None:
    for file in (theirs / "sharded").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    bundle = Bundle(tmp_path / "sharded")
    for i in range(6):
        assert bundle.read(f"v{i}").tolist() == [[float(i)] * (i + 1)] * 5
    (tmp_path / "sharded.data-00001-of-00003").unlink()
    bundle = Bundle(tmp_path / "sharded")
    assert bundle.read("v0").shape == (5, 1)
    with pytest.raises(CheckpointError, match=r"sharded\.data-00001-of-00003.*No such"):
        bundle.read("v1")


def test_a_partitioned_variable_is_refused_and_whole_ones_beside_it_are_read(theirs: Path) -> None:
    bundle = Bundle(theirs / "partitioned" / "partitioned")
    assert set(bundle.entries) == {"parts", "whole"}
    assert bundle.read("whole").tolist() == [1, 1]
    with pytest.raises(CheckpointError, match="parts is partitioned into 2 slices"):
        bundle.read("parts")


def test_an_index_of_several_blocks_is_read(theirs: Path) -> None:
    bundle = Bundle(theirs / "many" / "many")
    assert len(bundle.entries) == 1500
    assert all(bundle.read(name) == int(name.rpartition("/")[2]) for name in bundle.entries)
