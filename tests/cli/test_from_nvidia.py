"""Every equivalent of an option exists, the tables have all of them, and the command prints what
can be typed."""

import json
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from docs.extensions.nvidia_tables import describe_system
from lockstep.cli import app
from lockstep.data.index import open_index
from lockstep.data.sources import find_split
from lockstep.recipes import Execution, Recipe, parse_settings
from lockstep.recipes.nvidia.equivalents import describe_names
from lockstep.recipes.nvidia.table import (
    SLOTS,
    SYSTEMS,
    Option,
    Script,
    System,
    fill_template,
    systems,
)
from lockstep.recipes.nvidia.translation import translate

Run = Callable[..., tuple[int, str, str]]
PAGE = Path(__file__).parents[2] / "docs/reference/from-nvidia.md"
ROOT: Any = typer.main.get_command(app)


def parse(words: list[str]) -> dict[str, Any]:
    """Return what Lockstep's own parser makes of a command line. Nothing is run."""
    command = ROOT
    name = ""
    while hasattr(command, "commands"):
        name, *words = words
        command = command.commands[name]
    # With the names of the help: the command keeps them for other tests.
    context = command.make_context(name, list(words), **ROOT.context_settings)
    return parse(context.args) if name == "launch" else context.params


def templates(option: Option) -> Iterator[tuple[str, str]]:
    """Yield every template of an option with a value for it."""
    yield from ((to, value) for value, to in option.values.items())
    if option.to is not None:
        value = (
            option.default
            if option.default is not None and option.default not in option.values
            else option.example
        )
        assert option.takes == 0 or value, f"{option.names[0]} needs an example"
        yield option.to, value
    yield option.absent, ""


def rows() -> Iterator[tuple[System, Script | None, Option]]:
    for system in systems().values():
        yield from ((system, None, option) for option in system.environment)
        yield from (
            (system, None, option) for launcher in system.launchers for option in launcher.options
        )
        yield from (
            (system, script, option) for script in system.scripts for option in script.options
        )


def options_of(script: Script | None) -> set[str]:
    """Return the options of the command of Lockstep that a script is."""
    if script is None or script.command is None:
        return set()
    command = ROOT
    for name in (
        ["benchmark", "train"] if "@benchmark" in script.arguments else script.command.split()
    ):
        command = command.commands[name]
    return {name for parameter in command.params for name in parameter.opts}


def test_every_equivalent_is_a_field_with_a_valid_value_or_an_option_that_exists() -> None:
    translation = [
        (option.names[0], script, name, text)
        for _, script, option in rows()
        for template, value in templates(option)
        for name, text in fill_template(template, value, 2)
    ]
    assert {name[1:] for _, _, name, _ in translation if name.startswith("@")} <= set(SLOTS)
    options = [
        (known, name, options_of(script))
        for known, script, name, _ in translation
        if name.startswith("-")
    ]
    assert [(known, name) for known, name, ours in options if name not in ours] == []
    recipe = Recipe().replace(lr_step_epochs=[30])
    settings = {(name, text) for _, _, name, text in translation if name[0] not in "@-"}
    for name, text in settings:
        ours, how = parse_settings([f"{name}={text}"])
        assert recipe.replace(**ours) if ours else Execution.of(how)
    assert len(settings) > 100


@pytest.mark.parametrize("name", SYSTEMS)
def test_a_command_with_all_options_of_a_script_becomes_one_that_can_be_typed(name: str) -> None:
    system = systems()[name]
    for script in system.scripts:
        if script.command is None:
            continue
        words = ["horovodrun", "-np", "2"] if name == "tensorflow" else []
        words.append(script.name)
        for option in system.options(script):
            carried = [value for to, value in templates(option) if to and value]
            value = carried[0] if carried else option.default or option.example
            if option.takes == 0 or value:
                words += (
                    [value]
                    if option.positional
                    else [option.names[0], *[str(value)] * option.takes]
                )
        translation = translate(words, name, script.revision or None)
        assert translation.unknown == ()
        assert parse(list(translation.command))


def test_every_shell_script_is_found_by_the_name_that_the_page_shows() -> None:
    for system in systems().values():
        for shell in system.shells:
            assert re.fullmatch(shell.pattern, shell.shown.split()[0].rpartition("/")[2])
            assert parse(list(translate(shell.shown.split(), system.name).command))


def test_every_option_is_named_once_in_a_script() -> None:
    for system in systems().values():
        for script in system.scripts:
            names = [name for option in script.options for name in option.names]
            assert len(names) == len(set(names)), f"{system.name} {script.name}"
            assert set(script.also) <= {row.name for row in system.scripts}
            assert isinstance(system.start(script), Recipe)


@pytest.mark.parametrize("name", systems())
def test_the_tables_of_an_example_have_every_option(name: str) -> None:
    system = systems()[name]
    tables = describe_system(name)
    options = [option for script in system.scripts for option in script.options]
    options += [option for launcher in system.launchers for option in launcher.options]
    for option in [*options, *system.environment]:
        assert f"{describe_names(option)} |" in tables


def test_the_example_of_the_page_is_answered_as_the_page_shows(answer: Run) -> None:
    (block,) = re.findall(
        r"```console\n\$ (.*?)\n\$ ", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL
    )
    command, _, shown = block.replace("\\\n", "").partition("\n")
    code, output, errors = answer(*shlex.split(command)[1:])
    assert (code, output + errors) == (0, f"{shown}\n")


def test_json_has_the_words_of_the_command(answer: Run) -> None:
    code, output, errors = answer(
        "from-nvidia", "--json", "--", "python", "main.py", "--optimizer", "rmsprop", "D 1"
    )
    translation = json.loads(output)
    assert (code, errors) == (0, "")
    assert translation["command"][:2] == ["lockstep", "train"]
    assert parse(translation["command"][1:])["data"] == Path("D 1")
    assert [row["words"] for row in translation["not_carried"]] == ["--optimizer rmsprop"]


def test_a_script_without_equivalent_is_answered_with_the_reason_alone(answer: Run) -> None:
    code, output, errors = answer(
        "from-nvidia", "--", "bash", "scripts/nsys_profiling.sh", "--list", "train", "DATA"
    )
    assert (code, output) == (0, "")
    assert errors.startswith("not translated: nsys_profiling.sh: `lockstep train --profile ")
    assert "not known" not in errors


def test_what_im2rec_packs_is_packed(
    answer: Run, textures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for split in ("train", "val"):
        command = (
            f"python /opt/mxnet/tools/im2rec.py --pass-through --num-thread 2 {split}"
            f" {textures}/{split}"
        )
        code, output, _ = answer("from-nvidia", "--", *command.split())
        assert (code, output) == (
            0,
            f"lockstep data pack {textures}/{split} {split} --format recordio --workers 2\n",
        )
        assert answer(*output.split()[1:])[0] == 0
    packed = [len(open_index(find_split(tmp_path, split))) for split in ("train", "val")]
    assert packed == [60, 20]


def test_help_is_that_of_the_command_or_of_the_script(answer: Run) -> None:
    assert answer("from-nvidia", "--", "-h") == answer("from-nvidia", "-h")
    code, output, errors = answer("from-nvidia", "--", "python", "classify.py", "--help")
    assert (code, errors) == (0, "")
    assert output.startswith("## PyTorch: `classify.py`\n")
    assert output in describe_system("pytorch")


def test_a_command_line_is_needed(answer: Run) -> None:
    code, output, errors = answer("from-nvidia")
    assert (code, output) == (2, "")
    assert "nothing to translate" in errors
