"""Networks of MXNet with an operator more: computed as MXNet computes them, or refused by name.

MXNet runs in a separate process and in a separate environment.
"""

from pathlib import Path

import numpy as np
import pytest

from lockstep.system.errors import CheckpointError
from lockstep.weights import Weights
from lockstep.weights.formats.nvidia_mxnet import read
from tests.edges import Place, is_same_answer
from tests.processes import ROOT, mxnet_python
from tests.weights.formats.insertions_mxnet import CASES, HEAD, HEADS, PREFIX
from tests.weights.formats.peer_cases import logits, run_peer, save_images

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("small_models")]

ABOUT = (
    *("has one output", "name only the best classes", "it returns several results"),
    *(
        "follows the probability",
        "follows the probabilities",
        "follows the logarithms of probabilities",
    ),
)
"""What is said of outputs, or of what follows a softmax, in place of its name."""
FOLDED = (
    *("before the stem: broadcast_sub", "before the stem: reverse"),
    *("before the classifier: BatchNorm", "before the classifier: FullyConnected"),
    *("after it: take", "after it: slice_axis", "after it: broadcast_add", "after it: x / number"),
    *("after it: softmax with a temperature", "after it: one sigmoid"),
    "after it: one sigmoid, reshaped",
    *("before the stem: NHWC", "before the stem: NHWC with a mean"),
)


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("theirs")
    save_images(folder, 2, 3, 64, 64)
    np.save(folder / "photos.npy", np.random.default_rng(2).integers(0, 256, (2, 64, 64, 3)))
    run_peer("with_mxnet.py", "edges", folder, python=mxnet_python(), PYTHONPATH=str(ROOT))
    return folder


def read_or_explain(file: Path) -> Weights | str:
    try:
        return read(file, momentum=False)
    except CheckpointError as error:
        return str(error)


def compute_as_read(weights: Weights, images: np.ndarray) -> np.ndarray:
    """Return the logits of what was read, for images as the file takes them."""
    if "mean" in weights.stated:
        is_unit = any("images from 0 to 1" in remark for remark in weights.remarks)
        mean, std = (
            np.array(colour).reshape(3, 1, 1)
            for colour in (weights.recipe.mean, weights.recipe.std)
        )
        images = ((images * (255 if is_unit else 1) - mean) / std).astype(np.float32)
    return logits(weights, images)


@pytest.mark.parametrize(
    ("number", "place", "name"),
    [(number, place, name) for number, (place, name, _) in enumerate(CASES)],
    ids=[f"{place}: {name}" for place, name, _ in CASES],
)
def test_operators_are_known_or_named(number: int, place: Place, name: str, theirs: Path) -> None:
    weights = read_or_explain(theirs / f"case{number}-0000.params")
    if isinstance(weights, str):
        assert f"{place}: {name}" not in FOLDED
        assert any(text in weights for text in (PREFIX, *ABOUT))
        return
    expected = np.load(theirs / "edges.npz")[str(number)]
    assert is_same_answer(expected, compute_as_read(weights, np.load(theirs / "images.npy")))


@pytest.mark.parametrize(("number", "name"), list(enumerate(HEADS)))
def test_layers_after_the_pool_are_computed_or_named(number: int, name: str, theirs: Path) -> None:
    weights = read_or_explain(theirs / f"head{number}-0003.params")
    if isinstance(weights, str):
        assert name not in ("Dense", "Dropout, Dense", "BatchNorm, Dense", "Dense, Dense")
        assert any(text in weights for text in (HEAD, *ABOUT))
        return
    expected = np.load(theirs / f"head{number}-logits.npz")["logits"]
    assert is_same_answer(expected, compute_as_read(weights, np.load(theirs / "images.npy")))


@pytest.mark.parametrize(
    ("number", "name"),
    [
        (number, name)
        for number, name in enumerate(HEADS)
        if name.count("Dense") > 1 or "Norm" in name
    ],
)
def test_without_a_graph_other_layers_are_refused(number: int, name: str, theirs: Path) -> None:
    for kind in ("names", "paths"):
        with pytest.raises(CheckpointError, match=f"{HEAD}|output"):
            read(theirs / f"head{number}-{kind}.params", momentum=False)


def test_the_preprocessing_that_gluon_exports_is_read(theirs: Path) -> None:
    weights = read(theirs / "prepared-0003.params", momentum=False)
    assert weights.stated == {"mean", "std"}
    assert np.allclose(weights.recipe.mean, 255 * np.array([0.5, 0.4, 0.3]))
    photos = np.load(theirs / "photos.npy").transpose(0, 3, 1, 2)
    expected = np.load(theirs / "prepared-logits.npz")["logits"]
    assert is_same_answer(expected, compute_as_read(weights, photos))
