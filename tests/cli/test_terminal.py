"""A name never prints anything that a terminal obeys: on stdout and stderr, in lines, tables, bars
and JSON."""

import io
import json
import unicodedata
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.progress import Progress, TextColumn
from rich.table import Table

from lockstep.cli import terminal
from lockstep.cli.console import Reporter
from tests.data.cases import image_folder, jpeg

Run = Callable[..., tuple[int, str, str]]
NAME = "\x1b]0;owned\x07\x1b[31m\x9b2J\rred\u202egpj"
SHOWN = r"\x1b]0;owned\x07\x1b[31m\x9b2J\x0dred\u202egpj"


def list_obeyed(text: str) -> list[str]:
    """Return a text's characters that Unicode calls controls, formats or line separators, except
    newlines."""
    return [
        character
        for character in text
        if unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp") and character != "\n"
    ]


def test_what_a_terminal_obeys_is_shown_as_its_escape() -> None:
    assert terminal.escape_text(NAME) == SHOWN
    assert terminal.escape_text("käse 日本 👍\t\n") == "käse 日本 👍\t\n"
    assert terminal.escape_line("a\nb\tc") == r"a\nb\tc"
    assert terminal.escape_text("\udcff\U000e0041") == r"\udcff\U000e0041"


def test_every_control_character_and_every_direction_is_obeyed_by_none() -> None:
    controls = [
        chr(code)
        for code in range(2**16)
        if unicodedata.category(chr(code)) in ("Cc", "Zl", "Zp", "Cs")
    ]
    directions = [
        chr(code)
        for code in range(2**16)
        if unicodedata.bidirectional(chr(code))[:3] in BIDIRECTIONAL
    ]
    for character in {*controls, *directions} - {"\t", "\n"}:
        assert not list_obeyed(terminal.escape_text(character)), f"U+{ord(character):04X}"


BIDIRECTIONAL = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}


def test_json_is_read_back_and_obeyed_by_none(capsys: pytest.CaptureFixture[str]) -> None:
    terminal.print_json({NAME: ["käse\n", "\udcff"]})
    output = capsys.readouterr().out
    assert not list_obeyed(output)
    assert json.loads(output) == {NAME: ["käse\n", "\udcff"]}


def test_tables_and_bars_show_names_so_and_keep_their_own_moves() -> None:
    file = io.StringIO()
    console = terminal.make_console(
        file=file, force_terminal=True, color_system="truecolor", width=200
    )
    table = Table(NAME)
    table.add_row(NAME)
    console.print(table, style="red")
    with Progress(TextColumn("{task.description}"), console=console, transient=True) as bar:
        bar.add_task(NAME, total=2)
    output = file.getvalue()
    assert output.count(SHOWN) == 2
    assert r"\x1b]0;owned" in output.split(SHOWN)[-1]
    assert "\x1b]0;" not in output
    assert "\x9b" not in output
    assert "\u202e" not in output
    assert "\x1b[31m" in output  # rich's own red


def test_a_listener_shows_names_so(capsys: pytest.CaptureFixture[str]) -> None:
    with Reporter() as reporter:
        reporter({"kind": "warning", "message": NAME})
    assert capsys.readouterr().out == f"warning: {SHOWN}\n"


@pytest.mark.parametrize(
    "command", [["data", "index"], ["data", "info"], ["data", "info", "--json"], ["data", "check"]]
)
def test_names_command_no_terminal(command: list[str], answer: Run, tmp_path: Path) -> None:
    name = NAME.replace("/", "")
    root = image_folder(
        tmp_path / name,
        {f"{name}/a.jpg": jpeg(40, 40), f"b/{name}\nc.jpg": b"no image", "b/x.jpg": jpeg(50, 50)},
    )
    _, output, errors = answer(*command, root)
    assert not list_obeyed(output + errors)
    assert "owned" in output


@pytest.mark.parametrize(
    "line", [["data", "info", NAME], ["recipes", "show", NAME], [NAME], ["report", f"--{NAME}"]]
)
def test_arguments_in_complaints_command_no_terminal(line: list[str], answer: Run) -> None:
    code, output, errors = answer(*line)
    assert (code, output) == (2, "")
    assert not list_obeyed(errors)
    assert r"\x1b" in errors
