"""The resize and crop in exported programs, against those of Pillow and OpenCV that evaluation
uses."""

import numpy as np
import pytest

from lockstep.backends.shared.resize import crop_centre, read_geometry
from lockstep.inference.images import read_square
from lockstep.inference.preprocessing_file import write_preprocessing
from lockstep.recipes import Recipe
from tests.backends.drawing import draw_images

ORIGINALS = (
    {},
    {
        "eval_side_rounding": "nearest",
        "eval_offset_rounding": "up",
        "eval_sampling": "half_pixel_symmetric",
    },
    {
        "eval_side_rounding": "float32_down",
        "eval_offset_rounding": "down",
        "eval_sampling": "asymmetric",
    },
)
SIZES = ((56, 56), (64, 64), (23, 41), (97, 61), (376, 500), (64, 85), (211, 90))


@pytest.fixture(scope="module")
def operations(tmp_path_factory: pytest.TempPathFactory) -> type:
    """`Operations` of NumPy, from the file that is written next to models."""
    folder = tmp_path_factory.mktemp("model")
    write_preprocessing(folder, Recipe(), normalises=False)
    module: dict[str, object] = {"__name__": "preprocessing"}
    exec((folder / "preprocessing.py").read_text(encoding="utf-8"), module)
    numpy_operations = module["NumPy"]
    assert isinstance(numpy_operations, type)
    return numpy_operations


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("antialias", [False, True])
@pytest.mark.parametrize("original", ORIGINALS, ids=["torchvision", "DALI", "TensorFlow 1"])
def test_pixels_are_those_of_evaluation(
    interpolation: str, antialias: bool, original: dict[str, str], operations: type
) -> None:
    fields = {
        "interpolation": interpolation,
        "eval_antialias": antialias,
        "eval_resize": 64,
        "eval_crop": 56,
    }
    recipe = Recipe(**fields, **original)
    for height, width in SIZES:
        photo = draw_images(1, max(height, width), seed=height)[0, :height, :width]
        expected = np.empty((56, 56, 3), np.uint8)
        read_square(photo, recipe, expected)
        square = crop_centre(photo[None], read_geometry(recipe), operations())[0].transpose(1, 2, 0)
        difference = np.abs(square - expected.astype(np.float32))
        # Pillow 13 filters the columns of tall images first, and rounds in between.
        is_tall = antialias and height > (width if original else 2 * width)
        assert is_tall or difference.max() <= 1
        assert difference.mean() < 0.5
        is_opencv_cubic = interpolation == "bicubic" and recipe.eval_sampling == "half_pixel"
        if not antialias:
            assert difference.mean() <= (1e-3 if is_opencv_cubic else 0)
        elif not is_tall:
            assert difference.mean() <= (0.03 if original else 0)
