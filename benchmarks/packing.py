"""Compare writing a data set in another storage format, byte for byte, with copying the same bytes
with cp."""

import os
import shutil
import tempfile
import time
from collections.abc import Callable
from itertools import count, product
from pathlib import Path
from subprocess import run

import numpy as np

from lockstep.data.packing import Packing, pack
from lockstep.data.sources import FOLDER, FORMATS
from measuring import make_parser, median, record, round_all, seconds

ROUNDS = 7
COPIES = 10
SETTLED_SEC = 1
"""Pause before each measurement, in seconds. During it the system reports freed space to the disk,
which uses a core and makes reading from the disk slow."""
CASES = [
    *((FOLDER, format, FOLDER) for format in FORMATS),
    *(
        (source, format, source)
        for source in FORMATS
        if source != FOLDER
        for format in FORMATS
        if format != FOLDER
    ),
    ("recordio", FOLDER, FOLDER),  # one file for each image, which is slower than one file
]
"""For each case: the format of the source, the format of the target, and the format of the data
that cp copies."""


def main() -> None:
    parser = make_parser(__doc__, "Folder of images by class. Each image is copied 10 times.")
    data = parser.parse_args().data
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        write_sources(data, root)
        numbers = count()
        ratios = {}
        for (source, format, copied), cached in product(CASES, (True, False)):

            def measure(work: Callable[[Path, Path], object], source: Path) -> tuple[float, float]:
                os.sync()
                bring(source, cached)  # noqa: B023 - called immediately
                time.sleep(SETTLED_SEC)
                target = root / f"target{next(numbers)}"
                took = seconds(lambda: work(source, target))
                with_sync = took + seconds(os.sync)
                empty_files(target)
                return took, with_sync

            def pack(source: Path, target: Path) -> object:
                return pack(source, target, Packing(format))  # noqa: B023

            def copy(source: Path, target: Path) -> object:
                return run(["cp", "-r", source, target], check=True)

            ours = []
            cp = []
            for turn in range(ROUNDS):
                for first in (turn % 2 == 0, turn % 2 == 1):
                    times = ours if first else cp
                    times.append(
                        measure(pack, root / source) if first else measure(copy, root / copied)
                    )
            name = (
                f"{source} to {format}"
                + f" over cp of {copied}" * (copied != source)
                + ", not cached" * (not cached)
            )
            ratios[name] = {
                "seconds": round_all(np.array(ours)[:, 0].tolist()),
                "cp": round_all(np.array(cp)[:, 0].tolist()),
            }
            for key, quotients in zip(
                ("ratio", "ratio with sync"), (np.array(ours) / np.array(cp)).T, strict=True
            ):
                ratios[name][key] = round(median(quotients.tolist()), 3)
        size = sum(file.stat().st_size for file in (root / "recordio").iterdir() if file.is_file())
    record("packing", {"what": f"seconds to write {size / 1e6:.0f} MB, {ROUNDS} turns", **ratios})


def write_sources(data: Path, root: Path) -> None:
    """Write every image `COPIES` times to the folder of its class, and pack the result into files
    of the other formats."""
    for images in sorted(path for path in data.iterdir() if path.is_dir() and path.name[0] != "."):
        (root / FOLDER / images.name).mkdir(parents=True)
        for image, copy in product(sorted(images.iterdir()), range(COPIES)):
            shutil.copy(image, root / FOLDER / images.name / f"{copy:02d}-{image.name}")
    for format in FORMATS:
        if format != FOLDER:
            pack(root / FOLDER, root / format, Packing(format))


def bring(source: Path, cached: bool) -> None:
    """Load the source into the system's page cache if `cached`, otherwise remove it from there."""
    for file in source.rglob("*"):
        if file.is_file():
            with file.open("rb") as opened:
                if cached:
                    opened.read()
                else:
                    os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def empty_files(folder: Path) -> None:
    """Free the space of the files in a folder without deleting them.

    After files were deleted, ext4 searches for free inodes one by one, for minutes.
    """
    for file in folder.rglob("*"):
        if file.is_file():
            os.truncate(file, 0)


if __name__ == "__main__":
    main()
