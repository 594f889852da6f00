"""The preprocessing of an evaluation in ONNX models that Lockstep exports.

How images are resized, cropped and normalised is in the metadata property `KEY`: a JSON table of
the fields `lockstep.weights.preprocessing.FIELDS`, as the recipe has them. A model may lack those
that `_NEEDED` does not name. `_ASSUMED` is a list of the fields that the exported weights did not
say.

A model of photos also has nodes that resize and crop (`onnx_photos`). What they compute is the
value `SQUARES`, and their names, and those of their constants, begin with `PREPROCESSING`. Without
them the model is one of squares, which are its input `IMAGES` then.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.recipes import Recipe
from lockstep.system.errors import RecipeError
from lockstep.system.strict_json import is_list_of, is_text, parsed, to_json
from lockstep.weights.calibration import UNCALIBRATED, Calibration, parse_calibration
from lockstep.weights.opened_weights import Place
from lockstep.weights.preprocessing import FIELDS

KEY = "lockstep_preprocessing"
CALIBRATION = "lockstep_calibration"
"""The metadata property of a bare model with what turns its logits into probabilities, as JSON."""
UNKNOWN_BELOW = "lockstep_unknown_below"
"""The metadata property with the threshold below which images are unknown. The temperature is in
the model's classifier."""
IMAGES = "images"
"""The input of a model: photos, uint8 [N, H, W, 3], or squares."""
SQUARES = "squares"
"""Photos after resize and crop: uint8 [N, S, S, 3], where S is the recipe's `eval_crop`."""
PREPROCESSING = "preprocessing/"
_ASSUMED = "assumed"
_NEEDED = ("mean", "std", "interpolation", "antialias", "eval_resize", "eval_crop")


def apply_preprocessing(recipe: Recipe, text: str, *, normalises: bool = True) -> Recipe:
    """Return a recipe with the preprocessing of the property `KEY`.

    If the graph `normalises`, `recipe` has its mean and std, as far as float32 holds them. Raises
    `ValueError` that says what is wrong with the property, also if the graph has another mean or
    std.
    """
    values = parsed(text)
    if isinstance(values, dict):
        values.pop(_ASSUMED, None)
    if not isinstance(values, dict) or not set(_NEEDED) <= values.keys() <= set(FIELDS):
        raise ValueError(f"expected a table of {', '.join(FIELDS)}")
    try:
        changed = recipe.replace(**values)
    except RecipeError as error:
        raise ValueError(str(error)) from None
    for name in values:
        # A recipe also takes values of similar types, such as the text "224", which nothing but a
        # recipe would take.
        if to_json(changed.fields()[name]) != to_json(values[name]):
            raise ValueError(
                f"{name} is {values[name]!r:.60}, expected a value such as"
                f" {recipe.fields()[name]!r}"
            )
    for name in ("mean", "std"):
        colour = getattr(recipe, name)
        if normalises and not np.array_equal(
            np.float32(getattr(changed, name)), np.float32(colour)
        ):
            raise ValueError(f"its {name} is {values[name]}, but the graph's is {list(colour)}")
    return changed


def read_preprocessing(
    recipe: Recipe, text: str | None, label: str, *, normalises: bool
) -> tuple[Recipe, dict[str, Place], tuple[str, ...]]:
    """Return a recipe with the preprocessing that an export of Lockstep wrote, where each value of
    it comes from (empty if it wrote none), and remarks.

    `text` is the value of the property, None if there is none, and `label` what it is for the user.
    `normalises` is as in `apply_preprocessing`.
    """
    if text is None:
        return recipe, {}, ()
    try:
        changed = apply_preprocessing(recipe, text, normalises=normalises)
        assumed = parsed(text).get(_ASSUMED)
        places: dict[str, Place] = dict.fromkeys(FIELDS, "file")
        if is_list_of(is_text)(assumed):
            places |= dict.fromkeys(assumed, "assumed")
        return changed, places, ()
    except ValueError as error:
        return recipe, {}, (f"its {label} was left out: {error}",)


def read_calibration(metadata: Mapping[str, str], path: Path) -> Calibration:
    """Return what turns the logits of a model into probabilities, by its metadata. A threshold that
    is not a number from 0 to 1 is left out. Raises `CheckpointError` if the temperature is wrong,
    and `ValueError` if it is no JSON."""
    if CALIBRATION in metadata:
        return parse_calibration(parsed(metadata[CALIBRATION]), path)
    try:
        threshold = float(metadata.get(UNKNOWN_BELOW, 0))
    except ValueError:
        return UNCALIBRATED
    return Calibration(1.0, threshold) if 0 <= threshold <= 1 else UNCALIBRATED


def take_squares(model: Any) -> None:
    """Change a model of photos into one of squares; one that takes squares stays as it is."""
    graph = model.graph
    before = len(model.graph.node)
    for values in (graph.node, graph.initializer):
        for place in reversed(range(len(values))):
            # A name that is not UTF-8 is bytes.
            if str(values[place].name).startswith(PREPROCESSING):
                del values[place]
    if len(graph.node) < before:
        rename_input(graph.node, SQUARES, IMAGES)


def rename_input(nodes: Iterable[Any], name: str, other: str) -> None:
    """Give nodes that take a value of this name another one instead."""
    for node in nodes:
        for place, value in enumerate(node.input):
            if value == name:
                node.input[place] = other
