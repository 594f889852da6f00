"""A cluster of Ray on two hosts of this machine, with a token: its head on the first."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from tests.hosts import Host, two_hosts
from tests.processes import wait_until

PORT = 6379
DASHBOARD = 8265
TOKEN = "0123456789abcdef" * 4
_AGENTS = (
    "dashboard-agent-grpc-port",
    "dashboard-agent-listen-port",
    "runtime-env-agent-port",
    "metrics-export-port",
)
HAS_DASHBOARD = find_spec("aiohttp_cors") is not None
"""Whether Ray was installed as `ray[default]`: its dashboard takes jobs."""
PROGRAM = Path(sys.executable).with_name("ray")
"""Ray's command, of the Python that runs the tests."""


@dataclass(frozen=True)
class Ray:
    """A running cluster."""

    hosts: tuple[Host, Host]
    folder: Path
    """Ray's files. Its path is short: Ray puts sockets in folders below."""
    servers: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def address(self) -> str:
        """Where the head listens."""
        return f"{self.hosts[0].address}:{PORT}"

    @property
    def variables(self) -> dict[str, str]:
        """What those must know who use the cluster."""
        return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN, "RAY_USAGE_STATS_ENABLED": "0"}

    def start_node(self, number: int) -> None:
        """Start a node on a host, and wait until it answers. The first host's is the head."""
        host = self.hosts[number]
        place = (
            [
                "--head",
                f"--port={PORT}",
                f"--include-dashboard={HAS_DASHBOARD}",
                f"--temp-dir={self.folder}",
            ]
            if number == 0
            else [f"--address={self.address}"]
        )
        options = [*place, f"--node-ip-address={host.address}", "--num-cpus=2", "--block"]
        options.append("--object-store-memory=100000000")
        # With ports of their own, a node does not wait until its agents say which they have taken:
        # on a busy machine it gives up before.
        options += [f"--{name}={port}" for port, name in enumerate(_AGENTS, start=PORT + 1)]
        log = self.folder / f"node-{number}-{len(self.servers)}.out"
        with log.open("wb") as output:
            server = subprocess.Popen(
                host.inside_named(f"node{number}", PROGRAM, "start", *options),
                env=os.environ | self.variables,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self.servers.append(server)

        def has_started() -> bool:
            text = log.read_text(errors="replace")
            assert server.poll() is None, text
            return "Ray runtime started" in text

        wait_until(has_started)


@contextmanager
def ray_cluster() -> Iterator[Ray]:
    """Start a cluster of two nodes, and end it with all that it runs."""
    servers: list[subprocess.Popen[bytes]] = []
    folder = Path(tempfile.mkdtemp(prefix="ray-"))
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        stack.callback(lambda: [server.wait() for server in servers])
        hosts = stack.enter_context(two_hosts(4))  # ends them
        names = "".join(f"{host.address} node{number}\n" for number, host in enumerate(hosts))
        for host in hosts:
            (host.files / "hosts").write_text(f"127.0.0.1 localhost\n{names}")
        cluster = Ray(hosts, folder, servers)
        cluster.start_node(0)
        cluster.start_node(1)
        yield cluster
