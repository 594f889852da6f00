"""The preprocessing of an evaluation in the metadata of ONNX models that Lockstep exports.

A graph only normalises images. How they are resized and cropped before is in the metadata property `KEY`: a JSON table of
the fields `lockstep.weights.preprocessing.FIELDS`, as the recipe has them. A model may lack those that `_NEEDED` does not
name.
"""

import numpy as np

from lockstep.recipes import Recipe
from lockstep.system.errors import RecipeError
from lockstep.system.strict_json import parsed, to_json
from lockstep.weights.preprocessing import FIELDS

KEY = "lockstep_preprocessing"
_NEEDED = ("mean", "std", "interpolation", "antialias", "eval_resize", "eval_crop")


def preprocessing_of(recipe: Recipe) -> str:
    """Return the value of the property `KEY` for a recipe."""
    fields = recipe.fields()
    return to_json({name: fields[name] for name in FIELDS})


def with_preprocessing(recipe: Recipe, text: str, *, normalises: bool = True) -> Recipe:
    """Return a recipe with the preprocessing of the property `KEY`.

    If the graph `normalises`, `recipe` has its mean and std, as far as float32 holds them. Raises `ValueError` that says
    what is wrong with the property, also if the graph has another mean or std.
    """
    values = parsed(text)
    if not isinstance(values, dict) or not set(_NEEDED) <= values.keys() <= set(FIELDS):
        raise ValueError(f"expected a table of {', '.join(FIELDS)}")
    try:
        found = recipe.replace(**values)
    except RecipeError as error:
        raise ValueError(str(error)) from None
    for name in values:
        # A recipe also takes values of similar types, such as the text "224", which nothing but a recipe would take.
        if to_json(found.fields()[name]) != to_json(values[name]):
            raise ValueError(f"{name} is {values[name]!r:.60}, expected a value such as {recipe.fields()[name]!r}")
    for name in ("mean", "std") if normalises else ():
        if not np.array_equal(np.float32(getattr(found, name)), np.float32(getattr(recipe, name))):
            raise ValueError(f"its {name} is {values[name]}, but the graph's is {list(getattr(recipe, name))}")
    return found
