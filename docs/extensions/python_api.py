"""The public names, with their signatures and docstrings.

Sphinx's autodoc reads docstrings as reStructuredText. Ours are Markdown, like the pages, so this
makes the directives of Sphinx's Python domain itself.
"""

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from dataclasses import is_dataclass
from functools import cached_property
from importlib import import_module
from typing import Any, get_args, get_type_hints

from schemas import make_table, read_docstrings

import lockstep
from lockstep.backends import frameworks, protocol
from lockstep.recipes.field_validation import Settings
from lockstep.system import errors

GROUPS = {
    "Train, and use models": (
        *("train", "load", "Model", "Evaluation", "Prediction", "Int8"),
        *("read_run", "Run", "report", "verify", "pack", "draw_data_set"),
    ),
    "Signatures": ("sign", "verify_signature"),
    "Recipes": ("load_recipe", "Recipe", "Execution", "Augmentation", "learning_rates"),
    "Events": ("Event",),
    "Errors": ("LockstepError", "UserError"),
}
FIELDS = {
    "Recipe": "Its fields: [fields of a recipe](recipe-fields.md).",
    "Execution": "Its fields: [fields of an execution](execution-fields.md).",
}
OTHER_ERRORS = """### Other errors

You catch these as `lockstep.UserError` or `lockstep.LockstepError`. They are in
`lockstep.system.errors`."""
PROTOCOL = (
    *(frameworks.Framework, frameworks.Options, protocol.Backend, protocol.World),
    *(protocol.Engine, protocol.QuantisingEngine, protocol.Handle, protocol.Interval),
    protocol.Products,
)
EVENT = (
    "A `listener` is called with dictionaries, whose `kind` tells these events apart. If it raises"
    " an exception, the work stops and you get the exception, with a note on where it happened. The"
    " same call resumes a run."
)

SESSION = re.compile(r"^>>> .*(?:\n.+)*", re.M)
"""An example of a docstring: what is typed, and what Python answers."""
SECTION = re.compile(r"^(?P<name>Args|Returns|Raises):\n(?P<text>(?: {4}.+\n?)+)\n?", re.M)
ENTRY = re.compile(r"^(?P<name>\w+): (?P<text>.+(?:\n .+)*)", re.M)
"""An argument or an error of a section, with what is said of it."""
ROLES = {"Args": "param", "Raises": "raises"}
PROPERTIES = property | cached_property
MEMBERS = PROPERTIES | classmethod


def describe_public_names() -> str:
    """Return a section for each group of public names."""
    names = [name for group in GROUPS.values() for name in group]
    if sorted(names) != sorted(lockstep.__all__):
        raise ValueError(f"{set(names) ^ set(lockstep.__all__)} is not in one of GROUPS")
    parts = []
    for heading, group in GROUPS.items():
        parts.append(f"## {heading}")
        for name in group:
            thing = getattr(lockstep, name)
            texts = describe_events(thing) if name == "Event" else [describe(name, thing)]
            parts += [f"### `lockstep.{name}`", *texts]
    return "\n\n".join([*parts, OTHER_ERRORS, *map(describe_error, list_other_errors())])


def describe_protocol() -> str:
    """Return what a backend implements: its row, its functions, and what they return."""
    return "\n\n".join(describe(kind.__name__, kind) for kind in PROTOCOL)


def describe_step() -> str:
    """Return what a step computes, from the docstring of the reference engine."""
    about = import_module("lockstep.backends.reference.engine").__doc__ or ""
    return about[about.index("A step of every engine") :]


def list_other_errors() -> Iterator[type]:
    """Yield the errors that are not public names."""
    for kind in vars(errors).values():
        is_error = inspect.isclass(kind) and issubclass(kind, lockstep.LockstepError)
        if is_error and kind.__name__ not in lockstep.__all__:
            yield kind


def describe_error(kind: type) -> str:
    """Return the directive of an error, which names the error that it is a kind of."""
    base = f"It is a `{kind.__base__.__name__}`."
    return make_directive("exception", 3, kind.__name__, kind, [base])


def describe_events(union: Any) -> Iterator[str]:
    """Yield what each kind of event is, and its fields."""
    yield EVENT
    for event in get_args(union):
        names = " or ".join(f"`{kind}`" for kind in get_args(get_type_hints(event)["kind"]))
        yield f"{names}: {inspect.cleandoc(event.__doc__)}"
        yield make_table(event)


def describe(name: str, thing: Any) -> str:
    """Return the directive of a function or a class."""
    if not inspect.isclass(thing):
        return make_directive("function", 3, f"{name}{format_signature(thing)}", thing)
    members = [describe_member(member, value) for member, value in list_members(thing)]
    call = format_signature(thing) if has_own_call(thing) else ""
    role = "exception" if issubclass(thing, Exception) else "class"
    return make_directive(
        role, 4, f"{name}{call}", thing, [FIELDS.get(name, ""), *list_values(thing), *members]
    )


def has_own_call(kind: type) -> bool:
    """Return whether the arguments of a class say more than its list of fields."""
    return not (issubclass(kind, Settings | Exception) or has_values(kind))


def has_values(kind: type) -> bool:
    """Return whether a class is a dataclass or a protocol, whose annotations are its fields."""
    return is_dataclass(kind) or getattr(kind, "_is_protocol", False)


def describe_member(name: str, member: Any) -> str:
    """Return the directive of a method or a property."""
    if isinstance(member, PROPERTIES):
        function = member.func if isinstance(member, cached_property) else member.fget
        result = read_definition(function).returns
        return make_directive("property", 3, name, member, options=f":type: {write_type(result)}\n")
    function = member.__func__ if isinstance(member, classmethod) else member
    options = ":classmethod:\n" if isinstance(member, classmethod) else ""
    signature = format_signature(function, has_self=True)
    return make_directive("method", 3, f"{name}{signature}", function, options=options)


def list_members(kind: type) -> Iterator[tuple[str, Any]]:
    """Yield the public methods and properties that a class defines, and those of `Settings`."""
    bases = [kind, Settings] if issubclass(kind, Settings) else [kind]
    seen = set()
    for base in bases:
        for name, member in vars(base).items():
            is_function = inspect.isfunction(member) or isinstance(member, MEMBERS)
            if is_function and not name.startswith("_") and name not in seen:
                seen.add(name)
                if inspect.getdoc(getattr(base, name)) and name != "model_post_init":
                    yield name, member


def list_values(kind: type) -> Iterator[str]:
    """Yield the fields of a dataclass or of a protocol."""
    if not has_values(kind):
        return
    meanings = read_docstrings(kind)
    for node in read_definition(kind).body:
        if isinstance(node, ast.AnnAssign):
            name = ast.unparse(node.target)
            options = f":type: {write_type(node.annotation)}\n"
            if isinstance(node.value, ast.Constant | ast.Tuple):
                options += f":value: {ast.unparse(node.value)}\n"
            yield make_directive("attribute", 3, name, None, [meanings.get(name, "")], options)


def format_signature(function: Any, *, has_self: bool = False) -> str:
    """Return the arguments and the result of a function or a class, as its source writes them."""
    if inspect.isclass(function):
        return format_signature(function.__init__, has_self=True).removesuffix(" -> None")
    definition = read_definition(function)
    arguments = definition.args
    if has_self:
        (arguments.posonlyargs or arguments.args).pop(0)
    for node in ast.walk(arguments):
        if isinstance(node, ast.arg) and node.annotation:
            node.annotation = ast.Name(write_type(node.annotation))
    result = f" -> {write_type(definition.returns)}" if definition.returns else ""
    return f"({ast.unparse(arguments)}){result}"


def read_definition(thing: Any) -> Any:
    """Return the syntax tree of the definition of a function or a class."""
    source = textwrap.dedent(inspect.getsource(inspect.unwrap(thing)))
    return ast.parse(source).body[0]


def write_type(annotation: ast.expr) -> str:
    """Return a type without the quotes of names that its module imports late."""
    text = ast.unparse(annotation)
    return text if "Literal" in text else text.replace("'", "")


def read_section(docstring: str, name: str) -> dict[str, str]:
    """Return the entries of a section by their names; `Returns` has a single entry, "". Empty if
    there is no such section."""
    for section in SECTION.finditer(docstring):
        if section["name"] == name:
            text = textwrap.dedent(section["text"])
            return {entry["name"]: entry["text"] for entry in ENTRY.finditer(text)} or {"": text}
    return {}


def format_docstring(docstring: str) -> str:
    """Return a docstring as Markdown: sections are field lists, and examples are code."""
    fields = []
    for section in ("Args", "Returns", "Raises"):
        for name, text in read_section(docstring, section).items():
            role = f"{ROLES[section]} {name}" if name else "returns"
            fields.append(f":{role}: {' '.join(text.split())}")  # a line "1. ..." makes a list
    start = SECTION.search(docstring)
    text = SECTION.sub("", docstring)
    if start:
        before, after = docstring[: start.start()], text[start.start() :]
        text = "\n".join([before.rstrip(), "", *fields, "", after])
    return SESSION.sub(r"```pycon\n\g<0>\n```", text)


def make_directive(
    kind: str, colons: int, signature: str, thing: Any, more: Any = (), options: str = ""
) -> str:
    """Return a directive of the Python domain, in Markdown."""
    fence = ":" * colons
    about = (inspect.getdoc(thing) or "") if thing is not None else ""
    body = [format_docstring(about), *more]
    text = "\n\n".join(filter(None, body))
    return f"{fence}{{py:{kind}}} {signature}\n{options}\n{text}\n{fence}"
