"""Measure how long whole processes take: `lockstep --help`, `import lockstep`, and `lockstep
predict` of one photo.

`predict` gets a run of ResNet-50 at 224 px with random weights, and every installed runtime.
`nothing` is an interpreter that does nothing. With `--baseline SRC`, the folder src of another
version, that version is measured too. All of them are measured alternately.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image

from lockstep.inference.runtimes import list_installed
from lockstep.models.state import State
from lockstep.recipes import Recipe
from lockstep.weights import checkpoint
from measuring import make_parser, median, random_tensors, record, round_all, seconds


def prepare(folder: Path) -> tuple[Path, Path]:
    """Write a run with a checkpoint, and a photo; return their paths."""
    recipe = Recipe(model="resnet50", precision="fp32")
    about = {"recipe": recipe.fields(), "classes": []}
    checkpoint.save(
        folder / "run" / "checkpoints",
        State(1, random_tensors(recipe), {}),
        data_digest="",
        about=about,
    )
    coarse = np.random.default_rng(0).integers(0, 256, (6, 8, 3), np.uint8)
    Image.fromarray(coarse).resize((500, 375), Image.Resampling.BICUBIC).save(folder / "photo.jpg")
    return folder / "run", folder / "photo.jpg"


def run(source: Path | None, *arguments: str) -> float:
    """Run a Python process and return the seconds it takes. `source` is the folder src of the
    version to run."""
    environment = dict(os.environ) | ({"PYTHONPATH": str(source)} if source else {})
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed version is compiled
    command = [sys.executable, *arguments]
    return seconds(
        lambda: subprocess.run(command, capture_output=True, check=True, env=environment)
    )


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument(
        "--baseline", type=Path, metavar="SRC", help="The folder src of another version."
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="lockstep-startup-") as name:
        weights, photo = prepare(Path(name))
        commands = {
            "help_sec": ["-m", "lockstep", "--help"],
            "import_sec": ["-c", "import lockstep"],
            "nothing_sec": ["-c", "pass"],
        }
        for runtime in list_installed("torch"):
            commands[f"predict_{runtime}_sec"] = [
                "-m",
                "lockstep",
                "predict",
                str(weights),
                str(photo),
                "--runtime",
                runtime,
            ]
        versions = {"": None} | ({"baseline_": options.baseline} if options.baseline else {})
        times_by_name: dict[str, list[float]] = {
            version + name: [] for name in commands for version in versions
        }
        for turn in range(options.rounds + 1):
            for name, command in commands.items():
                for version, source in versions.items():
                    took = run(source, *command)
                    if turn:  # the first turn fills the caches of the disk
                        times_by_name[version + name].append(took)
    medians = {name: round(median(times), 4) for name, times in times_by_name.items()}
    record(
        "startup",
        medians | {"turns": {name: round_all(times) for name, times in times_by_name.items()}},
    )


if __name__ == "__main__":
    main()
