"""Links of the pages lead somewhere, and what README and the pages of weights and originals name
exists."""

import re
import runpy
from pathlib import Path
from typing import Any

import pytest

from lockstep.recipes import Execution, Recipe, parse_settings
from lockstep.weights.target_formats import TARGETS

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
WEB = "https://github.com/lockstep-vision/lockstep/blob/main/"
WEIGHTS = ROOT / "docs/reference/weight-formats.md"
ORIGINALS = ROOT / "docs/explanation/originals.md"
PAGES = sorted((ROOT / "docs").rglob("*.md"))


@pytest.mark.parametrize(
    "page",
    [README, *PAGES, ROOT / "SECURITY.md"],
    ids=lambda page: page.name,
)
def test_links_lead_to_files_of_the_project(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)", page.read_text(encoding="utf-8")):
        assert "://" in target or (page.parent / target).exists(), target


def test_the_metadata_of_the_package_has_readme_with_whole_addresses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    metadata: dict[str, Any] = {}
    monkeypatch.setattr("setuptools.setup", lambda **fields: metadata.update(fields))
    runpy.run_path(str(ROOT / "setup.py"))
    text = README.read_text(encoding="utf-8")
    links = re.findall(r"(!?)\[[^\]]*\]\(([^)]+)\)", metadata["long_description"])
    hosts = {"!": "https://raw.githubusercontent.com/lockstep-vision/lockstep/main/"}
    paths = [path.removeprefix(hosts.get(kind, WEB)) for kind, path in links]
    assert len(paths) > 20
    assert paths == re.findall(r"\]\(([^)]+)\)", text)


def test_readme_is_short_and_begins_with_what_people_want_to_do() -> None:
    text = README.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 75
    assert text.index("lockstep train --data photos") < text.index("TensorFlow")


def test_badges_are_those_of_the_package() -> None:
    badges = runpy.run_path(str(ROOT / "docs/pictures/badges.py"))
    for name, (label, value) in badges["find_texts"]().items():
        drawn = (badges["BADGES"] / f"{name}.svg").read_text(encoding="utf-8")
        assert drawn == badges["draw_badge"](label, value)
        assert f"badges/{name}.svg" in README.read_text(encoding="utf-8")


def headings(page: Path) -> set[str]:
    """Return the anchors of a page, as GitHub makes them: lower case, without marks, hyphens for
    spaces."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_to_a_part_of_a_page_lead_to_its_heading(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^):#]*)#([^)]+)\)", page.read_text(encoding="utf-8")):
        assert anchor in headings(page.parent / target if target else page), f"{target}#{anchor}"


def test_the_page_of_weights_has_a_command_for_every_format_that_is_written() -> None:
    shown = set(
        re.findall(
            r"`lockstep convert \S+ \S+ --to ([a-z-]+)`", WEIGHTS.read_text(encoding="utf-8")
        )
    )
    assert shown == TARGETS.keys() - {"safetensors"}  # the default


def test_the_page_of_originals_names_fields_and_tests_that_exist() -> None:
    page = ORIGINALS.read_text(encoding="utf-8")
    shown = re.findall(r"`([^`\n]+)`", page)
    settings = [text for text in shown if re.fullmatch(r"[a-z_]+=\S+", text)]
    for setting in settings:
        recipe, execution = parse_settings([setting])
        Recipe(**{"lr_step_epochs": [30]} | recipe)  # `lr_decay=step` needs epochs
        Execution(**execution)
    here = re.findall(r"\|([^|\n]*)\|$", page, flags=re.MULTILINE)
    names = {name for cell in here for name in re.findall(r"`([a-z]+(?:_[a-z]+)+)`", cell)} - {
        "open_predictor"
    }
    assert len(settings) + len(names) > 50
    assert names <= Recipe().fields().keys() | Execution().fields().keys()

    parity = (ROOT / "docs/results/parity.md").read_text(encoding="utf-8")
    tests = set(re.findall(r"`(tests/[^`\n]+)`", page + parity))
    assert len(tests) > 20
    assert {path for path in tests if not (ROOT / path).is_file()} == set()
