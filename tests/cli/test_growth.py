"""A long training with evaluation and saving takes no more memory, threads, files or sockets as it
goes on.

It lasts LOCKSTEP_GROWTH_MINUTES on every engine, by default 2. The figures of
docs/explanation/reliability.md are of an hour.
"""

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.backends.conftest import BACKENDS
from tests.processes import command, wait_until
from tests.soak import in_a_soak

MINUTES = float(os.environ.get("LOCKSTEP_GROWTH_MINUTES", "2"))
MEMORY_SHARE = 0.03
"""Memory may grow by this share from the second third to the last one: the log's evaluations, and
the allocator's pieces."""
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc"),
]


class Used(NamedTuple):
    """What a process uses."""

    memory_mb: float
    threads: int
    handles: int
    sockets: int
    temporary_files: int
    files_of_the_run: int


def last_step(run: Path) -> int:
    lines = (run / "log.jsonl").read_text().splitlines()[-2:]  # the last one may be half written
    return int(json.loads(lines[0])["step"])


def used(process: int, temporary: Path, run: Path) -> Used:
    folder = Path(f"/proc/{process}")
    status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
    targets = []
    for entry in (folder / "fd").iterdir():
        try:
            targets.append(str(entry.readlink()))
        except OSError:  # closed in the meantime
            continue
    return Used(
        int(status["VmRSS"].split()[0]) / 1024,
        int(status["Threads"]),
        len(targets),
        sum(target.startswith("socket:") for target in targets),
        *(sum(len(files) for _, _, files in os.walk(folder)) for folder in (temporary, run)),
    )


@in_a_soak
@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "reference"])
def test_nothing_grows_while_a_run_trains_evaluates_and_saves(
    backend: str, recipe_file: Path, textures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    changes = ("epochs=1000000", "save_every_steps=2", f"backend={backend}")
    options = [word for change in changes for word in ("--set", change)]
    trains = command("train", "--recipe", recipe_file, "--data", textures, "--out", run, *options)
    with (tmp_path / "output.txt").open("w+") as output:  # a pipe that nobody reads would stop it
        process = subprocess.Popen(trains, stdout=output, stderr=output)
        try:
            wait_until(
                lambda: (
                    (run / "checkpoints" / "step-00000014").exists() or process.poll() is not None
                ),
                120,
            )
            began = last_step(run)
            samples = []
            ends = time.monotonic() + 60 * MINUTES
            while time.monotonic() < ends and process.poll() is None:
                samples.append((last_step(run), used(process.pid, temporary, run)))
                time.sleep(MINUTES / 5)
            process.send_signal(signal.SIGTERM)
            code = process.wait(120)
        finally:
            process.kill()
            process.wait()
        output.seek(0)
        assert code == 75, output.read()[-2000:]
    third = len(samples) // 3
    assert began < samples[third][0] < samples[2 * third][0] < samples[-1][0], (
        "it trains all the time"
    )
    before, after = (
        Used(
            *(
                statistics.median(column)
                for column in zip(*(sizes for _, sizes in part), strict=True)
            )
        )
        for part in (samples[third : 2 * third], samples[2 * third :])
    )
    print(
        f"{backend}: {samples[-1][0] - began} steps in {MINUTES:.0f} minutes; {before} -> {after}"
    )  # shown by -s
    assert after[1:] == before[1:]
    assert after.memory_mb < before.memory_mb * (1 + MEMORY_SHARE)
