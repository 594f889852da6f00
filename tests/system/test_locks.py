"""The lock that several machines share. Other machines are other names in its file; its holders are
real processes."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from lockstep.system import locks
from lockstep.system.locks import hold_lock

HOLDS = """
import sys, time
from pathlib import Path
from lockstep.system import locks

locks.BEAT_SEC = float(sys.argv[2])
with locks.hold_lock(Path(sys.argv[1])) as lock:
    lock.tell(3, 7)
    lock.beat()
    print("holds", flush=True)
    for line in sys.stdin:
        lock.beat()
        print("has beaten", flush=True)
"""
COUNTS = """
import sys
from pathlib import Path
from lockstep.system.locks import hold_lock

folder = Path(sys.argv[1])
for _ in range(25):
    with hold_lock(folder / "lock"):
        count = int((folder / "count").read_text())
        (folder / "count").write_text(str(count + 1))
"""


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(locks, "STALE_SEC", 1.0)
    return tmp_path / "lock"


def holder(path: Path, beat_sec: float = 600) -> "subprocess.Popen[str]":
    """Return a process that holds a lock. By default it beats only when it is asked to: a file in a
    beat is empty."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(path), str(beat_sec)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "holds\n"
    return process


def move_to_another_machine(path: Path) -> None:
    """Make a lock look as if its holder were on another machine."""
    path.write_text(json.dumps(json.loads(path.read_text()) | {"machine": "elsewhere"}))


def test_one_process_at_a_time_holds_the_lock(tmp_path: Path) -> None:
    (tmp_path / "count").write_text("0")
    both = [subprocess.Popen([sys.executable, "-c", COUNTS, str(tmp_path)]) for _ in range(3)]
    assert [process.wait(300) for process in both] == [0, 0, 0]
    assert (tmp_path / "count").read_text() == "75"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["count"]


def test_a_waiting_process_sees_progress(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A busy machine keeps no thread from beating for so long.
    monkeypatch.setattr(locks, "STALE_SEC", 3.0)
    process = holder(path, 0.1)
    seen = []
    began = time.monotonic()

    def waiting(done: int, total: int) -> None:
        if (done, total) != (0, 1):  # the first look can come in the middle of a beat
            seen.append((done, total))
        if time.monotonic() > began + 4.0:  # longer than a lock without beats lasts
            process.communicate()

    with hold_lock(path, waiting):
        assert process.returncode == 0
    assert set(seen) == {(3, 7)}
    assert not path.exists()


def test_a_killed_process_frees_its_lock(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "STALE_SEC", 1e9)
    process = holder(path)
    process.kill()
    process.communicate()
    with hold_lock(path, lambda done, total: pytest.fail("it waits")):
        assert json.loads(path.read_text())["pid"] == os.getpid()


def test_a_lock_of_another_machine_is_taken_over_when_its_beats_end(path: Path) -> None:
    process = holder(path)
    process.kill()
    process.communicate()
    move_to_another_machine(path)
    began = time.monotonic()
    with hold_lock(path):
        assert time.monotonic() - began > 1.0
    assert list(path.parent.iterdir()) == []


def test_a_suspended_holder_that_lost_its_lock_does_not_remove_the_next_one(path: Path) -> None:
    process = holder(path)
    process.send_signal(signal.SIGSTOP)
    with hold_lock(path):
        process.send_signal(signal.SIGCONT)
        assert process.communicate("beat\n") == ("has beaten\n", None)
        assert json.loads(path.read_text())["pid"] == os.getpid()
    assert not path.exists()


@pytest.mark.parametrize("text", ["", "{", '{"machine": 3, "pid": "x"}', '{"beat": 1e999}'])
def test_a_file_that_is_no_lock_is_taken_over(text: str, path: Path) -> None:
    path.write_text(text)
    with hold_lock(path):
        assert json.loads(path.read_text())["pid"] == os.getpid()


def test_an_exception_ends_the_wait_and_leaves_the_lock_to_its_holder(path: Path) -> None:
    process = holder(path)

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), hold_lock(path, stop):
        pytest.fail("it is not held")
    assert json.loads(path.read_text())["pid"] == process.pid
    process.communicate()


def test_an_error_in_the_block_frees_the_lock(path: Path) -> None:
    with pytest.raises(ValueError, match="mine"), hold_lock(path):
        raise ValueError("mine")
    assert not path.exists()
    assert "lockstep-lock" not in {thread.name for thread in threading.enumerate()}
