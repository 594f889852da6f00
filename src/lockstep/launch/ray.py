"""Ray: one launcher on each of several nodes of a cluster.

Ray places the launchers, brings their output here, and replaces a node that is lost. Each launcher
(`lockstep.launch.launcher`) starts, watches and stops the ranks of its node.
"""

import os
import re
import secrets
import shlex
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from lockstep.launch.job import Job
from lockstep.launch.launcher import LOCKSTEP, Signals
from lockstep.launch.rendezvous_address import start_with_secret
from lockstep.launch.watch import choose_code
from lockstep.system.errors import BackendError, LockstepError, UserError
from lockstep.system.ranks import free_ports

_LOOK_SEC = 0.2
_PATIENT_SEC = 10.0
"""Seconds without a place in the cluster after which the wait is reported."""
OUTPUT = "output"
ERRORS = "errors"
CODE = "code"
_LOST: int | None = None


@dataclass(frozen=True)
class RayLaunch:
    """What is launched on a Ray cluster."""

    job: Job
    address: str | None
    """HOST:PORT of the cluster's head. None: RAY_ADDRESS, else the cluster on this machine."""
    run: Path | None
    """The folder of the run that the ranks train; None if they train none."""


class NodeLauncher:
    """An actor on a node of the cluster, which runs a launcher as a process."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def find_place(self) -> tuple[str, int]:
        """Return the node's address in the cluster, and a port that is free there."""
        import ray

        address = str(ray.util.get_node_ip_address())
        return address, free_ports(1, address)[0]

    def run(
        self, arguments: Sequence[str], folder: str, secret: str
    ) -> Iterator[tuple[str, str | int]]:
        """Run Python with these arguments in a folder; yield each line of its output, and its exit
        code. The secret is the first line of its input, which closes when this process ends."""
        process = start_with_secret([sys.executable, *arguments], secret, folder)
        self._process = process
        lines: SimpleQueue[tuple[str, str] | None] = SimpleQueue()
        for kind, source in ((OUTPUT, process.stdout), (ERRORS, process.stderr)):
            threading.Thread(target=_read_lines, args=(kind, source, lines), daemon=True).start()
        for _ in range(2):
            while (line := lines.get()) is not None:
                yield line
        yield CODE, process.wait()

    def send(self, number: int) -> None:
        """Send a signal to the launcher."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)


def _read_lines(kind: str, source: Any, lines: "SimpleQueue[tuple[str, str] | None]") -> None:
    with source:
        for line in source:
            lines.put((kind, line))
    lines.put(None)


def launch_on_ray(launch: RayLaunch, say: Callable[[str], None]) -> int:
    """Run a command on the nodes of a cluster; return the exit code, as `launch_ranks` does.

    If a node is lost, the ranks start again on another one as soon as there is one, provided that
    the run has saved a checkpoint since they started. Raises `UserError` or `BackendError` if Ray
    is not installed or no cluster can be reached.
    """
    with _connected(launch.address) as ray, Signals() as signals:
        received = signals.received
        while True:
            before = _newest_checkpoint(launch.run)
            codes = _Attempt(ray, launch, received, say).run()
            if _LOST not in codes:
                return 0 if set(codes) == {0} else choose_code(codes)
            nodes = ", ".join(str(node) for node, code in enumerate(codes) if code is _LOST)
            if received or _newest_checkpoint(launch.run) == before:
                say(f"lockstep: node {nodes} was lost, and no checkpoint was saved since the start")
                return choose_code(codes)
            say(f"lockstep: node {nodes} was lost; the ranks restart on the remaining nodes")


@contextmanager
def _connected(address: str | None) -> Iterator[Any]:
    """Yield the module of Ray, connected to a cluster."""
    address = address or os.environ.get("RAY_ADDRESS") or "auto"
    # For "local" Ray would start a new cluster, and for "ray://" use another protocol.
    if address != "auto" and not re.fullmatch(r"[^/]+:[0-9]+", address):
        raise UserError(
            f"the cluster's address is {address!r}, expected HOST:PORT of its head; give --address"
            " or RAY_ADDRESS"
        )
    try:
        import ray
    except ImportError:
        raise UserError("--on ray needs Ray; install it: pip install 'ray>=2.60'") from None
    # Without tokens, whoever reaches the ports of a cluster can run programs on it.
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    try:
        ray.init(address=address, log_to_driver=False, logging_level="warning")
    except (ConnectionError, RuntimeError, ray.exceptions.RayError) as error:
        raise BackendError(
            f"cannot reach a Ray cluster: {str(error).rstrip('.')}. Expected a running one that was"
            " started with RAY_AUTH_MODE=token and the same RAY_AUTH_TOKEN"
        ) from error
    try:
        yield ray
    finally:
        ray.shutdown()


def _newest_checkpoint(run: Path | None) -> str:
    """Return the name of the newest checkpoint of a run; "" without one."""
    if run is None:
        return ""
    return max((path.name for path in (run / "checkpoints").glob("step-*")), default="")


class _Attempt:
    """Launchers on all nodes, from their placement to their end."""

    def __init__(
        self, ray: Any, launch: RayLaunch, received: list[int], say: Callable[[str], None]
    ) -> None:
        self.ray = ray
        self.launch = launch
        self.received = received
        self.say = say
        self.codes: list[int | None] = [_LOST] * launch.job.nodes
        self._passed_on = 0  # a signal that comes before this counts, too

    def run(self) -> list[int | None]:
        """Return the exit code of each node's launcher; None if the node was lost."""
        from ray.util.placement_group import remove_placement_group

        group = self._reserve()
        actors: list[Any] = []
        try:
            if group is not None:
                actors = self._place(group)
                self._follow(actors)
        except self.ray.exceptions.RayTaskError as error:  # of our own code on a node
            self.say(f"lockstep: a node cannot start: {error.cause}")
            self.codes = [1] * self.launch.job.nodes
        except self.ray.exceptions.RayError as error:
            self.say(f"lockstep: {type(error).__name__}: {str(error).splitlines()[0]}")
        finally:
            for actor in actors:
                self.ray.kill(actor)
            if group is not None:
                remove_placement_group(group)
        return self.codes

    def _bundle(self) -> dict[str, float]:
        """Return what a node must have."""
        job = self.launch.job
        gpus = {"GPU": float(job.gpus)} if job.gpus else {}
        return {"CPU": float(job.processes)} | gpus

    def _reserve(self) -> Any:
        """Return a placement group with a bundle on each of the nodes, once they are there; None if
        a signal comes first."""
        from ray.util.placement_group import placement_group, remove_placement_group

        bundle = self._bundle()
        group = placement_group([bundle] * self.launch.job.nodes, strategy="STRICT_SPREAD")
        waited = 0.0
        while not group.wait(timeout_seconds=_LOOK_SEC):
            waited += _LOOK_SEC
            if self.received:
                remove_placement_group(group)
                self.codes = [128 + self.received[0]] * self.launch.job.nodes
                return None
            if _PATIENT_SEC <= waited < _PATIENT_SEC + _LOOK_SEC:
                needs = " and ".join(f"{count:g} {name}" for name, count in bundle.items())
                self.say(
                    f"lockstep: waiting for {self.launch.job.nodes} nodes with {needs} each; the"
                    f" cluster has {len([n for n in self.ray.nodes() if n['Alive']])} nodes"
                )
        return group

    def _place(self, group: Any) -> list[Any]:
        """Return an actor on each node, in their order."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        job = self.launch.job
        kind = self.ray.remote(max_concurrency=2, max_restarts=0)(NodeLauncher)
        return [
            kind.options(
                num_cpus=job.processes,
                num_gpus=job.gpus,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    placement_group=group, placement_group_bundle_index=node
                ),
            ).remote()
            for node in range(job.nodes)
        ]

    def _follow(self, actors: list[Any]) -> None:
        """Start the launchers, print their output, pass signals on, and wait until all have
        ended."""
        places = self.ray.get([actor.find_place.remote() for actor in actors])
        place = "{}:{}".format(*places[0])
        secret = secrets.token_hex(16)
        threads = []
        for node, actor in enumerate(actors):
            arguments = self.launch.job.list_arguments(node, place, places[node][0])
            lines = actor.run.options(num_returns="streaming").remote(
                arguments, str(Path.cwd()), secret
            )
            thread = threading.Thread(target=self._print, args=(node, lines), daemon=True)
            thread.start()
            threads.append(thread)
        while any(thread.is_alive() for thread in threads):
            threads[-1].join(_LOOK_SEC)
            for thread in threads:
                thread.join(0.01)
            for number in self.received[self._passed_on :]:
                for actor in actors:
                    actor.send.remote(number)
                self._passed_on += 1

    def _print(self, node: int, lines: Any) -> None:
        """Print the lines of a node, and note its exit code. Lines of node 0 have no prefix: its
        rank 0 reports for all."""
        prefix = "" if node == 0 else f"[node {node}] "
        try:
            for reference in lines:
                kind, value = self.ray.get(reference)
                if kind == CODE:
                    self.codes[node] = int(value)
                    continue
                target = sys.stdout if kind == OUTPUT else sys.stderr
                target.write(f"{prefix}{value}")
                target.flush()
        except self.ray.exceptions.RayTaskError as error:  # such as a missing folder
            self.say(f"lockstep: node {node} cannot start its launcher: {error.cause}")
            self.codes[node] = 1
        except self.ray.exceptions.RayError:
            pass  # the node is lost


# Submitting a launch

_NO_COMMAND = 127
"""Bash's exit code for a program that is not installed."""


def write_script(job: Job, address: str | None) -> str:
    """Return a shell script that submits a launch as a job of the cluster."""
    words = [sys.executable, *LOCKSTEP, "launch", "--on", "ray"]
    words += ["--nodes", str(job.nodes), "-n", str(job.processes), "--gpus", str(job.gpus)]
    words += job.launch
    place = [] if address is None else ["--address", address]
    own = shlex.quote(str(Path(sys.executable).parent))  # of an environment that is not activated
    command = (
        f"cd {shlex.quote(str(Path.cwd()))} && exec {shlex.join([*words, '--', *job.command])}"
    )
    return f"""\
#!/bin/bash
# The token is that of the cluster: RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH or ~/.ray/auth_token.
set -eu
export RAY_AUTH_MODE=token
export PATH=$PATH:{own}
{shlex.join(["ray", "job", "submit", "--no-wait", *place])} -- bash -c \\
    {shlex.quote(command)}
"""


def submit(script: str) -> str:
    """Run the script; return what it prints. Raises `UserError` if Ray is missing, `LockstepError`
    if the job is refused."""
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
    if done.returncode == _NO_COMMAND:
        raise UserError("--now needs Ray; install it: pip install 'ray[default]>=2.60'")
    if done.returncode:
        raise LockstepError(f"the cluster refused the job: {done.stderr.strip()}")
    return done.stdout.strip()
