"""Draw pictures of docs/tutorial/own-photos.md, by its commands and from trained weights.

    python docs/pictures/my_images.py FOLDER

The commands run in FOLDER, which keeps what they write and print: a second call draws the pictures
again and resumes the rest. It needs Chromium and playwright (`make browser`), and some minutes.
"""

import sys
from pathlib import Path

from PIL import Image
from shared import chromium, keep_picture, picture_part, picture_server, run, serving

from lockstep.data.textures import draw_data_set

PHOTOS = ("blobs", "bricks", "grid", "spiral", "zigzag")
"""The classes of "your own images"."""
OTHERS = ("checks", "dots", "rays", "rings", "stripes")
"""The classes from which the given weights were trained."""


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
    with chromium() as browser, serving(root, "run"):
        keep_picture(
            picture_part(browser, root / "report.html", "#mistakes", 490), "my-images-report.png"
        )
        keep_picture(picture_server(browser, root / photo), "my-images-serve.png")


def make_weights(root: Path) -> None:
    """Train weights on the other classes, and write them in torchvision's form."""
    draw_data_set(root / "others", train_images=1000, val_images=200, kinds=OTHERS)
    changes = ["--set", "model=resnet18", "--set", "image_size=64", "--set", "epochs=12"]
    run(root, "train", "--data", "others", "--out", "source", *changes)
    run(root, "convert", "source", "weights.pth", "--to", "torchvision")


if __name__ == "__main__":
    main()
