"""Preprocessing that a file of weights does not say: a user sets it, or the certificate next to the
file has it.

`lockstep convert` writes `TARGET.certificate.json` next to files whose formats have no place for
the preprocessing. It is used for a file with the SHA-256 that the certificate has for it, whatever
the certificate is called.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lockstep.recipes import Recipe
from lockstep.recipes.recipe import eval_fields
from lockstep.system.errors import RecipeError, nearest
from lockstep.system.regular_files import WEIGHTS, open_regular
from lockstep.system.strict_json import parsed
from lockstep.weights.fingerprints import sha256_of
from lockstep.weights.preprocessing import FIELDS, Changes

Preprocessing = Mapping[str, Any] | Recipe
"""Values of the fields `SETTABLE`, or a recipe whose evaluation is used."""
SETTABLE = (*FIELDS, "image_size", "dct_scaling")
"""The fields of a recipe that can be set for trained weights. Those of evaluation follow
`image_size` and `antialias`, as in a recipe."""
CERTIFICATE = ".certificate.json"
"""How the name of a certificate ends."""
_MOST_BYTES = 2**20
_MOST_CERTIFICATES = 1000


def evaluation_of(recipe: Recipe) -> Changes:
    """Return all preprocessing of a recipe's evaluation."""
    fields = recipe.fields()
    return {name: fields[name] for name in SETTABLE}


def checked_preprocessing(given: Preprocessing | None) -> Changes:
    """Return what is set, with the fields that follow from it. Raises `RecipeError` for other
    fields."""
    if given is None:
        return {}
    if isinstance(given, Recipe):
        return evaluation_of(given)
    strange = [str(name) for name in given if name not in SETTABLE]
    if strange:
        raise RecipeError(
            f"{', '.join(strange)} cannot be set for trained weights, which only need to know how"
            f" images are prepared. {nearest(strange[0], SETTABLE)}"
        )
    changes = dict(given)
    return changes | eval_fields(changes)


def prepared_as(recipe: Recipe, changes: Changes) -> tuple[Recipe, tuple[str, ...]]:
    """Return a recipe with the preprocessing that is set, and a remark if it is another one. Raises
    `RecipeError`."""
    if not changes:
        return recipe, ()
    prepared = recipe.replace(**changes)
    before = recipe.fields()
    unlike = {
        name: value for name, value in evaluation_of(prepared).items() if value != before[name]
    }
    described = "; ".join(f"{name} {value}, not {before[name]}" for name, value in unlike.items())
    return prepared, (f"images are prepared as set: {described}",) if unlike else ()


def certified_preprocessing(place: Path) -> tuple[Changes, tuple[str, ...]]:
    """Return the preprocessing that a certificate next to weights has for them, and a remark; both
    empty without one.

    `place` is a file, or the prefix of files. A certificate of this name with other contents is not
    used, and a remark says so.
    """
    found = [
        path
        for path in sorted(place.parent.glob(f"*{CERTIFICATE}"))[:_MOST_CERTIFICATES]
        if path.is_file()
    ]
    candidates = {path: about for path in found if (about := _read(path)) is not None}
    if not candidates:
        return {}, ()
    digests = sha256_of(place)
    remarks = []
    for path, about in candidates.items():
        certified = {
            name: digest for name, digest in about["target_sha256"].items() if name in digests
        }
        if not certified:
            continue
        if any(digests[name] != digest for name, digest in certified.items()):
            remarks.append(
                f"{path.name} is of other files of these names, so that it does not say how images"
                " are prepared"
            )
            continue
        changes = _changes(about["preprocessing"])
        if changes is None:
            remarks.append(
                f"{path.name} has a preprocessing that this version cannot read; it is not used"
            )
            continue
        sizes = (
            f"shorter side {changes['eval_resize']}, crop {changes['eval_crop']},"
            f" {changes['interpolation']}"
        )
        return changes, (f"{path.name} says how images are prepared: {sizes}",)
    return {}, tuple(remarks)


def _read(path: Path) -> dict[str, Any] | None:
    """Return a certificate that has a preprocessing; None for any other file."""
    try:
        with open_regular(path, WEIGHTS) as file:
            about = parsed(file.read(_MOST_BYTES))
    except (OSError, ValueError):
        return None
    if not isinstance(about, dict) or not isinstance(about.get("preprocessing"), dict):
        return None
    return about if isinstance(about.get("target_sha256"), dict) else None


def _changes(values: dict[str, Any]) -> Changes | None:
    """Return the preprocessing of a certificate; None if it is incomplete, or if this version does
    not have it."""
    if not set(FIELDS) <= values.keys() <= set(SETTABLE):
        return None
    try:
        Recipe.of(values)
    except RecipeError:
        return None
    return values
