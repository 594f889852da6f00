"""Docstrings of public names have the sections that docs/extensions/python_api.py reads."""

import ast
import inspect
import sys
from collections.abc import Iterator
from typing import Any

import pytest

import lockstep
from tests.docs.pages import ROOT

sys.path.append(str(ROOT / "docs/extensions"))
import python_api
from schemas import read_docstrings

PUBLIC = {name: getattr(lockstep, name) for name in lockstep.__all__ if name != "Event"}
EXPLAINED_ELSEWHERE = {"Options"}
"""Classes whose docstring says where their fields are explained."""
SELVES = ("self", "cls")
SECTIONS = ("Args", "Returns", "Raises")
PROTOCOL = {kind.__name__: kind for kind in python_api.PROTOCOL}


def find_faults(name: str, thing: Any) -> Iterator[str]:
    """Yield what is missing in a docstring or wrong in it."""
    docstring = inspect.getdoc(thing) or ""
    summary = docstring.partition("\n\n")[0]
    if "\n" in summary or not summary.endswith("."):
        yield f"{name}: the first paragraph is not a sentence on one line"
    if "Raises `" in docstring:
        yield f"{name}: errors are in the text instead of a section"
    if isinstance(thing, python_api.PROPERTIES):
        return
    if inspect.isclass(thing):
        yield from find_faults_of_members(name, thing)
    else:
        yield from find_faults_of_sections(name, thing, docstring)


def find_faults_of_members(name: str, kind: type) -> Iterator[str]:
    """Yield the faults of the fields, the properties and the methods of a class."""
    for member, value in python_api.list_members(kind):
        yield from find_faults(f"{name}.{member}", value)
    if python_api.has_values(kind) and name not in EXPLAINED_ELSEWHERE:
        meanings = read_docstrings(kind)
        for field in inspect.get_annotations(kind):
            if not meanings.get(field, "").endswith("."):
                yield f"{name}.{field}: the field has no docstring that is a sentence"


def find_faults_of_sections(name: str, function: Any, docstring: str) -> Iterator[str]:
    """Yield what is missing in the sections of a function or wrong in them."""
    function = getattr(function, "__func__", function)
    definition = python_api.read_definition(function)
    arguments = [name for name in inspect.signature(function).parameters if name not in SELVES]
    sections = {section: python_api.read_section(docstring, section) for section in SECTIONS}
    described = list(sections["Args"])
    if described != arguments and (described or len(arguments) > 1):
        yield f"{name}: Args are {described}; expected {arguments}"
    result = ast.unparse(definition.returns)
    is_said = result == "None" or docstring.startswith("Return ")
    if len(arguments) > 1 and not is_said and not sections["Returns"]:
        yield f"{name}: Returns is missing"
    has_raise = any(isinstance(node, ast.Raise) for node in ast.walk(definition))
    if has_raise and not sections["Raises"]:
        yield f"{name}: Raises is missing"
    for text in [text for section in sections.values() for text in section.values()]:
        if not text.strip().endswith("."):
            yield f"{name}: {text!r} does not end with a full stop"


@pytest.mark.parametrize(("name", "thing"), [*PUBLIC.items(), *PROTOCOL.items()])
def test_docstrings_have_the_sections_that_readers_expect(name: str, thing: Any) -> None:
    assert list(find_faults(name, thing)) == []


@pytest.mark.parametrize("name", PUBLIC)
def test_public_functions_and_classes_have_an_example(name: str) -> None:
    assert ">>> " in (inspect.getdoc(PUBLIC[name]) or "")


DOCSTRING = """Cut an image.

Args:
    size: Height and width, from 0 to
        1. By default all.
    seed: A number.

Returns:
    uint8.

>>> cut(1)
"""


def test_sections_become_fields_on_one_line_each_and_sessions_code() -> None:
    assert python_api.format_docstring(DOCSTRING).split("\n") == [
        "Cut an image.",
        "",
        ":param size: Height and width, from 0 to 1. By default all.",
        ":param seed: A number.",
        ":returns: uint8.",
        "",
        "```pycon",
        ">>> cut(1)",
        "```",
        "",
    ]
