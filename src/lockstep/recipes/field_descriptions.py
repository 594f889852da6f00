"""The descriptions of fields: the docstrings below them in the source.

They are read where they are shown. pydantic would read the source whenever a class is imported.
"""

import ast
import inspect
from functools import cache
from itertools import pairwise
from textwrap import dedent


@cache
def describe_fields(owner: type) -> dict[str, str]:
    """Return the description of each field of a class, also of those that it inherits, by name."""
    descriptions: dict[str, str] = {}
    for base in reversed(owner.__mro__):
        if base.__module__.startswith("lockstep."):
            descriptions |= _read_class(base)
    for name, field in getattr(owner, "model_fields", {}).items():
        if field.description:  # made from a table
            descriptions[name] = field.description
    return descriptions


def _read_class(owner: type) -> dict[str, str]:
    [definition] = ast.parse(dedent(inspect.getsource(owner))).body
    assert isinstance(definition, ast.ClassDef)
    descriptions = {}
    for field, text in pairwise(definition.body):
        match field, text:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(description))),
            ):
                descriptions[name] = inspect.cleandoc(description)
    return descriptions
