"""The files that Lockstep writes as JSON, field by field, from the types of their contents."""

import ast
import inspect
import re
import types
from itertools import pairwise
from typing import Any, Literal, NotRequired, Union, get_args, get_origin, get_type_hints

from lockstep.benchmark.report_file import BenchmarkReport
from lockstep.models.class_metrics import ClassCounts, ClassSummary
from lockstep.recipes import published_accuracies
from lockstep.runs.environment import Environment, Images
from lockstep.runs.folds import FoldsReport
from lockstep.runs.report import BestEvaluation, Evaluation, Report
from lockstep.system.event_log import (
    DivergedEvent,
    EvaluateEvent,
    RestartEvent,
    StartEvent,
    TrainEvent,
)
from lockstep.weights.certificate import Certificate

FILES: dict[str, tuple[str, list[Any]]] = {
    "report.json": (
        "The result of a run. It exists once the run is finished.",
        [
            Report,
            Evaluation,
            BestEvaluation,
            ClassCounts,
            ClassSummary,
            published_accuracies.Comparison,
        ],
    ),
    "log.jsonl": (
        "The events of a run, one JSON object on each line, in the order in which they happened."
        " The file only grows. `kind` says which of these fields a line has.",
        [StartEvent, TrainEvent, EvaluateEvent, RestartEvent, DivergedEvent],
    ),
    "environment.json": (
        "What a run depends on besides its recipe. The file also has the versions of Lockstep,"
        " Python, NumPy and the framework, the system, the processor, and the numbers of cores and"
        " bytes of memory. All fields may be missing.",
        [Environment, Images],
    ),
    "folds.json": ("The result of a cross-validation (`--folds`).", [FoldsReport]),
    "The report of a benchmark": (
        "`lockstep benchmark train|inference|all -o FILE` writes it.",
        [BenchmarkReport],
    ),
}
NAMES = {float: "number", int: "integer", str: "text", bool: "true or false", Any: "any value"}


def describe_files() -> str:
    """Return a section for each file, with a table for each type in it."""
    parts = []
    for file, (about, kinds) in FILES.items():
        name = f"`{file}`" if "." in file else file
        parts += [f"## {name}", about]
        for number, kind in enumerate(kinds):
            if number or len(kinds) > 2:
                parts.append(f"### {title(kind, file)}")
                parts.append(inspect.cleandoc(kind.__doc__ or ""))
            parts.append(make_table(kind))
    return "\n\n".join(parts)


def describe_certificate() -> str:
    """Return the table of the fields of a certificate."""
    return make_table(Certificate)


def title(kind: type, file: str) -> str:
    """Return the heading of a type: `kind` of an event, words for others."""
    hints = get_type_hints(kind, localns=vars(published_accuracies))
    if "kind" in hints and get_origin(hints["kind"]) is Literal:
        return f"`{get_args(hints['kind'])[0]}`"
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", kind.__name__)
    return "The whole file" if words == "Report" else words.capitalize()


def make_table(kind: Any) -> str:
    """Return a table with a row for each field."""
    meanings = read_meanings(kind)
    hints = get_type_hints(kind, localns=vars(published_accuracies), include_extras=True)
    rows = []
    for name in hints:
        values = name_type(hints[name])
        if name not in kind.__required_keys__ and kind.__total__:
            values += "; may be missing"
        rows.append(f"| `{name}` | {values} | {meanings.get(name, '')} |")
    return "\n".join(["| field | values | meaning |", "|---|---|---|", *rows])


def read_meanings(kind: Any) -> dict[str, str]:
    """Return the docstrings of the fields of a typed dictionary and of those that it extends."""
    meanings: dict[str, str] = {}
    for base in getattr(kind, "__orig_bases__", ()):
        if hasattr(base, "__required_keys__"):
            meanings |= read_meanings(base)
    return meanings | read_docstrings(kind)


def read_docstrings(kind: type) -> dict[str, str]:
    """Return the docstrings of the fields in the body of a class, on one line each."""
    (definition,) = ast.parse(inspect.getsource(kind)).body
    assert isinstance(definition, ast.ClassDef)
    docstrings = {}
    for field, text in pairwise(definition.body):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
            assert isinstance(field.target, ast.Name)
            docstrings[field.target.id] = " ".join(ast.literal_eval(text.value).split())
    return docstrings


def name_type(kind: Any) -> str:
    """Return the name that JSON's readers know a type by."""
    if kind is type(None):
        return "null"
    if kind in NAMES:
        return NAMES[kind]
    origin, own = get_origin(kind), get_args(kind)
    if origin is NotRequired:
        return name_type(own[0])
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in own)
    if origin in (Union, types.UnionType):
        return " or ".join(map(name_type, own))
    if origin is dict:
        return f"object; each value: {name_type(own[1])}"
    if origin is not None:  # list, Sequence
        return f"list; each entry: {name_type(own[0])}"
    return f"object: {re.sub(r'(?<=[a-z])(?=[A-Z])', ' ', kind.__name__).lower()}"
