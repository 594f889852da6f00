"""What a run records of its environment when it begins, `environment.json`."""

import hashlib
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

from typing_extensions import TypedDict  # typing's cannot be checked on Python 3.11

from lockstep.backends import FRAMEWORKS
from lockstep.recipes import Recipe
from lockstep.system.errors import CheckpointError
from lockstep.system.machine import cores, memory_bytes, processor
from lockstep.system.regular_files import TEXT, read_regular
from lockstep.system.schema import Count, Positive, matches
from lockstep.system.strict_json import parsed
from lockstep.system.version import version as lockstep_version


class Quarantined(TypedDict):
    """An image that was left out."""

    file: str
    reason: str


class PlugIn(TypedDict):
    """One of the user's own augmentations."""

    file: str
    """The file of its module."""
    sha256: str


class Images(TypedDict, total=False):
    """The training or validation images of a run."""

    images: Count
    root: str
    """The folder to which the names of files are relative, as the user named it."""
    quarantined: list[Quarantined]


class Environment(TypedDict, total=False):
    """The contents of environment.json that are read again. The file also has versions and the
    processor."""

    recipe: str
    command: list[str]
    device: str
    ranks: Positive
    execution: dict[str, Any]
    """The fields of `Execution`."""
    data: str
    classes: Count
    train: Images
    val: Images
    plug_ins: dict[str, PlugIn]


def describe_environment(backend: str | None) -> dict[str, Any]:
    """Return what results and speed depend on besides the recipe: versions, system, processor,
    cores, memory.

    The version of a framework is among them unless `backend` is None.
    """
    return {
        "lockstep": lockstep_version(),
        "python": platform.python_version(),
        "numpy": version("numpy"),
        **({} if backend is None else {backend: FRAMEWORKS[backend].version()}),
        "system": platform.platform(),
        "processor": processor(),
        "cores": cores(),
        "memory_bytes": memory_bytes(),
    }


def describe_plug_ins(recipe: Recipe) -> dict[str, PlugIn]:
    """Return what a run records of the user's own augmentations, by name."""
    files: dict[str, PlugIn] = {}
    for augmentation in recipe.augmentations:
        from lockstep.recipes.plug_ins import find_module_file

        file = find_module_file(augmentation)
        if file is not None and file.is_file():
            digest = hashlib.sha256(read_regular(file, TEXT)).hexdigest()
            files[augmentation.name] = {"file": str(file), "sha256": digest}
    return files


def list_changed_plug_ins(path: Path, recipe: Recipe) -> list[str]:
    """Return a note on each plug-in whose module has changed since the run in a folder last began;
    or a note that this is unknown."""
    try:
        before = read_environment(path).get("plug_ins", {})
    except CheckpointError:
        return ["the run's environment.json was damaged; this command rewrites it"]
    return [
        f"{about['file']} has changed since this run last began, so {name} may augment images"
        " differently"
        for name, about in describe_plug_ins(recipe).items()
        if name in before and before[name]["sha256"] != about["sha256"]
    ]


def read_environment(path: Path) -> Environment:
    """Return the environment that the run in a folder recorded when it last began; empty if it
    never did.

    Raises `CheckpointError`.
    """
    file = path / "environment.json"
    try:
        environment = parsed(read_regular(file, TEXT))
    except FileNotFoundError:
        return {}
    except ValueError:
        raise CheckpointError(f"{file} is not JSON; restore it or remove it") from None
    except OSError as error:
        raise CheckpointError(f"{file}: {error.strerror}; restore it or remove it") from None
    if not matches(environment, Environment):
        raise CheckpointError(f"{file} is not a run's environment; restore it or remove it")
    return cast(Environment, environment)
