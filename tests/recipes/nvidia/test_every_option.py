"""Every option of every script of NVIDIA's is carried, or the translation says that it is not.

The options are those of NVIDIA's argument parsers (options.yaml), not those of Lockstep's tables.
"""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from lockstep.recipes import Execution, Recipe, load_recipe, parse_settings
from lockstep.recipes.nvidia.commands import find_changes
from lockstep.recipes.nvidia.table import systems
from lockstep.recipes.nvidia.translation import Translation, translate
from lockstep.system.plain_yaml import read_yaml

SCRIPTS: list[dict[str, Any]] = read_yaml(
    Path(__file__).with_name("options.yaml").read_text(encoding="utf-8")
)
COMMANDS = [
    (script, launcher, mode)
    for script in SCRIPTS
    for launcher in script["launchers"]
    for mode in script["modes"]
]


def groups(script: dict[str, Any]) -> list[list[str]]:
    """Return the script's options, each with a value that our tables know if it takes one."""
    system = systems()[script["system"]]
    rows = {
        name: row
        for row in system.options(system.script(script["script"], script.get("revision", "")))
        for name in row.names
    }
    translation = []
    for name, following in pairwise([*script["options"].split(), ""]):
        row = rows.get(name)
        values = [*row.values, row.default, row.example] if row else []
        value = next((remark for remark in reversed(values) if remark), "7")
        if name != "V":
            translation.append([name, value] if following == "V" else [name])
    return translation


def list_accounted(translation: Translation) -> list[str]:
    """Return the texts in which a translation names words of the original command."""
    remarks = (*translation.carried, *translation.not_carried, *translation.not_needed)
    return [*(remark.words for remark in remarks), *translation.unknown]


def missing(words: list[list[str]], translation: Translation) -> list[str]:
    texts = list_accounted(translation)
    return [
        " ".join(group)
        for group in words
        if not ({" ".join(group)} & set(texts) or set(group) <= set(translation.unknown))
    ]


@pytest.mark.parametrize(
    ("script", "launcher", "mode"),
    COMMANDS,
    ids=lambda part: str(part) if isinstance(part, str) else "",
)
def test_every_option_is_accounted_for(script: dict[str, Any], launcher: str, mode: str) -> None:
    words = groups(script)
    arguments = script.get("arguments", [])
    command = [
        *launcher.split(),
        script["script"],
        *mode.split(),
        *(word for group in words for word in group),
        *arguments,
    ]
    translation = translate(command, script["system"], script.get("revision"))
    assert missing([*words, *([argument] for argument in arguments)], translation) == []
    texts = " ".join(list_accounted(translation)).replace("=", " ").split()
    assert [
        word
        for word in (launcher + " " + mode).replace("=", " ").split()
        if word[0] == "-" and word not in ("-m", *texts)
    ] == []
    assert set(translation.unknown) <= {"--unheard-of", "5"}
    assert all(remark.reason for remark in (*translation.not_carried, *translation.not_needed))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script["script"])
def test_what_is_carried_is_in_the_command(script: dict[str, Any]) -> None:
    for group in groups(script):
        command = [
            script["script"],
            *script["modes"][0].split(),
            *group,
            *script.get("arguments", []),
        ]
        translation = translate(command, script["system"], script.get("revision"))
        becomes = [
            text
            for carried in translation.carried
            if carried.words == " ".join(group)
            for text in carried.becomes
        ]
        assert [text for text in becomes if not holds(translation, text)] == [], group


def holds(translation: Translation, text: str) -> bool:
    """Return whether a command has what an option became: a field with this value, or the value as
    a part of a word."""
    words = list(translation.command)
    name, _, value = text.partition("=")
    ours, how = parse_settings([word for flag, word in pairwise(words) if flag == "--set"])
    if text == "backend torch":
        return "--backend" not in words  # the default
    if name in Execution.model_fields:
        return name in how
    if name in Recipe.model_fields and "--recipe" in words:
        recipe = load_recipe(words[words.index("--recipe") + 1]).replace(**ours)
        wanted = recipe.replace(**parse_settings([text])[0])
        in_recipe = (
            wanted.fields()[name] == recipe.fields()[name] or find_changes(recipe, wanted) == {}
        )
        return in_recipe or ("benchmark" in words and value in words)
    value = value or text.partition(" ")[2] or text
    return any(value in word for word in words)
