"""The pages of runtimes and exports have a command for every target and every use."""

import re

from lockstep.inference.targets import TARGETS, find_target
from tests.docs.pages import ROOT, find_calls, read_blocks, read_commands

PAGE = ROOT / "docs/how-to/deploy.md"
RUNTIMES = ROOT / "docs/how-to/runtimes.md"


def test_the_pages_have_a_command_for_every_target_and_every_use() -> None:
    calls = []
    for block in [*read_blocks(RUNTIMES), *read_blocks(PAGE)]:
        for command in read_commands(block):
            calls += find_calls(command.line)
    assert {words[0] for words in calls} >= {"doctor", "predict", "evaluate", "benchmark", "export"}

    exports = [words for words in calls if words[0] == "export"]
    names = {words[words.index("--to") + 1] for words in exports if "--to" in words}
    assert {find_target(name).name for name in names} | {"savedmodel"} == {*TARGETS}


def test_the_table_has_every_target() -> None:
    table = PAGE.read_text(encoding="utf-8").partition("| `--to` |")[2].partition("| any ")[0]
    assert {*re.findall(r"^\| `([a-z-]+)`", table, re.MULTILINE)} == {*TARGETS}
