"""`preprocessing.py` next to a model that takes squares only: how photos become them, in words and
as a program.

The program needs NumPy and Pillow, but not Lockstep. Its arithmetic is the source of
`lockstep.backends.shared.resize`.
"""

import inspect
from pathlib import Path

from lockstep.backends.shared import resize
from lockstep.recipes import Recipe

FILE = "preprocessing.py"
_SIDE_ROUNDINGS = {
    "down": "rounded down",
    "nearest": "rounded to the nearest number, halves up",
    "float32_down": "computed in float32 and rounded down",
}
_OFFSET_ROUNDINGS = {"even": "to the even number", "up": "up", "down": "down"}
_SAMPLINGS = {
    "half_pixel": "samples at the centres of pixels, the image fills the rounded sides",
    "half_pixel_symmetric": "both directions have the scale of the shorter side, from the centre",
    "asymmetric": "pixel i is sampled at i times the scale",
}

_PROGRAM = '''

class NumPy:
    """`Operations` of NumPy."""

    length = staticmethod(lambda images, axis: images.shape[axis])
    integer = staticmethod(np.int64)
    count = staticmethod(lambda first, end: np.arange(first, end, dtype=np.float64))
    real = staticmethod(lambda value: np.asarray(value, np.float64))
    single = staticmethod(lambda value: np.asarray(value, np.float32))
    round_to_float32 = staticmethod(lambda value: np.float64(np.asarray(value, np.float32)))
    truncate = staticmethod(lambda value: np.asarray(value).astype(np.int64))
    floor = staticmethod(np.floor)
    minimum = staticmethod(np.minimum)
    maximum = staticmethod(np.maximum)
    clip = staticmethod(np.clip)
    total = staticmethod(lambda value, axis: value.sum(axis=axis, keepdims=True))
    take = staticmethod(lambda pixels, index, axis: np.take(pixels, index, axis=axis))
    reshape = staticmethod(np.reshape)
    transpose = staticmethod(np.transpose)
    product = staticmethod(np.matmul)


def prepare(photo):
    """Return the model's input for a photo: a path, or uint8 RGB [height, width, 3]."""
    if not isinstance(photo, np.ndarray):
        with Image.open(photo) as image:
            upright = ImageOps.exif_transpose(image) if TURNS else image
            if upright.mode.startswith("I"):  # 16 bits of grey
                grey = np.clip(np.asarray(upright), 0, 65535).astype(np.uint32)
                upright = Image.fromarray(((grey * 255 + 32767) // 65535).astype(np.uint8))
            photo = np.asarray(upright.convert("RGB"))
    squares = crop_centre(photo[None], GEOMETRY, NumPy())
    if NORMALISES:
        mean, std = np.reshape(MEAN, (3, 1, 1)), np.reshape(STD, (3, 1, 1))
        return ((squares - mean) / std).astype(np.float32)
    return np.ascontiguousarray(np.transpose(squares, (0, 2, 3, 1)), np.uint8)


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit("expected: python preprocessing.py PHOTO... OUTPUT.npy")
    np.save(sys.argv[-1], np.concatenate([prepare(photo) for photo in sys.argv[1:-1]]))
'''


def write_preprocessing(folder: Path, recipe: Recipe, *, normalises: bool) -> None:
    """Write the file. With `normalises`, the model takes normalised float32 [N, 3, S, S], else
    uint8 [N, S, S, 3]."""
    source = inspect.getsource(resize).split('"""', 2)[2]  # without the docstring of the module
    geometry = resize.read_geometry(recipe)
    values = {
        "GEOMETRY": geometry,
        "MEAN": tuple(recipe.mean),
        "STD": tuple(recipe.std),
        "NORMALISES": normalises,
    }
    values["TURNS"] = recipe.exif_orientation
    constants = "\n\n" + "".join(f"{name} = {value!r}\n" for name, value in values.items())
    imports = "import sys\n\nimport numpy as np\nfrom PIL import Image, ImageOps\n"
    head = f'"""{_describe(recipe, normalises=normalises)}"""\n\n{imports}'
    (folder / FILE).write_text(head + source + constants + _PROGRAM, encoding="utf-8")


def _describe(recipe: Recipe, *, normalises: bool) -> str:
    """Return the preprocessing in words."""
    side = recipe.eval_crop
    filtering = "sampled as in OpenCV, without a filter"
    if recipe.eval_antialias:
        filtering = "filtered as in Pillow"
    decoding = "Decode the photo to RGB, 8 bits a colour"
    if recipe.exif_orientation:
        decoding += ", and turn it by its EXIF orientation"
    steps = [
        f"{decoding}.",
        f"Resize it: the shorter side to {recipe.eval_resize} pixels, the other in proportion,"
        f" {_SIDE_ROUNDINGS[recipe.eval_side_rounding]} ({recipe.interpolation}, {filtering};"
        f" {_SAMPLINGS[recipe.eval_sampling]}).",
        f"Cut out the centre, {side} x {side} pixels; offsets of half a pixel are rounded"
        f" {_OFFSET_ROUNDINGS[recipe.eval_offset_rounding]}.",
    ]
    result = f"uint8 [1, {side}, {side}, 3]"
    if normalises:
        result = f"float32 [1, 3, {side}, {side}]"
        steps += [
            f"Subtract {tuple(recipe.mean)} from red, green and blue (0 to 255), and divide by"
            f" {tuple(recipe.std)}.",
            "Move the colour axis to the front.",
        ]
    numbered = "".join(f"{number}. {step}\n" for number, step in enumerate(steps, start=1))
    return (
        f"Turn each photo into the model's input: {result}.\n\n{numbered}\n    python"
        " preprocessing.py PHOTO... OUTPUT.npy\n\nThe fields of `Geometry` are those of Lockstep's"
        " recipe.\n"
    )
