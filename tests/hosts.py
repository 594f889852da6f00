"""Two hosts on this machine: network namespaces with an address each, and a cable between them."""

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

SECRET = "a secret of the tests"
PORT = 29400
_FILES = Path("/etc/netns")
"""The folder in which `ip netns exec` looks for a host's files."""


def _why_not() -> str:
    if os.geteuid() != 0:
        return "only root can make network namespaces"
    if shutil.which("ip") is None:
        return "ip (iproute2) is not installed"
    name = f"lockstep-try-{os.getpid()}"
    ends = ["type", "veth", "peer", "name", "other", "netns", name]
    cable = ["ip", "link", "add", f"try{os.getpid()}", "netns", name, *ends]
    for command in (["ip", "netns", "add", name], cable):
        tried = subprocess.run(command, capture_output=True, text=True, check=False)
        if tried.returncode:
            break
    subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    if tried.returncode:
        return tried.stderr.strip()
    return _why_no_files(_FILES / name)


def _why_no_files(folder: Path) -> str:
    """Return why files for a host cannot be written; "" if they can."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        folder.rmdir()
    except OSError as error:
        return str(error)
    return ""


with_hosts = pytest.mark.skipif(
    bool(WHY_NOT := _why_not()), reason=f"no network namespaces here: {WHY_NOT}"
)
"""Skips a test, with the reason, where network namespaces cannot be made."""


@dataclass(frozen=True)
class Host:
    """A network namespace."""

    name: str
    interface: str
    address: str

    @property
    def files(self) -> Path:
        """The folder of files that `ip netns exec` puts in the place of those in /etc."""
        return _FILES / self.name

    def inside(self, *arguments: object) -> list[str]:
        """Return a command that runs another one on this host."""
        return ["ip", "netns", "exec", self.name, *map(str, arguments)]

    def inside_named(self, name: str, *arguments: object) -> list[str]:
        """Return a command that runs another one on this host, which has a name of its own then."""
        program = 'hostname "$1" && shift && exec "$@"'
        return self.inside("unshare", "--uts", "sh", "-c", program, "sh", name, *arguments)

    def run(self, *arguments: object) -> str:
        """Run a command on this host, and return its output."""
        return subprocess.run(
            self.inside(*arguments), capture_output=True, text=True, check=True
        ).stdout

    def start(self, *arguments: object, **more: str) -> subprocess.Popen[str]:
        """Start a command of Lockstep on this host."""
        return self.python("-m", "lockstep", *arguments, **more)

    def python(self, *arguments: object, **more: str) -> subprocess.Popen[str]:
        """Start Python on this host, with the secret in its environment."""
        return subprocess.Popen(
            self.inside(sys.executable, *arguments),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"LOCKSTEP_SECRET": SECRET} | more,
        )

    def processes(self) -> list[int]:
        """Return the processes on this host."""
        return [int(line) for line in self.run_outside("ip", "netns", "pids", self.name).split()]

    def run_outside(self, *arguments: str) -> str:
        """Run a command on the machine that has this host."""
        return subprocess.run(arguments, capture_output=True, text=True, check=True).stdout

    def cut(self) -> None:
        """Take the cable out: nothing is sent or received, and nobody is told."""
        self.run("ip", "link", "set", self.interface, "down")

    def slow_down(self, rate: str) -> None:
        """Limit what this host sends to a rate such as 10mbit."""
        limit = ["tbf", "rate", rate, "burst", "64kb", "latency", "400ms"]
        self.run("tc", "qdisc", "add", "dev", self.interface, "root", *limit)


@contextmanager
def two_hosts(number: int = 0) -> Iterator[tuple[Host, Host]]:
    """Make two hosts with a cable between them, and remove them with all their processes.

    The name of each is an address of loopback there, as in /etc/hosts of many systems. Their ends
    of the cable have one name, as Horovod wants it.
    """
    names = [f"lockstep-{os.getpid()}-{number}-{end}" for end in "ab"]
    one, other = hosts = tuple(
        Host(name, f"ls{os.getpid() % 10**6}-{number}", f"10.{77 + number}.0.{place}")
        for place, name in enumerate(names, start=1)
    )
    try:
        for host in hosts:
            subprocess.run(["ip", "netns", "add", host.name], check=True)
            host.files.mkdir(parents=True, exist_ok=True)
            addresses = f"127.0.0.1 localhost\n127.0.1.1 {socket.gethostname()}\n"
            (host.files / "hosts").write_text(addresses)
        cable = ["type", "veth", "peer", "name", other.interface, "netns", other.name]
        subprocess.run(["ip", "link", "add", one.interface, "netns", one.name, *cable], check=True)
        for host in hosts:
            host.run("ip", "addr", "add", f"{host.address}/24", "dev", host.interface)
            host.run("ip", "link", "set", host.interface, "up")
            host.run("ip", "link", "set", "lo", "up")
        yield one, other
    finally:
        for host in hosts:
            kill_all(host)
            subprocess.run(["ip", "netns", "del", host.name], check=False)
            shutil.rmtree(host.files, ignore_errors=True)


def kill_all(host: Host) -> None:
    """End everything on a host at once, as if its power was cut."""
    for process in subprocess.run(
        ["ip", "netns", "pids", host.name], capture_output=True, text=True
    ).stdout.split():
        subprocess.run(["kill", "-9", process], check=False, capture_output=True)


def variables(process: int) -> bytes:
    """Return the environment variables of a process, with a zero before each; nothing if it has
    ended."""
    try:
        return b"\0" + Path(f"/proc/{process}/environ").read_bytes()
    except OSError:
        return b""
