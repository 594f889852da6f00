"""Pages of docs/reference that are written by hand name what the code has, and the code names pages
that exist."""

import re
from pathlib import Path

from lockstep.system import errors

ROOT = Path(__file__).parent.parent
PAGES = ROOT / "docs/reference"
OF_OTHERS = {"docs/spec.md"}
"""A page of Git LFS."""


def test_every_environment_variable_of_the_code_is_on_its_page() -> None:
    page = (PAGES / "environment-variables.md").read_text(encoding="utf-8")
    read = set()
    for path in (ROOT / "src").rglob("*.py"):
        read |= set(re.findall(r"\"(LOCKSTEP_[A-Z_]+[A-Z])\"", path.read_text(encoding="utf-8")))
    assert len(read) > 10
    assert {name for name in read if f"`{name}`" not in page} == set()


def test_every_exit_code_of_an_error_is_on_its_page() -> None:
    page = (PAGES / "exit-codes.md").read_text(encoding="utf-8")
    shown = {int(code) for code in re.findall(r"^\| (\d+) \|", page, flags=re.MULTILINE)}
    assert shown == {
        0,
        errors.LockstepError.exit_code,
        errors.UserError.exit_code,
        errors.EXIT_DIVERGED,
        errors.EXIT_SAVED_AND_STOPPED,
        errors.EXIT_INTERRUPTED,
    }


def test_the_fields_of_export_json_are_on_the_page_of_files() -> None:
    page = (PAGES / "files.md").read_text(encoding="utf-8")
    (table,) = re.findall(r"## `export.json`\n(.*?)\n```", page, flags=re.DOTALL)
    source = (ROOT / "src/lockstep/inference/programs.py").read_text(encoding="utf-8")
    (written,) = re.findall(r"description = \{(.*?)\n    \}", source, flags=re.DOTALL)
    shown = re.findall(r"^\| (.*?) \|", table, flags=re.MULTILINE)
    assert {name for cell in shown for name in re.findall(r"`(\w+)`", cell)} == set(
        re.findall(r"^ +\"(\w+)\":", written, flags=re.MULTILINE)
    )


def test_pages_that_the_code_names_exist() -> None:
    files = [ROOT / "Makefile", ROOT / "pyproject.toml"]
    for folder in ("src", "benchmarks"):
        files += [*(ROOT / folder).rglob("*.py"), *(ROOT / folder).rglob("*.yaml")]
    named = set()
    for file in files:
        named |= set(re.findall(r"\bdocs/[\w/-]+\.md\b", file.read_text(encoding="utf-8")))
    assert len(named) > 20
    assert {name for name in named - OF_OTHERS if not (ROOT / name).is_file()} == set()
