"""What the tests of trainings in processes share."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.runs.starting_weights import read_masks
from lockstep.system.event_log import read_log
from tests.backends.conftest import BACKENDS
from tests.processes import call
from tests.runs.cases import copy_bytes, read_losses, read_state
from tests.soak import SOAK

DEFAULT = [] if "torch" in BACKENDS else ["--backend", BACKENDS[0]]
"""Options that select a backend, for tests that do not test a command's default."""
ROUNDING = 2e-4
"""The largest relative difference of weights that rounding explains after an epoch at a low
learning rate."""


def select_backends(*names: str) -> tuple[str, ...]:
    """Return these backends, or the first one of an environment that has none of them; all in a
    soak.

    Runs and launchers are alike for all backends.
    """
    if SOAK:
        return BACKENDS
    return tuple(name for name in names if name in BACKENDS) or BACKENDS[:1]


def set_fields(**fields: object) -> list[str]:
    """Return options that set fields of the recipe or the execution."""
    options = []
    for name, value in fields.items():
        options += ["--set", f"{name}={value}"]
    return options


def choose_launcher(launcher: str) -> list[str]:
    """Return the options for a launcher, such as "tensorflow horovod"."""
    backend, _, distributed = launcher.partition(" ")
    return [*set_fields(distributed=distributed or "native"), "--backend", backend]


def run_command(*command: object) -> str:
    """Run a command that succeeds, and return its output."""
    code, output, errors = call(*command)
    assert code == 0, errors
    return output


def last_step(run: Path) -> int:
    """Return the last step in a run's log; 0 without a log."""
    return max([0, *(entry["step"] for entry in read_log(run / "log.jsonl"))])


def read_report(run: Path) -> dict[str, Any]:
    """Return the report of a finished run."""
    report: dict[str, Any] = json.loads((run / "report.json").read_text())
    return report


LAUNCH = ("launch", "-n", 2, "--")
"""What launches a training in two ranks."""
LONGER = set_fields(save_every_steps=2, log_every_steps=1, epochs=3)
"""Options of a training that can be stopped or killed before its end."""


def measure_difference(first: Mapping[str, np.ndarray], second: Mapping[str, np.ndarray]) -> float:
    """Return the largest difference of any tensor, relative to the tensor's largest value."""
    differences = []
    for name, value in first.items():
        differences.append(float(np.abs(value - second[name]).max() / np.abs(value).max()))
    return max(differences)


def count_zeros(run: Path) -> dict[str, int]:
    """Return how many weights of each masked tensor are 0, minus the zeros of its mask."""
    tensors = read_state(run).tensors
    counts = {}
    for name, mask in read_masks(run).items():
        counts[name] = int((tensors[name] == 0).sum() - (~mask).sum())
    return counts


def assert_same_training(run: Path, other: Path) -> None:
    """Assert that two runs have the same losses and last state, bit for bit."""
    assert read_losses(run) == read_losses(other)
    ends = (read_state(run), read_state(other))
    for part in ("tensors", "momentum", "second_moments", "ema"):
        first, second = (copy_bytes(getattr(state, part)) for state in ends)
        assert first == second, part


def read_variables(process: int) -> dict[str, str]:
    """Return the environment variables of a process; empty if it is gone."""
    try:
        text = Path(f"/proc/{process}/environ").read_bytes().decode(errors="replace")
    except OSError:
        return {}
    return dict(pair.split("=", 1) for pair in text.split("\0") if "=" in pair)


def find_descendants(parent: int) -> list[int]:
    """Return the processes that a process has started, directly or not; parents come first."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                status = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            children.setdefault(int(status[1]), []).append(int(entry.name))
    family = [parent]
    for process in family:  # grows meanwhile
        family += children.get(process, [])
    return family[1:]


def find_ranks(launcher: int) -> list[int]:
    """Return the processes of a launcher's ranks, by rank."""
    ranks = {}
    for process in find_descendants(launcher):
        variables = read_variables(process)
        if "RANK" in variables and "WORLD_SIZE" in variables:
            ranks.setdefault(int(variables["RANK"]), process)
    return [ranks[rank] for rank in sorted(ranks)]
