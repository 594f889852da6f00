"""The entries of a recipe's `augmentations`: a name, or a mapping of `name` and fields.

A file of `lockstep.recipes.augmentations` is imported when a recipe names it, so that reading
another recipe imports no library of images.
"""

import importlib
import pkgutil
from typing import Annotated, Any

from pydantic import BeforeValidator, PlainSerializer

from lockstep.recipes.augmentation import BUILT_IN, Augmentation
from lockstep.system.errors import RecipeError, nearest


def list_augmentations() -> list[str]:
    """Return the names of Lockstep's augmentations in alphabetical order."""
    package = importlib.import_module(BUILT_IN)
    return sorted(module.name for module in pkgutil.iter_modules(package.__path__))


def import_augmentation(name: str) -> type[Augmentation]:
    """Return the class of one of Lockstep's augmentations. Raises `RecipeError`."""
    names = list_augmentations()
    if name not in names:
        timms = _translate_timm(name)
        if timms:
            raise RecipeError(f"{name!r} is timm's notation; expected {timms}")
        raise RecipeError(
            f"there is no augmentation {name!r:.60}. {nearest(name, names)} Give your own"
            " class as module:Class, such as mymodule:Fog"
        )
    module = importlib.import_module(f"{BUILT_IN}.{name}")
    [kind] = (
        value
        for value in vars(module).values()
        if isinstance(value, type)
        and issubclass(value, Augmentation)
        and value.__module__ == module.__name__
    )
    return kind


_TIMM_KEYS = {
    "m": "magnitude",
    "n": "operations",
    "p": "probability",
    "mstd": "magnitude_std",
    "mmax": "magnitude_max",
}
"""Fields of RandAugment by the names of the sections of timm's texts, such as m9 and mstd0.5."""


def _translate_timm(text: str) -> str:
    """Return the entry, as YAML, that equals a text for timm's `--aa`; "" if it is no such text."""
    first, *sections = text.split("-")
    if first == "rand":
        entry = "{name: randaugment, dialect: timm"
    elif first in ("original", "originalr", "v0", "v0r"):
        entry = f"{{name: autoaugment, policy: {first}"
    else:
        return ""
    for section in sections:
        key = section.rstrip("0123456789.")
        number = section.removeprefix(key)
        if key == "inc":
            entry += f", increasing: {'true' if number == '1' else 'false'}"
        elif key in _TIMM_KEYS and number:
            entry += f", {_TIMM_KEYS[key]}: {number}"
        else:
            return ""
    return f"{entry}}}"


def read_augmentation(entry: Any) -> Augmentation:
    """Return the augmentation of an entry of a recipe. Raises `RecipeError`."""
    if isinstance(entry, Augmentation):
        return entry
    fields = {"name": entry} if isinstance(entry, str) else entry
    if not isinstance(fields, dict) or not isinstance(fields.get("name"), str):
        raise RecipeError(
            "augmentations: expected names, or mappings such as {name: solarise, probability:"
            f" 0.2}}, not {entry!r:.60}"
        )
    parameters = dict(fields)
    name = parameters.pop("name")
    try:
        if ":" in name:
            from lockstep.recipes.plug_ins import PlugIn

            return PlugIn.named(name, parameters)
        kind = import_augmentation(name)
    except RecipeError as error:
        raise RecipeError(f"augmentations: {error}") from None
    try:
        return kind.of(parameters)
    except RecipeError as error:
        raise RecipeError(f"augmentations: {name}: {error}") from None


def _read_entries(value: Any) -> Any:
    """Return the augmentations of a list of entries, or of a single entry."""
    if isinstance(value, str | dict | Augmentation):
        value = [value]
    return tuple(map(read_augmentation, value)) if isinstance(value, list | tuple) else value


Augmentations = Annotated[
    tuple[Augmentation, ...],
    BeforeValidator(_read_entries),
    PlainSerializer(lambda augmentations: [one.fields() for one in augmentations]),
]
"""A recipe's augmentations. A single entry needs no list."""


def load_plug_ins(augmentations: tuple[Augmentation, ...]) -> tuple[Augmentation, ...]:
    """Return augmentations with all fields, after importing the user's own. Raises
    `RecipeError`."""
    from lockstep.recipes.plug_ins import PlugIn

    loaded = []
    for augmentation in augmentations:
        if isinstance(augmentation, PlugIn):
            loaded.append(augmentation.load())
        else:
            loaded.append(augmentation)
    return tuple(loaded)
