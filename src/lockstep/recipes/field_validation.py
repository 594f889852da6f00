"""Sets of fields with clear errors: the base of recipes and executions.

Both are frozen pydantic models. `recipe.replace(epochs=50)` returns a variant. A wrong value raises
`RecipeError`.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, Self

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from lockstep.models.architectures import ModelSpec
from lockstep.system.errors import RecipeError, nearest


class Settings(BaseModel):
    """A frozen set of fields with clear errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, defer_build=True)

    def __init__(self, /, **fields: Any) -> None:
        try:
            super().__init__(**fields)
        except ValidationError as error:
            problems = [problem for problem in error.errors() if problem["loc"] != _NOT_A_NAME]
            lines = [_explain(type(self), problem) for problem in problems[:_MOST_PROBLEMS]]
            if len(problems) > _MOST_PROBLEMS:
                lines.append(f"... and {len(problems) - _MOST_PROBLEMS} more")
            raise RecipeError("\n".join(lines)) from None

    @classmethod
    def of(cls, fields: dict[str, Any]) -> Self:
        """Build from plain values, such as those of YAML.

        Raises:
            RecipeError: A field is unknown or a value wrong; the message names each.
        """
        strange = [name for name in fields if not isinstance(name, str)]
        if strange:
            raise RecipeError(f"there is no field {strange[0]!r}: expected a text as name")
        return cls(**fields)

    def replace(self, /, **changes: Any) -> Self:
        """Return a copy with some fields changed and validated."""
        return self.of(self.fields() | changes)

    def fields(self) -> dict[str, Any]:
        """Return the fields as plain values (numbers, strings, lists), in order."""
        return self.model_dump(mode="json")

    def format_yaml(self) -> str:
        """Return the fields as YAML, in order."""
        return yaml.safe_dump(
            self.fields(), sort_keys=False, default_flow_style=None, allow_unicode=True
        )


_MOST_SHOWN = 100
"""Number of characters of a value that a message shows."""
_MOST_PROBLEMS = 10
"""Number of problems of one recipe that are reported. For each of them, the nearest names are
searched."""
# pydantic also reports that a model given by its fields is not a name. Only problems of the fields
# help the user.
_NOT_A_NAME = ("model", "str")


def _explain(cls: type[BaseModel], problem: Any) -> str:
    place = [str(part) for part in problem["loc"]]
    if place[:2] == ["model", ModelSpec.__name__]:
        del place[1]
    where = ".".join(place)
    if problem["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        from lockstep.recipes.synonyms import suggest_fields

        known = list(cls.model_fields)
        if len(place) > 1:
            known = [field.name for field in dataclasses.fields(ModelSpec)]
        suggestions = suggest_fields(place[-1], known)
        hint = nearest(place[-1], known)
        if suggestions:
            hint = f"Did you mean {' or '.join(suggestions)}?"
        return f"there is no field {where!r}. {hint}"
    message = problem["msg"].removeprefix("Value error, ")
    message = message.replace("a valid tuple", "a list")  # which YAML and --set have instead
    return f"{where}: {message}, not {_shorten(problem['input'])}" if where else message


def _shorten(value: object) -> str:
    try:
        text = repr(value)
    except ValueError:  # an integer of thousands of digits
        return "an integer too long to print"
    return shorten_text(text)


def shorten_text(text: str, most: int = _MOST_SHOWN) -> str:
    """Return the text of a value for a message: a thousand class weights are cut off."""
    return text if len(text) <= most else f"{text[:most]} ..."


def format_value(value: object) -> str:
    """Return the plain value of a field as YAML on one line, as `--set` takes it.

    >>> format_value([{"name": "solarise", "probability": 0.5}]), format_value(None)
    ('[{name: solarise, probability: 0.5}]', 'null')
    """
    as_yaml = yaml.safe_dump(
        value, default_flow_style=True, sort_keys=False, width=math.inf, allow_unicode=True
    )
    return as_yaml.splitlines()[0]


def list_changes(name: str, old: Any, new: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield the places at which two values of a field differ, with what each has there. Mappings
    with the same keys, and lists of equal length, are compared entry by entry.

    >>> there, now = [{"name": "fog", "density": 1}], [{"name": "fog", "density": 2}]
    >>> list(list_changes("augmentations", there, now))
    [('augmentations[0].density', 1, 2)]
    """
    pairs: list[tuple[str, Any, Any]] = []
    if isinstance(old, dict) and isinstance(new, dict) and old.keys() == new.keys():
        pairs = [(f"{name}.{key}", value, new[key]) for key, value in old.items()]
    elif _are_mappings(old) and _are_mappings(new) and len(old) == len(new):
        pairs = [(f"{name}[{i}]", *both) for i, both in enumerate(zip(old, new, strict=True))]
    for place, before, after in pairs:
        yield from list_changes(place, before, after)
    if not pairs and old != new:
        yield name, old, new


def _are_mappings(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(entry, dict) for entry in value)
