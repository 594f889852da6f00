"""The page in headless Chromium."""

import json
import re
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import lockstep
from lockstep.recipes import Recipe, load_recipe
from lockstep.reporting.page import MISSING
from lockstep.system.event_log import read_log
from tests.browsers import chromium, needs_browser
from tests.reporting.cases import write_run
from tests.reporting.conftest import NASTY

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

pytestmark = [pytest.mark.slow, needs_browser]

Show = Callable[..., "Page"]
FRAMES = (
    "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() =>"
    " requestAnimationFrame(done))))"
)
"""Waits until Chromium has shown the page twice."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as browser:
        yield browser


@pytest.fixture
def show(browser: Any) -> Iterator[Show]:
    """A function that opens a page. The page must cause no complaint and no request until the end
    of the test."""
    complaints: list[str] = []
    contexts = []

    def open_page(path: Path, width: int = 1280, height: int = 900, **how: Any) -> "Page":
        contexts.append(browser.new_context(viewport={"width": width, "height": height}, **how))
        page: Page = contexts[-1].new_page()
        page.set_default_timeout(60_000)
        page.on("console", lambda message: complaints.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: check(request.url, path))
        page.goto(path.as_uri())
        page.evaluate(FRAMES)  # the charts are drawn in the first one
        return page

    def check(url: str, path: Path) -> None:
        if url != path.as_uri() and not url.startswith("data:"):
            complaints.append(f"asks for {url}")

    yield open_page
    for context in contexts:
        context.close()
    assert complaints == []


@pytest.fixture(scope="module")
def page_of_one(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return lockstep.report(run, tmp_path_factory.mktemp("page") / "one.html")


@pytest.fixture(scope="module")
def page_of_four(four: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return lockstep.report(four, tmp_path_factory.mktemp("page") / "four.html")


def column(page: "Page", table: str, number: int) -> list[str]:
    rows = page.locator(f"{table} tbody tr")
    return [cell.strip() for cell in rows.locator(f":nth-child({number})").all_text_contents()]


def middle(locator: "Locator") -> tuple[float, float]:
    locator.scroll_into_view_if_needed()
    # The page hears of having been scrolled in the first one, and hides what it shows.
    locator.page.evaluate(FRAMES)
    box = locator.bounding_box()
    assert box is not None
    return box["x"] + box["width"] / 2, box["y"] + box["height"] / 2


def plot(page: "Page", number: int) -> "Locator":
    return page.locator(".chart .plot").nth(number)


def test_every_chart_has_a_whole_curve_for_every_run(show: Show, page_of_four: Path) -> None:
    page = show(page_of_four)
    assert page.locator(".chart").count() == 6
    for number in range(6):
        figure = plot(page, number)
        width = figure.evaluate("node => node.clientWidth")
        expected = 3 if number == 2 else 4  # the chart of differences has none for the first run
        assert (
            len(
                set(
                    figure.locator(".curve").evaluate_all(
                        "all => all.map(c => getComputedStyle(c).stroke)"
                    )
                )
            )
            == expected
        )
        boxes = figure.locator(".curve:not(.raw)").evaluate_all(
            "all => all.map(c => { const b = c.getBBox(); return [b.width, b.height] })"
        )
        assert max(box[0] for box in boxes) > 0.8 * (width - 60)
        assert max(box[1] for box in boxes) > 30


def test_a_run_of_one_interval_is_shown(show: Show, recipe: Recipe, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", recipe=recipe, classes=["a", "b", "none"], images=40)
    lines = (folder / "log.jsonl").read_text().splitlines()
    (folder / "log.jsonl").write_text("\n".join([*lines[:2], lines[-1], ""]))
    report = json.loads((folder / "report.json").read_text())
    for columns in report["per_class"].values():
        for name in ("images", "top1", "top5"):
            columns[name][2] = 0
    (folder / "report.json").write_text(json.dumps(report))
    (folder / "validation.npz").unlink()
    page = show(lockstep.report(folder, tmp_path / "page.html"))
    for number in range(page.locator(".chart").count()):
        assert (
            plot(page, number).locator(".mark").count()
            + plot(page, number).locator(".curve:not(.raw)").count()
            >= 2
        )
        assert not [
            text
            for text in plot(page, number).locator("text").all_text_contents()
            if text.startswith(("-", "\N{MINUS SIGN}"))
        ]
    assert plot(page, 2).locator("circle.mark").count() == 1  # the rate of the one interval
    assert column(page, "#per-class", 3)[2] == MISSING


def test_the_pointer_shows_the_values_of_its_step(show: Show, page_of_one: Path, run: Path) -> None:
    page = show(page_of_one)
    page.mouse.move(*middle(plot(page, 0)))
    text = page.locator("#tip").inner_text()
    match = re.match(r"step (\d+) · epoch ([\d.]+)\n", text)
    assert match is not None
    losses = [loss for entry in read_log(run / "log.jsonl") for loss in entry.get("losses", [])]
    assert f"{float(f'{losses[int(match[1]) - 1]:.4g}'):g}" in text
    assert float(match[2]) == pytest.approx(int(match[1]) * 4 / 120, abs=0.005)
    page.mouse.move(5, 5)
    assert page.locator("#tip").is_hidden()


def test_a_finger_shows_values_until_it_touches_elsewhere(show: Show, page_of_one: Path) -> None:
    page = show(page_of_one, width=390, height=740, has_touch=True)
    for chosen, words in ((plot(page, 0), "step"), (page.locator("#matrix svg"), "images")):
        page.touchscreen.tap(*middle(chosen))
        assert words in page.locator("#tip").inner_text()
        page.touchscreen.tap(3, 300)
        assert page.locator("#tip").is_hidden()


def steps_shown(page: "Page", number: int = 0) -> list[int]:
    texts = plot(page, number).locator("text[text-anchor=middle]").all_text_contents()
    return [int(text.replace(",", "")) for text in texts]


def test_dragging_zooms_and_a_double_click_shows_all(show: Show, page_of_one: Path) -> None:
    page = show(page_of_one)
    before = [steps_shown(page, number) for number in range(5)]
    x, y = middle(plot(page, 0))
    page.mouse.move(x, y)
    page.mouse.down()
    page.mouse.move(x + 50, y, steps=3)
    page.mouse.move(x + 90, y, steps=3)
    page.mouse.up()
    for number in range(5):
        assert min(steps_shown(page, number)) > 40
        assert max(steps_shown(page, number)) < 110
    assert page.locator("#reset").is_visible()
    page.mouse.dblclick(x, y)
    assert [steps_shown(page, number) for number in range(5)] == before
    assert page.locator("#reset").is_hidden()


def test_the_keyboard_reaches_the_charts_moves_and_zooms(show: Show, page_of_one: Path) -> None:
    page = show(page_of_one)
    page.locator("#smoothing").focus()
    page.keyboard.press("Tab")  # the log button of the first chart
    page.keyboard.press("Tab")
    assert plot(page, 0).evaluate("node => node === document.activeElement")
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    step = int(re.findall(r"step (\d+)", page.locator("#tip").inner_text())[0])
    page.keyboard.press("ArrowRight")
    assert int(re.findall(r"step (\d+)", page.locator("#tip").inner_text())[0]) > step
    before = steps_shown(page)
    page.keyboard.press("+")
    assert max(steps_shown(page)) < max(before)
    page.keyboard.press("Escape")
    assert steps_shown(page) == before


def test_the_matrix_and_the_bins_are_read_with_the_arrows(show: Show, page_of_one: Path) -> None:
    page = show(page_of_one)
    page.locator("#matrix").focus()
    page.keyboard.press("ArrowRight")
    assert page.locator("#tip").inner_text().startswith("blobs")
    page.keyboard.press("ArrowRight")
    assert page.locator("#tip b").inner_text() == "blobs → bricks"
    page.keyboard.press("ArrowDown")
    assert page.locator("#tip b").inner_text() == "bricks"
    page.locator("#reliability").focus()
    assert page.locator("#tip").is_hidden()
    page.keyboard.press("ArrowRight")
    assert "confidence 0 % to 7 %" in page.locator("#tip").inner_text()


def test_a_chart_on_a_logarithmic_scale_has_powers(show: Show, page_of_one: Path) -> None:
    page = show(page_of_one)
    button = page.locator(".chart").nth(2).locator(".log")
    button.click()
    assert button.get_attribute("aria-pressed") == "true"
    shown = plot(page, 2).locator("text[text-anchor=end]").all_text_contents()
    ratios = [float(b) / float(a) for a, b in pairwise(shown)]
    assert ratios == pytest.approx([ratios[0]] * len(ratios), rel=0.01)
    assert ratios[0] > 3


def test_tables_are_sorted_by_their_headers(show: Show, page_of_one: Path) -> None:
    page = show(page_of_one)
    header = page.locator("#per-class thead button", has_text="Top-1")
    names = column(page, "#per-class", 1)
    assert names == sorted(names)
    header.click()
    falling = [float(value) for value in column(page, "#per-class", 3)]
    assert falling == sorted(falling, reverse=True)
    assert len(set(falling)) > 3
    header.press("Enter")
    assert [float(value) for value in column(page, "#per-class", 3)] == sorted(falling)
    assert page.locator("#per-class th[aria-sort=ascending]").inner_text().startswith("Top-1")
    page.locator("#per-class thead button", has_text="Class").click()
    assert column(page, "#per-class", 1) == names


def test_classes_are_found_by_their_names(show: Show, page_of_one: Path) -> None:
    page = show(page_of_one)
    page.locator("#filter").fill("RI")
    assert page.locator("#per-class tbody tr:visible th").all_text_contents() == [
        "bricks",
        "grid",
        "rings",
        "stripes",
    ]
    assert page.locator("#filtered").inner_text() == "4 of 10 classes"


def brightness(page: "Page") -> float:
    colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
    return sum(map(float, re.findall(r"[\d.]+", colour)[:3]))


def test_colours_are_the_systems_until_switched(show: Show, page_of_one: Path) -> None:
    light, dark = (show(page_of_one, color_scheme=scheme) for scheme in ("light", "dark"))
    assert brightness(light) > 600
    assert brightness(dark) < 150
    light.locator("#theme").click()
    assert brightness(light) == brightness(dark)
    dark.locator("#theme").click()
    dark.locator("#theme").click()
    assert brightness(dark) > 600
    assert "light" in (dark.locator("#theme").get_attribute("aria-label") or "")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_first_look_has_one_row_of_figures_and_curves_of_different_kinds(
    show: Show, page_of_one: Path, scheme: str
) -> None:
    page = show(page_of_one, color_scheme=scheme)
    tops = "all => [...new Set(all.map(tile => tile.getBoundingClientRect().top))].length"
    assert page.locator(".tile:visible").evaluate_all(tops) == 1
    assert page.locator("#environment details[open]").count() == 0
    looks = "curve => { const s = getComputedStyle(curve); return [s.stroke, s.strokeWidth] }"
    kinds = [
        plot(page, 0).locator(f".curve.{kind}").first.evaluate(looks)
        for kind in ("training", "validation")
    ]
    keys = [
        page.locator(f".strokes .curve.{kind}").evaluate(looks)
        for kind in ("training", "validation")
    ]
    assert keys == kinds
    assert kinds[0][0] != kinds[1][0]
    assert kinds[0][1] != kinds[1][1]
    outside = """all => all.filter(text => {
      const [box, svg] = [text, text.ownerSVGElement].map(node => node.getBoundingClientRect());
      return box.left < svg.left || box.right > svg.right;
    }).map(text => text.textContent)"""
    assert page.locator(".chart text").evaluate_all(outside) == []


@pytest.mark.parametrize("width", [320, 768])
def test_a_page_is_no_wider_than_a_phone(
    show: Show, page_of_four: Path, page_of_one: Path, width: int
) -> None:
    for path in (page_of_one, page_of_four):
        page = show(path, width=width, height=740)
        page.locator("details summary").first.click()
        assert page.evaluate("document.documentElement.scrollWidth") == width


def test_long_names_leave_no_table_cut_and_no_section_out_of_sight(
    show: Show, recipe: Recipe, tmp_path: Path
) -> None:
    classes = ["Hunde & Füchse", "Katzen und Kater", "Donaudampfschifffahrtsgesellschaft"]
    folder = write_run(tmp_path / "run", recipe=recipe, classes=classes, images=51)
    path = lockstep.report(folder, tmp_path / "page.html")
    widths = "all => all.map(table => [table.clientWidth, table.closest('.scroll').clientWidth])"
    right = "all => Math.max(...all.map(link => link.getBoundingClientRect().right))"
    for width, tables in ((390, ".pairs"), (1280, ".pairs, #per-class")):
        page = show(path, width=width)
        for needed, room in page.locator(tables).locator("visible=true").evaluate_all(widths):
            assert 0 < needed <= room
        assert page.locator("nav a").evaluate_all(right) <= width


def test_counts_of_images_are_whole_and_at_their_heights(show: Show, page_of_one: Path) -> None:
    page = show(page_of_one)
    counts = page.locator("#confidences text[text-anchor=end]").all_text_contents()
    lines = page.locator("#confidences .grid")
    heights = lines.evaluate_all("all => all.map(line => line.y1.baseVal.value)")
    assert len(counts) == len(heights) > 2
    unit = (heights[0] - heights[1]) / int(counts[1])
    for count, height in zip(counts, heights, strict=True):
        assert heights[0] - height == pytest.approx(int(count) * unit, abs=0.01)


def test_a_run_can_be_hidden(show: Show, page_of_four: Path) -> None:
    page = show(page_of_four)
    colours = "all => [...new Set(all.map(c => getComputedStyle(c).stroke))]"
    before = plot(page, 0).locator(".curve").evaluate_all(colours)
    page.locator("#legend button", has_text="paddle").click()
    after = plot(page, 0).locator(".curve").evaluate_all(colours)
    assert set(after) < set(before)
    assert len(after) == 3


def test_equal_losses_have_no_difference(show: Show, recipe: Recipe, tmp_path: Path) -> None:
    folders = [
        write_run(tmp_path / name, recipe=recipe, classes=["a", "b"], steps=20)
        for name in ("one", "other")
    ]
    page = show(lockstep.report(folders, tmp_path / "page.html"))
    difference = page.locator(".chart.widest")
    assert "No difference in these steps." in difference.locator("text").all_text_contents()
    assert difference.locator(".curve").count() == 0
    page.locator("#legend button", has_text="other").click()
    assert "No run is shown." in difference.locator("text").all_text_contents()


def test_the_evaluation_picked_is_shown(show: Show, page_of_four: Path, four: list[Path]) -> None:
    page = show(page_of_four)
    before = column(page, "#per-class", 3)
    mistakes = page.locator("#mistakes li:visible img").evaluate_all("all => all.map(i => i.alt)")
    page.locator(".picker button", has_text="mxnet").click()
    assert column(page, "#per-class", 3) != before
    shown = page.locator("#mistakes li:visible img")
    assert shown.evaluate_all("all => all.map(i => i.alt)") != mistakes
    assert shown.evaluate_all(
        f"all => all.every(i => i.complete && i.naturalWidth === {load_recipe('demo').eval_crop})"
    )
    assert shown.count() == 24


def test_missing_results_are_said(show: Show, recipe: Recipe, tmp_path: Path) -> None:
    old = write_run(tmp_path / "old", recipe=recipe, classes=["a", "b"], keeps_results=False)
    new = write_run(tmp_path / "new", recipe=recipe, classes=["a", "b"])
    page = show(lockstep.report([old, new], tmp_path / "page.html"))
    for name, expected in (("old", 1), ("new", 0), ("old", 1)):
        page.locator(".picker button", has_text=name).click()
        for diagram in ("#matrix", "#reliability", "#confidences"):
            page.mouse.move(*middle(page.locator(diagram)))
            assert page.locator(diagram, has_text="The run kept no results").count() == expected
            assert page.locator(f"{diagram} svg").count() == 1 - expected
    assert page.locator("#tip").is_hidden()


def test_the_epoch_is_told_where_runs_agree(show: Show, recipe: Recipe, tmp_path: Path) -> None:
    folders = [
        write_run(tmp_path / name, recipe=recipe, classes=["a", "b"]) for name in ("one", "other")
    ]
    log = folders[1] / "log.jsonl"
    log.write_text(log.read_text().replace('"total": 120', '"total": 60'))
    page = show(lockstep.report(folders, tmp_path / "page.html"))
    page.mouse.move(*middle(plot(page, 0)))
    assert "epoch" not in page.locator("#tip b").inner_text()
    for hidden, steps in (("other", 120), ("one", 60)):
        page.locator("#legend button", has_text=hidden).click()
        page.mouse.move(*middle(plot(page, 0)))
        match = re.fullmatch(r"step (\d+) · epoch ([\d.]+)", page.locator("#tip b").inner_text())
        assert match is not None
        assert float(match[2]) == pytest.approx(int(match[1]) * 4 / steps, abs=0.006)
        page.locator("#legend button", has_text=hidden).click()


def test_a_thousand_classes_are_groups(show: Show, recipe: Recipe, tmp_path: Path) -> None:
    classes = [f"n{i:08d}" for i in range(1000)]
    folder = write_run(tmp_path / "run", recipe=recipe, classes=classes, images=20_000)
    page = show(lockstep.report(folder, tmp_path / "page.html"))
    assert "20 \N{MULTIPLICATION SIGN} 20 classes" in page.locator("#matrix-note").inner_text()
    assert page.locator("#matrix .cell").count() > 100
    assert page.locator("#per-class tbody tr").count() == 1000
    assert page.locator(".pairs tbody tr").count() == 30
    page.mouse.move(*middle(page.locator("#matrix svg")))
    assert "n00000" in page.locator("#tip").inner_text()


def test_names_are_shown_and_not_run(show: Show, recipe: Recipe, tmp_path: Path) -> None:
    classes = ["<img src=x onerror=alert(1)>", NASTY, "a & b"]
    folder = write_run(
        tmp_path / NASTY.replace("/", "\N{DIVISION SLASH}"),
        recipe=recipe,
        classes=classes,
        images=60,
    )
    page = show(lockstep.report(folder, tmp_path / "page.html"))
    assert page.title() == f"{folder.name} · Lockstep report"
    assert column(page, "#per-class", 1) == classes
    assert page.locator(".curve").count() > 5


@pytest.mark.parametrize("steps", [0, 65])
def test_an_unfinished_run_is_shown(show: Show, recipe: Recipe, tmp_path: Path, steps: int) -> None:
    folder = write_run(tmp_path / "part", recipe=recipe, classes=["a", "b"], steps=steps)
    page = show(lockstep.report(folder, tmp_path / "page.html"))
    assert f"at step {steps} of 120" in page.locator("#summary").inner_text()
    assert (page.locator(".curve").count() > 0) == (steps > 0)
