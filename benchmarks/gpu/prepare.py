"""Fetch the wheels that a GPU machine without a network usually lacks, a few MB, to carry there
with the source tree.

    python benchmarks/gpu/prepare.py [--python 3.12] [--out build/gpu-wheels]

The machine itself needs a CUDA build of torch >= 2.11 with Triton, NumPy, OpenCV, PyYAML, typer,
rich, protobuf, Pillow, safetensors, matplotlib and Jinja, and pytest for the conformance suite.
docs/gpu.md has the commands there.
"""

import argparse
import subprocess
import sys
from pathlib import Path

ALONE = ("simplejpeg", "crc32c", "tensorboardX")
"""Packages whose own needs (NumPy, protobuf, packaging) are on such a machine."""
WITH_NEEDS = ("pydantic",)
"""Packages that are fetched with all they need: versions must fit each other."""
PLATFORMS = (
    *(f"manylinux_2_{minor}_x86_64" for minor in (39, 35, 34, 31, 28, 27, 24, 17)),
    "manylinux2014_x86_64",
)


def commands(python: str, out: Path) -> list[list[str]]:
    """Return the command lines that fetch the wheels."""
    platforms = [word for platform in PLATFORMS for word in ("--platform", platform)]
    pip = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--only-binary=:all:",
        "--implementation",
        "cp",
    ]
    pip += ["--python-version", python, *platforms, "--dest", str(out)]
    return [[*pip, "--no-deps", *ALONE], [*pip, *WITH_NEEDS]]


def main() -> int:
    """Fetch the wheels and print their names."""
    parser = argparse.ArgumentParser(
        description="Fetch wheels for a GPU machine without a network."
    )
    parser.add_argument(
        "--python", default="3.12", help="The machine's version of Python (default 3.12)."
    )
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).resolve().parents[2] / "build" / "gpu-wheels"
    )
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    for command in commands(given.python, given.out):
        if code := subprocess.run(command, check=False).returncode:
            return code
    for wheel in sorted(given.out.glob("*.whl")):
        print(f"{wheel.stat().st_size / 2**20:6.2f} MB  {wheel.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
