"""What the tests of schedulers have in common: when a run has started, and that it ends with the
weights of an undivided run."""

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from lockstep.models.state import State
from lockstep.weights import checkpoint
from tests.hosts import WHY_NOT, Host
from tests.processes import call, finish, wait_until

ENDLESS = ["--set", "epochs=2000", "--set", "batch_norm=synchronised"]
"""More steps than a test trains."""
BUSY_SEC = 1200
"""Seconds until something counts as hung on a busy machine. Two starts of four processes take
minutes there."""


def needs(*programs: str) -> pytest.MarkDecorator:
    """Return a mark that skips tests where a program of a scheduler is not installed: `make
    schedulers` installs all of them."""
    missing = [program for program in programs if shutil.which(program) is None]
    reason = WHY_NOT or f"not installed: {', '.join(missing)}; run make schedulers"
    return pytest.mark.skipif(bool(missing or WHY_NOT), reason=reason)


def read_log(run: Path) -> list[dict[str, object]]:
    """Return the complete lines of a run's log; none if it has not begun."""
    log = run / "log.jsonl"
    lines = log.read_text().splitlines(keepends=True) if log.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def count_starts(run: Path) -> int:
    """Return how often a run has begun or resumed, and has trained since."""
    starts = 0
    has_trained = False
    for line in read_log(run):
        if line["kind"] == "start":
            starts += 1
            has_trained = False
        has_trained = has_trained or line["kind"] == "train"
    return starts if has_trained else starts - 1


def wait_for_start(run: Path, number: int, is_over: Callable[[], str] = lambda: "") -> None:
    """Wait until a run trains after its n-th start. `is_over` returns why it cannot, or ""."""

    def has_come() -> bool:
        why = is_over()
        assert not why, why
        return count_starts(run) >= number

    wait_until(has_come, BUSY_SEC)


def wait_for_checkpoint(run: Path) -> None:
    """Wait until a run has saved a checkpoint."""
    wait_until(lambda: bool(checkpoint.steps(run / "checkpoints")), BUSY_SEC)


def why_ended(process: subprocess.Popen[str]) -> str:
    """Return what a command has printed, if it has ended; "" if it runs."""
    return "" if process.poll() is None else "\n".join(map(str, finish(process)))


def list_ranks(host: Host, run: Path) -> list[int]:
    """Return the processes on a host that train a run. Launchers are none of them."""
    return [process for process in host.processes() if _is_rank(process, run)]


def _is_rank(process: int, run: Path) -> bool:
    try:
        words = Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")
    except OSError:  # it has ended
        return False
    is_python = Path(os.fsdecode(words[0])).name.startswith("python")  # Ray may call it python3
    return is_python and str(run).encode() in words and b"launch" not in words


def newest(run: Path) -> State:
    """Return the newest checkpoint of a run."""
    state, _, damaged = checkpoint.newest_intact(run / "checkpoints")
    assert state is not None
    assert damaged == []
    return state


def assert_undivided(run: Path, train: list[object], folder: Path, ranks: int = 2) -> None:
    """Assert that a run has the weights, to the last bit, of the same steps without a stop, on one
    machine."""
    divided = newest(run)
    one = ["--out", folder / "undivided", "--stop-after-steps", divided.step]
    code, _, errors = call("launch", "-n", ranks, "--", *train, *one, seconds=BUSY_SEC)
    assert code == 0, errors
    undivided = newest(folder / "undivided")
    assert divided.step == undivided.step > 0
    assert divided.tensors.keys() == undivided.tensors.keys()
    assert [
        name
        for name, tensor in divided.tensors.items()
        if tensor.tobytes() != undivided.tensors[name].tobytes()
    ] == []
