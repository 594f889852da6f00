"""The user's own augmentations: `mymodule:Fog` is the class Fog of the user's module mymodule.

Reading a recipe imports no such module, because the recipe can be anyone's. It is imported when
images are augmented: by training, and by commands that show or measure it.
"""

import importlib
import os
import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, Self

import numpy as np
from pydantic import ConfigDict, PrivateAttr

from lockstep.recipes.augmentation import Augmentation
from lockstep.system.errors import RecipeError, nearest

_NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")


class PlugIn(Augmentation):
    """One of the user's own augmentations, by its name and the fields that are set. Its module is
    imported on first use."""

    model_config = ConfigDict(extra="allow")

    _name: str = PrivateAttr(default="")
    _loaded: Augmentation | None = PrivateAttr(default=None)

    @classmethod
    def named(cls, name: str, fields: dict[str, Any]) -> Self:
        """Return the plug-in of this name. Raises `RecipeError` if it is not `module:Class`."""
        if not _NAME.fullmatch(name):
            raise RecipeError(
                f"expected module:Class, such as mymodule:Fog for class Fog of mymodule.py, not"
                f" {name!r:.60}"
            )
        plug_in = cls.of(fields)
        plug_in._name = name
        return plug_in

    @property
    def name(self) -> str:
        """Its name in a recipe: `module:Class`."""
        return self._name

    @property
    def numbers(self) -> int:
        """How many random numbers it needs for an image."""
        return self.load().numbers

    def draw(self, numbers: list[float]) -> Any:
        """Return what is done to an image."""
        return self.load().draw(numbers)

    def apply(self, pixels: np.ndarray, parameters: Any) -> np.ndarray:
        """Return the changed image: uint8 RGB [size, size, 3]."""
        return self.load().apply(pixels, parameters)

    def load(self) -> Augmentation:
        """Return the augmentation itself, with all of its fields. Raises `RecipeError`."""
        if self._loaded is None:
            module_name, _, class_name = self._name.partition(":")
            module = _import_module(module_name)
            kind = _find_class(module, class_name)
            fields = super().fields()
            del fields["name"]
            try:
                self._loaded = kind.of(fields)
            except RecipeError as error:
                raise RecipeError(f"augmentations: {self._name}: {error}") from None
            except TypeError as error:  # a method is missing
                raise RecipeError(
                    f"augmentations: {self._name}: {error}; the class must define numbers, draw and"
                    " apply"
                ) from None
            _check_numbers(self._loaded)
        return self._loaded


def _check_numbers(augmentation: Augmentation) -> None:
    with naming(augmentation, "numbers"):
        count = augmentation.numbers
    if type(count) is not int or count < 0:
        raise RecipeError(
            f"augmentations: numbers of {augmentation.name} is {count!r:.60}; expected a whole"
            " number, 0 or more"
        )


@contextmanager
def naming(augmentation: Augmentation, method: str) -> Iterator[None]:
    """Turn what a method of the user's own augmentation raises into a `RecipeError` that names the
    augmentation. Errors of Lockstep's augmentations stay as they are."""
    try:
        yield
    except (Exception, SystemExit) as error:  # sys.exit(0) would end a training as if it were done
        if ":" not in augmentation.name:
            raise
        place = traceback.extract_tb(error.__traceback__)[-1]
        raise RecipeError(
            f"the augmentation {augmentation.name} failed in {method}:"
            f" {type(error).__name__}: {error} ({place.filename}, line {place.lineno})"
        ) from error


def find_module_file(augmentation: Augmentation) -> Path | None:
    """Return the file of the user's module that an imported augmentation is from; None if it is
    Lockstep's own, or if its module has no file."""
    module, colon, _ = augmentation.name.partition(":")
    file = getattr(sys.modules.get(module), "__file__", None) if colon else None
    return None if file is None else Path(file)


def _import_module(name: str) -> ModuleType:
    """Return a module of the working directory or of Python's path (PYTHONPATH)."""
    folder = os.getcwd()  # noqa: PTH109  sys.path holds texts
    if folder not in sys.path:
        # Last: a file there must not replace a module that Lockstep itself imports later.
        sys.path.append(folder)
    importlib.invalidate_caches()  # the file may be newer than Python's cached list of its folder
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and name.startswith(error.name or "?"):
            raise RecipeError(
                f"augmentations: there is no module {name!r}; expected {name.replace('.', '/')}.py"
                f" in {folder}, or in a folder of PYTHONPATH"
            ) from None
        raise RecipeError(
            f"augmentations: cannot import {name}: {type(error).__name__}: {error}"
        ) from error


def _find_class(module: ModuleType, name: str) -> type[Augmentation]:
    known = [
        key
        for key, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, Augmentation) and value is not Augmentation
    ]
    if name not in known:
        file = getattr(module, "__file__", None) or module.__name__
        raise RecipeError(
            f"augmentations: {file} has no class {name!r} that derives from lockstep.Augmentation."
            + (f" {nearest(name, known)}" if known else "")
        )
    kind: type[Augmentation] = getattr(module, name)
    return kind
