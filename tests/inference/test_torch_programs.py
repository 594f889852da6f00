"""TorchScript and torch.export programs, compared with the reference in float64 and with Pillow's
and OpenCV's pixels."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import lockstep
from lockstep.backends.shared.resize import crop_centre, read_geometry
from lockstep.backends.torch.export import _Operations
from lockstep.recipes import Recipe
from tests.backends.cases import NARROWED
from tests.backends.drawing import draw_images
from tests.edges import softmax
from tests.inference.cases import (
    CLASSES,
    MEAN,
    STD,
    assert_answers,
    compute_expected,
    image_file,
    pictures,
    prepare_photo,
    run_alone,
    save_random,
)
from tests.recipes.cases import DALI, TF1

SIZES = {"eval_resize": 47, "eval_crop": 40, "mean": MEAN, "std": STD}
"""The surplus of 7 pixels is odd, so that the rounding of the crop's place is noticed."""

ALONE = """
import sys
sys.modules["lockstep"] = None  # an import of it fails
import numpy as np
import torch

script, exported, *batches = sys.argv[1:]
noted, kept = {"classes.txt": ""}, {"classes.txt": ""}
programs = {"script": torch.jit.load(script, _extra_files=noted)}
programs["exported"] = torch.export.load(exported, extra_files=kept).module()
assert noted["classes.txt"].decode() == kept["classes.txt"]
print(kept["classes.txt"], end="")
for path in batches:
    images = torch.from_numpy(np.load(path))
    for name, program in programs.items():
        found = program(images)
        np.savez(path + "." + name, **{key: value.numpy() for key, value in found.items()})
"""


def exported(weights: Path, folder: Path) -> Any:
    """Return the TorchScript program of a checkpoint."""
    lockstep.load(weights).export(folder, to="torchscript", compare=False)
    return torch.jit.load(str(folder / "model.pt"))


@pytest.mark.parametrize(
    "changes",
    [
        {**NARROWED["narrow resnet50"], "padding": "same"},
        {**NARROWED["narrow resnext101-32x4d"], "padding": "symmetric"},
    ],
    ids=["resnet50, same", "resnext101-32x4d, symmetric"],
)
def test_a_torchscript_program_has_the_probabilities_of_float64_for_any_batch(
    tiny_recipe: Recipe, changes: dict[str, Any], tmp_path: Path
) -> None:
    weights = save_random(tiny_recipe.replace(**SIZES, **changes), tmp_path)
    program = exported(weights, tmp_path / "model")
    for count in (1, 3):
        squares = draw_images(count, 40, seed=count)
        answers = program(torch.from_numpy(squares))
        assert_answers(answers, compute_expected(weights, squares))


@pytest.mark.slow
def test_pytorch_alone_answers_as_float64(tiny_recipe: Recipe, tmp_path: Path) -> None:
    weights = save_random(tiny_recipe.replace(**SIZES, padding="same"), tmp_path)
    batches = [draw_images(1, 40, seed=1), draw_images(3, 40, seed=3)]
    batches += [pictures(71, 33), pictures(40, 57)[:1]]
    programs = []
    for form, name in (("torchscript", "model.pt"), ("torch-export", "model.pt2")):
        compared = lockstep.load(weights).export(
            tmp_path / form, to=form, compare=form == "torch-export"
        )["comparison"]
        programs.append(tmp_path / form / name)
        assert (tmp_path / form / "classes.txt").read_text().splitlines() == list(CLASSES)
    assert compared["largest_difference"] < compared["bound"]
    paths, printed = run_alone(ALONE, programs, batches, tmp_path)
    assert printed.splitlines() == list(CLASSES)
    for path, batch in zip(paths, batches, strict=True):
        for name in ("script", "exported"):
            assert_answers(np.load(f"{path}.{name}.npz"), compute_expected(weights, batch))


@pytest.mark.parametrize(
    ("interpolation", "antialias", "tolerance"),
    # Pillow filters the columns of the tall image first.
    [
        ("bilinear", True, 1e-3),
        ("bicubic", True, 1e-3),
        ("bilinear", False, 1e-6),
        ("bicubic", False, 1e-4),
    ],
)
def test_images_of_any_size_are_resized_and_cropped_as_pillow_and_opencv_do(
    tiny_recipe: Recipe, interpolation: str, antialias: bool, tolerance: float, tmp_path: Path
) -> None:
    recipe = tiny_recipe.replace(**SIZES, interpolation=interpolation, antialias=antialias)
    weights = save_random(recipe, tmp_path)
    program = exported(weights, tmp_path / "model")
    reference = lockstep.load(weights).on("reference").module()
    for height, width in ((96, 131), (71, 33), (40, 57)):
        path = image_file(tmp_path, height, width)
        answer = program(torch.from_numpy(np.array(Image.open(path)))[None])
        wanted = softmax(reference(prepare_photo(path, recipe).astype(np.float64)))
        assert answer["probabilities"].numpy() == pytest.approx(wanted, abs=tolerance)


def compute_by_hand(pixels: np.ndarray, geometry: dict[str, str]) -> np.ndarray:
    """Return the square of 40 pixels of an image whose shorter side becomes 47, in the geometry of
    DALI or TensorFlow 1."""
    shorter = min(pixels.shape[:2])
    for axis, length in enumerate(pixels.shape[:2]):
        if geometry == DALI:
            side = math.floor(length * 47 / shorter + 0.5)
            first = math.floor((side - 40) / 2 + 0.5)
            at = length / 2 + (np.arange(first, first + 40) + 0.5 - side / 2) * shorter / 47 - 0.5
        else:
            side = int(np.float32(length) * (np.float32(47) / np.float32(shorter)))
            at = np.arange((side - 40) // 2, (side - 40) // 2 + 40) * length / side
        pixels = np.apply_along_axis(
            lambda line, at=at: np.interp(at, np.arange(len(line)), line), axis, pixels
        )
    return np.floor(pixels + 0.5).astype(np.uint8)


@pytest.mark.parametrize("geometry", [DALI, TF1], ids=["DALI", "TensorFlow 1"])
def test_images_of_any_size_are_sampled_in_the_geometry_of_an_original(
    tiny_recipe: Recipe, geometry: dict[str, str], tmp_path: Path
) -> None:
    recipe = tiny_recipe.replace(**SIZES, **geometry)
    for height, width in ((96, 131), (86, 33), (40, 57), (40, 40)):
        pixels = np.array(Image.open(image_file(tmp_path, height, width)))
        photos = torch.from_numpy(pixels)[None]
        [square] = crop_centre(photos, read_geometry(recipe), _Operations())
        difference = np.abs(square.permute(1, 2, 0).numpy() - compute_by_hand(pixels, geometry))
        assert difference.max() <= 1
        assert (difference > 0).mean() < 0.01


def test_what_is_not_bytes_of_rgb_is_refused(tiny_recipe: Recipe, tmp_path: Path) -> None:
    program = exported(save_random(tiny_recipe, tmp_path), tmp_path / "model")
    for images in (torch.zeros(1, 32, 32, 3), torch.zeros(1, 3, 32, 32, dtype=torch.uint8)):
        with pytest.raises(torch.jit.Error, match=r"expected uint8 RGB \[N, height, width, 3\]"):
            program(images)
