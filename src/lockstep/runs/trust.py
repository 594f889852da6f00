"""The user's confirmation of what a run's folder refers to.

A folder can be anyone's. What it refers to outside of itself is used only if a command on this
machine used it before for this run, or trusts the folder: files to write, links to folders, images
to read, addresses to send to, and modules to import. Commands leave what they used in
`lockstep/runs/ID` in the user's state folder (`XDG_STATE_HOME`), a JSON text on each line.
"""

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from lockstep.recipes import Recipe
from lockstep.system.errors import CheckpointError
from lockstep.system.regular_files import TEXT, read_regular_text
from lockstep.system.strict_json import parsed
from lockstep.weights.run_identity import read_identity

OUTSIDE_FIELDS = ("model_prefix", "dlll_file", "nvidia_report_file", "checkpoint_store")
"""The fields of an execution that name files outside the run's folder, or addresses."""
_SENDING = ("mlflow", "wandb")
"""The loggers that send figures."""


def list_names(
    execution: Mapping[str, Any], data: str | Path = "", recipe: Recipe | None = None
) -> Iterator[str]:
    """Yield what an execution, images and the user's own augmentations of a recipe name, as
    `field=value`."""
    for name in OUTSIDE_FIELDS:
        if execution.get(name):
            yield f"{name}={execution[name]}"
    for name in _SENDING:
        if name in (execution.get("loggers") or ()):
            yield f"logger={name}"
    if str(data):
        yield f"data={data}"
    for augmentation in () if recipe is None else recipe.augmentations:
        if ":" in augmentation.name:
            yield f"augmentation={augmentation.name}"


def list_links(folder: Path) -> Iterator[str]:
    """Yield the links in a run's folder that lead to folders, as `link=name -> target`. A run
    writes to these folders, and removes old checkpoints from them."""
    for path in sorted((*folder.glob("*"), *folder.glob("checkpoints/*"))):
        if path.is_symlink() and path.is_dir():
            yield f"link={path.relative_to(folder)} -> {path.readlink()}"


def require_word(folder: Path, names: Iterable[str]) -> None:
    """Raise `CheckpointError` if a run's folder refers to something that no command on this machine
    has used for this run."""
    identity = read_identity(folder)  # refuses checkpoints of two runs
    known = set() if identity is None else _read(identity.id)
    unknown = [name for name in dict.fromkeys(names) if name not in known]
    if unknown:
        more = f", and {len(unknown) - 3} more" if len(unknown) > 3 else ""
        shown = ", ".join(f"{name!r:.200}" for name in unknown[:3]) + more
        raise CheckpointError(
            f"{folder} refers to {shown}, which no command on this machine has used for this run."
            " Anyone could have written that. To confirm, give the same in the command (--data,"
            " --recipe, --set); if you trust the folder's author, train takes --trust-run"
        )


def accept(folder: Path, names: Iterable[str]) -> None:
    """Accept whatever a run's folder refers to."""
    read_identity(folder)  # refuses checkpoints of two runs


def remember(folder: Path, names: Iterable[str]) -> None:
    """Remember what a command used, for the run in a folder. A state folder that cannot be written
    to is ignored: the next command asks."""
    identity = read_identity(folder)
    if identity is None:
        return
    new = set(names) - _read(identity.id)
    text = "".join(json.dumps(name, allow_nan=False) + "\n" for name in sorted(new))
    file = _find_file(identity.id)
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with file.open("a", encoding="utf-8") as opened:  # one call: ranks may do so at once
            opened.write(text)


def _find_file(run: str) -> Path:
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state"
    return Path(state) / "lockstep/runs" / run


def _read(run: str) -> set[str]:
    names = set()
    with suppress(OSError):
        for line in read_regular_text(_find_file(run), TEXT, errors="replace").splitlines():
            with suppress(ValueError):  # half a line of a full disk
                names.add(str(parsed(line)))
    return names
