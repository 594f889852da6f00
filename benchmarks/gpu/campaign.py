"""Measure everything that needs a GPU, in parts, within a few minutes: see docs/gpu.md.

    PYTHONPATH=src python -m benchmarks.gpu.campaign --minutes 9 --out DIR

Each command of a part runs in a separate process. Started again, it measures what is missing.
"""

import argparse
import hashlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.parts import Part, list_parts, list_tiny_parts
from benchmarks.gpu.running import (
    FAILED,
    ROOT,
    Campaign,
    list_open_parts,
    run_parts,
)
from benchmarks.gpu.summary import summarise
from lockstep.runs.environment import describe_environment

ABOUT_SEC = 120
"""A device that does not report its name within this many seconds does not work."""


def main(arguments: Sequence[str]) -> int:
    """Run the campaign, or show its results. Return 0; 1 if a part failed; 2 if options are wrong
    or the device is missing."""
    options = _make_parser().parse_args(arguments)
    end = time.monotonic() + 60 * options.minutes
    try:
        if options.show:
            print(summarise(_read_results(options.show)))
            return 0
        parts = _choose(list_tiny_parts() if options.tiny else list_parts(), options.parts)
        about = _describe_machine(options.device)
    except ValueError as error:
        print(f"campaign.py: {error}", file=sys.stderr)
        return 2
    return _run(parts, Campaign(options.out.resolve(), options.device, end, about, options.photos))


def _run(parts: Sequence[Part], campaign: Campaign) -> int:
    # As after Ctrl-C, the command that runs is ended, too.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(128 + signal.SIGTERM))
    todo = list_open_parts(parts, campaign)
    device = f"{campaign.about['device']}, torch {campaign.about['torch']}"
    print(f"{device}: {len(todo)} of {len(parts)} parts to measure", flush=True)
    left_out = run_parts(todo, campaign)
    results = [campaign.read(part) for part in parts]
    done = [result for result in results if result is not None]
    print(f"\n{summarise(done)}\n\nresults: {campaign.out}")
    if left_out:
        names = ", ".join(part.name for part in left_out)
        print(f"time is over; the same command measures the rest: {names}")
    return int(any(result["status"] == FAILED for result in done))


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="campaign.py", description="Measure everything that needs a GPU, in parts."
    )
    add = parser.add_argument
    add("--minutes", type=float, default=9.0, help="Minutes that this command may take.")
    add("--parts", default="", metavar="A,B", help="Only these parts.")
    add("--out", type=Path, default=ROOT / "benchmarks" / "results" / "gpu", help="Results.")
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--tiny", action="store_true", help="Few steps, to try the campaign itself.")
    add("--photos", default="", metavar="DIR", help="JPEGs in folders by class.")
    add("--show", type=Path, metavar="DIR", help="Print the summary of a folder of results.")
    return parser


def _choose(parts: list[Part], names: str) -> list[Part]:
    """Return the parts of these names, comma-separated; all without names. Raises `ValueError`."""
    known = {part.name: part for part in parts}
    wanted = names.split(",") if names else list(known)
    for name in wanted:
        if name not in known:
            raise ValueError(f"there is no part {name!r}; the parts are {', '.join(known)}")
    return [known[name] for name in wanted]


def _describe_machine(device: str) -> dict[str, Any]:
    """Return what results depend on. Raises `ValueError` if the device cannot be used."""
    about = describe_environment("torch") | {"device": "CPU", "sources": _digest_sources()}
    if device == "cuda":  # in another process, so that a driver that hangs does not hang this one
        words = [sys.executable, "-c", "import torch; print(torch.cuda.get_device_name())"]
        try:
            done = subprocess.run(words, capture_output=True, text=True, timeout=ABOUT_SEC)
        except subprocess.TimeoutExpired:
            raise ValueError(
                f"the GPU did not answer within {ABOUT_SEC} s; see nvidia-smi"
            ) from None
        if done.returncode:
            raise ValueError(
                "PyTorch finds no GPU; a CUDA build of torch and NVIDIA's driver are expected. To"
                " try the campaign without a GPU: --device cpu --tiny"
            )
        about["device"] = done.stdout.strip()
    return about


def _digest_sources() -> str:
    digest = hashlib.sha256()
    for path in sorted((ROOT / "src").rglob("*.py")):
        digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


def _read_results(folder: Path) -> list[dict[str, Any]]:
    files = sorted(folder.glob("*.json"))
    if not files:
        raise ValueError(f"{folder} has no results; --show expects a campaign's folder")
    return [json.loads(file.read_text(encoding="utf-8")) for file in files]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
