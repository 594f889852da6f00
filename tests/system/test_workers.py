"""Worker processes, which carry out a part of a command."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.system.ranks import EXIT_CODE_FOLDER
from lockstep.system.workers import LINES_OF_ERROR, carry_out
from tests.processes import is_running, wait_until


def silent(done: int, total: int) -> None:
    pass


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_what_a_worker_tells_is_heard_and_what_else_it_prints_is_not(tmp_path: Path) -> None:
    progress: list[tuple[int, int]] = []
    code = (
        "import os\nfrom lockstep.system.workers import tell\nprint('a greeting', flush=True)\n"
        "tell(1, 2)\nprint('{}', flush=True)\nos.write(1, bytes([0xff, 0xfe, 10]))\ntell(2, 2)"
    )
    ended = carry_out(python(code), tmp_path, lambda *now: progress.append(now))
    assert (ended.code, ended.errors) == (0, "")
    assert progress == [(1, 2), (2, 2)]


def test_the_end_of_a_worker_is_told_with_its_last_words(tmp_path: Path) -> None:
    code = "import sys\nfor i in range(100): print(i, file=sys.stderr)\nsys.exit(7)"
    ended = carry_out(python(code), tmp_path, silent)
    assert ended.code == 7
    assert ended.errors.splitlines() == [str(i) for i in range(100 - LINES_OF_ERROR, 100)]
    assert carry_out(python("import os; os.abort()"), tmp_path, silent).code == -signal.SIGABRT


def test_a_worker_is_no_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [
        *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", EXIT_CODE_FOLDER),
        *("TF_CONFIG", "PADDLE_TRAINER_ID", "HOROVOD_RANK", "MASTER_ADDR", "LOCKSTEP_TORCH_STORE"),
        *("SLURM_STEP_ID", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"),
        *("LOCKSTEP_RENDEZVOUS", "LOCKSTEP_SECRET"),
    ]
    for name in names:
        monkeypatch.setenv(name, "3")
    names_left = f"[name for name in {names} if name in os.environ]"
    code = f"import os, sys, tempfile\nsys.exit(tempfile.gettempdir() + ' ' + str({names_left}))"
    assert carry_out(python(code), tmp_path, silent).errors == f"{tmp_path} []"


def test_a_program_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        carry_out([tmp_path / "none"], tmp_path, silent)


def test_a_worker_is_killed_when_whoever_waits_for_it_is_interrupted(tmp_path: Path) -> None:
    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    code = (
        "import os, time, pathlib, lockstep.system.workers as"
        f" w\npathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(os.getpid()))\nw.tell(1,"
        " 2)\ntime.sleep(600)"
    )
    with pytest.raises(KeyboardInterrupt):
        carry_out(python(code), tmp_path, interrupt)
    assert not is_running(int((tmp_path / "pid").read_text()))


def test_a_worker_ends_when_whoever_waits_for_it_is_killed(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    worker = (
        "import os, time, pathlib, lockstep.system.workers as w\nw.end_with_parent()\n"
        f"pathlib.Path({str(tmp_path / 'new')!r}).write_text(str(os.getpid()))\n"
        f"os.rename({str(tmp_path / 'new')!r}, {str(pid)!r})\ntime.sleep(600)"
    )
    parent = (
        "import sys, pathlib\nfrom lockstep.system.workers import carry_out\n"
        f"carry_out([sys.executable, '-c', {worker!r}], pathlib.Path({str(tmp_path)!r}), print)"
    )
    with subprocess.Popen(python(parent), stdin=subprocess.DEVNULL) as process:
        wait_until(pid.exists)
        process.kill()
    wait_until(lambda: not is_running(int(pid.read_text())))
