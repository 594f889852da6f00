"""Which rank this process is, from the environment variables of any launcher.

Lockstep and torchrun set RANK, WORLD_SIZE and LOCAL_RANK. Other launchers use other names, which
`name_rank` translates.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from lockstep.system.errors import UserError
from lockstep.system.strict_json import parsed


@dataclass(frozen=True)
class _Launcher:
    """A launcher, and its variables by the usual names."""

    name: str
    variables: Mapping[str, str]


_MPI = (
    _Launcher(
        "Open MPI",
        {
            "RANK": "OMPI_COMM_WORLD_RANK",
            "WORLD_SIZE": "OMPI_COMM_WORLD_SIZE",
            "LOCAL_RANK": "OMPI_COMM_WORLD_LOCAL_RANK",
        },
    ),
    _Launcher(
        "MPICH or Intel MPI",
        {"RANK": "PMI_RANK", "WORLD_SIZE": "PMI_SIZE", "LOCAL_RANK": "MPI_LOCALRANKID"},
    ),
)
_SLURM = _Launcher(
    "Slurm",
    {"RANK": "SLURM_PROCID", "WORLD_SIZE": "SLURM_STEP_NUM_TASKS", "LOCAL_RANK": "SLURM_LOCALID"},
)
"""The variables of a step. A batch script and a shell of salloc have SLURM_PROCID=0 too, but no
SLURM_STEP_ID.

LOCAL_WORLD_SIZE is left out: Slurm and MPI bind each process to its share of the cores.
"""


@dataclass(frozen=True)
class _Claim:
    """What a launcher says about this process."""

    launcher: str
    values: Mapping[str, str]
    """RANK, WORLD_SIZE and what else the launcher sets."""
    source: str
    """The variables that it sets, for a message."""


def name_rank(variables: Mapping[str, str], *, reads_tf_config: bool = False) -> None:
    """Set RANK, WORLD_SIZE and LOCAL_RANK where a launcher names this rank in other variables.

    `variables` are those of the framework's own launchers. These take precedence, then TF_CONFIG,
    MPI and Slurm, because the innermost launcher counts. TF_CONFIG does not tell which workers
    share a machine: each has local rank 0, unless LOCAL_RANK is set. Raises
    `UserError` if variables are wrong or contradict each other.
    """
    if "RANK" in os.environ:
        return
    claims = []
    if variables.get("RANK", "") in os.environ:
        claims.append(_claim(_Launcher("the framework's launcher", variables), os.environ))
    if reads_tf_config and (workers := _read_tf_config()):
        rank, ranks = workers
        values = {"RANK": str(rank), "WORLD_SIZE": str(ranks)}
        claims.append(_Claim("TF_CONFIG", values, f"TF_CONFIG with task {rank} of {ranks}"))
    claims += [claim for claim in list_claims(os.environ) if claim.values["WORLD_SIZE"] != "1"]
    if not claims:
        return
    _refuse_contradiction(claims)
    for name, value in claims[0].values.items():
        os.environ.setdefault(name, value)


def list_claims(environment: Mapping[str, str]) -> list[_Claim]:
    """Return what MPI and Slurm say about a process. Raises `UserError` if their variables are
    wrong."""
    launchers = [*_MPI, _SLURM] if "SLURM_STEP_ID" in environment else _MPI
    claims = []
    for launcher in launchers:
        if launcher.variables["RANK"] not in environment:
            continue
        claim = _claim(launcher, environment)
        rank = claim.values.get("RANK", "")
        ranks = claim.values.get("WORLD_SIZE", "")
        if not (rank.isdecimal() and ranks.isdecimal() and int(rank) < int(ranks)):
            raise UserError(
                f"{claim.launcher} sets {claim.source}: expected a rank from 0 and a larger number"
                " of processes"
            )
        claims.append(claim)
    return claims


def _claim(launcher: _Launcher, environment: Mapping[str, str]) -> _Claim:
    values = {}
    sources = []
    for name, own in launcher.variables.items():
        if own in environment:
            values[name] = environment[own]
            sources.append(f"{own}={environment[own]}")
    return _Claim(launcher.name, values, ", ".join(sources))


def _refuse_contradiction(claims: list[_Claim]) -> None:
    """Raise `UserError` if launchers number the same processes differently.

    Different numbers of processes are no conflict: mpirun starts its helpers through Slurm, one on
    each machine.
    """
    first = claims[0]
    for other in claims[1:]:
        is_same_size = first.values.get("WORLD_SIZE") == other.values["WORLD_SIZE"]
        if is_same_size and first.values["RANK"] != other.values["RANK"]:
            raise UserError(
                f"two launchers number this process differently: {first.launcher} sets"
                f" {first.source}; {other.launcher} sets {other.source}. Unset the variables of one"
                " of them, or set RANK, WORLD_SIZE and LOCAL_RANK"
            )


def _read_tf_config() -> tuple[int, int] | None:
    """Return this worker's index and the number of workers; None if there is no TF_CONFIG with
    several tasks."""
    text = os.environ.get("TF_CONFIG", "")
    if not text:
        return None
    try:
        config = parsed(text)
        cluster: dict[str, list[str]] = config.get("cluster", {})
        if sum(map(len, cluster.values())) < 2:
            return None
        kind = config["task"]["type"]
        index = int(str(config["task"]["index"]))
        is_sound = all(isinstance(addresses, list) for addresses in cluster.values())
    except (ValueError, TypeError, KeyError, AttributeError):
        is_sound = False
    if not is_sound:
        raise UserError(
            f"TF_CONFIG is {text:.200}: expected JSON with cluster.worker, task.type and task.index"
        )
    workers = len(cluster.get("worker", []))
    if set(cluster) != {"worker"} or kind != "worker" or not 0 <= index < workers:
        raise UserError(
            f"TF_CONFIG: task {kind} {index}, expected a worker from 0 to {workers - 1}; list all"
            " as workers"
        )
    return index, workers


# Slurm's step


@dataclass(frozen=True)
class SlurmStep:
    """This process as a task of a Slurm step."""

    node: int
    nodes: int
    tasks: int
    """Number of tasks on all nodes."""
    first_host: str
    last_host: str
    port: int
    """A port that other steps do not have. Slurm does not reserve it."""


def slurm_step(environment: Mapping[str, str]) -> SlurmStep | None:
    """Return the Slurm step of a process; None if srun did not start it. Raises `UserError` if a
    variable is missing."""
    if "SLURM_STEP_ID" not in environment or "SLURM_PROCID" not in environment:
        return None
    try:
        hosts = environment.get("SLURM_STEP_NODELIST") or environment["SLURM_JOB_NODELIST"]
        job = int(environment["SLURM_JOB_ID"])
        step = int(environment["SLURM_STEP_ID"])
        return SlurmStep(
            node=int(environment["SLURM_NODEID"]),
            nodes=int(environment["SLURM_STEP_NUM_NODES"]),
            tasks=int(environment["SLURM_STEP_NUM_TASKS"]),
            first_host=first_host(hosts),
            last_host=last_host(hosts),
            port=_PORTS.start + (8 * job + step) % len(_PORTS),
        )
    except (KeyError, ValueError) as error:
        raise UserError(
            f"Slurm's variables are not complete: {error}. Start with srun, or unset SLURM_STEP_ID"
        ) from None


_PORTS = range(15_000, 30_000)
"""Ports for the meeting of a Slurm step: below those that systems give to outgoing connections."""


def first_host(hosts: str) -> str:
    """Return the first host of Slurm's list.

    >>> first_host("node[08-11,20],login")
    'node08'
    """
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", hosts)
    return re.sub(r"\[([^,\-\]]*)[^\]]*\]", r"\1", first[0]) if first else ""


def last_host(hosts: str) -> str:
    """Return the last host of Slurm's list.

    >>> last_host("login,node[08-11,20-23]")
    'node23'
    """
    last = re.search(r"(?:[^,\[\]]|\[[^\]]*\])*$", hosts)
    return re.sub(r"\[(?:[^\]]*[,\-])?([^\]]*)\]", r"\1", last[0]) if last else ""
