"""The fields of recipes, executions and models: meaning, values, unit, default, and what each
published recipe has."""

import re
from collections import defaultdict
from typing import Any

from pydantic import TypeAdapter

from lockstep.models.architectures import ModelSpec
from lockstep.recipes import Execution, Recipe
from lockstep.recipes.augmentation_list import import_augmentation, list_augmentations
from lockstep.recipes.field_descriptions import describe_fields
from lockstep.recipes.field_validation import Settings, format_value
from lockstep.recipes.published import RECIPES
from lockstep.recipes.recipe import list_subjects

UNITS = {
    "epochs": "epochs",
    "images": "images",
    "steps": "steps",
    "batches": "batches",
    "percent": "percent",
    "mb": "MB",
    "threads": "threads",
    "size": "pixels",
    "padding": "pixels",
    "resize": "pixels",
    "crop": "pixels",
    "attempts": "draws",
    "shards": "files",
}
"""By the last word of a field's name, if its values are numbers."""
WORDS = {"integer": "integer", "number": "number", "string": "text", "boolean": "true or false"}
LONGEST = 60
"""A longer value of a published recipe is cut off."""


def describe_recipe_fields() -> str:
    """Return a section for each subject of a recipe, with a part for each field, and one for each
    augmentation."""
    recipe = Recipe()
    published = {name: make().fields() for name, make in RECIPES.items()}
    parts = []
    for subject, names in list_subjects().items():
        parts.append(f"## {subject.capitalize()}")
        parts += [describe_field(recipe, name, published) for name in names]
    return "\n\n".join(parts)


def describe_execution_fields() -> str:
    """Return a section for each field of an execution."""
    execution = Execution()
    parts = [describe_field(execution, name, {}, level="##") for name in Execution.model_fields]
    return "\n\n".join(parts)


def describe_model_fields() -> str:
    """Return tables of the fields of a model and of each augmentation."""
    parts = ["## Fields of a model"]
    schema = TypeAdapter(ModelSpec).json_schema()
    descriptions = describe_fields(ModelSpec)
    rows = []
    for name, about in schema["properties"].items():
        default = f"`{format_value(about['default'])}`" if "default" in about else "required"
        rows.append(f"| `{name}` | {default} | {join(descriptions[name])} |")
    parts.append("\n".join(["| field | default | meaning |", "|---|---|---|", *rows]))
    for augmentation in map(import_augmentation, list_augmentations()):
        own = augmentation()
        parts += [
            f"## Augmentation `{own.name}`",
            join((augmentation.__doc__ or "").split("\n\n")[0]),
        ]
        rows = [
            f"| `{name}` | `{format_value(own.fields()[name])}` | {join(text)} |"
            for name, text in describe_fields(augmentation).items()
        ]
        if rows:
            parts.append("\n".join(["| field | default | meaning |", "|---|---|---|", *rows]))
    return "\n\n".join(parts)


def describe_field(
    settings: Settings, name: str, published: dict[str, dict[str, Any]], level: str = "###"
) -> str:
    """Return the part of a field. `published` are the fields of the published recipes by name."""
    schema = type(settings).model_json_schema()["properties"][name]
    about = describe_fields(type(settings))[name]
    default = settings.fields()[name]
    lines = [f"- Default: `{format_value(default)}`"]
    unit = find_unit(name, schema)
    lines.append(f"- Values: {describe_values(schema)}" + (f"; unit: {unit}" if unit else ""))
    if published:
        lines.append(f"- Published recipes: {describe_published(name, default, published)}")
    return "\n".join([f"{level} `{name}`", "", about, "", *lines])


def find_unit(name: str, schema: dict[str, Any]) -> str:
    """Return the unit of a field's numbers; "" if it has none."""
    kinds = {schema.get("type"), schema.get("items", {}).get("type")}
    return UNITS.get(name.rpartition("_")[2], "") if kinds & {"integer", "number"} else ""


def describe_values(schema: dict[str, Any]) -> str:
    """Return in words what values a JSON schema allows."""
    if "anyOf" in schema:
        return ", or ".join(map(describe_values, schema["anyOf"]))
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    if "$ref" in schema:
        return "a mapping of fields"
    kind = schema.get("type")
    if kind == "array" and "prefixItems" in schema:
        return f"a list of {len(schema['prefixItems'])} numbers"
    if kind == "array":
        return f"a list; each entry: {describe_values(schema['items'])}"
    if kind == "object":
        return f"a mapping to values; each: {describe_values(schema['additionalProperties'])}"
    return " ".join([WORDS.get(str(kind), str(kind)), *list_limits(schema)])


def list_limits(schema: dict[str, Any]) -> list[str]:
    """Return the limits of a number in words."""
    words = {
        "minimum": "from {}",
        "exclusiveMinimum": "above {}",
        "maximum": "up to {}",
        "exclusiveMaximum": "below {}",
    }
    return [text.format(schema[key]) for key, text in words.items() if key in schema]


def describe_published(name: str, default: Any, published: dict[str, dict[str, Any]]) -> str:
    """Return which published recipes have another value than the default, by value."""
    recipes = defaultdict(list)
    for recipe, fields in published.items():
        if fields[name] != default:
            recipes[format_value(fields[name])].append(f"`{recipe}`")
    if not recipes:
        return "all have the default."
    lines = []
    for value, names in recipes.items():
        shown = value if len(value) <= LONGEST else f"{value[:LONGEST]} ..."
        lines.append(f"  - `{shown}`: {', '.join(names)}")
    count = sum(map(len, recipes.values()))
    rest = "none has the default" if count == len(published) else "the others have the default"
    return "\n".join([f"{rest}.", *lines])


def join(text: str) -> str:
    """Return a text of several lines for a cell of a table."""
    return re.sub(r"\s+", " ", text).replace("|", "\\|")
