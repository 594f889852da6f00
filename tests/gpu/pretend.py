"""Parts of a campaign that end in every way a part can end. They are run as real processes."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu.parts import Part
from benchmarks.gpu.timing import Ground, Say

HANGS = "hangs"
"""A part that hangs makes this file in the folder of results when it has said all that it says."""


def part(
    name: str,
    *,
    limit_sec: float = 600,
    expected_sec: float = 0.1,
    needs: tuple[str, ...] = (),
    **settings: Any,
) -> Part:
    return Part(
        name, "tests.gpu.pretend", f"pretends {name}", expected_sec, limit_sec, settings, needs
    )


def measure(ground: Ground, say: Say, does: str = "", counts_in: str = "") -> None:
    if counts_in:
        with Path(counts_in).open("a") as file:
            file.write("begun\n")
    say({"what": "begun", "device": ground.device, "left_sec": ground.left_sec})
    if does == "raise":
        raise ValueError("the figure is not there")
    if does == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if does == "exit":
        os._exit(3)
    if does == "hang":
        child = subprocess.Popen(["sleep", "1000"])
        say({"what": "child", "pid": child.pid})
        (Path(ground.out) / HANGS).touch()
        time.sleep(1000)
    if does == "look":
        found = json.loads((Path(ground.out) / "campaign.json").read_text())
        say({"what": "saw", "parts": [result["part"] for result in found["results"]]})
    if does == "infinite":
        say({"what": "ratio", "ratio": float("inf")})
