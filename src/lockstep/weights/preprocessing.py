"""How images are prepared for trained weights: the file has it, a certificate next to the file has
it, or a user sets it.

`lockstep convert` writes `TARGET.certificate.json` next to files whose formats have no place for
the preprocessing. It is used for a file with the SHA-256 that the certificate has for it, whatever
the certificate is called.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lockstep.recipes import Recipe
from lockstep.recipes.recipe import PREPROCESSING, eval_fields
from lockstep.system.errors import RecipeError, nearest
from lockstep.system.regular_files import WEIGHTS, open_regular
from lockstep.system.strict_json import parsed
from lockstep.weights.fingerprints import hash_files

Changes = dict[str, Any]
"""Values of `Recipe` fields."""
FIELDS = PREPROCESSING
"""The fields of `Recipe` that are the preprocessing of an evaluation; `antialias` is that of
training."""
Preprocessing = Mapping[str, Any] | Recipe
"""Values of the fields `SETTABLE`, or a recipe whose evaluation is used."""
SETTABLE = (*FIELDS, "image_size", "dct_scaling")
"""The fields of a recipe that can be set for trained weights. Those of evaluation follow
`image_size` and `antialias`, as in a recipe."""
CERTIFICATE = ".certificate.json"
"""How the name of a certificate ends."""
_MOST_BYTES = 2**20
_MOST_CERTIFICATES = 1000


def read_evaluation(recipe: Recipe) -> Changes:
    """Return all preprocessing of a recipe's evaluation."""
    fields = recipe.fields()
    return {name: fields[name] for name in SETTABLE}


def check_preprocessing(preprocessing: Preprocessing | None) -> Changes:
    """Return what a user sets, with the fields that follow from it. Raises `RecipeError` for other
    fields."""
    if preprocessing is None:
        return {}
    if isinstance(preprocessing, Recipe):
        return read_evaluation(preprocessing)
    strange = [str(name) for name in preprocessing if name not in SETTABLE]
    if strange:
        raise RecipeError(
            f"{', '.join(strange)} cannot be set for trained weights; only preprocessing can."
            f" {nearest(strange[0], SETTABLE)}"
        )
    return {**preprocessing, **eval_fields(dict(preprocessing))}


def set_preprocessing(recipe: Recipe, settings: Changes) -> tuple[Recipe, tuple[str, ...]]:
    """Return a recipe with the preprocessing that a user sets, and a remark if it differs.
    Raises `RecipeError`."""
    if not settings:
        return recipe, ()
    changed = recipe.replace(**settings)
    before = recipe.fields()
    differences = []
    for name, value in read_evaluation(changed).items():
        if value != before[name]:
            differences.append(f"{name} {value}, not {before[name]}")
    if not differences:
        return changed, ()
    return changed, (f"images are prepared as set: {'; '.join(differences)}",)


def read_certified_preprocessing(place: Path) -> tuple[Changes, tuple[str, ...], tuple[str, ...]]:
    """Return the preprocessing that a certificate next to weights has for them, the fields of it
    that were assumed, and a remark; all empty without one.

    `place` is a file, or the prefix of files. A certificate of this name with other contents is not
    used, and a remark says so.
    """
    certificates = _read_certificates(place.parent)
    if not certificates:
        return {}, (), ()
    digests = hash_files(place)
    remarks = []
    for name, certificate in certificates.items():
        certified = certificate["target_sha256"]
        shared = certified.keys() & digests.keys()
        if not shared:
            continue
        if any(digests[file] != certified[file] for file in shared):
            remarks.append(
                f"{name} belongs to other files with these names, so its preprocessing is not used"
            )
            continue
        changes = certificate["preprocessing"]
        if not _is_preprocessing(changes):
            remarks.append(
                f"{name} has a preprocessing that this version cannot read; it is not used"
            )
            continue
        sizes = (
            f"shorter side {changes['eval_resize']}, crop {changes['eval_crop']},"
            f" {changes['interpolation']}"
        )
        places = certificate.get("preprocessing_from")
        assumed = list_assumed(places) if isinstance(places, dict) else ()
        return changes, assumed, (f"{name} says how images are prepared: {sizes}",)
    return {}, (), tuple(remarks)


def list_assumed(places: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the fields whose values are assumed, of where each value comes from."""
    return tuple(name for name in FIELDS if places.get(name) == "assumed")


def _read_certificates(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the certificates in a folder that have a preprocessing, by file name."""
    certificates = {}
    files = [path for path in sorted(folder.glob(f"*{CERTIFICATE}")) if path.is_file()]
    for path in files[:_MOST_CERTIFICATES]:
        try:
            with open_regular(path, WEIGHTS) as file:
                value = parsed(file.read(_MOST_BYTES))
        except (OSError, ValueError):
            continue
        if (
            isinstance(value, dict)
            and isinstance(value.get("preprocessing"), dict)
            and isinstance(value.get("target_sha256"), dict)
        ):
            certificates[path.name] = value
    return certificates


def _is_preprocessing(values: Changes) -> bool:
    """Return whether the preprocessing of a certificate is complete, and this version has it."""
    if not set(FIELDS) <= values.keys() <= set(SETTABLE):
        return False
    try:
        Recipe.of(values)
    except RecipeError:
        return False
    return True
