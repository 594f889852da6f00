"""Writing a data set in another storage format, byte for byte, against copying the same bytes with cp."""

import argparse
import shutil
import subprocess
import tempfile
from pathlib import Path

from lockstep.data.pack import Packing, pack
from measuring import in_turns, median, record, rounded, seconds

ROUNDS, COPIES = 3, 10


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
        ratios = {}
        for source in ("source", "rec"):
            for format in ("recordio", "tfrecord", "webdataset", "folder"):
                ours, copied = in_turns(
                    lambda source=source, format=format: packed(root / source, format, root / "target"),
                    lambda source=source: copy_time(root / source, root / "target"),
                    ROUNDS,
                )
                ratio = round(median(a / b for a, b in zip(ours, copied, strict=True)), 3)
                ratios[f"{source} to {format}"] = {"seconds": rounded(ours), "cp": rounded(copied), "ratio": ratio}
        size = sum(file.stat().st_size for file in (root / "rec").iterdir() if file.is_file())
    record("packing", {"what": f"seconds to write {size / 1e6:.0f} MB, {ROUNDS} turns", **ratios})


def packed(source: Path, format: str, target: Path) -> float:
    """Return the seconds a pack takes, and remove what it wrote."""
    taken = seconds(lambda: pack(source, target, Packing(format)))
    shutil.rmtree(target)
    return taken


def copy_time(source: Path, target: Path) -> float:
    """Return the seconds that cp takes, and remove what it wrote."""
    taken = seconds(lambda: subprocess.run(["cp", "-r", source, target], check=True))
    shutil.rmtree(target)
    return taken


if __name__ == "__main__":
    main()
