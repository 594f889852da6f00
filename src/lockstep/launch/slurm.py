"""Slurm: write the batch script of a job, and submit it.

The job saves before its time is over or another job preempts it, and is queued again.
`lockstep.system.rank_variables` reads the variables that Slurm sets for the tasks of a step.
"""

import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from lockstep.launch.job import SAVING_SEC, Job, hand_in
from lockstep.launch.launcher import LOCKSTEP
from lockstep.system.errors import LockstepError, UserError

NODE = "node"
RANK = "rank"
TASKS = (NODE, RANK)
"""What each task of the step is: a machine's launcher, or a rank."""
_TASK = "$SLURM_ARRAY_TASK_ID"
_LAST_RANK_SEC = 120
"""Without a launcher, Slurm kills the remaining ranks this many seconds after one has ended."""
_COMMAND = """\
# All nodes get the same secret: srun passes it on in the environment.
LOCKSTEP_SECRET=$({python} -P -c 'import secrets; print(secrets.token_hex(16))')
export LOCKSTEP_SECRET
# srun does not take --cpus-per-task from the job.
export SRUN_CPUS_PER_TASK=${{SLURM_CPUS_PER_TASK:-1}}

newest() {{ find {run}/checkpoints -maxdepth 1 -name 'step-*' 2>/dev/null | sort | tail -n 1; }}
before=$(newest || true)
code=0
{command} || code=$?

# 75: stopped by a signal, and saved. 2: wrong use, 3: diverged, 130: interrupted by a person.
# All others: a rank or a node was lost. The job is queued again if it saved a checkpoint.
again=no
case $code in
    0 | 2 | 3 | 130) ;;
    75) again=yes ;;
    *) if [ "$(newest || true)" != "$before" ]; then again=yes; fi ;;
esac
if [ "$again" = yes ]; then
    echo "lockstep: exit code $code, queued again"
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""


@dataclass(frozen=True)
class Slurm:
    """What only Slurm needs to know about a job."""

    tasks: str = NODE
    """One of `TASKS`."""
    cpus: int | None = None
    """Processors on each machine. None: Slurm's default."""
    saving_sec: int = SAVING_SEC
    """Seconds at the end of the time in which ranks save and stop."""
    options: tuple[str, ...] = ()
    """More options of sbatch, such as --partition=gpu."""
    runs: Mapping[str, Path] = field(default_factory=dict)
    """An array of jobs: the run of each recipe. Empty: a single job."""


def write_script(job: Job, slurm: Slurm, run: Path | None) -> str:
    """Return the batch script of a job. `run` is the folder of the run that a single job trains,
    None if it trains none.

    Raises `UserError` if sbatch would refuse an option.
    """
    lines = ["#!/bin/bash", *(f"#SBATCH {option}" for option in _list_options(job, slurm))]
    lines += ["set -euo pipefail", ""]
    if slurm.runs:
        lines += [f"recipes=({shlex.join(slurm.runs)})"]
        lines += [f"runs=({shlex.join(map(str, slurm.runs.values()))})", ""]
    folder = f'"${{runs[{_TASK}]}}"' if slurm.runs else shlex.quote(str(run or "."))
    command = _COMMAND.format(
        python=shlex.quote(sys.executable), command=_write_step(job, slurm), run=folder
    )
    return "\n".join(lines) + "\n" + command


def _list_options(job: Job, slurm: Slurm) -> list[str]:
    """Return the options of sbatch."""
    tasks = 1 if slurm.tasks == NODE else job.processes
    options = [
        f"--job-name={job.name}",
        f"--nodes={job.nodes}",
        f"--ntasks-per-node={tasks}",
        f"--signal=TERM@{slurm.saving_sec}",
        "--requeue",
        "--open-mode=append",
    ]
    if job.seconds is not None:
        if job.seconds <= slurm.saving_sec:
            raise UserError(
                f"--time is {job.seconds} s, of which {slurm.saving_sec} s are for saving; give"
                " more time, or a shorter --saving"
            )
        options.append(f"--time={_format_time(job.seconds)}")
    if job.gpus:
        options.append(f"--gpus-per-node={job.gpus}")
    if slurm.cpus is not None:
        options.append(f"--cpus-per-task={max(1, slurm.cpus // tasks)}")
    if slurm.runs:
        options.append(f"--array=0-{len(slurm.runs) - 1}")
    for option in slurm.options:
        if not option.startswith("-") or "\n" in option:
            raise UserError(
                f"--sbatch is {option!r}, expected an option of sbatch such as --qos=low"
            )
    return options + list(slurm.options)


def _write_step(job: Job, slurm: Slurm) -> str:
    """Return the command that starts a launcher on each machine, or all ranks."""
    lockstep = shlex.join([sys.executable, *LOCKSTEP])
    command = shlex.join(job.command)
    if slurm.runs:
        command += f' --recipe "${{recipes[{_TASK}]}}" --out "${{runs[{_TASK}]}}"'
        for word in job.command:
            setting = word.removeprefix("--set=")
            if setting.startswith("checkpoint_store=") and setting != "checkpoint_store=":
                # Each run has its own address in the store; the last value counts.
                command += f' --set {shlex.quote(setting.rstrip("/"))}/"${{recipes[{_TASK}]}}"'
    if slurm.tasks == RANK:
        return f"srun --wait={_LAST_RANK_SEC} {lockstep} \\\n    {command}"
    launch = shlex.join(["launch", "-n", str(job.processes), *job.launch])
    return f"srun {lockstep} {launch} -- \\\n    {command}"


def _format_time(seconds: int) -> str:
    """Return a time limit as Slurm reads it.

    >>> _format_time(93600)
    '26:00:00'
    """
    minutes, rest = divmod(seconds, 60)
    return f"{minutes // 60:02}:{minutes % 60:02}:{rest:02}"


def submit(script: str) -> str:
    """Submit a script; return what sbatch prints. Raises `LockstepError` if it refuses."""
    done = hand_in(["sbatch"], script)
    if done.returncode:
        raise LockstepError(f"sbatch refused the job: {done.stderr.strip()}")
    return done.stdout.strip()
