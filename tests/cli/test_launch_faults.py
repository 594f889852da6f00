"""`lockstep launch` when something breaks: everything ends in a bounded time, is explained, and
resumes bit for bit.

The quick tests are of one backend. A soak breaks every backend in every way. With
LOCKSTEP_FAULT_SECONDS=FILE the time from a fault to the end of everything is appended to a file, as
in docs/explanation/reliability.md.
"""

import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from lockstep.weights import checkpoint
from tests.backends.conftest import BACKENDS
from tests.cli.cases import (
    LONGER,
    assert_same_training,
    choose_launcher,
    find_descendants,
    find_ranks,
    last_step,
    set_fields,
)
from tests.processes import finish, is_running, room_for, running, wait_until
from tests.runs.cases import newest_step, read_entries
from tests.soak import SOAK, in_a_soak

PATIENCE = 8
"""Seconds. A busy machine with several frameworks can be silent for less."""
TO_END_SEC = 15
BOUND = PATIENCE + TO_END_SEC
"""Seconds to the end of everything from a fault that is seen at once, and from one that only the
patience shows, as docs/explanation/reliability.md promises."""
A_BUSY_MACHINE_SEC = 0 if SOAK else 60
"""Seconds that other tests may add at the same time. A soak has the machine for itself."""
linux = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="looks for processes in /proc"
)
pytestmark = [linux, pytest.mark.slow]


Record = Callable[[float], None]


@pytest.fixture
def record(request: pytest.FixtureRequest) -> Record:
    """A function that takes the seconds that a fault has lasted."""

    def append(seconds: float) -> None:
        path = os.environ.get("LOCKSTEP_FAULT_SECONDS")
        if path:
            with Path(path).open("a") as file:
                print(f"{request.node.name}\t{seconds:.1f}", file=file)

    return append


@pytest.fixture
def training(launcher: str, recipe_file: Path, textures: Path) -> list[object]:
    """A training to launch, on one backend; on all backends in a soak."""
    options = [*LONGER, *choose_launcher(launcher)]
    return ["train", "--recipe", recipe_file, "--data", textures, *options]


class Launch:
    """A launch of a long training in two ranks that is to break."""

    def __init__(self, process: subprocess.Popen[str], record: Record) -> None:
        self.process = process
        self.started = find_descendants(process.pid)
        self.ranks = find_ranks(process.pid)
        self._record = record
        self._began = time.monotonic()

    def begin(self) -> None:
        """Count the seconds from here."""
        self._began = time.monotonic()

    def kill(self, rank: int, number: signal.Signals) -> None:
        """Send a rank a signal, and count the seconds from there."""
        self.begin()
        os.kill(self.ranks[rank], number)

    def assert_ended(self, *codes: int, bound: float = BOUND) -> str:
        """Wait for the end, and return the errors: it ends in time, and leaves no process."""
        code, _, errors = finish(self.process, BOUND + 60 + A_BUSY_MACHINE_SEC)
        seconds = time.monotonic() - self._began
        self._record(seconds)
        assert code in codes, errors
        assert not any(map(is_running, self.started))
        assert seconds < bound + A_BUSY_MACHINE_SEC
        return errors


@contextmanager
def launch_training(
    run: Path, training: list[object], record: Record, *options: object
) -> Iterator[Launch]:
    """Launch a long training in two ranks, and wait until some steps are done."""
    command = ["launch", "-n", 2, "--patience", PATIENCE, *options, "--", *training]
    with running(*command, *set_fields(epochs=500), "--out", run) as process:
        wait_until(lambda: last_step(run) >= 3 or process.poll() is not None)
        assert process.poll() is None, process.communicate()
        launch = Launch(process, record)
        try:
            yield launch
        finally:
            process.kill()
            kill_all(launch.started)
            process.communicate()
    assert_intact(run)


def kill_all(processes: Iterable[int]) -> None:
    for process in processes:
        if is_running(process):
            os.kill(process, signal.SIGKILL)


def assert_intact(run: Path) -> None:
    state, _, damaged = checkpoint.newest_intact(run / "checkpoints")
    assert state is not None
    assert state.step >= 2
    assert damaged == []


# Bit for bit

KILLED = {"SIGKILL": signal.SIGKILL}
if SOAK:
    KILLED |= {"SIGSTOP": signal.SIGSTOP, "SIGSEGV": signal.SIGSEGV}


@pytest.mark.parametrize("number", KILLED.values(), ids=KILLED)
def test_ranks_that_are_started_again_give_bit_identical_weights(
    number: signal.Signals, training: list[object], whole_of_two_ranks: Path, tmp_path: Path
) -> None:
    again = tmp_path / "again"
    command = ["launch", "-n", 2, "--patience", PATIENCE, "--restarts", 1, "--", *training]
    with running(*command, "--out", again, room=room_for(5)) as process:
        wait_until(lambda: last_step(again) >= 5)
        killed = find_ranks(process.pid)[1]
        os.kill(killed, number)
        code, output, errors = finish(process)
    assert code == 0, errors
    assert re.search(rf"lockstep: rank 1 \(host \S+, pid {killed}\) ", errors)
    assert "lockstep: all ranks restart (1 of 1) from the newest checkpoint" in errors
    assert re.search(r"resuming after step [1-9]\d* of 21", output)
    assert_same_training(again, whole_of_two_ranks)
    (restart,) = read_entries(again, "restart")
    assert restart["restart"] == 1
    assert f"pid {killed}" in restart["reason"]
    assert "  restarts             1\n" in output


@in_a_soak
@pytest.mark.skipif("torch" not in BACKENDS, reason="LOCKSTEP_BACKENDS leaves it out")
def test_torchrun_starts_ranks_again(recipe_file: Path, textures: Path, tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    again = tmp_path / "again"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", "--max-restarts", "2", "-m", "lockstep", "train"]
    command += ["--recipe", str(recipe_file), "--data", str(textures)]
    command += [*LONGER, "--out"]
    subprocess.run([*command, whole], check=True, timeout=200, capture_output=True)
    with (tmp_path / "errors.txt").open("w+") as errors:
        how: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": errors, "text": True}
        process = subprocess.Popen([*command, again], **how)
        try:
            wait_until(lambda: last_step(again) >= 5)
            os.kill(find_ranks(process.pid)[1], signal.SIGKILL)
            output, _ = process.communicate(timeout=200)
        finally:
            kill_all((process.pid, *find_descendants(process.pid)))
            process.communicate()
        errors.seek(0)
        assert process.returncode == 0, errors.read()
    assert_same_training(again, whole)
    restarts = [entry["reason"] for entry in read_entries(again, "restart")]
    assert restarts == ["torchrun restarted the ranks"]
    assert "  restarts             1\n" in output


# Faults


@in_a_soak
def test_a_stopped_rank_ends_it(training: list[object], tmp_path: Path, record: Record) -> None:
    with launch_training(tmp_path / "run", training, record) as launch:
        launch.kill(1, signal.SIGSTOP)
        errors = launch.assert_ended(1)
    assert re.search(
        rf"lockstep: rank 1 \(host \S+, pid {launch.ranks[1]}\) has shown no sign of life for"
        r" \d+ s; its process is stopped \(state T\); it was last \w+, \d+ steps begun, \d+ s"
        r" ago\. Stopping all ranks\.\n",
        errors,
    )


@in_a_soak
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_ends_the_launch(
    rank: int, training: list[object], tmp_path: Path, record: Record
) -> None:
    with launch_training(tmp_path / "run", training, record) as launch:
        launch.kill(rank, signal.SIGKILL)
        errors = launch.assert_ended(1, bound=TO_END_SEC)
    where = rf"\(host \S+, pid {launch.ranks[rank]}\)"
    assert re.search(rf"lockstep: rank {rank} {where} was killed by SIGKILL, as the system", errors)


@in_a_soak
def test_a_rank_without_memory_ends(training: list[object], tmp_path: Path, record: Record) -> None:
    with launch_training(tmp_path / "run", training, record) as launch:
        starved = launch.ranks[1]
        launch.begin()
        pages = int(Path(f"/proc/{starved}/statm").read_text().split()[0])
        size = pages * resource.getpagesize()
        resource.prlimit(starved, resource.RLIMIT_AS, (size, size))
        resource.prlimit(starved, resource.RLIMIT_DATA, (2**20, 2**20))
        # It fails when it next needs memory. 2: the backend says what to do.
        errors = launch.assert_ended(1, 2, bound=BOUND + 15)
    # MXNet loses the thread that computes, and waits for it.
    faults = (
        rf"rank 1 \(host \S+, pid {starved}\) (failed with|was killed by|has shown no)|no rank has"
        r" taken a batch"
    )
    assert re.search(f"lockstep: {faults}", errors)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 16 MB."""
    folder = tmp_path / "small disk"
    folder.mkdir()
    if shutil.which("mount") is None:
        pytest.skip("mounting a small disk needs mount")
    mount = ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(folder)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"mounting a small disk needs root: {done.stderr}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@in_a_soak
def test_a_full_disk_ends_it(training: list[object], small_disk: Path, record: Record) -> None:
    with launch_training(small_disk / "run", training, record) as launch:
        launch.begin()
        with (small_disk / "fill").open("wb", buffering=0) as file, suppress(OSError):
            while True:
                file.write(bytes(2**16))
        errors = launch.assert_ended(2, bound=TO_END_SEC)
    assert "No space left on device" in errors


@in_a_soak
def test_a_data_file_that_is_gone_ends_the_launch(
    training: list[object], textures: Path, tmp_path: Path, record: Record
) -> None:
    data = tmp_path / "data"
    shutil.copytree(textures, data)
    training[training.index(textures)] = data
    with launch_training(tmp_path / "run", training, record) as launch:
        launch.begin()
        shutil.rmtree(data / "train")
        errors = launch.assert_ended(2, bound=TO_END_SEC)
    assert re.search(r"No such file or directory|is gone|does not exist", errors), errors
    assert str(data) in errors


@in_a_soak
@pytest.mark.parametrize("is_stopped", [False, True], ids=["all well", "a rank stopped"])
def test_ranks_do_not_outlive_a_killed_launcher(
    is_stopped: bool, training: list[object], tmp_path: Path, record: Record
) -> None:
    with launch_training(tmp_path / "run", training, record) as launch:
        started = launch.started
        if is_stopped:
            launch.kill(1, signal.SIGSTOP)
            started = launch.ranks[:1]  # servers of MXNet end with the last rank
        began = time.monotonic()
        launch.process.kill()
        wait_until(lambda: not any(map(is_running, started)), BOUND)
        record(time.monotonic() - began)


@in_a_soak
def test_a_short_life_saves_first(training: list[object], tmp_path: Path, record: Record) -> None:
    run = tmp_path / "run"
    with launch_training(run, training, record) as launch:
        step = last_step(run)
        launch.begin()
        launch.process.send_signal(signal.SIGTERM)
        errors = launch.assert_ended(75, bound=30)
    assert re.search(r"stopped by SIGTERM after step \d+ of 3500, saved in", errors)
    assert newest_step(run) >= step
