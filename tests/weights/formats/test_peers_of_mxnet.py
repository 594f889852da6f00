"""Lockstep reads files of MXNet's functions, and MXNet reads Lockstep's, with equal values and
logits.

MXNet runs in separate processes and in a separate environment.
"""

import json
import re
import struct
from pathlib import Path

import numpy as np
import pytest

import lockstep
from lockstep.models.architectures import MODELS
from lockstep.models.state import State
from lockstep.recipes import Recipe
from lockstep.recipes.from_nvidia import resnet50_mxnet_90ep
from lockstep.system.errors import CheckpointError
from lockstep.weights import Weights
from lockstep.weights.formats import mxnet_params, numbers, nvidia_mxnet
from lockstep.weights.formats.common import FOURTH_CHANNEL
from tests.edges import softmax
from tests.processes import mxnet_python
from tests.weights.formats.cases import RESNET, Variables, assert_stored
from tests.weights.formats.peer_cases import (
    assert_near,
    logits,
    run_peer,
    save_images,
    state_of_peers,
)
from tests.weights.small_models import compute_in_this_process

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("small_models")]
HALF = "22 variables, such as conv0_weight, are not float32 and were converted to it"


def recipe_of(model: str = "small") -> Recipe:
    return resnet50_mxnet_90ep().replace(model=model, logits=10, precision="fp32")


def state() -> State:
    return state_of_peers(recipe_of())


def check_logits(original: Weights, folder: Path, name: str) -> None:
    """Check that weights have the logits that MXNet has written."""
    actual = logits(original, np.load(folder / "images.npy"))
    assert_near(actual, np.load(folder / f"{name}-logits.npz")["logits"])


def mxnet(command: str, folder: Path) -> None:
    run_peer("with_mxnet.py", command, folder, python=mxnet_python())


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("theirs")
    save_images(folder, 4, 3, 64, 64)
    mxnet("save", folder)
    return folder


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a state of Lockstep's that MXNet has loaded."""
    folder = tmp_path_factory.mktemp("ours")
    save_images(folder, 4, 3, 64, 64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(MODELS, "small", RESNET)
        nvidia_mxnet.write(folder / "ours-0007.params", recipe_of(), state())
    mxnet("load", folder)
    return folder


OURS: Variables = {
    "a": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b": np.array([True, False]),
    "c": np.array([[[-1]]], np.int8),
    "ö": np.linspace(0, 1, 3, dtype=np.float16),
}


@pytest.fixture(scope="module")
def arrays(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("arrays")
    mxnet_params.dump(folder / "ours.params", OURS)
    values = struct.pack("<3i2f", 1, 0, 0, 1, 2) + struct.pack("<QQ", 1, 1) + b"x"
    head = struct.pack("<QQQ", 0x112, 0, 1)
    (folder / "first.params").write_bytes(head + struct.pack("<III", 2, 1, 2) + values)
    (folder / "V1.params").write_bytes(head + struct.pack("<Iiqq", 0xF993FAC8, 2, 1, 2) + values)
    mxnet("arrays", folder)
    return folder


def test_every_type_of_mxnets_arrays_is_read(arrays: Path) -> None:
    actual = mxnet_params.load(arrays / "theirs.params")
    assert len(actual) == 8
    assert_stored(actual, dict(np.load(arrays / "theirs.npz")))
    halves = mxnet_params.load(arrays / "bfloat16.params")["x"]
    assert np.array_equal(numbers(halves), actual["float32"])
    assert_stored(mxnet_params.load(arrays / "numpy.params"), {"x": actual["float32"]})
    assert mxnet_params.load(arrays / "empty.params") == {}


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("row_sparse", "is row_sparse"),
        ("csr", "is csr"),
        ("nameless", "it has 1 arrays and 0 names"),
    ],
)
def test_sparse_and_nameless_arrays_are_refused(name: str, reason: str, arrays: Path) -> None:
    with pytest.raises(CheckpointError, match=reason):
        mxnet_params.load(arrays / f"{name}.params")


def test_mxnet_loads_the_arrays_that_were_written(arrays: Path) -> None:
    assert_stored(dict(np.load(arrays / "loaded.npz")), OURS)


@pytest.mark.parametrize("version", ["first", "V1"])
def test_older_files_are_read_as_mxnet_does(version: str, arrays: Path) -> None:
    assert_stored(
        mxnet_params.load(arrays / f"{version}.params"), dict(np.load(arrays / f"{version}.npz"))
    )


def theirs_of(name: str) -> str:
    """Return the original's name of a tensor, independently of the code under test."""
    name = re.sub(
        r"^layer(\d)\.(\d)\.", lambda match: f"stage{match[1]}_unit{int(match[2]) + 1}_", name
    )
    for old, new in (("downsample.0", "conv1sc"), ("downsample.1", "sc")):
        name = name.replace(old, new)
    name = name.replace(".running_", ".moving_")
    if re.search(r"(bn\d|sc)\.", name) and "conv1sc" not in name:
        name = name.replace(".weight", ".gamma").replace(".bias", ".beta")
    return re.sub(r"^fc\.", "fc1.", re.sub(r"^(conv|bn)1\.", r"\g<1>0.", name)).replace(".", "_")


MODULES: dict[str, tuple[str, float, tuple[str, ...]]] = {
    "nchw": ("small", 1e-5, ()),
    "nhwc": ("small", 1e-5, ()),
    "half": ("small", 1e-5, (FOURTH_CHANNEL, HALF)),
    "epsilon": ("small", 2e-2, ()),
    "resnet50": ("resnet50", 1e-5, ()),
}


@pytest.mark.parametrize(
    ("name", "graph"),
    # Only the graph says what the batch norms of "epsilon" add.
    [
        *((name, True) for name in MODULES),
        *((name, False) for name in MODULES if name != "epsilon"),
    ],
)
def test_a_module_gives_its_logits(name: str, graph: bool, theirs: Path, tmp_path: Path) -> None:
    model, epsilon, remarks = MODULES[name]
    file = nvidia_mxnet.find(theirs / name)
    assert file == theirs / f"{name}-0090.params"
    stored = dict(np.load(theirs / f"{name}.npz"))
    if not graph:
        file = tmp_path / file.name
        file.symlink_to(theirs / file.name)
    original = nvidia_mxnet.read(file, momentum=False)
    alone = (
        f"there is no {name}-symbol.json: it is assumed that bottlenecks stride in their 3x3, and"
        " that batch norms add 1e-05"
    )
    assert original.recipe == recipe_of(model).replace(bn_epsilon=epsilon)
    assert original.remarks == (*(() if graph else (alone,)), *remarks)
    assert len(original.state.tensors) == len(stored)
    for tensor, value in original.state.tensors.items():
        expected = stored[theirs_of(tensor)]
        if name in ("nhwc", "half") and expected.ndim == 4:
            expected = expected.transpose(0, 3, 1, 2)
        assert np.array_equal(value, expected[:, :3] if tensor == "conv1.weight" else expected), (
            tensor
        )
    assert_near(
        logits(original, np.load(theirs / "images.npy")),
        np.load(theirs / f"{name}-logits.npz")["logits"],
    )


@pytest.mark.parametrize(("name", "model"), [("counted", "small"), ("resnet18_v1", "resnet18")])
@pytest.mark.parametrize("kind", ["export", "names", "paths"])
def test_a_gluon_network_gives_its_logits(kind: str, name: str, model: str, theirs: Path) -> None:
    file = theirs / (f"{name}-0003.params" if kind == "export" else f"{name}-{kind}.params")
    original = nvidia_mxnet.read(file, momentum=False)
    assert original.origin == ("NVIDIA MXNet" if name == "counted" else "Gluon")
    assert (original.recipe.model, original.recipe.logits) == (model, 10)
    assert len(original.remarks) == (0 if kind == "export" else 1)
    assert_near(
        logits(original, np.load(theirs / "images.npy")),
        np.load(theirs / f"{name}-logits.npz")["logits"],
    )


@pytest.mark.parametrize("kind", ["0003", "names", "paths"])
def test_the_model_zoos_resnet50_v1_gives_its_logits(kind: str, theirs: Path) -> None:
    original = nvidia_mxnet.read(theirs / f"resnet50_v1-{kind}.params", momentum=False)
    assert original.origin == "Gluon"
    assert (original.recipe.model, original.recipe.logits) == ("resnet50-v1", 10)
    assert "biases of convolutions were subtracted" in original.remarks[-1]
    assert_near(
        logits(original, np.load(theirs / "images.npy")),
        np.load(theirs / "resnet50_v1-logits.npz")["logits"],
    )


def test_a_certificate_names_the_folded_biases(
    theirs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MXNet computes the file too."""
    compute_in_this_process(monkeypatch)
    small = {"image_size": 64, "eval_resize": 72, "eval_crop": 64}
    model = lockstep.load(theirs / "resnet50_v1-names.params", preprocessing=small)
    record = model.save(tmp_path / "gluon.safetensors")["certificate"]
    assert (record["model"], record["holds"], record["top1_agreement"]) == ("resnet50-v1", True, 1)
    assert record["tensors_equal"] == record["tensors"]
    assert [change for change in record["changes"] if "biases of convolutions" in change]
    assert record["original"]["by"].startswith("MXNet 1.")
    assert record["original"]["top1_agreement"] == 1
    assert record["original"]["largest_difference"] < 1e-5


@pytest.mark.parametrize("loaded_by", ["module", "gluon"])
def test_mxnet_computes_the_same_from_our_files(loaded_by: str, ours: Path) -> None:
    arrays = dict(np.load(ours / "ours.npz"))
    for tensor, value in state().tensors.items():
        assert np.array_equal(arrays[theirs_of(tensor)], value), tensor
    original = nvidia_mxnet.read(ours / "ours-0007.params")
    assert_near(arrays[loaded_by], softmax(logits(original, np.load(ours / "images.npy"))))


def test_the_graph_that_was_written_is_the_originals(ours: Path) -> None:
    """MXNet writes both. Attributes of variables and attributes with default values are not
    compared."""
    both = [json.loads(text)["nodes"] for text in np.load(ours / "ours.npz")["nodes"]]
    written, originals = (
        {
            node["name"]: (
                node["op"],
                [nodes[i]["name"] for i, *_ in node["inputs"]],
                (
                    {}
                    if node["op"] == "null"
                    else {**node.get("attrs", {}), "num_group": "1", "workspace": "256"}
                ),
            )
            for node in nodes
        }
        for nodes in both
    )
    assert len(written) > 150
    assert [node["op"] for node in both[0]] == [node["op"] for node in both[1]]
    assert {re.sub(r"^(_plus|flatten|pooling)\d+$", r"\1", name) for name in written} == {
        re.sub(r"^(_plus|flatten|pooling)\d+$", r"\1", name) for name in originals
    }
    for name in written.keys() & originals.keys():
        # Its inputs are named by MXNet's counters.
        if not re.match(r"stage\d_unit\d_relu3|pool1", name):
            assert written[name] == originals[name], name


def test_mxnet_goes_on_training_from_what_was_written(ours: Path) -> None:
    """The gradient of the classifier's bias is known: probabilities minus labels."""
    arrays = np.load(ours / "ours.npz")
    after = np.load(ours / "ours-after.npz")
    gradient = (after["probabilities"] - np.eye(4, 10)).mean(axis=0)
    assert np.abs(gradient).max() > 1e-2
    assert np.allclose(
        after["bias"], state().tensors["fc.bias"] - 0.1 * gradient, rtol=1e-5, atol=1e-6
    )
    assert not np.array_equal(after["mean"], arrays["bn0_moving_mean"])
