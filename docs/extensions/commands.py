"""Every command of the command line, with examples of the pages and its options."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from lockstep.cli import app
from lockstep.cli.command import describe_parameter

DOCS = Path(__file__).parents[1]
TASKS = DOCS / "reference/commands.md"
ROW = re.compile(r"^\| (?P<task>[^|`]+) \| (?P<command>.*`lockstep .*) \|$", re.M)
SHOWN = re.compile(r"^\$ (?:.* \| )?(?P<line>lockstep .*)$", re.M)
EXAMPLE = re.compile(r"^Example: (?P<line>.*(?:\n(?!\n).*)*)", re.M)
MOST_SHOWN = 3
"""Lines of other pages that are shown for a command without a task."""


def describe_commands() -> str:
    """Return a section for each command."""
    sections = []
    for path, command in list_commands(typer.main.get_command(app), "lockstep", None):
        sections.append(describe_command(path, command))
    return "\n\n".join(sections)


def list_commands(command: Any, name: str, parent: Any) -> Iterator[tuple[str, Any]]:
    """Yield the words that call a command, and its context, for a command and all below it."""
    settings = command.context_settings  # a command keeps the help option of its first context
    context = command.context_class(command, info_name=name, parent=parent, **settings)
    if command.hidden:
        return
    if parent is not None:
        yield context.command_path, context
    for own_name, own in getattr(command, "commands", {}).items():
        yield from list_commands(own, own_name, context)


def describe_command(path: str, context: Any) -> str:
    """Return the section of a command: what it does, what it is used for, its options."""
    command = context.command
    usage = command.get_usage(context).removeprefix("Usage: ")
    parts = [f"## `{path}`", describe_help(command.help or ""), f"```text\n{usage}\n```"]
    if not getattr(command, "commands", {}) or command.invoke_without_command:
        parts.append(show_examples(path))
    options = [
        record for parameter in command.params if (record := describe_parameter(parameter, context))
    ]
    if options:
        rows = [f"| `{escape(names)}` | {escape(about)} |" for names, about in options]
        parts.append("\n".join(["| argument or option | meaning |", "|---|---|", *rows]))
    return "\n\n".join(filter(None, parts))


def describe_help(text: str) -> str:
    """Return the help text of a command as Markdown, its example as a block."""
    return EXAMPLE.sub(
        lambda match: "```console\n$ {}\n```".format(match["line"].replace("\n", " ")), text
    )


def escape(text: str) -> str:
    """Return a text for a cell of a table."""
    return text.replace("|", "\\|")


def show_examples(path: str) -> str:
    """Return a table of what a command is used for, from the page of commands; for a command that
    is not there, lines of other pages."""
    rows = [
        row[0]
        for row in ROW.finditer(TASKS.read_text(encoding="utf-8"))
        if any(is_of(path, line) for line in re.findall(r"`(lockstep [^`]*)`", row["command"]))
    ]
    if rows:
        return "\n".join(["| to do | command |", "|---|---|", *rows])
    lines = list(dict.fromkeys(list_lines(path)))
    if not lines:
        raise ValueError(f"no page shows {path}; add a line to docs/reference/commands.md")
    return "\n".join(["```console", *(f"$ {line}" for line in lines[:MOST_SHOWN]), "```"])


def list_lines(path: str) -> Iterator[str]:
    """Yield the lines of all pages that call a command."""
    for page in sorted(DOCS.rglob("*.md")):
        for match in SHOWN.finditer(page.read_text(encoding="utf-8")):
            if is_of(path, match["line"]):
                yield match["line"]


def is_of(path: str, line: str) -> bool:
    """Return whether a command line calls this command itself, not one below it."""
    words = line.split()
    return shlex.join(words[: len(path.split())]) == path
