"""Which run a folder holds: `run.json`.

| key | value |
|---|---|
| id | 32 random hexadecimal digits, which the run's log, report, checkpoints and copies have too |
| out | the folder, as the command that began the run named it, and the task of an array of jobs |
| adopted_step | checkpoints up to this step were written by a version without ids; -1 without any |
| history | the digests of all checkpoints that were saved, by step |

The id changes no result. Two runs with equal results have different ids.
"""

import os
import re
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from lockstep.system.errors import CheckpointError
from lockstep.system.files import write_json
from lockstep.system.regular_files import TEXT, read_regular
from lockstep.system.strict_json import is_text, parsed
from lockstep.weights import checkpoint

FILE = "run.json"
_ID = re.compile(r"[0-9a-f]{32}")
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class RunIdentity:
    """The contents of `run.json`; see there."""

    id: str
    out: str = ""
    adopted_step: int = -1
    history: Mapping[int, str] = field(default_factory=dict)


def parse_identity(data: bytes) -> RunIdentity:
    """Return the identity in the bytes of a `run.json`. Raises `ValueError`."""
    value = parsed(data)
    fields = value if isinstance(value, dict) else {}
    number: Any = fields.get("id")
    out: Any = fields.get("out", "")
    adopted: Any = fields.get("adopted_step", -1)
    saved = fields.get("history", {})
    is_id = is_text(number) and _ID.fullmatch(number)
    if not (is_id and is_text(out) and type(adopted) is int):
        raise ValueError("it has no run id")
    history: dict[int, str] = {}
    for step, digest in saved.items() if isinstance(saved, dict) else ():
        is_digest = is_text(digest) and _DIGEST.fullmatch(digest)
        if not (is_digest and re.fullmatch("[0-9]{1,15}", step)):
            raise ValueError("its history does not list checkpoints")
        history[int(step)] = digest
    return RunIdentity(number, out, adopted, history)


def read_identity(folder: Path) -> RunIdentity | None:
    """Return the identity of the run in a folder; None if it has no id.

    The history has the checkpoints that are there. A lost `run.json` is made up from them. Raises
    `CheckpointError` if the file is damaged, or as `refuse_mixture` does.
    """
    file = folder / FILE
    identity = None
    try:
        identity = parse_identity(read_regular(file, TEXT))
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{file} cannot be read: {error}; restore it, or remove it to use the checkpoints' id"
        ) from None
    saved = checkpoint.read_identities(folder / "checkpoints")
    if identity is None:
        newest = max(saved, default=-1)
        if newest < 0 or not saved[newest][0]:
            return None
        adopted = -1
        for step, (number, _) in saved.items():
            if not number:
                adopted = max(adopted, step)
        identity = RunIdentity(saved[newest][0], adopted_step=adopted)
    for step, (number, _) in saved.items():
        if number != identity.id and (number or step > identity.adopted_step):
            raise CheckpointError(
                f"{folder} holds checkpoints of two runs: step {step} belongs to run"
                f" {number or 'without an id'}, the folder to run {identity.id}. Move the other"
                " run's checkpoints away"
            )
    return replace(identity, history={**identity.history, **list_digests(folder)})


def name_place(folder: Path) -> str:
    """Return a folder with the job's number: an array may have one path on many machines."""
    task = os.environ.get("SLURM_ARRAY_TASK_ID", os.environ.get("PBS_ARRAY_INDEX"))
    return str(folder) if task is None else f"{folder}, task {task} of an array"


def list_digests(folder: Path) -> dict[int, str]:
    """Return the digests of the checkpoints in a run's folder, by step."""
    saved = checkpoint.read_identities(folder / "checkpoints")
    return {step: digest for step, (_, digest) in saved.items()}


def settle_identity(folder: Path) -> RunIdentity:
    """Return the identity of the run in a folder, which gets one if it has none; its history has
    all checkpoints that are there. Raises as `read_identity` does."""
    identity = read_identity(folder)
    if identity is None:
        saved = list_digests(folder)
        newest = max(saved, default=-1)
        identity = RunIdentity(secrets.token_hex(16), adopted_step=newest, history=saved)
    write_json(folder / FILE, asdict(replace(identity, out=name_place(folder))))
    return identity
