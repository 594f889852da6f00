"""Draw the picture of the first page from five runs: docs/how-to/reports.md has their commands.

    lockstep report torch tensorflow paddle mxnet jax -o report.html
    python docs/pictures/five_backends.py report.html

It needs Chromium and playwright (`make browser`).
"""

import sys
from pathlib import Path

from shared import chromium, keep_picture, picture_part


def main() -> None:
    report = Path(sys.argv[1]).resolve()
    with chromium() as browser:
        keep_picture(picture_part(browser, report, "#curves", 690), "report-five-backends.png")


if __name__ == "__main__":
    main()
