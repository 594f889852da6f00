"""Running parts, each command in a separate process, until the campaign's minutes are over. Every
part has a file, `<part>.json`: what was measured on which machine, with which sources."""

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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.gpu.parts import Command, Part
from benchmarks.gpu.readers import READERS, Row
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

    @property
    def left_sec(self) -> float:
        """Seconds that are left."""
        return self.end - time.monotonic()

    def read(self, part: Part) -> Row | None:
        """Return the result of a part on this machine, if there is one of the same commands."""
        file = self.out / f"{part.name}.json"
        if not file.is_file():
            return None
        result: Row = json.loads(file.read_text(encoding="utf-8"))
        is_same = result["about"] == self.about and result["commands"] == part.lines
        return result if is_same else None


def make_environment() -> dict[str, str]:
    """Return the environment of a command, which finds Lockstep and the campaign in this tree."""
    paths = [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}


def list_open_parts(parts: Sequence[Part], campaign: Campaign) -> list[Part]:
    """Return the parts without a result: first the new ones, then those that failed."""
    new = []
    failed = []
    for part in parts:
        status = (campaign.read(part) or {"status": STOPPED})["status"]
        if status == FAILED:
            failed.append(part)
        elif status == STOPPED:
            new.append(part)
    return new + failed


def run_parts(parts: Sequence[Part], campaign: Campaign) -> list[Part]:
    """Measure parts until the minutes are over, and write every result at once. Return the parts
    left out."""
    left_out = []
    campaign.out.mkdir(parents=True, exist_ok=True)
    for part in parts:
        if campaign.left_sec < part.expected_sec:
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
    limit = min(part.limit_sec, campaign.left_sec)
    end = time.monotonic() + limit
    with tempfile.TemporaryDirectory() as folder:
        if not campaign.photos:
            campaign = replace(campaign, photos=f"{folder}/photos")
        for command in part.commands:
            more, reason = run_command(command, campaign, Path(folder), end - time.monotonic())
            rows += more
            if reason == STOPPED and limit < part.limit_sec:
                reason = "the campaign's minutes were over"
                return {"status": STOPPED, "reason": reason, "rows": rows}
            if reason == STOPPED:
                reasons.append(f"ran longer than its limit of {limit:.0f} s and was stopped")
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
    places = {"out": campaign.out, "photos": campaign.photos, "report": report}
    line = command.line.format(device=campaign.device, **places)
    output = folder / "output"
    complaints = folder / "errors"
    with output.open("wb") as first, complaints.open("wb") as second:
        code = run_process(line, campaign.device, seconds, stdout=first, stderr=second)
    printed = output.read_text(encoding="utf-8", errors="replace")
    errors = complaints.read_text(encoding="utf-8", errors="replace")
    with (campaign.out / "campaign.log").open("a", encoding="utf-8") as log:
        log.write(f"\n== {line}\n{printed}{errors}")
    if code is None:
        reason = STOPPED
    elif code:
        ends = [text for text in errors.splitlines() if text and not text.startswith(" ")]
        name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        reason = f"{name}: {ends[-1] if ends else 'without a message':.600}"
    else:
        reason = ""
    try:
        rows = READERS[command.reader](printed, report)
    except Exception as error:  # the command printed something else
        return [], reason or f"{type(error).__name__}: {error}"
    # Commands of Lockstep and pytest also report in rows what failed.
    if rows and code and command.reader != "rows":
        reason = ""
    return [{"what": "", **row, **command.fields} for row in rows], reason


def run_process(line: str, device: str, seconds: float, **files: Any) -> int | None:
    """Run `python -m` with a command line; return its exit code, or None if it was stopped. First
    it is interrupted as by Ctrl-C, so that it can write its report. All processes that it started
    end with it."""
    environment = make_environment()
    if line.startswith("pytest"):  # several processes must find the tests in the same order
        environment |= {"LOCKSTEP_BACKENDS": "torch", "LOCKSTEP_TEST_DEVICE": device}
        environment["PYTHONHASHSEED"] = "0"
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
