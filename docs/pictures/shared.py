"""What the scripts of this folder share: commands, a browser, a server, and files of pictures.

A picture has a frame in a grey that is seen on white and on black, so that it looks alike where a
page is light and where it is dark.
"""

import io
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from PIL import Image, ImageOps
from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

PICTURES = Path(__file__).parent.parent / "images"
FRAME = "#8a94a0"
LIGHT_AND_WIDE = {"viewport": {"width": 1000, "height": 700}, "color_scheme": "light"}
SERVER = "http://127.0.0.1:8341"
THEME = TerminalTheme(
    (23, 27, 33),
    (230, 234, 239),
    [
        (23, 27, 33),
        (255, 138, 118),
        (126, 211, 33),
        (255, 214, 102),
        (122, 165, 255),
        (214, 140, 255),
        (100, 210, 220),
        (230, 234, 239),
    ],
)
"""The colours of a terminal in a picture: those of the dark pages of reports."""


def run(root: Path, *arguments: str, expected: frozenset[int] | set[int] = frozenset({0})) -> str:
    """Run a command of Lockstep in a folder, print it with what it prints, and return this."""
    print("$ lockstep", *arguments, flush=True)
    command = [sys.executable, "-m", "lockstep", *arguments]
    done = subprocess.run(
        command, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    print(done.stdout, flush=True)
    if done.returncode not in expected:
        raise SystemExit(f"exit code {done.returncode}; expected {sorted(expected)}")
    return done.stdout


@contextmanager
def chromium() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path="/usr/bin/chromium", args=["--no-sandbox"]
        )
        yield browser
        browser.close()


@contextmanager
def serving(root: Path, source: str) -> Iterator[None]:
    """Serve a run of a folder at `SERVER`."""
    port = SERVER.rpartition(":")[2]
    command = [sys.executable, "-m", "lockstep", "serve", source, "--port", port, "--no-token"]
    with subprocess.Popen(command, cwd=root) as server:
        while True:
            try:
                urllib.request.urlopen(SERVER + "/v2/health/ready").close()
                break
            except OSError:
                if server.poll() is not None:
                    raise SystemExit("the server has ended") from None
                time.sleep(0.2)
        yield
        server.terminate()


def picture_server(browser: Any, photo: Path) -> Image.Image:
    """Drop a photo on the page of the server, and return what a user sees then."""
    page = browser.new_page(**LIGHT_AND_WIDE)
    page.goto(SERVER)
    page.locator("#explain").check()
    page.locator("#files").set_input_files([photo])
    page.locator("#results > li").first.wait_for()
    page.locator("#status", has_text="1 of 1").wait_for()
    return Image.open(io.BytesIO(page.screenshot()))


def picture_part(browser: Any, report: Path, selector: str, most_pixels: int) -> Image.Image:
    """Return a part of a report, at most this high."""
    page = browser.new_page(**LIGHT_AND_WIDE)
    page.goto(report.as_uri())
    page.add_style_tag(content="* { position: static !important } header { display: none }")
    picture = Image.open(io.BytesIO(page.locator(selector).screenshot()))
    return picture.crop((0, 0, picture.width, min(picture.height, most_pixels)))


def keep_picture(picture: Image.Image, name: str) -> None:
    """Store a picture with 256 colours, which makes the file several times smaller."""
    framed = ImageOps.expand(picture.convert("RGB"), border=1, fill=FRAME)
    framed.quantize(256).save(PICTURES / name, optimize=True)


def record_terminal(width: int = 92) -> Console:
    """Return a terminal whose content `keep_terminal` draws."""
    return Console(
        record=True,
        force_terminal=True,
        color_system="truecolor",
        width=width,
        file=io.StringIO(),
        highlight=False,
        soft_wrap=True,
    )


def keep_terminal(console: Console, title: str, name: str) -> None:
    """Store the content of a terminal as SVG, without the fonts that Rich would load from a
    network."""
    drawing = console.export_svg(title=title, theme=THEME, unique_id=name.replace(".", "-"))
    drawing = re.sub(r"@font-face \{.*?\}\s*", "", drawing, flags=re.DOTALL)
    drawing = drawing.replace("font-family: Fira Code", "font-family: ui-monospace, Fira Code")
    lines = [line.rstrip() for line in drawing.splitlines() if line.strip()]
    (PICTURES / name).write_text("\n".join([*lines, ""]), encoding="utf-8")


def picture_command(output: str, line: str, name: str, width: int = 92) -> None:
    """Store what a command printed as a picture of a terminal."""
    console = record_terminal(width)
    console.print(Text.assemble(("$ ", "bold green"), (line, "bold")))
    console.print(Text(output.rstrip()))
    keep_terminal(console, "", name)
