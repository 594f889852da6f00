"""What the pages show exists: commands with their options and values, and names of Python.

`make docs-run` runs them and compares what they print (`run_pages.py`)."""

import ast
import re
import shlex
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import typer

import lockstep
from docs.extensions.nvidia_tables import describe_benchmarks, describe_system
from lockstep import cli
from lockstep.recipes import parse_settings
from lockstep.recipes.nvidia.table import SYSTEMS
from tests.docs.pages import PAGES, ROOT, find_calls, read_blocks, read_commands

BLOCKS = [block for page in PAGES for block in read_blocks(page)]
LOCKSTEP: Any = typer.main.get_command(cli.app)
STARTERS = ("launch", "slurm", "ray", "kubernetes")
"""Commands that start another one, which stands behind --."""
OMITTED = ("...", "COMMAND")
CODE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")


def find_calls_of(page: Path) -> list[tuple[str, list[str], bool]]:
    """Return where a page calls Lockstep, the words of each call, and whether it is complete: that
    is in a block, whereas a sentence may show a part of one."""
    calls = []
    for block in (block for block in BLOCKS if block.page == page and block.language == "console"):
        for command in read_commands(block):
            if command.output.startswith("lockstep: "):
                continue  # it shows an error
            called = find_calls(command.line)
            calls += [(block.place, words, "..." not in words) for words in called]
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), start=1):
        for code in CODE.findall(line):
            if code.startswith("lockstep "):
                place = f"{page.relative_to(ROOT)}:{number}"
                calls += [(place, words, False) for words in find_calls(code)]
    return calls


def find_mistake(words: list[str], is_complete: bool = True) -> str:
    """Return what is wrong with a command line, without its first word; an empty text if nothing
    is. `is_complete` says whether everything that is required must be there."""
    command: Any = LOCKSTEP
    while words and hasattr(command, "commands") and words[0] not in OMITTED and words[0][0] != "-":
        name, *words = words
        if name not in command.commands:
            return f"there is no command {name}"
        command = command.commands[name]
    if hasattr(command, "commands") or {"-h", "--help", "--help-all"} & {*words}:
        return ""
    if command.name in STARTERS:
        end = words.index("--") if "--" in words else len(words)
        mistake = find_mistake(words[end + 1 :], is_complete) if words[end + 1 :] else ""
        return find_wrong_words(command, words[:end], is_complete) or mistake
    return find_wrong_words(command, words, is_complete) or find_wrong_settings(words)


def find_wrong_words(command: Any, words: list[str], is_complete: bool) -> str:
    """Return which options do not exist, or what is missing. Values are not looked at: some would
    be downloaded."""
    # A command keeps the help option of its first context, also for later tests.
    settings = LOCKSTEP.context_settings | command.context_settings
    context = command.context_class(command, info_name=command.name, **settings)
    try:
        values, _, _ = command.make_parser(context).parse_args(list(words))
    except Exception as error:
        # A form such as `--to onnx|triton` may end in an option without its value.
        is_short = type(error).__name__ == "BadOptionUsage" and not is_complete
        return "" if is_short else f"{type(error).__name__}: {getattr(error, 'message', error)}"
    if not is_complete:
        return ""
    missing = [item.name for item in command.params if item.required and not values.get(item.name)]
    return f"missing: {missing}" if missing else ""


def find_wrong_settings(words: list[str]) -> str:
    settings = [value for name, value in pairwise(words) if name == "--set" and "=" in value]
    try:
        parse_settings(settings)
    except lockstep.UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_are_understood(page: Path) -> None:
    mistakes = [
        f"{place}: lockstep {shlex.join(words)}: {mistake}"
        for place, words, is_complete in find_calls_of(page)
        if (mistake := find_mistake(words, is_complete))
    ]
    assert mistakes == []


def test_commands_in_nvidias_tables_are_understood() -> None:
    """The site has these tables, the pages in the tree do not."""
    text = "\n".join([describe_benchmarks(), *map(describe_system, SYSTEMS)])
    calls = [
        call
        for code in CODE.findall(text)
        if code.startswith("lockstep ")
        for call in find_calls(code.replace("<n>", "N"))
    ]
    assert len(calls) > 100
    assert [words for words in calls if find_mistake(words, is_complete=False)] == []


@pytest.mark.parametrize("name", ["predict", "serve"])
def test_the_page_of_a_command_names_options_that_exist(name: str) -> None:
    page = (ROOT / f"docs/how-to/{name}.md").read_text(encoding="utf-8")
    options = re.findall(r"`(--[a-z-]+)", page)
    assert len(options) > 3
    assert [option for option in options if find_mistake([name, option], is_complete=False)] == []


def test_python_imports_names_that_exist() -> None:
    blocks = [block for block in BLOCKS if block.language == "python"]
    assert len(blocks) > 15
    missing = []
    for block in blocks:
        tree = ast.parse(block.text, block.place)
        missing += [f"{block.place}: {name}" for name in find_missing_names(tree)]
    assert missing == []


def find_missing_names(tree: ast.Module) -> list[str]:
    """Return the names of Lockstep that a program uses and that do not exist."""
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lockstep"):
            names += [(node.module or "", alias.name) for alias in node.names]
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "lockstep":
            names.append(("lockstep", node.attr))
    return [
        f"{module}.{name}" for module, name in names if not hasattr(import_module(module), name)
    ]
