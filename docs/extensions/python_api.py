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
from importlib import import_module
from typing import Any, get_args, get_type_hints

from schemas import make_table, read_docstrings

import lockstep
from lockstep.backends import frameworks, protocol
from lockstep.recipes.field_validation import Settings

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
PROTOCOL = (
    *(frameworks.Framework, frameworks.Options, protocol.Backend, protocol.World),
    *(protocol.Engine, protocol.QuantisingEngine, protocol.Handle, protocol.Interval),
    protocol.Products,
)
EVENT = (
    "What the function given as `listener` is called with: a dictionary, whose `kind` says which of"
    " these it is. An exception that the function raises stops the work and reaches the caller,"
    " with a note that says where; the same call resumes a run."
)

SESSION = re.compile(r"^>>> .*(?:\n.+)*", re.M)
"""An example of a docstring: what is typed, and what Python answers."""


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
    return "\n\n".join(parts)


def describe_protocol() -> str:
    """Return what a backend implements: its row, its functions, and what they return."""
    return "\n\n".join(describe(kind.__name__, kind) for kind in PROTOCOL)


def describe_step() -> str:
    """Return what a step computes, from the docstring of the reference engine."""
    about = import_module("lockstep.backends.reference.engine").__doc__ or ""
    return about[about.index("A step of every engine") :]


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
    return make_directive(
        "class", 4, f"{name}{call}", thing, [FIELDS.get(name, ""), *list_values(thing), *members]
    )


def has_own_call(kind: type) -> bool:
    """Return whether the arguments of a class say more than its list of fields."""
    return not (issubclass(kind, Settings | Exception) or has_values(kind))


def has_values(kind: type) -> bool:
    """Return whether a class is a dataclass or a protocol, whose annotations are its fields."""
    return is_dataclass(kind) or getattr(kind, "_is_protocol", False)


def describe_member(name: str, member: Any) -> str:
    """Return the directive of a method or a property."""
    if isinstance(member, property):
        return make_directive("property", 3, name, member)
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
            is_function = inspect.isfunction(member) or isinstance(member, property | classmethod)
            if is_function and not name.startswith("_") and name not in seen:
                seen.add(name)
                if inspect.getdoc(getattr(base, name)) and name != "model_post_init":
                    yield name, member


def list_values(kind: type) -> Iterator[str]:
    """Yield the fields of a dataclass or of a protocol."""
    if not has_values(kind):
        return
    meanings = read_docstrings(kind)
    for name in inspect.get_annotations(kind):
        yield make_directive("attribute", 3, name, None, [meanings.get(name, "")])


def format_signature(function: Any, *, has_self: bool = False) -> str:
    """Return the arguments and the result of a function or a class, as its source writes them."""
    if inspect.isclass(function):
        return format_signature(function.__init__, has_self=True).removesuffix(" -> None")
    source = textwrap.dedent(inspect.getsource(inspect.unwrap(function)))
    (definition,) = ast.parse(source).body
    assert isinstance(definition, ast.FunctionDef)
    definition.args.args = definition.args.args[1 if has_self else 0 :]
    result = f" -> {ast.unparse(definition.returns)}" if definition.returns else ""
    return f"({ast.unparse(definition.args)}){result}"


def make_directive(
    kind: str, colons: int, signature: str, thing: Any, more: Any = (), options: str = ""
) -> str:
    """Return a directive of the Python domain, in Markdown."""
    fence = ":" * colons
    about = (inspect.getdoc(thing) or "") if thing is not None else ""
    body = [SESSION.sub(r"```pycon\n\g<0>\n```", about), *more]
    text = "\n\n".join(filter(None, body))
    return f"{fence}{{py:{kind}}} {signature}\n{options}\n{text}\n{fence}"
