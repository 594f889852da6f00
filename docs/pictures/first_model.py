"""Draw the pictures of docs/tutorial/first-model.md from what its commands wrote.

    make docs-run PAGES=docs/tutorial/first-model.md
    python docs/pictures/first_model.py build/docs-run/docs/tutorial/first-model

It needs Chromium and playwright (`make browser`).
"""

import json
import sys
from pathlib import Path
from typing import Any

from PIL import Image
from rich.text import Text
from shared import (
    chromium,
    keep_picture,
    keep_terminal,
    picture_part,
    picture_server,
    record_terminal,
    serving,
)

from lockstep.cli import console

SHOWN_STEPS = 250
"""The terminal is shown when the run has done this many steps."""


def main() -> None:
    root = Path(sys.argv[1]).resolve()
    picture_training(root / "demo/run/log.jsonl")
    sheet = Image.open(root / "sheet.png")
    keep_picture(enlarge(sheet, 2), "first-model-sheet.png")
    photo = Image.open(root / "demo/data/val/rings/00220.jpg")
    why = Image.open(root / "why.png")
    keep_picture(put_side_by_side(enlarge(photo, 3), enlarge(why, 6)), "first-model-why.png")
    with chromium() as browser, serving(root, "demo/run"):
        report = root / "report.html"
        keep_picture(picture_part(browser, report, "#curves", 414), "first-model-curves.png")
        keep_picture(picture_part(browser, report, "#confusion", 620), "first-model-confusion.png")
        dots = root / "demo/data/val/dots/00220.jpg"
        keep_picture(picture_server(browser, dots), "first-model-serve.png")


def enlarge(picture: Image.Image, times: int) -> Image.Image:
    size = (picture.width * times, picture.height * times)
    return picture.convert("RGB").resize(size, Image.Resampling.NEAREST)


def put_side_by_side(left: Image.Image, right: Image.Image) -> Image.Image:
    """Return two pictures with a gap between them, at the height of the lower one."""
    height = min(left.height, right.height)
    pair = Image.new("RGB", (left.width + right.width + 12, height), "white")
    pair.paste(left, (0, 0))
    pair.paste(right, (left.width + 12, 0))
    return pair


def picture_training(log: Path) -> None:
    """Draw the terminal in the middle of a run, from the events that the run has logged."""
    terminal = record_terminal(108)
    make_console = console.make_console
    console.make_console = lambda **_: terminal
    reporter = console.Reporter()
    console.make_console = make_console
    terminal.print(Text.assemble(("$ ", "bold green"), ("lockstep demo", "bold")))
    for line in log.read_text(encoding="utf-8").splitlines():
        event: Any = json.loads(line)
        if event["step"] > SHOWN_STEPS:
            break
        reporter(event)
    terminal.print(reporter._bar.get_renderable())
    keep_terminal(terminal, "", "first-model-training.svg")


if __name__ == "__main__":
    main()
