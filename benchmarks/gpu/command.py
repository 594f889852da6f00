"""The command line of the campaign."""

import argparse
import json
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.parts import Part, all_parts, tiny_parts
from benchmarks.gpu.results import FAILED, FILE, Results
from benchmarks.gpu.running import ROOT, Campaign, environment, open_parts, run_parts
from benchmarks.gpu.summary import summary

ABOUT_SEC = 120
"""A device that does not say its name within this many seconds does not work."""


def main(arguments: Sequence[str]) -> int:
    """Run the campaign, or show its file. Return 0; 1 if a part failed; 2 if options are wrong or
    the device is missing."""
    given = _parser().parse_args(arguments)
    if given.show is not None:
        return _show(given.show)
    parts = _chosen(tiny_parts() if given.tiny else all_parts(), given.parts)
    if isinstance(parts, str):
        return _refuse(parts)
    if given.list:
        for part in parts:
            print(f"{part.name:<34} {part.expected_sec:4.0f} s  {part.what}")
        return 0
    end = time.monotonic() + 60 * given.minutes
    try:
        results = Results.open(given.out / FILE)
        about = _about(given.device)
    except ValueError as error:
        return _refuse(str(error))
    return _run(
        parts,
        results,
        about,
        Campaign(given.out, given.device, given.tiny, end, given.photos),
        again=given.again,
    )


def _run(
    parts: Sequence[Part],
    results: Results,
    about: dict[str, Any],
    campaign: Campaign,
    *,
    again: bool,
) -> int:
    machine = results.add_machine(about | ({"tiny": True} if campaign.tiny else {}))
    for number in (
        signal.SIGTERM,
        signal.SIGHUP,
    ):  # as after Ctrl-C, the part that runs is ended, too
        signal.signal(number, lambda *_: sys.exit(128 + signal.SIGTERM))
    todo = open_parts(parts, results, machine, again=again)
    print(
        f"{about['device']}, torch {about['torch']}: {len(todo)} of {len(parts)} parts to measure",
        flush=True,
    )
    left_out = run_parts(todo, campaign, results, machine, lambda line: print(line, flush=True))
    results.write()
    print(f"\n{summary(results, machine)}")
    print(f"\nresults: {results.path}")
    if left_out:
        print(
            "time is over; the same command measures the rest:"
            f" {', '.join(part.name for part in left_out)}"
        )
    found = [results.find(part.name, part.settings, machine) for part in parts]
    return int(any(result is not None and result["status"] == FAILED for result in found))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="campaign.py", description="Measure everything that needs a GPU, in parts."
    )
    parser.add_argument(
        "--minutes", type=float, default=9.0, help="Minutes that this command may take (default 9)."
    )
    parser.add_argument(
        "--parts", default="", metavar="A,B", help="Only these parts; --list names them."
    )
    parser.add_argument(
        "--out", type=Path, default=ROOT / "build" / "gpu", help="Folder of the results."
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--tiny",
        action="store_true",
        help="Small models and few steps, to try the campaign itself.",
    )
    parser.add_argument(
        "--photos",
        default="",
        metavar="DIR",
        help="JPEGs in folders by class, instead of drawn pictures.",
    )
    parser.add_argument(
        "--again", action="store_true", help="Also measure parts that have a result."
    )
    parser.add_argument(
        "--list",
        action="store_true",
        help="List the parts and the seconds that they are expected to take.",
    )
    parser.add_argument(
        "--show", type=Path, metavar="FILE", help="Print the summary of a file of results."
    )
    return parser


def _chosen(parts: list[Part], names: str) -> list[Part] | str:
    """Return the parts of these names, comma-separated, or what is wrong with the names. No names:
    all parts."""
    if not names:
        return parts
    known = {part.name: part for part in parts}
    unknown = [name for name in names.split(",") if name not in known]
    if unknown:
        return f"there is no part {unknown[0]!r}; the parts are {', '.join(known)}"
    return [known[name] for name in names.split(",")]


def _about(device: str) -> dict[str, Any]:
    """Return what results depend on. Raises `ValueError` if the device cannot be used."""
    command = [sys.executable, "-m", "benchmarks.gpu.about", device]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=ABOUT_SEC,
            cwd=ROOT,
            env=environment(),
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ValueError(
            f"the device {device} did not answer within {ABOUT_SEC} s; see nvidia-smi"
        ) from None
    if done.returncode:
        raise ValueError((done.stderr.strip().splitlines() or ["torch cannot be imported"])[-1])
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _show(path: Path) -> int:
    if not path.is_file():
        return _refuse(f"{path} is not a file; --show expects a campaign's {FILE}")
    try:
        results = Results.open(path)
    except ValueError as error:
        return _refuse(str(error))
    print(
        "\n\n".join(summary(results, machine) for machine in results.machines)
        or "nothing is measured yet"
    )
    return 0


def _refuse(message: str) -> int:
    print(f"campaign.py: {message}", file=sys.stderr)
    return 2
