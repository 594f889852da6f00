"""Where launchers of several machines meet, from options, environment variables and Slurm."""

import os
import secrets
import stat
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from lockstep.launch.nodes import find_address, resolve_bind
from lockstep.system.errors import UserError
from lockstep.system.rank_variables import slurm_step
from lockstep.system.ranks import free_ports
from lockstep.system.regular_files import SETTINGS, open_regular
from lockstep.system.text import format_count

RENDEZVOUS = "LOCKSTEP_RENDEZVOUS"
BIND = "LOCKSTEP_BIND"
SECRET = "LOCKSTEP_SECRET"
"""Environment variables that replace `--rendezvous`, `--bind` and `--secret-file`."""
SECRET_LENGTH = 16
"""A shared secret has at least this many characters."""
STDIN = "-"
"""As a secret file: the first line of standard input."""
_MAKE = """(umask 077; python3 -c 'import secrets; print(secrets.token_hex(16))' > FILE)"""


@dataclass(frozen=True)
class Meeting:
    """Where and as which node a launcher meets the others."""

    node: int
    nodes: int
    host: str
    """Where node 0 listens."""
    port: int
    secret: str = field(repr=False)
    """The secret that only the launchers know."""
    bind: str | None = None
    """The address of this machine at which it and its ranks listen. By default the one that reaches
    node 0."""
    other: str | None = None
    """The name of a node other than node 0, if known."""

    def __post_init__(self) -> None:
        if len(self.secret) < SECRET_LENGTH:
            raise UserError(
                f"the shared secret has {len(self.secret)} characters; expected at least"
                f" {SECRET_LENGTH}"
            )


@dataclass(frozen=True)
class Options:
    """What the options of `lockstep launch` say about machines. None: not given."""

    nodes: int | None = None
    node_rank: int | None = None
    rendezvous: str | None = None
    bind: str | None = None
    secret_file: Path | None = None
    hosts: tuple[str, ...] = ()
    """Other machines whose launchers this one starts."""


def find_meeting(options: Options, environment: Mapping[str, str]) -> Meeting | None:
    """Return where this launcher meets the others; None if there are no others. Raises `UserError`
    if something is missing.

    Under srun, the number of nodes, this node's number and the rendezvous come from Slurm unless
    they are given.
    """
    if options.hosts:
        return _lead(options, environment)
    step = slurm_step(environment)
    nodes = options.nodes or (step.nodes if step else 1)
    if step and step.tasks != step.nodes:
        started = f"{format_count(step.tasks, 'task')} on {format_count(step.nodes, 'node')}"
        raise UserError(
            f"srun started {started}; expected one `lockstep launch` on each node, which starts its"
            " ranks: srun --ntasks-per-node=1"
        )
    if nodes == 1:
        if options.node_rank:
            raise UserError(
                f"--node-rank is {options.node_rank}, but --nodes is 1; give every machine the same"
                " --nodes"
            )
        return None
    node = options.node_rank
    if node is None and step is not None:
        node = step.node
    place = options.rendezvous or _find_place(environment)
    if node is None or place is None:
        missing = []
        if node is None:
            missing.append("--node-rank")
        if place is None:
            missing.append("--rendezvous HOST:PORT")
        raise UserError(
            f"--nodes is {nodes}: give this machine's number and node 0's address; missing:"
            f" {', '.join(missing)}"
        )
    if node >= nodes:
        raise UserError(f"--node-rank is {node}, expected 0 to {nodes - 1}")
    host, port = split_place(place)
    bind = _resolve_bind(options.bind, environment)
    secret = read_secret(options.secret_file, environment)
    return Meeting(node, nodes, host, port, secret, bind, step.last_host if step else None)


def _lead(options: Options, environment: Mapping[str, str]) -> Meeting:
    """Return where node 0 meets machines whose launchers it starts itself."""
    if (options.nodes, options.node_rank, options.secret_file) != (None, None, None):
        raise UserError(
            "--hosts numbers the machines and makes their secret; leave out --nodes, --node-rank"
            " and --secret-file"
        )
    if not all(options.hosts) or any(host.startswith("-") for host in options.hosts):
        raise UserError(
            f"--hosts is {','.join(options.hosts)!r}, expected names such as node2,node3"
        )
    bind = _resolve_bind(options.bind, environment)
    if options.rendezvous:
        host, port = split_place(options.rendezvous)
    else:
        host = bind or find_address(options.hosts[0].rpartition("@")[2])
        port = free_ports(1, host)[0]
    return Meeting(0, 1 + len(options.hosts), host, port, secrets.token_hex(16), bind)


def find_rank_meeting(environment: Mapping[str, str]) -> Meeting | None:
    """Return where ranks that srun or mpirun started meet, each as a node; None if there is one
    rank, or no rendezvous is known.

    Raises `UserError` if the place or the secret is wrong.
    """
    ranks = int(environment.get("WORLD_SIZE", "1"))
    place = _find_place(environment)
    if ranks == 1 or place is None or "RANK" not in environment:
        return None
    host, port = split_place(place)
    bind = _resolve_bind(None, environment)
    secret = read_secret(None, environment)
    step = slurm_step(environment)
    other = step.last_host if step else None
    return Meeting(int(environment["RANK"]), ranks, host, port, secret, bind, other)


def _find_place(environment: Mapping[str, str]) -> str | None:
    """Return the rendezvous that the environment gives, or that follows from Slurm's step."""
    step = slurm_step(environment)
    if environment.get(RENDEZVOUS) or step is None:
        return environment.get(RENDEZVOUS)
    return f"{step.first_host}:{step.port}"


def _resolve_bind(option: str | None, environment: Mapping[str, str]) -> str | None:
    text = option or environment.get(BIND)
    return resolve_bind(text) if text else None


def split_place(text: str) -> tuple[str, int]:
    """Return host and port of a text such as node1:29400. Raises `UserError`."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise UserError(f"the rendezvous is {text!r}, expected HOST:PORT such as node1:29400")
    return host, int(port)


def read_secret(file: Path | None, environment: Mapping[str, str]) -> str:
    """Return the shared secret from a file, from standard input, or from LOCKSTEP_SECRET. Raises
    `UserError`."""
    if file is None:
        if environment.get(SECRET):
            return environment[SECRET].strip()
        raise UserError(
            f"several nodes need a shared secret; make one with\n  {_MAKE}\ncopy it to every node,"
            f" and set {SECRET} to it (lockstep launch also takes --secret-file FILE)"
        )
    if str(file) == STDIN:
        return sys.stdin.readline(SETTINGS.most_bytes).strip()
    try:
        with open_regular(file, SETTINGS) as opened:
            if os.fstat(opened.fileno()).st_mode & (stat.S_IRGRP | stat.S_IROTH):
                raise UserError(f"others can read the secret file {file}; run: chmod 600 {file}")
            return opened.read().decode("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise UserError(
            f"cannot read the secret file {file}: {reason}; give a regular file, or set {SECRET}"
        ) from None


def start_with_secret(
    command: Sequence[str], secret: str, folder: str | None = None
) -> subprocess.Popen[str]:
    """Start a command with the secret as the first line of its input, in a folder (by default this
    one). Its output and errors are pipes.

    It runs in a separate session: Ctrl-C reaches only this process, whose end closes the input.
    """
    process = subprocess.Popen(
        command,
        cwd=folder,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    assert process.stdin is not None
    with suppress(BrokenPipeError):  # its exit code says why
        process.stdin.write(f"{secret}\n")
        process.stdin.flush()
    return process
