"""Measure everything that needs a GPU, in parts, within a few minutes: see docs/how-to/gpu.md.

    PYTHONPATH=src python -m benchmarks.gpu.campaign --minutes 9 --out DIR

Each command of a part runs in a separate process. Every part has a file, `<part>.json`: what was
measured on which machine, with which sources. Started again, the campaign measures what is missing.

A machine without a network gets the few wheels that it lacks, fetched elsewhere:

    pip download --only-binary=:all: --python-version 3.12 --platform manylinux2014_x86_64
        --platform manylinux_2_28_x86_64 --dest build/gpu-wheels pydantic
    pip download --no-deps (the same options) simplejpeg crc32c tensorboardX
    python -m pip install --no-index --no-deps --no-compile --upgrade --target /tmp/site
        build/gpu-wheels/*.whl
    PYTHONPATH=src:/tmp/site python -m benchmarks.gpu.campaign --minutes 9 --out DIR

The conformance suite alone; the last option keeps warnings of operators without a deterministic
kernel from failing tests:

    LOCKSTEP_BACKENDS=torch LOCKSTEP_TEST_DEVICE=cuda python -m pytest tests/backends
        -k "torch or kernels" -W default
"""

import argparse
import hashlib
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.parts import Command, Part, Row, list_parts, list_tiny_parts, read_rows
from benchmarks.gpu.summary import print_summary
from lockstep.runs.environment import describe_environment
from lockstep.system.files import write_json

ROOT = Path(__file__).resolve().parents[2]
OK = "ok"
FAILED = "failed"
STOPPED = "stopped"
"""The campaign's minutes were over before the part was done. Its rows so far are kept."""
ENDING_SEC = 8.0
"""A command that is stopped has this many seconds to write its report."""


@dataclass(frozen=True)
class Campaign:
    """How the parts are measured."""

    out: Path
    device: str
    end: float
    """`time.monotonic` when the campaign's minutes are over."""
    about: dict[str, Any]
    """What results belong to: device, versions and sources."""
    photos: str = ""

    def read(self, part: Part) -> Row | None:
        """Return the result of a part on this machine, if there is one of the same commands."""
        file = self.out / f"{part.name}.json"
        if not file.is_file():
            return None
        result: Row = json.loads(file.read_text(encoding="utf-8"))
        is_same = result["about"] == self.about and result["commands"] == part.lines
        return result if is_same else None


def main(arguments: Sequence[str]) -> int:
    """Run the campaign, or show its results. Return 0; 1 if a part failed; 2 if options are wrong
    or the device is missing."""
    options = _make_parser().parse_args(arguments)
    end = time.monotonic() + 60 * options.minutes
    try:
        if options.show:
            files = sorted(options.show.glob("*.json"))
            if not files:
                raise ValueError(f"{options.show} has no results; expected a campaign's folder")
            print_summary([json.loads(file.read_text(encoding="utf-8")) for file in files])
            return 0
        parts = _choose(list_tiny_parts() if options.tiny else list_parts(), options.parts)
        about = describe_machine(options.device)
    except ValueError as error:
        print(f"campaign.py: {error}", file=sys.stderr)
        return 2
    campaign = Campaign(options.out.resolve(), options.device, end, about, options.photos)
    # As after Ctrl-C, the command that runs is ended, too.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(128 + signal.SIGTERM))
    todo = list_open_parts(parts, campaign)
    device = f"{about['device']}, torch {about['torch']}"
    print(f"{device}: {len(todo)} of {len(parts)} parts to measure", flush=True)
    left_out = run_parts(todo, campaign)
    results = list(filter(None, map(campaign.read, parts)))
    print()
    print_summary(results)
    print(f"\nresults: {campaign.out}")
    if left_out:
        names = ", ".join(part.name for part in left_out)
        print(f"time is over; the same command measures the rest: {names}")
    return int(any(result["status"] == FAILED for result in results))


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
    known = {part.name: part for part in parts}
    wanted = names.split(",") if names else list(known)
    for name in wanted:
        if name not in known:
            raise ValueError(f"there is no part {name!r}; the parts are {', '.join(known)}")
    return [known[name] for name in wanted]


def describe_machine(device: str) -> dict[str, Any]:
    """Return what results depend on. Raises `ValueError` if the device cannot be used."""
    about = describe_environment("torch") | {"device": "CPU", "sources": _digest_sources()}
    if device == "cuda":  # in another process, so that a driver that hangs does not hang this one
        words = [sys.executable, "-c", "import torch; print(torch.cuda.get_device_name())"]
        try:
            answer = subprocess.run(words, capture_output=True, text=True, timeout=120, check=True)
        except subprocess.SubprocessError:
            raise ValueError(
                "PyTorch finds no GPU; a CUDA build of torch and NVIDIA's driver are expected, and"
                " nvidia-smi must answer. To try the campaign without a GPU: --device cpu --tiny"
            ) from None
        about["device"] = answer.stdout.strip()
    return about


def _digest_sources() -> str:
    digest = hashlib.sha256()
    for path in sorted((ROOT / "src").rglob("*.py")):
        digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


def list_open_parts(parts: Sequence[Part], campaign: Campaign) -> list[Part]:
    """Return the parts without a result: first the new ones, then those that failed."""
    results = {part.name: campaign.read(part) for part in parts}
    status = {name: result["status"] for name, result in results.items() if result is not None}
    todo = [part for part in parts if status.get(part.name) != OK]
    return sorted(todo, key=lambda part: status.get(part.name) == FAILED)


def run_parts(parts: Sequence[Part], campaign: Campaign) -> list[Part]:
    """Measure parts until the minutes are over, and write every result at once. Return the parts
    left out."""
    left_out = []
    campaign.out.mkdir(parents=True, exist_ok=True)
    for part in parts:
        if campaign.end - time.monotonic() < part.expected_sec:
            left_out.append(part)
            continue
        began = time.monotonic()
        result = run_part(part, campaign)
        result |= {"part": part.name, "about": campaign.about, "commands": part.lines}
        write_json(campaign.out / f"{part.name}.json", result)
        seconds = time.monotonic() - began
        figures = f"{result['status']:<8} {seconds:6.1f} s  {len(result['rows'])} rows"
        print(f"{part.name:<34} {figures}  {result['reason']:.160}".rstrip(), flush=True)
    return left_out


def run_part(part: Part, campaign: Campaign) -> Row:
    """Run the commands of a part, also if one fails; return its status, the reason if it is not
    done, and its rows."""
    rows: list[Row] = []
    reasons = []
    end = min(time.monotonic() + part.limit_sec, campaign.end)
    with tempfile.TemporaryDirectory() as folder:
        for command in part.commands:
            more, reason = run_command(command, campaign, Path(folder), end - time.monotonic())
            rows += more
            if reason == STOPPED and end == campaign.end:
                return {"status": STOPPED, "reason": "the campaign's time is over", "rows": rows}
            if reason == STOPPED:
                reasons.append(f"ran longer than its limit of {part.limit_sec:.0f} s")
                break
            if reason:
                reasons.append(reason)
    return {"status": FAILED if reasons else OK, "reason": "; ".join(reasons), "rows": rows}


def run_command(
    command: Command, campaign: Campaign, folder: Path, seconds: float
) -> tuple[list[Row], str]:
    """Run a command for at most this many seconds; return its rows, and the reason if it failed:
    `STOPPED` if it took too long. What it prints goes to the log."""
    report = folder / "report"
    report.unlink(missing_ok=True)
    places = {"out": campaign.out, "photos": campaign.photos or folder / "photos"}
    line = command.line.format(device=campaign.device, report=report, **places)
    files = (folder / "output", folder / "errors")
    with files[0].open("wb") as output, files[1].open("wb") as errors:
        code = run_process(line, campaign.device, seconds, stdout=output, stderr=errors)
    printed = files[0].read_text(encoding="utf-8", errors="replace")
    complaints = files[1].read_text(encoding="utf-8", errors="replace")
    with (campaign.out / "campaign.log").open("a", encoding="utf-8") as log:
        log.write(f"\n== {line}\n{printed}{complaints}")
    reason = ""
    if code is None:
        reason = STOPPED
    elif code:
        ends = [text for text in complaints.splitlines() if text and not text.startswith(" ")]
        name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        reason = f"{name}: {ends[-1] if ends else 'without a message':.600}"
    try:
        rows = command.reader(printed, report)
    except Exception as error:  # the command printed something else
        return [], reason or f"{type(error).__name__}: {error}"
    # Commands of Lockstep and pytest also report in rows what failed, and end with 1.
    if rows and code == 1 and command.reader is not read_rows:
        reason = ""
    return [{"what": "", **row, **command.fields} for row in rows], reason


def run_process(line: str, device: str, seconds: float, **files: Any) -> int | None:
    """Run `python -m` with a command line, which finds this tree; return its exit code, or None if
    it was stopped. First it is interrupted as by Ctrl-C, so that it can write its report. All
    processes that it started end with it."""
    paths = (str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", ""))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
    environment |= {"LOCKSTEP_BACKENDS": "torch", "LOCKSTEP_TEST_DEVICE": device}  # for pytest
    words = [sys.executable, "-m", *shlex.split(line)]
    process = subprocess.Popen(words, cwd=ROOT, env=environment, start_new_session=True, **files)
    try:
        return process.wait(timeout=max(seconds, 0))
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=ENDING_SEC)
        return None
    finally:  # also after Ctrl-C
        with suppress(ProcessLookupError):  # all have ended
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
