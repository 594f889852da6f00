"""What README and the pages of commands and weights show exists, and the Python example runs unchanged."""

import re
from pathlib import Path

import pytest
import typer

from lockstep.cli import app
from lockstep.data.textures import draw_data_set
from lockstep.weights.conversion import TARGETS

ROOT = Path(__file__).parent.parent
README, COMMANDS, WEIGHTS = ROOT / "README.md", ROOT / "docs" / "commands.md", ROOT / "docs" / "weights.md"
ON_THE_WEB = re.compile(r"https://(?:raw\.githubusercontent|github)\.com/lockstep-vision/lockstep/(?:blob/)?main/")


@pytest.mark.slow
def test_the_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", COMMANDS.read_text(encoding="utf-8"), flags=re.DOTALL)
    monkeypatch.chdir(tmp_path)
    draw_data_set(Path("demo/data"), train_images=40, val_images=10)
    # The numbers of the demo's validation images follow those of its training images; here there are fewer of those.
    example = re.sub(r"00\d+\.jpg", "00004.jpg", example)
    exec(compile(example, str(COMMANDS), "exec"), {})
    assert "10 " in capsys.readouterr().out


@pytest.mark.parametrize(
    "page", [README, *sorted((ROOT / "docs").glob("*.md")), ROOT / "SECURITY.md"], ids=lambda page: page.name
)
def test_links_lead_to_files_of_the_project(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)", page.read_text(encoding="utf-8")):
        on_the_web = ON_THE_WEB.match(target)
        if on_the_web:
            assert (ROOT / target[on_the_web.end() :]).is_file(), target
        elif "://" not in target:
            assert (page.parent / target).exists(), target


def headings(page: Path) -> set[str]:
    """Return the anchors of a page, as GitHub makes them: lower case, without marks, hyphens for spaces."""
    found = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda page: page.name)
def test_links_to_a_part_of_a_page_lead_to_its_heading(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^):#]*)#([^)]+)\)", page.read_text(encoding="utf-8")):
        assert anchor in headings(page.parent / target if target else page), f"{target}#{anchor}"


def test_the_page_of_weights_has_a_command_for_every_format_that_is_written() -> None:
    shown = set(re.findall(r"`lockstep convert \S+ \S+ --to ([a-z-]+)`", WEIGHTS.read_text(encoding="utf-8")))
    assert shown == TARGETS.keys() - {"safetensors"}  # the default


@pytest.mark.parametrize("page", [README, COMMANDS, WEIGHTS], ids=lambda page: page.name)
def test_every_command_shown_is_one_of_lockstep(page: Path) -> None:
    known = typer.main.get_command(app).commands.keys()  # type: ignore[attr-defined]
    shown = set(re.findall(r"(?:`|\$ )lockstep ([a-z-]+)", page.read_text(encoding="utf-8")))
    assert len(shown) >= 4
    assert shown <= known
