"""The help of the command line, and its answers to options that it does not have."""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import version
from typing import Any

import pytest
import typer

from lockstep.cli import COMMANDS, app
from tests.lines import check_lines

Run = Callable[..., tuple[int, str, str]]


def test_the_version_is_said(answer: Run) -> None:
    assert answer("--version") == (0, f"lockstep {version('lockstep-vision')}\n", "")


@pytest.mark.parametrize(
    "command",
    ["", "train", "data", "data check", "recipes show", "benchmark train", "find batch", "launch"],
)
def test_h_is_help_everywhere(answer: Run, command: str) -> None:
    short, long = (answer(*command.split(), option) for option in ("-h", "--help"))
    assert short == long
    assert (short[0], short[2]) == (0, "")
    assert "  -h, --help " in short[1]


@pytest.mark.parametrize("command", ["", "data", "recipes", "benchmark"])
def test_summaries_of_commands_fit_into_80_columns(
    answer: Run, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    _, output, _ = answer(*command.split(), "--help")
    summaries = output.partition("Commands:")[2].partition("\n\n")[0].splitlines()[1:]
    assert len(summaries) >= 3
    assert [
        line
        for line in summaries
        if line.endswith("...") or len(line) > 80 or not re.match("  [a-z]", line)
    ] == []


def list_commands(command: Any, name: str, parent: Any) -> Iterator[Any]:
    """Yield the contexts of a command and of all below it that are not hidden."""
    context = command.context_class(
        command, info_name=name, parent=parent, terminal_width=100, **command.context_settings
    )
    if not command.hidden:
        yield context
        for own_name, own in getattr(command, "commands", {}).items():
            yield from list_commands(own, own_name, context)


def list_names(parameters: list[Any]) -> set[str]:
    """Return the names of parameters as a help writes them."""
    names = set()
    for parameter in parameters:
        if parameter.param_type_name == "argument":
            names.add(parameter.metavar or parameter.name.upper())
        elif not parameter.hidden:
            names |= {*parameter.opts, *parameter.secondary_opts}
    return names


def read_rows(text: str) -> list[set[str]]:
    """Return the names in each row of a help that describes an argument or an option."""
    rows = re.findall(r"^  ([A-Z]+|-.*?)(?:  |$)", text, re.M)
    return [{*re.findall(r"--?[a-z][\w-]*|^[A-Z]+", row)} for row in rows]


def test_help_fits_a_screen_and_help_all_shows_the_rest() -> None:
    shortened = {}
    for context in list_commands(typer.main.get_command(app), "lockstep", None):
        path = context.command_path
        short = context.get_help().splitlines()
        assert len(short) <= 30, path
        assert "--help-all" in context.command.get_params(context)[-1].opts, path
        assert max(map(len, short)) <= 100, path
        context.meta["shows_all"] = True
        everything = context.get_help()
        context.meta.clear()
        assert "<" not in everything, path  # a type of Python instead of a metavar
        rows = read_rows(everything)
        names = list_names(context.command.params) | {"-h", "--help"}
        assert set().union(*rows) - {"--help-all"} == names, path
        few = read_rows("\n".join(short))
        left_out = len(rows) - len(few) - 1
        if short[-1] == f"--help-all shows {left_out} more options.":
            shortened[path] = left_out
        elif path != "lockstep":
            assert few == rows, path
        required = [parameter for parameter in context.command.params if parameter.required]
        assert list_names(required) <= set().union(*few), path
    assert shortened["lockstep train"] > 5
    assert shortened["lockstep serve"] > 5


def test_the_help_of_all_commands_names_those_that_it_does_not_describe(answer: Run) -> None:
    _, short, _ = answer("--help")
    _, everything, _ = answer("--help-all")
    commands = set(re.findall(r"^  ([a-z][a-z-]+)  ", everything, re.M))
    described = set(re.findall(r"^  ([a-z][a-z-]+)  ", short, re.M))
    assert commands == {*COMMANDS}
    left_out = commands - described
    _, _, named = " ".join(short.split()).rpartition(f"and {len(left_out)} more commands: ")
    assert {*named.rstrip(".").split(", ")} == left_out != set()


@pytest.mark.parametrize(
    ("option", "where"),
    [("--stop-after-epochs", "-h"), ("--stop-after-steps", "--help-all"), ("--zzz", "--help-all")],
)
def test_an_error_names_the_help_that_shows_the_option(
    answer: Run, option: str, where: str
) -> None:
    _, _, errors = answer("train", "--out", "R", option, "x")
    assert f"lockstep train {where}' for help." in errors


@pytest.mark.parametrize(
    ("words", "position", "completed"),
    [("lockstep si", 1, "sign"), ("lockstep train --trust", 2, "--trust-run")],
)
def test_a_shell_completes_commands_and_options(words: str, position: int, completed: str) -> None:
    environment = {
        "_LOCKSTEP_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(position),
    }
    code = "import sys; sys.argv = ['lockstep']; from lockstep.cli import run; run()"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.stdout.split(), done.stderr) == ([completed], "")


TRAIN = ["train", "--recipe", "demo", "--data", "D", "--out", "R"]


@pytest.mark.parametrize(
    ("words", "option", "known"),
    [
        ([*TRAIN, "--epochs", "3"], "--epochs", "--set epochs=3"),
        ([*TRAIN, "--lr=0.1"], "--lr", "--set lr=0.1"),
        ([*TRAIN, "--amp", "--lr", "1"], "--amp", "--set precision=VALUE"),
        ([*TRAIN, "-j", "4"], "-j", "--set loader_threads=4"),
        (["evaluate", "R", "--data", "D", "--batch-size", "3"], "--batch-size", "--batch 3"),
        (["benchmark", "train", "--learning-rate", "3"], "--learning-rate", "--set lr=3"),
    ],
)
def test_other_options_are_known(answer: Run, words: list[str], option: str, known: str) -> None:
    code, output, errors = answer(*words)
    assert (code, output) == (2, "")
    command = "train" if "train" in words else "evaluate"
    check_lines(errors, rf"^lockstep: {command} .* {option}\. .* {re.escape(known)}\?$")


@pytest.mark.parametrize(
    "words",
    [[*TRAIN, "--zzz", "3"], ["report", "R", "--lr", "3"], ["recipes", "show", "demo", "--lr"]],
)
def test_an_option_that_is_like_none_is_said_to_be_unknown(answer: Run, words: list[str]) -> None:
    code, output, errors = answer(*words)
    assert (code, output) == (2, "")
    assert "No such option" in errors
