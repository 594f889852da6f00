"""`lockstep recipes`: list, show and compare."""

import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from lockstep.cli.terminal import format_number, make_console, print, print_json, print_table
from lockstep.system.errors import RecipeError, nearest

if TYPE_CHECKING:
    from lockstep.recipes.field_validation import Settings

app = typer.Typer(
    help="List published recipes; with a command, show or compare them.",
    invoke_without_command=True,
    rich_markup_mode=None,
)


@app.callback()
def list_recipes(context: typer.Context) -> None:
    """List the published recipes, by who published them.

    `show` prints one, `diff` compares two, `table` lists published accuracies, and `fields`
    describes what you can set.
    """
    from lockstep.recipes.published import ORIGINS, RECIPES

    if context.invoked_subcommand is None:
        width = max(map(len, RECIPES))
        for origin in ORIGINS:
            print(origin)
            for name in filter(lambda name: RECIPES[name].origin == origin, RECIPES):
                title, _, _ = str(inspect.getdoc(RECIPES[name].load_function())).partition("\n\n")
                print(f"  {name:<{width}}  {' '.join(title.split())}")


@app.command("show")
def show(
    name: Annotated[str, typer.Argument(help="A published recipe, a YAML file or a run.")],
) -> None:
    """Print a recipe, its source and published accuracies.

    Prints every field as YAML, and for a finished run its top-1 next to the published ones.
    """
    from lockstep.recipes import load_recipe
    from lockstep.recipes.published import RECIPES

    recipe = load_recipe(name)
    if name in RECIPES:
        for line in (inspect.getdoc(RECIPES[name].load_function()) or "").splitlines():
            print(f"# {line}".rstrip())
    lines = _list_accuracies(name) if name in RECIPES else _compare_run(Path(name))
    for line in lines:
        print(f"# {line}".rstrip())
    print(recipe.format_yaml(), end="")


def _list_accuracies(name: str) -> list[str]:
    """Return lines about the published accuracies of a recipe; none if nobody published one."""
    from lockstep.recipes.published_accuracies import find_accuracies

    lines = []
    document = ""
    for row in find_accuracies(name):
        if row.document != document:
            document = row.document
            lines += ["", f"Published top-1 in percent, {document}:"]
        hours = f", {row.hours:g} h" if row.hours else ""
        lines.append(f"  {row.figure()} ({row.conditions()}{hours})")
    return lines


def _compare_run(folder: Path) -> list[str]:
    """Return the lines that put the top-1 of a finished run next to the published ones; none for
    anything else."""
    from lockstep.models.accuracy_interval import format_accuracy
    from lockstep.recipes import load_recipe
    from lockstep.recipes.published_accuracies import describe_comparison
    from lockstep.runs.report import compare_with_published, read_report

    report = read_report(folder)
    if report is None:
        return []
    rows = describe_comparison(compare_with_published(load_recipe(folder), report))
    if not rows:
        return []
    final = report["final"]["trained"]
    accuracy = format_accuracy(final["top1_percent"], final["images"])
    return [
        f"top-1 {accuracy} of {final['images']} images",
        *map(" ".join, rows),
    ]


@app.command("table")
def table(
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON, with source and container.")
    ] = False,
) -> None:
    """Print the published accuracies, by who published them.

    Shows hardware, precision, epochs and hours of training; a hyphen if they are not published.
    """
    from lockstep.recipes.published import RECIPES
    from lockstep.recipes.published_accuracies import read_accuracies

    rows = read_accuracies()
    if as_json:
        print_json([row.model_dump() for row in rows])
        return
    lines = [("recipe", "top-1 %", "precision", "hardware", "epochs", "hours", "notes")]
    origin = ""
    for row in rows:
        if RECIPES[row.recipe].origin != origin:
            origin = RECIPES[row.recipe].origin
            lines.append((origin, "", "", "", "", "", ""))
        gpus = f"{row.accelerators} x {row.accelerator}" if row.accelerator else "-"
        epochs = str(row.epochs or "-")
        hours = format_number(row.hours, "g")
        notes = row.variant or ""
        lines.append((f"  {row.recipe}", row.figure(), row.precision, gpus, epochs, hours, notes))
    print_table(lines)


class Section(NamedTuple):
    """Fields that `lockstep recipes fields` describes under one heading."""

    name: str
    """Selects the whole section."""
    heading: str
    fields: list[tuple[str, str, str]]
    """Name, name with default, and meaning of each."""


@app.command("fields")
def fields(
    name: Annotated[
        str, typer.Argument(help="A field, a subject such as loss, or an augmentation.")
    ] = "",
) -> None:
    """Describe every field that --set can change, with its default.

    With NAME, describes only what has this name.
    """
    sections = list(_list_sections())
    known = [section.name for section in sections]
    for section in sections:
        known += [field for field, _, _ in section.fields]
    if name and name not in known:
        from lockstep.recipes.synonyms import suggest_fields

        hint = " or ".join(suggest_fields(name, known))
        hint = f"Did you mean {hint}?" if hint else nearest(name, dict.fromkeys(known))
        raise RecipeError(f"there is no field {name!r:.60}. {hint}")
    gap = ""
    for section in sections:
        chosen = section.fields
        if name not in ("", section.name):
            chosen = [row for row in section.fields if row[0] == name]
        if chosen:
            print(gap, end="")
            _fill_line(section.heading, "", "  ")
            gap = "\n"
        for _, field, about in chosen:
            _describe_field(field, about)


def _list_sections() -> Iterator[Section]:
    """Yield what can be set: the recipe by subject, augmentations, a model, the execution."""
    from pydantic import TypeAdapter

    from lockstep.models.architectures import EXAMPLE, ModelSpec
    from lockstep.recipes import Execution, Recipe
    from lockstep.recipes.augmentation_list import import_augmentation, list_augmentations
    from lockstep.recipes.field_descriptions import describe_fields
    from lockstep.recipes.field_validation import format_value
    from lockstep.recipes.recipe import list_subjects

    recipe = Recipe()
    for subject, names in list_subjects().items():
        heading = f"Recipe: {subject}"
        yield Section(subject, heading, _list_fields(recipe, names))
    for kind in map(import_augmentation, list_augmentations()):
        summary = " ".join((kind.__doc__ or "").split("\n\n")[0].split())
        own = _list_fields(kind(), list(kind.model_fields))
        yield Section(kind().name, f"Augmentation {kind().name}: {summary}", own)
    parts = []
    descriptions = describe_fields(ModelSpec)
    for part, schema in TypeAdapter(ModelSpec).json_schema()["properties"].items():
        default = f": {format_value(schema['default'])}" if "default" in schema else ""
        parts.append((part, f"{part}{default}", descriptions[part]))
    yield Section("model", f"Model: parts of a description such as {EXAMPLE!r}", parts)
    how = _list_fields(Execution(), list(Execution.model_fields))
    yield Section("execution", "Execution: how a recipe is run", how)


def _list_fields(settings: "Settings", names: list[str]) -> list[tuple[str, str, str]]:
    """Return these fields as rows of a section, with the values that they have."""
    from lockstep.recipes.field_descriptions import describe_fields
    from lockstep.recipes.field_validation import format_value

    descriptions = describe_fields(type(settings))
    values = settings.fields()
    rows = []
    for name in names:
        field = f"{name}={format_value(values[name])}"
        rows.append((name, field, descriptions.get(name, "")))
    return rows


def _describe_field(field: str, about: str) -> None:
    """Print a field and its meaning below it, with the entries of a list on separate lines."""
    print(f"  {field}")
    for part in re.split(r"\n+(?=- )|\n\n", about):
        hanging = 8 if part.startswith("- ") else 6
        _fill_line(part, 6 * " ", hanging * " ")


def _fill_line(text: str, first: str, others: str) -> None:
    """Print a text in lines of at most 120 characters, which begin with `first` and `others`."""
    print(
        textwrap.fill(
            " ".join(text.split()),
            120,
            initial_indent=first,
            subsequent_indent=others,
            break_on_hyphens=False,
        )
    )


@app.command("diff")
def diff(
    a: Annotated[str, typer.Argument(help="A published recipe, a YAML file or a run.")],
    b: Annotated[str, typer.Argument(help="Another one, to compare with the first.")],
) -> None:
    """Show the fields that differ between two recipes, by subject."""
    from rich.table import Column, Table

    from lockstep.recipes import difference, load_recipe
    from lockstep.recipes.field_validation import format_value
    from lockstep.recipes.recipe import list_subjects

    differences = difference(load_recipe(a), load_recipe(b))
    if not differences:
        print("no field differs")
        return
    values = (Column(header, overflow="fold") for header in (a, b))
    table = Table(Column("field", no_wrap=True), *values, box=None)
    for subject, names in list_subjects().items():
        different = [name for name in names if name in differences]
        if different:
            table.add_row(subject, style="bold")
        for name in different:
            table.add_row(f"  {name}", *map(format_value, differences[name]))
    make_console().print(table, markup=False)
