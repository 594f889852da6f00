"""`lockstep from-nvidia`."""

import shlex
import sys
from dataclasses import asdict
from typing import Annotated

import typer

from lockstep.cli.terminal import escape_line, print, print_json
from lockstep.system.errors import UserError


def command(
    context: typer.Context,
    system: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="pytorch, tensorflow, paddle or mxnet (default: recognised)."
        ),
    ] = None,
    revision: Annotated[
        str | None,
        typer.Option(metavar="YEAR", help="Year of MXNet's scripts: 2019 (default) or 2022."),
    ] = None,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print JSON: command, recipe and what is not translated."),
    ] = False,
) -> None:
    """Translate a command of NVIDIA's examples; run nothing.

    Prints the equivalent command, and on standard error what is not translated. For a command with
    -h, prints the equivalents of all its options.

    Example: lockstep from-nvidia -- python main.py --arch resnext101-32x4d -b 128 --amp /imagenet
    """
    from lockstep.recipes.nvidia.command_line import read_command
    from lockstep.recipes.nvidia.equivalents import describe_script
    from lockstep.recipes.nvidia.translation import translate_command

    if not context.args:
        raise UserError(
            "nothing to translate; expected a command after --: lockstep from-nvidia -- python"
            " main.py ..."
        )
    if context.args[0] in ("-h", "--help"):
        print(context.get_help())
        return
    parsed = read_command(list(context.args), system, revision)
    if parsed.wants_help:
        print(describe_script(parsed.system, parsed.script), end="")
        return
    translation = translate_command(parsed)
    words = ["lockstep", *translation.command] if translation.command else []
    if as_json:
        print_json(asdict(translation) | {"command": words})
        return
    if words:
        environment = translation.environment.items()
        keep = [f"{name}={shlex.quote(value)}" for name, value in environment]
        print(escape_line(" ".join([*keep, shlex.join(words)])))
    remarks = [("not translated", remark) for remark in translation.not_carried]
    remarks += [("not needed", remark) for remark in translation.not_needed]
    lines = [f"{label}: {remark.words}: {remark.reason}" for label, remark in remarks]
    if translation.unknown:
        lines.append(f"unknown: {shlex.join(translation.unknown)}")
    for line in [*lines, *(f"note: {note}" for note in translation.notes)]:
        print(escape_line(line), file=sys.stderr)
