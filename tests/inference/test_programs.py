"""`evaluate` runs exported programs as they are deployed, in their own runtimes, on whole photos."""

import importlib.util
import json
from pathlib import Path

import pytest

import lockstep
from lockstep.inference.programs import FILE
from lockstep.recipes import Recipe
from lockstep.system.errors import CheckpointError
from tests.inference.cases import CLASSES, MEAN, STD, image_file, saved

TARGETS = ["torchscript", "torch-export", "savedmodel", "frozen-graph", "paddle-inference", "triton", "openvino"]
SIZES = ((32, 32), (97, 61), (97, 61), (120, 200), (33, 50))


@pytest.fixture(scope="module")
def weights(tiny_recipe: Recipe, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tiny_recipe.replace(mean=MEAN, std=STD), tmp_path_factory.mktemp("weights"))


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An image folder with photos of several sizes in each class."""
    folder = tmp_path_factory.mktemp("photos")
    for number, name in enumerate(CLASSES):
        (folder / name).mkdir()
        for height, width in SIZES[: 1 + number % len(SIZES)]:
            image_file(folder / name, height + number, width)
    return folder


@pytest.mark.parametrize("target", TARGETS)
def test_a_program_is_evaluated_on_whole_photos_as_its_weights_are(
    target: str, weights: Path, photos: Path, tmp_path: Path
) -> None:
    if importlib.util.find_spec("openvino") is None and target == "openvino":
        pytest.skip("openvino is not installed")
    lockstep.export(weights, tmp_path / "model", to=target, compare=False)
    result = lockstep.evaluate(tmp_path / "model", photos, batch_images=2)
    expected = lockstep.evaluate(weights, photos)
    assert result["engine"].startswith(f"{target} (")
    assert (result["images"], result["top1_percent"]) == (expected["images"], expected["top1_percent"])
    assert result["loss"] == pytest.approx(expected["loss"], rel=1e-3)
    assert result["per_class"] == expected["per_class"]


def test_a_program_of_squares_gets_squares(weights: Path, photos: Path, tmp_path: Path) -> None:
    lockstep.export(weights, tmp_path / "model", to="triton", bare=True, compare=False)
    result = lockstep.evaluate(tmp_path / "model", photos, batch_images=4)
    assert result["loss"] == pytest.approx(lockstep.evaluate(weights, photos)["loss"], rel=1e-4)


@pytest.mark.parametrize(
    "changes",
    [{"target": "coreml"}, {"takes": "anything"}, {"batch": -1}, {"preprocessing": {}}, {"logits": "many"}],
    ids=str,
)
def test_a_description_that_was_changed_is_refused(
    changes: dict[str, object], weights: Path, photos: Path, tmp_path: Path
) -> None:
    lockstep.export(weights, tmp_path / "model", to="torchscript", compare=False)
    file = tmp_path / "model" / FILE
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(CheckpointError, match=r"export.json does not describe an export: .*; export the weights again"):
        lockstep.evaluate(tmp_path / "model", photos)
