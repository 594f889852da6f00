"""The help of the command line, and its answers to options that it does not have."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version

import pytest

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
    summaries = output.partition("Commands:")[2].splitlines()[1:]
    assert len(summaries) >= 3
    assert [
        line
        for line in summaries
        if line.endswith("...") or len(line) > 80 or not re.match("  [a-z]", line)
    ] == []


@pytest.mark.parametrize(
    ("words", "position", "completed"),
    [("lockstep tr", 1, "train"), ("lockstep train --rec", 2, "--recipe")],
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
