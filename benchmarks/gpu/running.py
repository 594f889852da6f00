"""Running parts, each in a separate process with a time limit, until the campaign's minutes are
over."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.parts import Part
from benchmarks.gpu.results import DONE, FAILED, MISSING, OK, STOPPED, Results, read_rows

ROOT = Path(__file__).resolve().parents[2]
LOG = "campaign.log"
MOST_SAID = 600
"""At most this many characters of the reason of a failure are kept. The log has the rest."""
MOST_ATTEMPTS = 2
"""A part that failed is tried this often before it is left alone; `--again` tries it once more."""
FEWEST_SEC = 10.0
ORDER = "benchmarks.gpu.part_process"


@dataclass(frozen=True)
class Campaign:
    """How the parts are measured."""

    out: Path
    device: str
    tiny: bool
    end: float
    """`time.monotonic` when the campaign's minutes are over."""
    photos: str = ""

    @property
    def left_sec(self) -> float:
        """Seconds that are left."""
        return self.end - time.monotonic()


def environment() -> dict[str, str]:
    """Return the environment of a part: it finds Lockstep and the campaign in this source tree."""
    paths = [str(ROOT / "src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}


def open_parts(
    parts: Sequence[Part], results: Results, machine: str, *, again: bool = False
) -> list[Part]:
    """Return the parts that are to be measured: first those that were not finished, then those that
    failed."""
    found: tuple[list[Part], list[Part]] = [], []
    for part in parts:
        before = results.find(part.name, part.settings, machine)
        if again or before is None or before["status"] == STOPPED:
            found[0].append(part)
        elif before["status"] not in DONE and before["attempts"] < MOST_ATTEMPTS:
            found[1].append(part)
        elif before["status"] == MISSING and not part.missing():
            found[0].append(part)
    return [*found[0], *found[1]]


def run_parts(
    parts: Sequence[Part],
    campaign: Campaign,
    results: Results,
    machine: str,
    tell: Callable[[str], None],
) -> list[Part]:
    """Measure parts until the minutes are over, and put every result into the file at once. Return
    the parts left out."""
    left_out = []
    for part in parts:
        why = part.missing()
        if not why and campaign.left_sec < max(part.expected_sec, FEWEST_SEC):
            left_out.append(part)
            continue
        began = time.monotonic()
        result: dict[str, Any] = {
            "part": part.name,
            "settings": dict(part.settings),
            "machine": machine,
            "what": part.what,
        }
        result |= (
            {"status": MISSING, "reason": why, "rows": []} if why else run_part(part, campaign)
        )
        result["seconds"] = round(time.monotonic() - began, 1)
        results.put(result)
        said = f": {result['reason'].splitlines()[-1]}" if result["reason"] else ""
        tell(
            f"{part.name:<34} {result['status']:<8} {result['seconds']:6.1f} s "
            f" {len(result['rows'])} rows{said:.160}"
        )
    return left_out


def run_part(part: Part, campaign: Campaign) -> dict[str, Any]:
    """Run a part in a process; return its status, the reason if it is not done, and its rows, also
    those of a killed one."""
    limit = min(part.limit_sec, campaign.left_sec)
    campaign.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "rows.jsonl"
        order = {
            "module": part.module,
            "settings": dict(part.settings),
            "rows": str(rows),
            "seconds": limit,
        }
        order |= {
            "device": campaign.device,
            "tiny": campaign.tiny,
            "out": str(campaign.out),
            "photos": campaign.photos,
        }
        said, code = _process(
            [sys.executable, "-m", ORDER, json.dumps(order, allow_nan=False)],
            part.name,
            campaign,
            limit,
        )
        found = read_rows(rows)
    if code is None and limit < part.limit_sec:
        return {"status": STOPPED, "reason": "the campaign's minutes were over", "rows": found}
    if code is None:
        return {
            "status": FAILED,
            "reason": f"ran longer than its limit of {limit:.0f} s and was killed",
            "rows": found,
        }
    if code < 0:
        name = signal.Signals(-code).name
        return {
            "status": FAILED,
            "reason": f"killed by {name}: {said or 'it printed nothing'}",
            "rows": found,
        }
    if code:
        return {
            "status": FAILED,
            "reason": said or f"exit code {code}, without a message",
            "rows": found,
        }
    return {"status": OK, "reason": "", "rows": found}


def _process(
    command: list[str], name: str, campaign: Campaign, limit: float
) -> tuple[str, int | None]:
    """Run a command for at most `limit` seconds; return the end of what it printed, and its exit
    code.

    The code is None if it was killed at the limit. All processes that it started end with it. What
    is printed goes to the log.
    """
    log = campaign.out / LOG
    with log.open("ab") as file:
        file.write(f"\n== {name}\n".encode())
        file.flush()
        begins_at = file.tell()
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env=environment(),
            start_new_session=True,
        )
        code: int | None = None
        try:
            with suppress(subprocess.TimeoutExpired):
                code = process.wait(timeout=limit)
        finally:  # also after Ctrl-C
            end_group(process)
    with log.open("rb") as file:
        file.seek(begins_at)
        printed = file.read().decode(errors="replace").strip()
    return _reason(printed), code


def _reason(printed: str) -> str:
    """Return the end of what a process printed: the last line that is not part of a traceback's
    list of calls."""
    lines = [line for line in printed.splitlines() if line.strip() and not line.startswith(" ")]
    return lines[-1][:MOST_SAID] if lines else ""


def end_group(process: "subprocess.Popen[Any]") -> None:
    """Kill a process that began its own session, and all that it started there."""
    with suppress(ProcessLookupError):  # all have ended
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
