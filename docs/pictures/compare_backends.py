"""Draw the pictures of docs/tutorial/compare-backends.md from what its commands wrote.

    make docs-run PAGES=docs/tutorial/compare-backends.md
    python docs/pictures/compare_backends.py build/docs-run/docs/tutorial/compare-backends/five

It needs Chromium and playwright (`make browser`).
"""

import sys
from pathlib import Path

from PIL import Image
from shared import chromium, keep_picture, picture_part, run

RECORD = Path(__file__).parents[2] / "benchmarks/results/grid_engines.json"
"""The figures of the page, measured while no other program ran."""


def main() -> None:
    source = Path(sys.argv[1]).resolve()
    run(source, "report", str(RECORD), "-o", "engines.html", "--plots", ".")
    keep_picture(Image.open(source / "roofline.png"), "compare-backends-roofline.png")
    keep_picture(Image.open(source / "curves.png"), "compare-backends-verify.png")
    with chromium() as browser:
        curves = picture_part(browser, source / "report.html", "#curves", 690)
    keep_picture(curves, "compare-backends-curves.png")


if __name__ == "__main__":
    main()
