"""Start and stop the launchers of other machines over ssh."""

import os
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from lockstep.launch.rendezvous_address import start_with_secret
from lockstep.system.errors import LockstepError, UserError

_SSH = ("ssh", "-T", "-o", "BatchMode=yes", "-o", "ServerAliveInterval=15")
"""BatchMode: ssh asks for no password. -T: no terminal, so that the other launcher ends when its
input closes."""
_TO_END_SEC = 10.0


@contextmanager
def launch_over_ssh(
    hosts: Sequence[str], commands: Sequence[Sequence[str]], secret: str
) -> Iterator["Remotes"]:
    """Run a command on each of the other machines, in this folder and with this Python.

    A command is a list of Python's arguments. The secret is the first line of its standard input,
    which closes when the context is left or this process ends. Each line of output is printed after
    the host's name.
    """
    remotes = Remotes(hosts)
    try:
        for host, command in zip(hosts, commands, strict=True):
            remotes.start(host, command, secret)
        yield remotes
    finally:
        remotes.end()


class Remotes:
    """The ssh processes of a launch."""

    def __init__(self, hosts: Sequence[str]) -> None:
        self._hosts = hosts
        self._running: list[subprocess.Popen[str]] = []
        self._printing: list[threading.Thread] = []

    def start(self, host: str, command: Sequence[str], secret: str) -> None:
        """Start a command on a host."""
        line = f"cd {shlex.quote(str(Path.cwd()))} && exec {shlex.join([sys.executable, *command])}"
        try:
            started = start_with_secret([*_SSH, "--", host, line], secret)
        except FileNotFoundError:
            raise UserError(
                "--hosts needs ssh, which is not installed here; start the launchers yourself"
            ) from None
        self._running.append(started)
        for source, target in ((started.stdout, sys.stdout), (started.stderr, sys.stderr)):
            thread = threading.Thread(target=_print, args=(host, source, target), daemon=True)
            thread.start()
            self._printing.append(thread)

    def refuse_loss(self) -> None:
        """Raise `LockstepError` if a host's launcher has ended."""
        for host, process in zip(self._hosts, self._running, strict=False):
            if process.poll() is not None:
                raise LockstepError(
                    f"the launcher on {host} has ended with exit code {process.returncode}; see its"
                    " output"
                )

    def end(self) -> None:
        """Ask the other launchers to stop by closing their input, and wait until they have."""
        for process in self._running:
            with suppress(OSError):
                process.stdin.close()  # type: ignore[union-attr]
        for process in self._running:
            try:
                process.wait(_TO_END_SEC)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for thread in self._printing:
            thread.join(_TO_END_SEC)


def _print(host: str, source: Any, target: IO[str]) -> None:
    with source:
        for line in source:
            target.write(f"[{host}] {line}")
            target.flush()


def end_with_input() -> None:
    """Send this process SIGTERM when its standard input closes: the connection or the launch that
    started it has ended."""

    def follow() -> None:
        while os.read(0, 1024):
            continue
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=follow, name="lockstep-input", daemon=True).start()
