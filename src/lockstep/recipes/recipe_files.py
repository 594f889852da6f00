"""Recipes from names, YAML files, run folders and `field=value` texts."""

from pathlib import Path
from typing import Any

from lockstep.recipes.execution import Execution
from lockstep.recipes.published import RECIPES
from lockstep.recipes.recipe import Recipe, eval_fields
from lockstep.system.errors import RecipeError, as_path, nearest
from lockstep.system.plain_yaml import read_yaml
from lockstep.system.regular_files import SETTINGS, read_regular_text


def load_recipe(source: str | Path | Recipe) -> Recipe:
    """Load a recipe.

    Args:
        source: A published name, a YAML file (docs/how-to/recipe.md), a run's folder, or a recipe.

    Raises:
        RecipeError: There is no such recipe, or a field is wrong.

    >>> import lockstep
    >>> lockstep.load_recipe("resnet50-paddle-90ep").epochs
    90
    """
    if isinstance(source, Recipe):
        return source
    as_path(source, "recipe")
    return _load(str(source), Path(), ())


def _load(source: str, folder: Path, seen: tuple[Path, ...]) -> Recipe:
    """Load a published recipe or a file in `folder`. `seen` are the files that have it as base,
    directly or indirectly."""
    if source in RECIPES:
        return RECIPES[source]().rename(source)
    path = folder / source
    if (path / "recipe.yaml").is_file():
        path = path / "recipe.yaml"
    if not path.is_file():
        raise RecipeError(f"there is no recipe and no file {source!r}. {nearest(source, RECIPES)}")
    if path.resolve() in seen:
        raise RecipeError(f"{path} is its own base, directly or through other files; change `base`")
    try:
        fields = _read_fields(path)
        base = fields.pop("base", None)
        if base is not None and (path.parent / "checkpoints").is_dir():
            raise RecipeError("the recipe of a run has all fields and needs no base; remove `base`")
        name = _choose_name(path, fields.pop("based_on", None))
        if base is not None:
            inherited = _load(str(base), path.parent, (*seen, path.resolve())).fields()
            fields = inherited | fields | eval_fields(fields)
        return Recipe.of(fields).rename(name)
    except RecipeError as error:
        raise RecipeError(f"{path}: {error}") from None


def _choose_name(path: Path, noted: object) -> str:
    """Return the name of the recipe in a file: `noted`, its `based_on`, or else the file's name.

    It is "" for a run's `recipe.yaml` without `based_on`.
    """
    if noted is not None and not isinstance(noted, str):
        raise RecipeError(f"based_on: expected the name of a recipe, not {noted!r:.60}")
    if noted is not None:
        return noted
    return "" if path.name == "recipe.yaml" else path.stem


def _read_fields(path: Path) -> dict[str, Any]:
    try:
        fields = read_yaml(read_regular_text(path, SETTINGS))
    except OSError as error:
        raise RecipeError(f"cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise RecipeError(f"cannot be read as YAML: {error}") from None
    if not isinstance(fields, dict):
        raise RecipeError(
            f"expected fields of a recipe (such as `epochs: 50`), found {fields!r:.60}"
        )
    return fields


def parse_settings(settings: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split `field=value` texts into changes to a recipe and changes to an execution. Values are
    YAML.

    >>> parse_settings(["epochs=2", "mean=[1, 2, 3]", "log_every_steps=1"])
    ({'epochs': 2, 'mean': [1, 2, 3]}, {'log_every_steps': 1})
    """
    recipe: dict[str, Any] = {}
    execution: dict[str, Any] = {}
    for setting in settings:
        name, equals, text = setting.partition("=")
        if not equals:
            raise RecipeError(f"expected field=value, found {setting!r}")
        try:
            value = read_yaml(text)
        except ValueError as error:
            raise RecipeError(f"{name}: {text!r:.60} is not a value: {error}") from None
        if name in Recipe.model_fields:
            recipe[name] = value
        elif name in Execution.model_fields:
            execution[name] = value
        else:
            from lockstep.recipes.synonyms import suggest_setting

            hint = suggest_setting(name, text, [*Recipe.model_fields, *Execution.model_fields])
            raise RecipeError(
                f"there is no field {name!r}. {hint or '`lockstep recipes fields` describes all.'}"
            )
    return recipe, execution
