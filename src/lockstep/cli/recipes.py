"""`lockstep recipes`: list, show and compare."""

import inspect
from typing import Annotated

import typer

from lockstep.cli.terminal import console, print

app = typer.Typer(help="The published recipes.", invoke_without_command=True, rich_markup_mode=None)


@app.callback()
def listing(context: typer.Context) -> None:
    """List the published recipes. `show` prints one, `diff` compares two, `fields` describes what can be set."""
    from lockstep.recipes.published import RECIPES

    if context.invoked_subcommand is None:
        width = max(map(len, RECIPES))
        for name, build in RECIPES.items():
            print(f"{name:<{width}}  {inspect.getdoc(build).splitlines()[0]}")  # type: ignore[union-attr]


@app.command("show")
def show(name: Annotated[str, typer.Argument(help="A recipe's name, a YAML file or a run's folder.")]) -> None:
    """Print the source of a recipe, then every field as YAML."""
    from lockstep.recipes import load_recipe
    from lockstep.recipes.published import RECIPES

    recipe = load_recipe(name)
    if name in RECIPES:
        for line in (inspect.getdoc(RECIPES[name]) or "").splitlines():
            print(f"# {line}".rstrip())
    print(recipe.to_yaml(), end="")


@app.command("fields")
def fields() -> None:
    """Describe every field that --set can change, with its default."""
    import textwrap

    from lockstep.recipes import Execution, Recipe

    for title, settings in (("Recipe: decides the result", Recipe()), ("Execution: how it is run", Execution())):
        print(title)
        for name, value in settings.fields().items():
            print(f"  {name} = {value}")
            about = type(settings).model_fields[name].description or ""
            print(textwrap.fill(about.replace("\n", " "), 120, initial_indent="      ", subsequent_indent="      "))


@app.command("diff")
def diff(
    a: Annotated[str, typer.Argument(help="A recipe's name, a YAML file or a run's folder.")],
    b: Annotated[str, typer.Argument(help="Another recipe, to compare with the first.")],
) -> None:
    """Show the fields that differ between two recipes."""
    from rich.table import Column, Table

    from lockstep.recipes import difference, load_recipe

    changed = difference(load_recipe(a), load_recipe(b))
    if not changed:
        print("no field differs")
        return
    table = Table(*(Column(header, overflow="fold") for header in ("field", a, b)), box=None)
    for name, values in changed.items():
        table.add_row(name, *(str(value) for value in values))
    console().print(table, markup=False)
