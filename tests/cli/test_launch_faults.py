"""`lockstep launch` when something breaks: everything ends in a bounded time, is explained, and
resumes bit for bit.

The quick tests are of one engine. A soak breaks every engine in every way. With
LOCKSTEP_FAULT_SECONDS=FILE the time from a fault to the end of everything is appended to a file, as
in docs/reliability.md.
"""

import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from lockstep.system.event_log import read_log
from lockstep.weights import checkpoint
from tests.backends.conftest import BACKENDS
from tests.backends.launchers import LAUNCHED
from tests.processes import call, finish, is_running, room_for, running, wait_until
from tests.soak import SOAK, in_a_soak

PATIENCE = 8
"""Seconds. A busy machine with several frameworks can be silent for less."""
TO_END_SEC = 15
BOUND = PATIENCE + TO_END_SEC
"""Seconds to the end of everything from a fault that is seen at once, and from one that only the
patience shows, as docs/reliability.md promises."""
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
        if path := os.environ.get("LOCKSTEP_FAULT_SECONDS"):
            with Path(path).open("a") as file:
                print(f"{request.node.name}\t{seconds:.1f}", file=file)

    return append


@pytest.fixture(params=LAUNCHED if SOAK else LAUNCHED[-1:])
def trains(request: pytest.FixtureRequest, recipe_file: Path, textures: Path) -> list[object]:
    """A training to launch, on one engine; on all engines in a soak."""
    backend, _, distributed = str(request.param).partition(" ")
    changes = [
        "--set",
        "save_every_steps=2",
        "--set",
        "log_every_steps=1",
        "--set",
        f"distributed={distributed or 'native'}",
    ]
    return ["train", "--recipe", recipe_file, "--data", textures, *changes, "--backend", backend]


def last_step(run: Path) -> int:
    return max([0, *(entry["step"] for entry in read_log(run / "log.jsonl"))])


def losses(run: Path) -> list[float]:
    return [
        loss
        for entry in read_log(run / "log.jsonl")
        if entry["kind"] == "train"
        for loss in entry["losses"]
    ]


def newest_weights(run: Path) -> dict[str, bytes]:
    folder = run / "checkpoints"
    file = checkpoint.checkpoint_path(folder, checkpoint.steps(folder)[-1]) / "model.safetensors"
    return {name: value.tobytes() for name, value in load_file(file).items()}


def descendants(parent: int) -> dict[int, dict[str, str]]:
    """Return the environment variables of all processes that a process has started, directly or
    not, by their ids."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int(
                    (entry / "stat").read_text().rpartition(")")[2].split()[1]
                )
            except OSError:
                continue
    found = {parent}
    added = {parent}
    while added:
        added = {each for each, of in parents.items() if of in added}
        found |= added
    return {each: variables(each) for each in found - {parent}}


def variables(process: int) -> dict[str, str]:
    try:
        pairs = Path(f"/proc/{process}/environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return {}
    return dict(pair.split("=", 1) for pair in pairs if "=" in pair)


def rank_of(parent: int, rank: int) -> int:
    """Return the process id of a rank of a launcher."""
    return next(
        each
        for each, its in descendants(parent).items()
        if its.get("RANK") == str(rank) and "WORLD_SIZE" in its
    )


@contextmanager
def broken(run: Path, trains: list[object], *options: object) -> Iterator[subprocess.Popen[str]]:
    """Launch a long training in two ranks, and wait until some steps are done."""
    command = [
        "launch",
        "-n",
        2,
        "--patience",
        PATIENCE,
        *options,
        "--",
        *trains,
        "--out",
        run,
        "--set",
        "epochs=500",
    ]
    with running(*command) as process:
        wait_until(lambda: last_step(run) >= 3 or process.poll() is not None)
        assert process.poll() is None, process.communicate()
        started = descendants(process.pid)
        try:
            yield process
        finally:
            process.kill()
            for each in started:
                if is_running(each):
                    os.kill(each, signal.SIGKILL)
            process.communicate()


def ended(
    process: subprocess.Popen[str],
    began: float,
    started: set[int],
    record: Record,
    *,
    codes: tuple[int, ...] = (1,),
    bound: float = BOUND,
) -> str:
    """Return the errors of a launch that ends by itself in time, without a process or a torn
    checkpoint left."""
    code, _, errors = finish(process, BOUND + 60 + A_BUSY_MACHINE_SEC)
    seconds = time.monotonic() - began
    record(seconds)
    assert code in codes, errors
    assert [each for each in started if is_running(each)] == []
    assert seconds < bound + A_BUSY_MACHINE_SEC
    return errors


def assert_intact(run: Path) -> None:
    state, _, damaged = checkpoint.newest_intact(run / "checkpoints")
    assert state is not None
    assert state.step >= 2
    assert damaged == []


# Bit for bit

KILLED = {
    "SIGKILL": signal.SIGKILL,
    **({"SIGSTOP": signal.SIGSTOP, "SIGSEGV": signal.SIGSEGV} if SOAK else {}),
}


@pytest.mark.parametrize("number", KILLED.values(), ids=KILLED)
def test_ranks_that_are_started_again_end_bit_for_bit_like_undisturbed_ones(
    number: signal.Signals, trains: list[object], tmp_path: Path
) -> None:
    whole = tmp_path / "whole"
    again = tmp_path / "again"
    trains += ["--set", "epochs=3"]
    code, _, errors = call("launch", "-n", 2, "--", *trains, "--out", whole)
    assert code == 0, errors
    restarts = [
        "launch",
        "-n",
        2,
        "--patience",
        PATIENCE,
        "--restarts",
        1,
        "--",
        *trains,
        "--out",
        again,
    ]
    with running(*restarts, room=room_for(5)) as process:
        wait_until(lambda: last_step(again) >= 5)
        killed = rank_of(process.pid, 1)
        os.kill(killed, number)
        code, output, errors = finish(process)
    assert code == 0, errors
    assert re.search(rf"lockstep: rank 1 \(host \S+, pid {killed}\) ", errors)
    assert "lockstep: all ranks are started again (1 of 1), from the newest checkpoint" in errors
    assert re.search(r"resuming after step [1-9]\d* of 21", output)
    assert losses(again) == losses(whole)
    assert newest_weights(again) == newest_weights(whole)
    (restart,) = [entry for entry in read_log(again / "log.jsonl") if entry["kind"] == "restart"]
    assert restart["restart"] == 1
    assert f"pid {killed}" in restart["reason"]
    assert "  restarts             1\n" in output


@in_a_soak
@pytest.mark.skipif("torch" not in BACKENDS, reason="LOCKSTEP_BACKENDS leaves it out")
def test_torchrun_starts_ranks_again_bit_for_bit(
    recipe_file: Path, textures: Path, tmp_path: Path
) -> None:
    trains = [
        "train",
        "--recipe",
        recipe_file,
        "--data",
        textures,
        "--set",
        "save_every_steps=2",
        "--set",
        "epochs=3",
    ]
    whole = tmp_path / "whole"
    again = tmp_path / "again"
    options = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "2"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", *options, "-m", "lockstep"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [*torchrun, *map(str, trains), "--set", "log_every_steps=1"]
    subprocess.run(
        [*command, "--out", str(whole)],
        env=environment,
        check=True,
        timeout=200,
        capture_output=True,
    )
    with (tmp_path / "errors.txt").open("w+") as errors:
        process = subprocess.Popen(
            [*command, "--out", str(again)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        try:
            wait_until(lambda: last_step(again) >= 5)
            os.kill(rank_of(process.pid, 1), signal.SIGKILL)
            output, _ = process.communicate(timeout=200)
        finally:
            for each in (process.pid, *descendants(process.pid)):
                if is_running(each):
                    os.kill(each, signal.SIGKILL)
            process.communicate()
        errors.seek(0)
        assert process.returncode == 0, errors.read()
    assert losses(again) == losses(whole)
    assert newest_weights(again) == newest_weights(whole)
    restarts = [
        entry["reason"] for entry in read_log(again / "log.jsonl") if entry["kind"] == "restart"
    ]
    assert restarts == ["torchrun started the ranks again"]
    assert "  restarts             1\n" in output


# Faults


def test_a_stopped_rank_ends_the_launch(
    trains: list[object], tmp_path: Path, record: Record
) -> None:
    run = tmp_path / "run"
    with broken(run, trains) as process:
        started = set(descendants(process.pid))
        stopped = rank_of(process.pid, 1)
        began = time.monotonic()
        os.kill(stopped, signal.SIGSTOP)
        errors = ended(process, began, started, record)
    assert re.search(
        rf"lockstep: rank 1 \(host \S+, pid {stopped}\) has shown no sign of life for \d+ s; its"
        r" process is stopped "
        r"\(state T\); last it was \w+, \d+ steps begun, \d+ s ago\. All ranks are ended\.\n",
        errors,
    )
    assert_intact(run)


@in_a_soak
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_ends_the_launch(
    rank: int, trains: list[object], tmp_path: Path, record: Record
) -> None:
    run = tmp_path / "run"
    with broken(run, trains) as process:
        started = set(descendants(process.pid))
        killed = rank_of(process.pid, rank)
        began = time.monotonic()
        os.kill(killed, signal.SIGKILL)
        errors = ended(process, began, started, record, bound=TO_END_SEC)
    assert re.search(
        rf"lockstep: rank {rank} \(host \S+, pid {killed}\) was ended by SIGKILL, as the system"
        r" does",
        errors,
    )
    assert_intact(run)


@in_a_soak
def test_a_rank_without_memory_ends_the_launch(
    trains: list[object], tmp_path: Path, record: Record
) -> None:
    run = tmp_path / "run"
    with broken(run, trains) as process:
        started = set(descendants(process.pid))
        starved = rank_of(process.pid, 1)
        began = time.monotonic()
        pages = int(Path(f"/proc/{starved}/statm").read_text().split()[0])
        size = pages * resource.getpagesize()
        resource.prlimit(starved, resource.RLIMIT_AS, (size, size))
        resource.prlimit(starved, resource.RLIMIT_DATA, (2**20, 2**20))
        # It fails when it next needs memory. 2: the engine says what to do.
        errors = ended(process, began, started, record, codes=(1, 2), bound=BOUND + 15)
    # MXNet loses the thread that computes, and waits for it.
    faults = (
        rf"rank 1 \(host \S+, pid {starved}\) (failed with|was ended by|has shown no)|no rank has"
        r" taken a batch"
    )
    assert re.search(f"lockstep: {faults}", errors)
    assert_intact(run)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 16 MB."""
    folder = tmp_path / "small disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(folder)]
    done = (
        subprocess.run(mount, capture_output=True, text=True, check=False)
        if shutil.which("mount")
        else None
    )
    if done is None or done.returncode:
        pytest.skip(f"mounting a small disk needs root: {done.stderr if done else 'no mount'}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@in_a_soak
def test_a_full_disk_ends_the_launch(
    trains: list[object], small_disk: Path, record: Record
) -> None:
    run = small_disk / "run"
    with broken(run, trains) as process:
        started = set(descendants(process.pid))
        began = time.monotonic()
        with (small_disk / "fill").open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(2**16))
            except OSError:
                pass
        code, _, errors = finish(process, BOUND + 60)
        seconds = time.monotonic() - began
        record(seconds)
    assert code == 2, errors
    assert seconds < TO_END_SEC
    assert "No space left on device" in errors
    assert [each for each in started if is_running(each)] == []
    assert_intact(run)


@in_a_soak
def test_a_data_file_that_is_gone_ends_the_launch(
    trains: list[object], textures: Path, tmp_path: Path, record: Record
) -> None:
    run = tmp_path / "run"
    data = tmp_path / "data"
    shutil.copytree(textures, data)
    trains[trains.index(textures)] = data
    with broken(run, trains) as process:
        started = set(descendants(process.pid))
        began = time.monotonic()
        shutil.rmtree(data / "train")
        code, _, errors = finish(process, BOUND + 60)
        seconds = time.monotonic() - began
        record(seconds)
    assert code == 2, errors
    assert seconds < TO_END_SEC
    assert re.search(r"No such file or directory|is gone|does not exist", errors), errors
    assert str(data) in errors
    assert [each for each in started if is_running(each)] == []
    assert_intact(run)


@in_a_soak
@pytest.mark.parametrize("stopped", [False, True], ids=["all well", "a rank stopped"])
def test_ranks_do_not_outlive_a_killed_launcher(
    stopped: bool, trains: list[object], tmp_path: Path, record: Record
) -> None:
    run = tmp_path / "run"
    with broken(run, trains) as process:
        started = set(descendants(process.pid))
        rank = rank_of(process.pid, 1)
        if stopped:
            os.kill(rank, signal.SIGSTOP)
            started = {rank_of(process.pid, 0)}  # servers of MXNet end with the last rank
        began = time.monotonic()
        process.kill()
        wait_until(lambda: not any(map(is_running, started)), BOUND)
        record(time.monotonic() - began)
    assert_intact(run)


@in_a_soak
def test_a_launch_with_30_seconds_to_live_saves_and_stops(
    trains: list[object], tmp_path: Path, record: Record
) -> None:
    run = tmp_path / "run"
    with broken(run, trains) as process:
        started = set(descendants(process.pid))
        step = last_step(run)
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        code, _, errors = finish(process, 30)
        record(time.monotonic() - began)
    assert code == 75, errors
    assert re.search(r"stopped by SIGTERM after step \d+ of 3500, saved in", errors)
    assert [each for each in started if is_running(each)] == []
    state, _, damaged = checkpoint.newest_intact(run / "checkpoints")
    assert state is not None
    assert state.step >= step
    assert damaged == []
