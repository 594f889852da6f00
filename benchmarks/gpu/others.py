"""Part: `lockstep benchmark train` for a framework or a loader that is installed, with its own
report."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu.photos import draw_photos
from benchmarks.gpu.timing import Ground, Say

DRAWN = "DRAWN"
"""Stands for a folder of drawn pictures in a command line."""
PICTURES = 256
LEFT_OUT = ("times_sec", "other_definitions")


def measure(ground: Ground, say: Say, arguments: Sequence[str]) -> None:
    """Write a row for every cell of the report."""
    with tempfile.TemporaryDirectory() as folder:
        pictures = Path(folder) / "pictures"
        report = Path(folder) / "report.json"
        if DRAWN in arguments and not ground.photos:
            draw_photos(pictures / "train", PICTURES)
        given = [(ground.photos or str(pictures)) if each == DRAWN else each for each in arguments]
        command = [
            sys.executable,
            "-m",
            "lockstep",
            "benchmark",
            "train",
            "--set",
            f"device={ground.device}",
            *given,
        ]
        done = subprocess.run(
            [*command, "-o", str(report)], capture_output=True, text=True, check=False
        )
        print(done.stdout[-4000:], done.stderr[-4000:])
        if not report.is_file():
            raise RuntimeError(
                f"lockstep benchmark ended with code {done.returncode}: {done.stderr[-600:]}"
            )
        for cell in json.loads(report.read_text(encoding="utf-8"))["cells"]:
            say(
                {name: value for name, value in cell.items() if name not in LEFT_OUT}
                | {"what": "other"}
            )
