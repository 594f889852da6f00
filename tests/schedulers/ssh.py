"""sshd on two hosts of this machine, with keys of its own: each host logs in on the other without a
password.

The hosts are network namespaces (`tests.hosts`). Each has its own name and its own /etc/ssh.
"""

import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.hosts import Host, two_hosts
from tests.processes import ONE_THREAD, wait_until

NAMES = ("one", "two")
_SERVER = """\
ListenAddress {address}
HostKey {folder}/host
AuthorizedKeysFile {folder}/user.pub
PidFile none
PermitRootLogin prohibit-password
PasswordAuthentication no
UsePAM no
StrictModes no
SetEnv {variables}
"""
_CLIENT = """\
IdentityFile {folder}/user
IdentitiesOnly yes
UserKnownHostsFile {folder}/known
StrictHostKeyChecking yes
"""


@dataclass(frozen=True)
class Machines:
    """Two hosts with a name each, which log in on each other."""

    hosts: tuple[Host, Host]
    folder: Path
    """Keys, and what the servers print."""

    def start(self, number: int, *command: object, **more: str) -> subprocess.Popen[str]:
        """Start a command on a host."""
        return subprocess.Popen(
            self.hosts[number].inside_named(NAMES[number], *command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | more,
        )

    @contextmanager
    def routed_names(self) -> Iterator[None]:
        """Give both hosts their names at their addresses, and not at 127.0.1.1, in the block."""
        lines = [f"{host.address} {name}" for host, name in zip(self.hosts, NAMES, strict=True)]
        files = [host.files / "hosts" for host in self.hosts]
        before = files[0].read_text(), files[1].read_text()
        for file in files:
            file.write_text("\n".join(["127.0.0.1 localhost", *lines]) + "\n")
        try:
            yield
        finally:
            for file, text in zip(files, before, strict=True):
                file.write_text(text)


@contextmanager
def machines(folder: Path) -> Iterator[Machines]:
    """Start sshd on two hosts, and end them with all that runs there."""
    servers: list[subprocess.Popen[bytes]] = []
    with ExitStack() as stack:
        stack.callback(lambda: [server.wait() for server in servers])
        hosts = stack.enter_context(two_hosts(5))  # ends them
        _make_keys(folder)
        public = (folder / "host.pub").read_text()
        (folder / "known").write_text("".join(f"{name} {public}" for name in NAMES))
        for number, host in enumerate(hosts):
            _write_files(hosts, number, folder)
            with (folder / f"sshd-{NAMES[number]}.out").open("wb") as output:
                # sshd wants its own path in full. Its empty folder is in /run, which is not there
                # in every container.
                program = "mkdir -p /run/sshd && exec /usr/sbin/sshd -D -e"
                server = subprocess.Popen(
                    host.inside_named(NAMES[number], "sh", "-c", program),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
            servers.append(server)
        both = Machines(hosts, folder)
        for number in range(len(hosts)):
            wait_until(lambda here=number: _logs_in(both, here), 30)  # type: ignore[misc]
        yield both


def _make_keys(folder: Path) -> None:
    for name in ("host", "user"):
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
        subprocess.run(command, check=True)


def _write_files(hosts: tuple[Host, Host], number: int, folder: Path) -> None:
    """Write a host's files: names as Debian writes them, and the settings of ssh."""
    other = 1 - number
    lines = [
        "127.0.0.1 localhost",
        f"127.0.1.1 {NAMES[number]}",
        f"{hosts[other].address} {NAMES[other]}",
    ]
    files = hosts[number].files
    (files / "hosts").write_text("\n".join(lines) + "\n")
    # sshd gives its sessions nothing of its own environment.
    passed_on = ONE_THREAD | {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    variables = " ".join(f'{name}="{value}"' for name, value in passed_on.items())
    settings = {"address": hosts[number].address, "folder": folder, "variables": variables}
    (files / "ssh").mkdir()
    (files / "ssh" / "sshd_config").write_text(_SERVER.format_map(settings))
    (files / "ssh" / "ssh_config").write_text(_CLIENT.format_map(settings))


def _logs_in(both: Machines, number: int) -> bool:
    """Return whether a host reaches the other one."""
    login = ["ssh", "-o", "BatchMode=yes", NAMES[1 - number], "true"]
    process = both.start(number, *login)
    process.communicate()
    return process.returncode == 0
