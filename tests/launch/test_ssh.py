"""Launchers of other machines, started by a program that stands for ssh: it runs the command on
this machine.

It has the environment that ssh gives: nothing of this process. Real ssh, its keys and its networks
are not tested.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.launch import ssh
from lockstep.launch.ssh import launch_over_ssh
from lockstep.system.errors import LockstepError, UserError
from tests.backends.conftest import BACKENDS
from tests.processes import call, wait_until

SECRET = "a secret of the tests"

SSH = """#!/bin/sh
for argument; do host=$command; command=$argument; done
printf '%s\\n' "$@" > "{folder}/$host.arguments"
exec env -i PATH="$PATH" PYTHONPATH="{path}" sh -c "$command"
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder where `ssh` writes with which arguments it was called for each host."""
    program = tmp_path / "bin" / "ssh"
    program.parent.mkdir()
    program.write_text(SSH.format(folder=tmp_path, path=os.environ.get("PYTHONPATH", "")))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)
    monkeypatch.setattr(ssh, "_TO_END_SEC", 60.0)  # these commands begin when they are asked to end
    return tmp_path


def test_each_host_runs_its_command_here_and_gets_the_secret_unseen(
    folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("OF_THIS_SHELL", "not passed on")
    program = (
        "import os, sys; print(sys.argv[1:], input(), os.getcwd(), os.environ.get('OF_THIS_SHELL'))"
    )
    words = "a 'word' $HOME"
    commands = [["-c", program, number, words] for number in ("1", "2")]
    with launch_over_ssh(["one", "two"], commands, SECRET):
        wait_until(lambda: len(list(folder.glob("*.arguments"))) == 2)
    lines = sorted(capfd.readouterr().out.splitlines())
    assert lines == [
        f"[one] {['1', words]} {SECRET} {folder} None",
        f"[two] {['2', words]} {SECRET} {folder} None",
    ]
    for host in ("one", "two"):
        called = (folder / f"{host}.arguments").read_text()
        assert SECRET not in called
        assert "BatchMode=yes" in called, "ssh must not wait for a password"


def test_a_hosts_errors_are_errors(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with launch_over_ssh(["one"], [["-c", "import sys; print('why', file=sys.stderr)"]], SECRET):
        pass
    assert capfd.readouterr() == ("", "[one] why\n")


def test_a_host_that_has_ended_is_an_error_with_its_exit_code(folder: Path) -> None:
    program = "import sys; input(); sys.argv[1] == '1' and sys.stdin.read(); sys.exit(7)"
    commands = [["-c", program, number] for number in ("1", "2")]
    with launch_over_ssh(["one", "two"], commands, SECRET) as both:

        def is_over() -> bool:
            try:
                both.refuse_loss()
            except LockstepError as error:
                return "exit code 7" in str(error) and "on two" in str(error)
            return False

        wait_until(is_over)


def test_without_ssh_it_is_told_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="needs ssh"), launch_over_ssh(["one"], [["-V"]], SECRET):
        pass


LAUNCHER = """
import signal, sys, time
from pathlib import Path
from lockstep.launch.ssh import end_with_input
folder = Path(sys.argv[1])

def stop(*_):
    (folder / "stopped").touch()
    sys.exit()

signal.signal(signal.SIGTERM, stop)
assert sys.stdin.readline()
(folder / "started").touch()  # first: the input may have closed already
end_with_input()
for _ in range(1200):  # a signal just before one long sleep would be noticed after it
    time.sleep(0.05)
"""
FIRST = """
import sys, time
from pathlib import Path
from lockstep.launch.ssh import launch_over_ssh
with launch_over_ssh(["one"], [["-c", sys.argv[1], sys.argv[2]]], "a secret of the tests"):
    while not (Path(sys.argv[2]) / "started").exists():
        time.sleep(0.005)
    if sys.argv[3] == "is killed":
        time.sleep(60)
"""


@pytest.mark.parametrize("end", ["ends", "is killed"])
def test_other_launchers_are_stopped_when_the_first_one_ends(folder: Path, end: str) -> None:
    first = subprocess.Popen([sys.executable, "-c", FIRST, LAUNCHER, str(folder), end])
    try:
        wait_until((folder / "started").exists)
        if end == "is killed":
            first.send_signal(signal.SIGKILL)
        wait_until((folder / "stopped").exists)
    finally:
        first.kill()
        first.wait()


def train_nothing(folder: Path) -> list[str | Path]:
    """Return a command whose ranks find no data."""
    return ["train", "--recipe", "demo", "--data", folder / "nowhere", "--out", folder / "run"]


@pytest.mark.slow
@pytest.mark.skipif("torch" not in BACKENDS, reason="LOCKSTEP_BACKENDS leaves it out")
def test_a_command_runs_on_this_machine_and_on_the_other(folder: Path) -> None:
    code, _, errors = call("launch", "--hosts", "127.0.0.1", "-n", 1, "--", *train_nothing(folder))
    assert code == 2
    assert "nowhere" in errors
    assert "launch -n 1 --nodes 2 --node-rank 1" in (folder / "127.0.0.1.arguments").read_text()


@pytest.mark.slow
@pytest.mark.skipif("torch" not in BACKENDS, reason="LOCKSTEP_BACKENDS leaves it out")
def test_a_machine_that_cannot_be_reached_ends_the_launch(folder: Path) -> None:
    (folder / "bin" / "ssh").write_text("#!/bin/sh\necho no route to host >&2\nexit 255\n")
    command = train_nothing(folder)
    code, output, errors = call("launch", "--hosts", "127.0.0.1", "-n", 1, "--", *command)
    assert (code, output) == (1, "")
    assert "[127.0.0.1] no route to host" in errors
    assert "lockstep: the launcher on 127.0.0.1 has ended with exit code 255" in errors
