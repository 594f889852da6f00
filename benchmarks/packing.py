"""Writing a data set in another storage format, byte for byte, against copying the same bytes with cp."""

import argparse
import os
import shutil
import tempfile
from itertools import count, product
from pathlib import Path
from subprocess import run

from lockstep.data.pack import Packing, pack
from lockstep.data.sources import FORMATS
from measuring import median, record, rounded, seconds

ROUNDS, COPIES = 5, 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder of images by class, copied 10 times")
    data = parser.parse_args().data
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for copy in range(COPIES):
            shutil.copytree(data, root / "source" / f"{copy:02d}", ignore=shutil.ignore_patterns(".*"))
        for nested in list((root / "source").glob("*/*")):  # copies of classes are classes
            nested.rename(root / "source" / f"{nested.parent.name}-{nested.name}")
        for empty in list((root / "source").iterdir()):
            if not any(empty.iterdir()):
                empty.rmdir()
        pack(root / "source", root / "rec", Packing("recordio"))
        cases = [(source, format, source) for source in ("source", "rec") for format in FORMATS]
        # As many files as there are images cannot be made as fast as one.
        cases.append(("rec", "folder", "source"))
        targets = (root / f"target{number}" for number in count())
        ratios = {}
        for (source, format, copied), cached in product(cases, (True, False)):
            ours, cp, synced = [], [], []
            for _ in range(ROUNDS):
                target = prepared(root / source, cached, next(targets))
                ours.append(seconds(lambda: pack(root / source, target, Packing(format))))  # noqa: B023 - called at once
                empty_files(target)
                target = prepared(root / copied, cached, next(targets))
                cp.append(seconds(lambda: run(["cp", "-r", root / copied, target], check=True)))  # noqa: B023
                synced.append(cp[-1] + seconds(os.sync))
                empty_files(target)
            name = f"{source} to {format}" + f" over cp of {copied}" * (copied != source) + ", not cached" * (not cached)
            ratios[name] = {"seconds": rounded(ours), "cp": rounded(cp), "cp and sync": rounded(synced)}
            for key, other in {"ratio": cp, "ratio to cp and sync": synced}.items():
                ratios[name][key] = round(median(a / b for a, b in zip(ours, other, strict=True)), 3)
        size = sum(file.stat().st_size for file in (root / "rec").iterdir() if file.is_file())
    record("packing", {"what": f"seconds to write {size / 1e6:.0f} MB, {ROUNDS} turns", **ratios})


def prepared(source: Path, cached: bool, target: Path) -> Path:
    """Return the target once nothing is left to write and the source is in memory, or is not."""
    os.sync()
    for file in source.rglob("*"):
        if file.is_file():
            with file.open("rb") as opened:
                if cached:
                    opened.read()
                else:
                    os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return target


def empty_files(folder: Path) -> None:
    """Free their space. Where files were deleted, ext4 looks for room for others one by one, for minutes."""
    for file in folder.rglob("*"):
        if file.is_file():
            os.truncate(file, 0)


if __name__ == "__main__":
    main()
