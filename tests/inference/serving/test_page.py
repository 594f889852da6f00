"""The page in headless Chromium, with a server behind it."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from PIL import Image

import lockstep
from lockstep.recipes import Execution
from tests.browsers import chromium, needs_browser
from tests.inference.serving.cases import ENGINE, TOKEN, Server, serving

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = [pytest.mark.slow, needs_browser]
Show = Callable[..., "Page"]
REFUSED = "Failed to load resource"
"""Chromium's complaint about every answer that is an error."""


DROP_AND_PASTE = """([first, second]) => {
  const carrier = (data, name, type) => {
    const transfer = new DataTransfer();
    transfer.items.add(new File([new Uint8Array(data)], name, { type }));
    return transfer;
  };
  const how = { bubbles: true, cancelable: true };
  const dropped = carrier(first, "dropped.png", "image/png");
  const pasted = carrier(second, "pasted.jpg", "image/jpeg");
  document.body.dispatchEvent(new DragEvent("drop", { ...how, dataTransfer: dropped }));
  document.body.dispatchEvent(new ClipboardEvent("paste", { ...how, clipboardData: pasted }));
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as playwright_browser:
        yield playwright_browser


@pytest.fixture(scope="module")
def explaining(weights: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose engine computes Grad-CAM."""
    with serving(weights, tmp_path_factory.mktemp("log") / "log") as explaining_server:
        yield explaining_server


@pytest.fixture
def show(browser: Any) -> Iterator[Show]:
    """A function that opens a server's page. The page must complain about nothing and ask only its
    server."""
    complaints: list[str] = []
    contexts = []

    def open_page(
        server: Server, refusals: int = 0, width: int = 1000, path: str = "/", **how: Any
    ) -> "Page":
        contexts.append(browser.new_context(viewport={"width": width, "height": 800}, **how))
        page: Page = contexts[-1].new_page()
        page.set_default_timeout(60_000)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: check(request.url, server))
        expected = [REFUSED] * refusals

        def complain(text: str) -> None:
            if expected and text.startswith(REFUSED):
                expected.pop()
            else:
                complaints.append(text)

        page.on("console", lambda message: complain(message.text))
        page.goto(server.url + path)
        return page

    def check(url: str, server: Server) -> None:
        if not url.startswith((server.url + "/", "data:", f"blob:{server.url}/")):
            complaints.append(f"asks for {url}")

    yield open_page
    for context in contexts:
        context.close()
    assert complaints == []


def wait_for_results(page: "Page", count: int) -> None:
    page.locator("#results > li").nth(count - 1).wait_for()
    assert page.locator("#results > li").count() == count


def test_images_get_bars_of_their_classes(
    show: Show, server: Server, weights: Path, photos: list[Path]
) -> None:
    page = show(server)
    page.locator("#about", has_text=ENGINE).wait_for()
    assert page.locator("#explains").is_hidden()
    page.locator("#top").fill("3")
    page.locator("#files").set_input_files(photos[:2])
    wait_for_results(page, 2)
    page.locator("#status", has_text="2 of 2 classified.").wait_for()
    execution = Execution(backend="reference", reference_dtype="float32")
    expected = list(lockstep.load(weights).on(execution=execution).predict(photos[:2], top=3))
    for card, prediction in zip(reversed(page.locator(".result").all()), expected, strict=True):
        assert prediction.path is not None
        assert card.locator("h2").inner_text() == prediction.path.name
        assert card.locator(".name").all_text_contents() == list(prediction.classes)
        assert card.locator(".value").all_text_contents() == [
            f"{100 * share:.2f} %" for share in prediction.probabilities
        ]
        unknown = ["Unknown: no class has 13.70 % or more."] if prediction.is_unknown else []
        assert card.locator(".unknown").all_text_contents() == unknown
        widths = card.locator(".fill").evaluate_all(
            "all => all.map(bar => bar.getBoundingClientRect().width)"
        )
        track = card.locator(".track").first.evaluate("bar => bar.getBoundingClientRect().width")
        assert widths == pytest.approx([track * share for share in prediction.probabilities], abs=1)
        assert card.locator("img").evaluate(
            "image => image.decode().then(() => image.naturalWidth > 0)"
        )
        assert " ms (server " in card.locator(".times").inner_text()
    page.locator("#clear").click()
    assert page.locator(".result").count() == 0


def test_an_image_can_be_dropped_and_pasted(show: Show, server: Server, photos: list[Path]) -> None:
    page = show(server)
    page.locator("#about", has_text=ENGINE).wait_for()
    page.evaluate(DROP_AND_PASTE, [list(photo.read_bytes()) for photo in photos[:2]])
    wait_for_results(page, 2)
    assert sorted(page.locator("h2").all_text_contents()) == ["dropped.png", "pasted.jpg"]
    assert page.locator(".bad:visible").count() == 0


def test_the_page_works_by_keyboard(show: Show, server: Server, photos: list[Path]) -> None:
    page = show(server)
    # From the start: where cores are busy, Chromium may see a key before it is asked to report the
    # dialog of that key.
    page.on("filechooser", lambda chooser: chooser.set_files(photos[0]))
    page.locator("#about", has_text=ENGINE).wait_for()
    reached = []
    for _ in range(4):
        page.keyboard.press("Tab")
        reached.append(
            page.evaluate("document.activeElement.className || document.activeElement.id")
        )
    assert reached == ["skip", "theme", "unseen", "top"]
    page.keyboard.press("Shift+Tab")
    outline = page.locator(".choose").evaluate("label => getComputedStyle(label).outlineStyle")
    assert outline == "solid"
    page.keyboard.press("Enter")
    wait_for_results(page, 1)
    page.locator("#theme").focus()
    for expected in ("dark", "light", "auto"):
        page.keyboard.press("Space")
        assert page.evaluate("document.documentElement.dataset.theme") == expected


def test_the_page_shows_why_an_image_is_refused(show: Show, server: Server, tmp_path: Path) -> None:
    (tmp_path / "<b>broken.png").write_bytes(b"\x89PNG\r\n\x1a\nbroken")
    page = show(server, refusals=1)
    page.locator("#about", has_text=ENGINE).wait_for()
    page.locator("#files").set_input_files(tmp_path / "<b>broken.png")
    wait_for_results(page, 1)
    assert page.locator(".result h2").inner_text() == "<b>broken.png"
    assert page.locator(".result .bad").inner_text().startswith("cannot be read: ")
    status = page.locator("#status").inner_text()
    assert status == "0 of 1 classified. 1 failed: their cards say why."
    # When Chromium reports that it is damaged.
    page.locator(".result img").wait_for(state="detached")


def test_files_that_are_no_images_are_named(
    show: Show, server: Server, photos: list[Path], tmp_path: Path
) -> None:
    others = [tmp_path / f"<b>{number}.txt" for number in range(7)]
    for path in others:
        path.write_text("words")
    page = show(server)
    page.locator("#about", has_text=ENGINE).wait_for()
    page.locator("#files").set_input_files([*others, photos[0]])
    wait_for_results(page, 1)
    names = ", ".join(path.name for path in others[:5])
    expected = f"Left out, not images: {names} and 2 more"
    assert page.locator("#left").inner_text() == expected
    page.locator("#files").set_input_files(photos[1])
    wait_for_results(page, 2)
    assert page.locator("#left").is_hidden()


def test_an_image_that_the_browser_cannot_show_gets_the_servers_thumbnail(
    show: Show, server: Server, photos: list[Path], tmp_path: Path
) -> None:
    Image.open(photos[0]).save(tmp_path / "scan.tif")
    page = show(server)
    page.locator("#about", has_text=ENGINE).wait_for()
    page.locator("#files").set_input_files(tmp_path / "scan.tif")
    wait_for_results(page, 1)
    pictures = page.locator(".result img")
    assert pictures.count() == 1
    assert pictures.evaluate("image => image.decode().then(() => image.naturalWidth)") == 32
    assert pictures.get_attribute("alt") == "scan.tif, as the network sees it"
    assert page.locator(".result .name").count() == 5


def test_grad_cam_is_shown_if_asked_for(show: Show, explaining: Server, photos: list[Path]) -> None:
    page = show(explaining)
    page.locator("#explain").check()
    page.locator("#files").set_input_files(photos[0])
    wait_for_results(page, 1)
    pictures = page.locator(".result img")
    assert pictures.count() == 2
    assert pictures.nth(1).evaluate("image => image.decode().then(() => image.naturalWidth)") == 32
    best = page.locator(".result .name").first.inner_text()
    assert pictures.nth(1).get_attribute("alt") == f"Evidence for {best}"


def test_the_token_is_asked_for_and_used(
    show: Show, weights: Path, photos: list[Path], tmp_path: Path
) -> None:
    (tmp_path / "token").write_text(TOKEN + "\n")
    with serving(
        weights, tmp_path / "log", "--runtime", ENGINE, "--token-file", tmp_path / "token"
    ) as server:
        page = show(server, refusals=2)
        page.locator("#access").wait_for()
        assert page.locator("#drop").is_hidden()
        page.locator("#token").fill("wrong")
        page.keyboard.press("Enter")
        page.locator("#denied", has_text="This token is wrong.").wait_for()
        page.locator("#token").fill(TOKEN)
        page.keyboard.press("Enter")
        page.locator("#drop").wait_for()
        assert page.locator("#access").is_hidden()
        page.locator("#files").set_input_files(photos[0])
        wait_for_results(page, 1)
        assert page.locator(".result .bad").count() == 0
        linked = show(server, path=f"/#token={TOKEN}")
        linked.locator("#about", has_text=ENGINE).wait_for()
        assert linked.locator("#access").is_hidden()
        assert linked.evaluate("location.href") == f"{server.url}/"
        linked.locator("#files").set_input_files(photos[0])
        wait_for_results(linked, 1)
        assert linked.locator(".result .bad").count() == 0


@pytest.mark.parametrize("width", [320, 768])
def test_the_page_is_no_wider_than_a_phone(
    show: Show, server: Server, photos: list[Path], width: int
) -> None:
    page = show(server, width=width)
    page.locator("#about", has_text=ENGINE).wait_for()
    page.locator("#files").set_input_files(photos[0])
    wait_for_results(page, 1)
    assert page.evaluate("document.documentElement.scrollWidth") == width
