"""Draw the pictures of docs/how-to/my-images.md: every command of the page, on drawn images.

    python docs/pictures/my_images.py FOLDER

The commands run in FOLDER, which keeps what they write and print: a second call draws the pictures
again and resumes the rest. It needs Chromium and playwright (`make browser`), and some minutes.
"""

import io
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from PIL import Image

from lockstep.data.textures import draw_data_set

PICTURES = Path(__file__).parent.parent / "images"
PHOTOS = ("blobs", "bricks", "grid", "spiral", "zigzag")
"""The classes of "your own images"."""
OTHERS = ("checks", "dots", "rays", "rings", "stripes")
"""The classes from which the given weights were trained."""
LIGHT_AND_WIDE = {"viewport": {"width": 1000, "height": 700}, "color_scheme": "light"}
SERVER = "http://127.0.0.1:8341"


def main() -> None:
    root = Path(sys.argv[1]).resolve()
    draw_data_set(root / "photos", train_images=150, val_images=150, kinds=PHOTOS)
    if not (root / "weights.pth").exists():
        make_weights(root)
    run(root, "data", "check", "photos", expected={0, 1})
    run(root, "data", "show", "photos", "--images", "12", "--out", "sheet.png")
    run(root, "train", "--data", "photos", "--weights", "weights.pth", "--out", "run")
    run(root, "evaluate", "run", "--precision-at", "0.95")
    run(root, "report", "run", "-o", "report.html")
    photo = "photos/val/spiral/00030.jpg"
    run(root, "predict", "run", photo, "--top", "2", "--explain", "why.png")
    keep_picture(Image.open(root / "sheet.png"), "my-images-show.png")
    with chromium() as browser, serving(root):
        keep_picture(picture_report(browser, root / "report.html"), "my-images-report.png")
        keep_picture(picture_server(browser, root / photo), "my-images-serve.png")


def make_weights(root: Path) -> None:
    """Train weights on the other classes, and write them in torchvision's form."""
    draw_data_set(root / "others", train_images=1000, val_images=200, kinds=OTHERS)
    changes = ["--set", "model=resnet18", "--set", "image_size=64", "--set", "epochs=12"]
    run(root, "train", "--data", "others", "--out", "source", *changes)
    run(root, "convert", "source", "weights.pth", "--to", "torchvision")


def run(root: Path, *arguments: str, expected: frozenset[int] | set[int] = frozenset({0})) -> None:
    """Run a command in the folder and print it with what it prints."""
    print("$ lockstep", *arguments, flush=True)
    command = [sys.executable, "-m", "lockstep", *arguments]
    code = subprocess.run(command, cwd=root, check=False).returncode
    if code not in expected:
        raise SystemExit(f"it ended with exit code {code}; expected {sorted(expected)}")


@contextmanager
def chromium() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium")
        yield browser
        browser.close()


@contextmanager
def serving(root: Path) -> Iterator[None]:
    port = SERVER.rpartition(":")[2]
    command = [sys.executable, "-m", "lockstep", "serve", "run", "--port", port, "--no-token"]
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


def picture_report(browser: Any, report: Path) -> Image.Image:
    page = browser.new_page(**LIGHT_AND_WIDE)
    page.goto(report.as_uri())
    page.add_style_tag(content="* { position: static !important } header { display: none }")
    mistakes = Image.open(io.BytesIO(page.locator("#mistakes").screenshot()))
    return mistakes.crop((0, 0, mistakes.width, min(mistakes.height, 490)))


def picture_server(browser: Any, photo: Path) -> Image.Image:
    page = browser.new_page(**LIGHT_AND_WIDE)
    page.goto(SERVER)
    page.locator("#explain").check()
    page.locator("#files").set_input_files([photo])
    page.locator("#results > li").first.wait_for()
    page.locator("#status", has_text="1 of 1").wait_for()
    return Image.open(io.BytesIO(page.screenshot()))


def keep_picture(picture: Image.Image, name: str) -> None:
    """Store a picture with 256 colours, which makes the file several times smaller."""
    picture.convert("RGB").quantize(256).save(PICTURES / name, optimize=True)


if __name__ == "__main__":
    main()
