"""Draw the pictures of docs/tutorial/own-photos.md from what its commands wrote.

    make docs-run PAGES=docs/tutorial/own-photos.md
    python docs/pictures/own_photos.py build/docs-run/docs/tutorial/own-photos

The page also has pictures of `my_images.py`. That of the rates is in docs/how-to/learning-rate.md.
"""

import shutil
import sys
from pathlib import Path

from PIL import Image
from shared import keep_picture, picture_command, run


def main() -> None:
    root = Path(sys.argv[1]).resolve()
    run(root, "find", "lr", "--data", "demo/data", "--steps", "60")
    keep_picture(Image.open(root / "lr-range/lr.png"), "own-photos-lr.png")
    spoiled = root / "spoiled"
    shutil.rmtree(spoiled, ignore_errors=True)
    shutil.copytree(root / "photos", spoiled / "photos")
    train = spoiled / "photos/train"
    photo = (train / "blobs/00000.jpg").read_bytes()
    (train / "blobs/cut.jpg").write_bytes(photo[:900])
    shutil.copy(train / "grid/00000.jpg", train / "zigzag/again.jpg")
    output = run(spoiled, "data", "check", "photos", expected={1})
    picture_command(output, "lockstep data check photos", "own-photos-check.svg")


if __name__ == "__main__":
    main()
