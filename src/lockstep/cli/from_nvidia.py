"""`lockstep from-nvidia`."""

import shlex
import sys
from dataclasses import asdict
from typing import Annotated

import typer

from lockstep.cli.terminal import in_line, print, print_json


def command(
    context: typer.Context,
    system: Annotated[
        str | None,
        typer.Option(
            help="Example: pytorch, tensorflow, paddle or mxnet; by default found from the command."
        ),
    ] = None,
    revision: Annotated[
        str | None, typer.Option(help="Year of MXNet's scripts: 2019 (default) or 2022.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON: command, recipe, what is not carried.")
    ] = False,
    tables: Annotated[
        bool, typer.Option("--tables", help="Print all options and their equivalents.", hidden=True)
    ] = False,
) -> None:
    """Translate a command of NVIDIA's examples; run nothing.

    Example: lockstep from-nvidia -- python main.py --arch resnext101-32x4d -b 128 --amp /imagenet

    The equivalent command is on standard output. What it does not carry is on standard error. If
    the command has -h, the options of its script are printed, with their equivalents.
    """
    from lockstep.recipes.nvidia.command_line import read_command
    from lockstep.recipes.nvidia.page import script_table
    from lockstep.recipes.nvidia.page import tables as all_tables
    from lockstep.recipes.nvidia.translation import translate_command
    from lockstep.system.errors import UserError

    if tables:
        print(all_tables(), end="")
        return
    if not context.args:
        raise UserError(
            "nothing to translate; expected a command after --: lockstep from-nvidia -- python"
            " main.py ..."
        )
    if context.args[0] in ("-h", "--help"):
        print(context.get_help())
        return
    given = read_command(list(context.args), system, revision)
    if given.wants_help:
        print(script_table(given.system, given.script), end="")
        return
    found = translate_command(given)
    if as_json:
        print_json(
            asdict(found) | {"command": ["lockstep", *found.command] if found.command else []}
        )
        return
    if found.command:
        keep = [f"{name}={shlex.quote(value)}" for name, value in found.environment.items()]
        print(in_line(" ".join([*keep, shlex.join(["lockstep", *found.command])])))
    lines = [("not carried", f"{each.words}: {each.reason}") for each in found.not_carried]
    lines += [("nothing to type", f"{each.words}: {each.reason}") for each in found.not_needed]
    lines += [("not known", shlex.join(found.unknown))] if found.unknown else []
    lines += [("note", each) for each in found.notes]
    for label, text in lines:
        print(in_line(f"{label}: {text}"), file=sys.stderr)
