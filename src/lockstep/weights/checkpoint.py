"""Checkpoints: a run's state on disk, either complete or absent.

    checkpoints/step-00000100/
        model.safetensors      parameters and batch norm statistics; metadata: recipe, classes
        momentum.safetensors   velocities
        second_moments.safetensors  means of squared gradients, if the optimizer has them
        ema.safetensors        moving averages, if the recipe has them; with the same metadata
        state.json             step, loss scaling, digest of the data, SHA-256 of these files

A checkpoint is written under a temporary name, flushed to disk and renamed. Reading checks every
digest, including that of `state.json`, which the file itself holds.
"""

import hashlib
import json
import math
import re
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, deserialize, safe_open
from safetensors.numpy import save as serialise
from safetensors.numpy import save_file

from lockstep.models.state import State
from lockstep.system.errors import CheckpointError
from lockstep.system.files import appearing, flush, write_json
from lockstep.system.regular_files import TEXT, WEIGHTS, Limit, open_regular, read_regular
from lockstep.system.strict_json import Check, is_count, is_number, is_text, parsed
from lockstep.weights.fingerprints import hash_file
from lockstep.weights.formats import BFLOAT16, MOST_ARRAYS, numbers, refuse_existing, refuse_many
from lockstep.weights.formats.lfs_pointers import refuse_stand_in

Part = tuple[dict[str, np.ndarray], dict[str, Any] | None]
"""Tensors of a file by name, and Lockstep's metadata; None if the file has none."""

_WEIGHTS = ("model.safetensors", "ema.safetensors")
"""The files whose metadata has the recipe: the weights, and their moving average."""
_FILES = (_WEIGHTS[0], "momentum.safetensors", _WEIGHTS[1], "second_moments.safetensors")
_UNFINISHED = "unfinished-"
_OWN_DIGEST = "own_sha256"
_SLIM = "is_slim"
"""The field of `state.json` that says that velocities were removed."""
_MOST_HEADER = 32 * 2**20
"""The header of a safetensors file may have at most this many bytes. 20,000 arrays need 3 MB, and
the names of 1,048,576 classes in Lockstep's metadata 20 MB."""
_MOST_MARKS = {b"{": 2 * MOST_ARRAYS, b":": 2**18}
"""A header may have each of these at most this often. An array has one brace and four colons, an
entry of the metadata has one colon; class names may have some."""
_NUMPY_DTYPES: dict[str, Any] = {
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "BOOL": "?",
    "BF16": BFLOAT16,
}
_NUMPY_DTYPES |= {
    f"{kind}{bits}": f"<{kind.lower()}{bits // 8}" for kind in "IU" for bits in (8, 16, 32, 64)
}
"""NumPy's dtypes by safetensors' names."""


def _is_scaler(value: Any) -> bool:
    """Return whether a value is `State.scaler`."""
    if not isinstance(value, dict):
        return False
    if not all(is_number(number) and math.isfinite(number) for number in value.values()):
        return False
    return value.keys() in (set(), _SCALER)


def _is_digests(value: Any) -> bool:
    """Return whether a value has digests of parts by name, among them that of the weights."""
    return isinstance(value, dict) and _FILES[0] in value and {*_FILES} >= value.keys()


def _is_run_id(value: Any) -> bool:
    """Return whether a value is the id of a run, or "" of a version without ids."""
    return is_text(value) and re.fullmatch("(?:[0-9a-f]{32})?", value) is not None


_SCALER = {"scale", "good_steps", "bad_steps"}
_FIELDS: dict[str, tuple[Check, str]] = {
    "step": (is_count, "a number of steps"),
    "scaler": (_is_scaler, f"nothing, or finite numbers for {', '.join(sorted(_SCALER))}"),
    "data_digest": (is_text, "a text"),
    "run": (_is_run_id, "the id of a run, 32 hexadecimal digits"),
    "sha256": (_is_digests, "the digests of the checkpoint's files"),
}
"""The fields of `state.json`: checks of their values, and what is expected."""


def checkpoint_path(folder: Path, step: int) -> Path:
    """Return the path of a step's checkpoint."""
    return folder / f"step-{step:08d}"


def save(
    folder: Path, state: State, *, data_digest: str, about: dict[str, Any], run_id: str = ""
) -> Path:
    """Write a checkpoint below `folder` and return its path. `about` goes into the weights file's
    metadata as JSON. `run_id` is that of the run; "" without one.

    An intact checkpoint of the same step is kept: a run has only one state at a step, and a folder
    cannot be replaced atomically. Checkpoints of later steps are deleted: a run resumes from its
    newest intact one, so they must be damaged.

    Raises `CheckpointError` if it cannot be written.
    """
    target = checkpoint_path(folder, state.step)
    try:
        if not is_intact(target):
            _write_checkpoint(target, state, {"data_digest": data_digest, "run": run_id}, about)
        for step in steps(folder):
            if step > state.step:
                shutil.rmtree(checkpoint_path(folder, step))
    except (OSError, SafetensorError) as error:
        remove_unfinished(folder)
        raise CheckpointError(
            f"{target} cannot be saved: {error}. Earlier checkpoints are unchanged."
        ) from error
    return target


def _write_checkpoint(
    target: Path, state: State, origin: dict[str, str], about: dict[str, Any]
) -> None:
    temporary = target.with_name(f"{_UNFINISHED}{target.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    digests = {}
    parts = (state.tensors, state.momentum, state.ema, state.second_moments)
    for name, tensors in zip(_FILES, parts, strict=True):
        if tensors:
            file = temporary / name
            metadata = None
            if name in _WEIGHTS:
                metadata = {"lockstep": json.dumps(about, allow_nan=False)}
            save_file(tensors, file, metadata=metadata)
            flush(file)
            digests[file.name] = hash_file(file)
    description = {"step": state.step, "scaler": state.scaler, **origin, "sha256": digests}
    description[_OWN_DIGEST] = _hash_description(description)
    (temporary / "state.json").write_text(
        json.dumps(description, indent=1, allow_nan=False), encoding="utf-8"
    )
    flush(temporary / "state.json")
    flush(temporary)
    shutil.rmtree(target, ignore_errors=True)
    temporary.rename(target)
    flush(target.parent)


def load(path: Path) -> tuple[State, str]:
    """Return a checkpoint's state and the digest of the data it was trained on.

    Raises `CheckpointError` if a part of it is missing or damaged.
    """
    about = _read_description(path)
    if about.get(_SLIM):
        raise CheckpointError(f"{path} has no velocities: `lockstep runs slim` removed them")
    weights, momentum, average, second_moments = (
        _read_part(path, about, name)[0] for name in _FILES
    )
    state = State(about["step"], weights, momentum, average, about["scaler"], second_moments)
    return state, about["data_digest"]


def _read_part(path: Path, about: dict[str, Any], name: str, *, as_stored: bool = False) -> Part:
    """Return a file of a checkpoint, given the content of `state.json`; nothing if the checkpoint
    does not have it.

    The file is read once: its SHA-256 is that of the bytes that are used. Raises `CheckpointError`
    if it is missing or damaged.
    """
    if name not in about["sha256"]:
        return {}, None
    data = _read_file(path, name, WEIGHTS)
    _check_digest(path / name, hashlib.sha256(data).hexdigest(), about)
    return _parse_weights(path / name, data, as_stored=as_stored)


def _check_digest(file: Path, digest: str, about: dict[str, Any]) -> None:
    if digest != about["sha256"][file.name]:
        raise CheckpointError(f"{file} is damaged: its SHA-256 differs from the one in state.json")


def _read_file(folder: Path, name: str, limit: Limit) -> bytes:
    """Return the bytes of a checkpoint's file. Raises `CheckpointError`."""
    try:
        data = read_regular(folder / name, limit)
    except OSError as error:
        raise CheckpointError(f"{folder} is damaged or not a checkpoint: {error}") from None
    refuse_stand_in(folder / name, data)
    return data


def _read_description(path: Path) -> dict[str, Any]:
    """Return the content of a checkpoint's `state.json`. Raises `CheckpointError` if it is missing
    or damaged."""
    file = path / "state.json"
    data = _read_file(path, file.name, TEXT)
    try:
        about = parsed(data)
        digest = about.pop(_OWN_DIGEST, None) if isinstance(about, dict) else None
        whole = isinstance(digest, str) and digest == _hash_description(about)
    except (ValueError, RecursionError):
        whole = False
    if not whole:
        raise CheckpointError(f"{file} is damaged: its SHA-256 differs from the one that it holds")
    about = {"run": "", **about, _OWN_DIGEST: digest}
    for name, (check, expected) in _FIELDS.items():
        if not check(about.get(name)):
            raise CheckpointError(f"{file}: {name} is {about.get(name)!r:.60}; expected {expected}")
    return about


def is_intact(path: Path) -> bool:
    """Return whether all files of a checkpoint have the digests in its `state.json`."""
    try:
        about = _read_description(path)
        for name in about["sha256"]:
            _check_digest(path / name, hash_file(path / name), about)
    except (CheckpointError, OSError):
        return False
    return True


def load_weights(
    path: Path, *, ema: bool, everything: bool = False
) -> tuple[State, dict[str, Any]]:
    """Return a checkpoint's weights, or their moving average, as a state, and their metadata.

    The weights are as they are stored, also in bfloat16 (`BFLOAT16`). With `everything`, the state
    also has velocities, moving average and loss scale. Raises `CheckpointError` if a part is
    missing or damaged; other parts are not read.
    """
    name = find_weights_file(path, ema=ema).name
    description = _read_description(path)
    if name not in description["sha256"]:
        raise CheckpointError(f"{path} has no moving average; the recipe's ema_decay is 0")
    tensors, about = _read_part(path, description, name, as_stored=True)
    if about is None:
        raise CheckpointError(f"{path / name} has no metadata with its recipe")
    state = State(description["step"], tensors, {})
    if everything:
        momentum = _read_part(path, description, "momentum.safetensors")[0]
        average = _read_part(path, description, "ema.safetensors")[0]
        second_moments = _read_part(path, description, "second_moments.safetensors")[0]
        scaler = description["scaler"]
        state = State(state.step, tensors, momentum, average, scaler, second_moments)
    return state, about


def read_digest(file: Path) -> str:
    """Return the SHA-256 of a file of a checkpoint as the checkpoint states it; "" if it does not
    have the file. Raises `CheckpointError`."""
    return _read_description(file.parent)["sha256"].get(file.name, "")


def read_data_digest(path: Path) -> str:
    """Return the digest of the images that a checkpoint was trained on. Raises
    `CheckpointError`."""
    return _read_description(path)["data_digest"]


def read_identities(folder: Path) -> dict[int, tuple[str, str]]:
    """Return the id of the run, "" without one, and the digest of `state.json`, of every checkpoint
    below `folder` whose `state.json` is intact, by step."""
    identities = {}
    for step in steps(folder):
        with suppress(CheckpointError):
            about = _read_description(checkpoint_path(folder, step))
            identities[step] = about["run"], about[_OWN_DIGEST]
    return identities


def find_weights_file(folder: Path, *, ema: bool) -> Path:
    """Return the file of a checkpoint's weights, or of their moving average."""
    return folder / _WEIGHTS[ema]


def is_weights_file(path: Path) -> bool:
    """Return whether a file is that of the weights or the moving average of a checkpoint."""
    return path.name in _WEIGHTS and (path.parent / "state.json").is_file()


def steps(folder: Path) -> list[int]:
    """Return the steps that have checkpoints, in ascending order."""
    steps = []
    for path in folder.glob("step-*"):
        match = re.fullmatch(r"step-([0-9]{8,})", path.name)
        if match and path.is_dir():
            steps.append(int(match[1]))
    return sorted(steps)


def newest_intact(folder: Path) -> tuple[State | None, str, list[str]]:
    """Return the newest state that can be read, its data's digest, and the reasons why newer ones
    cannot be read.

    The state is None if there is no checkpoint. Raises `CheckpointError` if there are checkpoints
    and all are damaged, so that a run never starts again over its old checkpoints.
    """
    damaged: list[str] = []
    for step in reversed(steps(folder)):
        try:
            state, data_digest = load(checkpoint_path(folder, step))
        except CheckpointError as error:
            damaged.append(str(error))
        else:
            return state, data_digest, damaged
    if damaged:
        raise CheckpointError(
            "no checkpoint can be read:\n" + "\n".join(damaged) + "\nTrain into another folder."
        )
    return None, "", []


def prune(folder: Path, keep: int, best: int | None) -> None:
    """Delete all checkpoints except the newest `keep`, the best one and the weights that the run
    started from (step 0), and unfinished ones of killed processes."""
    kept = {*steps(folder)[-keep:], best, 0}
    remove(folder, [step for step in steps(folder) if step not in kept])


def remove(folder: Path, old: Iterable[int]) -> None:
    """Delete the checkpoints of some steps, and unfinished ones."""
    for step in old:
        shutil.rmtree(checkpoint_path(folder, step))
    remove_unfinished(folder)


def remove_unfinished(folder: Path) -> None:
    """Delete what a killed process or a full disk left of checkpoints."""
    for path in folder.glob(f"{_UNFINISHED}*"):
        shutil.rmtree(path, ignore_errors=True)


def is_slim(path: Path) -> bool:
    """Return whether training cannot resume from a checkpoint because of `drop_velocities`."""
    try:
        return bool(_read_description(path).get(_SLIM))
    except CheckpointError:
        return False


def drop_velocities(path: Path) -> None:
    """Remove everything from a checkpoint but the weights and their moving average. An interrupted
    call can be repeated. Raises `CheckpointError` if these are damaged, or `OSError`."""
    about = _read_description(path)
    about.pop(_OWN_DIGEST, None)
    for name in about["sha256"].keys() & {*_WEIGHTS}:
        _check_digest(path / name, hash_file(path / name), about)
    others = {*_FILES}.difference(_WEIGHTS)
    for name in others:
        about["sha256"].pop(name, None)
    about[_SLIM] = True
    # Readers ignore files that it does not name.
    write_json(path / "state.json", about | {_OWN_DIGEST: _hash_description(about)})
    flush(path)
    for name in others:
        (path / name).unlink(missing_ok=True)


def read_weights(path: Path, *, as_stored: bool = False) -> Part:
    """Return the tensors of a safetensors file, and Lockstep's metadata (None if another program
    wrote the file).

    bfloat16 tensors become float32; with `as_stored` they stay as they are (`BFLOAT16`). Raises
    `CheckpointError` if the file cannot be read.
    """
    try:
        data = read_regular(path, WEIGHTS)
    except OSError as error:
        raise _describe_error(path, error) from None
    refuse_stand_in(path, data)
    return _parse_weights(path, data, as_stored=as_stored)


def read_metadata(path: Path) -> dict[str, Any] | None:
    """Return Lockstep's metadata of a safetensors file; None if another program wrote it. Raises
    `CheckpointError`."""
    try:
        with open_regular(path, WEIGHTS) as file:
            length = int.from_bytes(file.read(8), "little")
            _check_header(path, length, file.read(length) if length <= _MOST_HEADER else b"")
        with safe_open(path, framework="numpy") as file:
            text = (file.metadata() or {}).get("lockstep")
        return None if text is None else parsed(text)
    except (OSError, ValueError, SafetensorError) as error:
        raise _describe_error(path, error) from None


def _parse_weights(path: Path, data: bytes, *, as_stored: bool) -> Part:
    """Return what `read_weights` returns, of the bytes of the file `path`. Its arrays are new and
    writeable."""
    length = int.from_bytes(data[:8], "little")
    _check_header(path, length, data[8 : 8 + length] if length <= _MOST_HEADER else b"")
    try:
        # It checks the header; its order is random.
        entries = dict(deserialize(data))  # type: ignore[no-untyped-call]
        header = parsed(data[8 : 8 + length])
        metadata = header.pop("__metadata__", None) or {}
        about = parsed(metadata["lockstep"]) if "lockstep" in metadata else None
    except (ValueError, RecursionError, SafetensorError) as error:
        raise _describe_error(path, error) from None
    unknown = {entry["dtype"] for entry in entries.values()} - _NUMPY_DTYPES.keys()
    if unknown:
        raise CheckpointError(
            f"{path} has tensors of {', '.join(sorted(unknown))}; convert them to F32 first"
        )
    tensors = {}
    for name in header:
        entry = entries[name]
        values = np.frombuffer(entry["data"], _NUMPY_DTYPES[entry["dtype"]])
        try:
            values = values.reshape(entry["shape"])
        except (ValueError, OverflowError):  # too many axes, or a size beyond any memory
            reason = f"{name:.100} has {len(entry['shape']):,} axes or sizes that no array can have"
            raise _describe_error(path, reason) from None
        tensors[name] = values if as_stored else numbers(values)
    return tensors, about


def _check_header(path: Path, length: int, header: bytes) -> None:
    """Raise `CheckpointError` if the header of a safetensors file is larger than that of weights.
    It is not parsed for this.

    `length` is the length that the file says. An array is an object in the header, which is one
    itself.
    """
    if length > _MOST_HEADER:
        raise _describe_error(
            path, f"its header has {length:,} bytes; expected at most {_MOST_HEADER:,}"
        )
    refuse_many(path, header.count(b'"data_offsets"'))
    # A name may be spelled with escapes.
    if any(header.count(mark) > most for mark, most in _MOST_MARKS.items()):
        raise _describe_error(path, "its header has more entries than weights have")


def _describe_error(path: Path, error: Exception | str) -> CheckpointError:
    return CheckpointError(f"{path} is not a safetensors file that can be read: {error}")


def write_weights(path: Path, tensors: dict[str, np.ndarray], about: dict[str, Any]) -> None:
    """Write a new safetensors file of weights and metadata, completely or not at all.
    `read_weights` reads it.

    Raises `CheckpointError` if it exists already or cannot be written.
    """
    refuse_existing(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with appearing(path) as partial:
            # Not save_file: its files are readable by their owner only, and this one may be shared.
            partial.write_bytes(
                serialise(tensors, metadata={"lockstep": json.dumps(about, allow_nan=False)})
            )
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be written: {error}") from None


def _hash_description(description: dict[str, Any]) -> str:
    return hashlib.sha256(
        json.dumps(description, sort_keys=True, allow_nan=False).encode()
    ).hexdigest()
