"""`evaluate` runs exported programs as they are deployed, on whole photos."""

import importlib.util
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lockstep
from lockstep.data.index import open_index
from lockstep.inference import evaluation
from lockstep.inference.evaluation import group_photos
from lockstep.inference.images import read_photo
from lockstep.inference.programs import FILE
from lockstep.recipes import Recipe
from lockstep.system.errors import CheckpointError
from tests.inference.cases import CLASSES, image_file

TARGETS = [
    *("torchscript", "torch-export", "savedmodel", "frozen-graph", "paddle-inference", "triton"),
    "openvino",
]
SIZES = ((32, 32), (97, 61), (97, 61), (120, 200), (33, 50))


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An image folder with photos of several sizes in each class."""
    folder = tmp_path_factory.mktemp("photos")
    for number, name in enumerate(CLASSES):
        (folder / name).mkdir()
        for height, width in SIZES[: 1 + number % len(SIZES)]:
            image_file(folder / name, height + number, width)
    return folder


@pytest.fixture(scope="module")
def expected(weights: Path, photos: Path) -> dict[str, Any]:
    """What the weights' own evaluation returns."""
    return lockstep.load(weights).evaluate(photos).to_json()


@pytest.mark.parametrize("target", TARGETS)
def test_a_program_is_evaluated_on_whole_photos_as_its_weights_are(
    target: str, weights: Path, photos: Path, expected: dict[str, Any], tmp_path: Path
) -> None:
    if importlib.util.find_spec("openvino") is None and target == "openvino":
        pytest.skip("openvino is not installed")
    lockstep.load(weights).export(tmp_path / "model", to=target, compare=False)
    result = lockstep.load(tmp_path / "model").on("program", batch=2).evaluate(photos).to_json()
    assert result["runtime"].startswith(f"{target} (")
    assert result["images"] == expected["images"]
    assert result["top1_percent"] == expected["top1_percent"]
    assert result["loss"] == pytest.approx(expected["loss"], rel=1e-3)
    assert result["per_class"] == expected["per_class"]


def test_a_program_of_squares_gets_squares(
    weights: Path, photos: Path, expected: dict[str, Any], tmp_path: Path
) -> None:
    lockstep.load(weights).export(tmp_path / "model", to="triton", bare=True, compare=False)
    result = lockstep.load(tmp_path / "model").on(batch=4).evaluate(photos).to_json()
    assert result["loss"] == pytest.approx(expected["loss"], rel=1e-4)


@pytest.fixture
def described(weights: Path, tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes an export and changes its description."""

    def describe(**changes: Any) -> Path:
        folder = tmp_path / "model"
        lockstep.load(weights).export(folder, to="triton", compare=False)
        description = json.loads((folder / FILE).read_text())
        (folder / FILE).write_text(json.dumps(description | changes))
        return folder

    return describe


def test_code_is_loaded_on_request_alone(described: Callable[..., Path], photos: Path) -> None:
    """PyTorch's loader unpickles. That it was called shows in its complaint about this file."""
    folder = described(target="torch-export")
    (folder / "model.pt2").write_bytes(b"not a program")
    with pytest.raises(CheckpointError, match=r"--runtime program, if you trust"):
        lockstep.load(folder).evaluate(photos).to_json()
    with pytest.raises(CheckpointError, match="onnx"):
        list(lockstep.load(folder).predict(photos / "dots"))
    with pytest.raises(CheckpointError, match=r"torch-export \(torch .*\) cannot run .*model"):
        lockstep.load(folder).on("program").evaluate(photos).to_json()


def test_by_default_the_weights_in_a_frozen_graph_are_read(
    weights: Path, photos: Path, expected: dict[str, Any], tmp_path: Path
) -> None:
    lockstep.load(weights).export(tmp_path / "model", to="frozen-graph", compare=False)
    result = lockstep.load(tmp_path / "model").evaluate(photos).to_json()
    assert (result["runtime"], result["per_class"]) == ("native", expected["per_class"])
    assert [
        remark for remark in result["remarks"] if "--runtime program runs its program" in remark
    ]


def test_a_pipe_in_a_program_is_not_opened(described: Callable[..., Path], photos: Path) -> None:
    folder = described()
    os.mkfifo(folder / "more")
    with pytest.raises(CheckpointError, match=r"more cannot be read: it is a pipe"):
        lockstep.load(folder).evaluate(photos).to_json()


@pytest.mark.parametrize(
    "changes",
    [
        {"target": "coreml"},
        {"takes": "anything"},
        {"batch": -1},
        {"preprocessing": {}},
        {"logits": "many"},
        {"logits": 9},
        {"validation_share": 2},
    ],
    ids=str,
)
def test_a_description_that_was_changed_is_refused(
    changes: dict[str, Any], described: Callable[..., Path], photos: Path
) -> None:
    with pytest.raises(CheckpointError, match=r"export\.json"):
        lockstep.load(described(**changes)).evaluate(photos).to_json()


def test_wrong_numbers_of_logits_are_errors(described: Callable[..., Path], photos: Path) -> None:
    with pytest.raises(CheckpointError, match=r"\[\d, 10\], expected \[\d, 12\]"):
        lockstep.load(described(logits=12)).evaluate(photos).to_json()


def test_photos_of_a_batch_are_bounded_by_their_pixels() -> None:
    sizes = np.array([[4000, 2000]] * 5 + [[9000, 9000]] * 2)
    assert [len(group) for group in group_photos(sizes, 4)] == [2, 2, 1, 1, 1]


def test_photos_of_different_sizes_are_decoded_at_the_same_time(
    photos: Path, tiny_recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    together = threading.Barrier(2, timeout=60)

    def read(data: bytes, recipe: Recipe) -> np.ndarray:
        together.wait()  # until another thread reads too
        return read_photo(data, recipe)

    monkeypatch.setattr(evaluation, "read_photo", read)
    index = open_index(photos)
    groups = [np.array([place]) for place in range(len(index) // 2 * 2)]
    batches = list(evaluation.load_photos(index, tiny_recipe, groups, threads=2))
    sizes = index.sizes_for(tiny_recipe)[:]
    assert [batch.pixels.shape[1:3] for batch in batches] == [
        tuple(sizes[group[0]]) for group in groups
    ]
