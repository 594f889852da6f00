"""`lockstep recipes`: list, show and compare."""

import inspect
import math
from pathlib import Path
from typing import Annotated

import typer

from lockstep.cli.terminal import format_number, make_console, print, print_json, print_table

app = typer.Typer(help="The published recipes.", invoke_without_command=True, rich_markup_mode=None)


@app.callback()
def list_recipes(context: typer.Context) -> None:
    """List the published recipes.

    `show` prints one, `diff` compares two, `table` lists published accuracies, `fields` describes
    what can be set.
    """
    from lockstep.recipes.published import RECIPES

    if context.invoked_subcommand is None:
        width = max(map(len, RECIPES))
        for name, build in RECIPES.items():
            title, _, _ = str(inspect.getdoc(build)).partition("\n\n")
            print(f"{name:<{width}}  {' '.join(title.split())}")


@app.command("show")
def show(
    name: Annotated[str, typer.Argument(help="A recipe's name, a YAML file or a run's folder.")],
) -> None:
    """Print a recipe, its source and published accuracies.

    Every field is printed as YAML. For a finished run's folder, its top-1 is put next to the
    published ones.
    """
    from lockstep.recipes import load_recipe
    from lockstep.recipes.published import RECIPES

    recipe = load_recipe(name)
    if name in RECIPES:
        for line in (inspect.getdoc(RECIPES[name]) or "").splitlines():
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
    return [
        f"top-1 {final['top1_percent']:.2f} % of {final['images']} images",
        *map(" ".join, rows),
    ]


@app.command("table")
def table(
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON, with source and container.")
    ] = False,
) -> None:
    """Print the published accuracies.

    With hardware, precision, epochs and hours of training. A hyphen stands for what the document
    does not say.
    """
    from lockstep.recipes.published_accuracies import read_accuracies

    rows = read_accuracies()
    if as_json:
        print_json([row.model_dump() for row in rows])
        return
    lines = [("recipe", "top-1 %", "precision", "hardware", "epochs", "hours", "notes")]
    for row in rows:
        gpus = f"{row.accelerators} x {row.accelerator}" if row.accelerator else "-"
        epochs = str(row.epochs or "-")
        hours = format_number(row.hours, "g")
        notes = row.variant or ""
        lines.append((row.recipe, row.figure(), row.precision, gpus, epochs, hours, notes))
    print_table(lines)


@app.command("fields")
def fields() -> None:
    """Describe every field that --set can change, with its default."""
    import textwrap

    import yaml

    from lockstep.recipes import Execution, Recipe
    from lockstep.recipes.augmentation_list import import_augmentation, list_augmentations
    from lockstep.recipes.field_validation import Settings

    parts: list[tuple[str, Settings]] = [
        ("Recipe: decides the result", Recipe()),
        ("Execution: how it is run", Execution()),
    ]
    for kind in map(import_augmentation, list_augmentations()):
        summary = (kind.__doc__ or "").split("\n\n")[0].replace("\n", " ")
        parts.append((f"Augmentation {kind().name}: {' '.join(summary.split())}", kind()))
    wrapper = textwrap.TextWrapper(120, initial_indent=6 * " ", subsequent_indent=6 * " ")
    for title, settings in parts:
        print(title)
        values = settings.fields()
        for name, field in type(settings).model_fields.items():
            as_yaml = yaml.safe_dump(values[name], default_flow_style=True, width=math.inf)
            print(f"  {name}={as_yaml.splitlines()[0]}")
            print(wrapper.fill((field.description or "").replace("\n", " ")))


@app.command("diff")
def diff(
    a: Annotated[str, typer.Argument(help="A recipe's name, a YAML file or a run's folder.")],
    b: Annotated[str, typer.Argument(help="Another recipe, to compare with the first.")],
) -> None:
    """Show the fields that differ between two recipes."""
    from rich.table import Column, Table

    from lockstep.recipes import difference, load_recipe

    differences = difference(load_recipe(a), load_recipe(b))
    if not differences:
        print("no field differs")
        return
    table = Table(*(Column(header, overflow="fold") for header in ("field", a, b)), box=None)
    for name, values in differences.items():
        table.add_row(name, *(str(value) for value in values))
    make_console().print(table, markup=False)
