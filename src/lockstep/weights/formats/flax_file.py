"""Weights files of JAX users: MessagePack of `flax.serialization`, and archives of
`numpy.savez`.

They hold variables of Flax (`flax_models`), or a dict of arrays by PyTorch's names and in its
layouts, as torchax has it (`torch_models`). Both may be in safetensors too, which
`foreign_safetensors` reads.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save as serialise

from lockstep.models.state import State
from lockstep.recipes import Recipe
from lockstep.system.errors import CheckpointError
from lockstep.system.npz import NUMBERS, read_npz
from lockstep.system.regular_files import WEIGHTS, open_regular
from lockstep.weights import checkpoint
from lockstep.weights.formats import (
    BFLOAT16,
    MOST_ARRAYS,
    common,
    flax_models,
    msgpack_tree,
    naming_damage,
)
from lockstep.weights.formats.torch_models import read_state_dict
from lockstep.weights.opened_weights import Weights
from lockstep.weights.weights_choice import DEFAULT_CHOICE, WeightsChoice

NAME = "Flax and JAX"

TORCHAX = "torchax"
"""`Weights.origin` of arrays with PyTorch's names."""
_MSGPACK, _NPZ, _SAFETENSORS = _ENDINGS = (".msgpack", ".npz", ".safetensors")
_OF_TRAINING = re.compile(r"checkpoint_([0-9]{1,12})")
"""The names of files that `flax.training.checkpoints` writes without Orbax."""
_ORBAX = ("_CHECKPOINT_METADATA", "_METADATA", "manifest.ocdbt")
_COUNTER = "num_batches_tracked"
_BEGIN = 4096
_ZIP = b"PK\x03\x04"
_MOST_GROWTH = 16
"""Weights hardly compress. An archive that expands more was made to fill the memory."""


def matches(head: bytes, path: Path) -> bool:
    """Return whether a file begins as a dict of MessagePack, or an archive of NumPy."""
    return msgpack_tree.begins_dict(head) or is_npz(head)


def is_npz(head: bytes) -> bool:
    """Return whether a file that begins so is an archive whose first member is an array."""
    length = int.from_bytes(head[26:28], "little")
    return head.startswith(_ZIP) and head[30 : 30 + length].endswith(b".npy")


def find(path: Path) -> Path | None:
    """Return the file that a path names; None if there is none.

    A path is a file with an ending of this format, or a folder with checkpoints of
    `flax.training.checkpoints`, of which the one with the highest step is used. Raises
    `CheckpointError` for a folder of Orbax, which is not read.
    """
    if not path.is_dir():
        return path if path.suffix in (_MSGPACK, _NPZ) and path.is_file() else None
    steps = {}
    for place in path.glob("checkpoint_*"):
        if match := _OF_TRAINING.fullmatch(place.name):
            steps[int(match[1])] = place
    last = steps[max(steps)] if steps else path
    if any((last / name).is_file() for name in _ORBAX):
        raise CheckpointError(
            f"{last} is an Orbax checkpoint, which cannot be read. Restore it with Orbax, and"
            " write its params and batch_stats with flax.serialization.to_bytes"
            " (docs/how-to/flax.md)"
        )
    return last if last.is_file() else None


def read(path: Path, *, momentum: bool = True, choice: WeightsChoice = DEFAULT_CHOICE) -> Weights:
    """Read Flax's variables, or arrays by PyTorch's names. Raises `CheckpointError` if the file is
    damaged, incomplete or of another model."""
    arrays = load(path)
    if flax_models.are_flax(arrays):
        return flax_models.read_variables(path, arrays, momentum=momentum, choice=choice)
    return replace(read_state_dict(path, arrays, choice=choice), origin=TORCHAX)


def load(path: Path) -> dict[str, Any]:
    """Return the arrays and plain values of a file by path. Raises `CheckpointError`."""
    if path.suffix == _SAFETENSORS:
        return dict(checkpoint.read_weights(path, as_stored=True)[0])
    with naming_damage(path, "weights"), open_regular(path, WEIGHTS) as file:
        head = file.read(_BEGIN)
    if is_npz(head):
        return dict(load_npz(path))
    tree = msgpack_tree.load(path)
    if not isinstance(tree, Mapping):
        raise CheckpointError(f"{path} holds a {type(tree).__name__}; expected a dict of variables")
    return flax_models.flatten(tree)


def load_npz(path: Path) -> dict[str, np.ndarray]:
    """Return the arrays of an archive by name, read-only and of the types of the file. No pickle is
    read.

    Raises `CheckpointError` if the file is damaged, holds objects, or expands to more than 16 times
    its size.
    """
    with naming_damage(path, "an archive of numpy.savez"), open_regular(path, WEIGHTS) as file:
        most = _MOST_GROWTH * path.stat().st_size
        arrays = read_npz(file, most_members=MOST_ARRAYS, most_bytes=most, kinds=f"{NUMBERS}V")
        for name, values in arrays.items():
            if values.dtype.kind == "V":  # JAX's bfloat16, as NumPy stores it
                arrays[name] = values.view(BFLOAT16)
        return arrays


def dump_npz(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write arrays as `numpy.savez` does."""
    with path.open("wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]


def write_flax(
    target: Path, recipe: Recipe, state: State, into: Path | None = None
) -> common.Written:
    """Write Flax's variables: nested in `.msgpack`, by path in `.npz` and `.safetensors`.

    `flax.serialization.from_bytes` reads the first as the variables of the example's model.
    `into` is as in `write_new`. Raises `CheckpointError` if the target exists, has another ending,
    or the state does not fit.
    """
    arrays = flax_models.build_variables(recipe, state)
    tree = _nest(arrays) if target.suffix == _MSGPACK else arrays
    remarks = (*flax_models.describe_differences(recipe), *common.describe_omitted_parts(state))
    _write(target, tree, into)
    return common.Written((target,), (target,), remarks)


def write_torchax(
    target: Path, recipe: Recipe, state: State, into: Path | None = None
) -> common.Written:
    """Write arrays with torchvision's names and layouts, and the counters that PyTorch's modules
    expect, int32 as JAX has integers. `into` and errors are as in `write_flax`."""
    arrays: dict[str, np.ndarray] = {}
    for tensor in common.check_state(recipe.spec, recipe.logits, state):
        arrays[tensor.name] = np.ascontiguousarray(state.tensors[tensor.name], np.float32)
        if tensor.role == "bn_var":
            arrays[f"{tensor.name.rpartition('.')[0]}.{_COUNTER}"] = np.zeros((), np.int32)
    _write(target, arrays, into)
    paddings = common.describe_other_padding(recipe)
    remarks = [f"torchvision's class pads symmetrically; {remark}" for remark in paddings]
    return common.Written(
        (target,), (target,), (*remarks, *common.describe_omitted_parts(state)), common.COUNTERS
    )


def _write(target: Path, tree: Mapping[str, Any], into: Path | None) -> None:
    dumps: dict[str, Callable[[Path], object]] = {
        _MSGPACK: partial(msgpack_tree.dump, tree=tree),
        _NPZ: partial(dump_npz, arrays=tree),
        _SAFETENSORS: lambda path: path.write_bytes(serialise(dict(tree))),
    }
    if target.suffix not in dumps:
        raise CheckpointError(f"{target}: expected a name that ends in {', '.join(_ENDINGS)}")
    files: common.Writers = {target: dumps[target.suffix]}
    common.write_new(target, files, into=into)


def _nest(arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Return nested dicts of arrays by path.

    >>> _nest({"a/b": np.zeros(1), "a/c": np.ones(1)})
    {'a': {'b': array([0.]), 'c': array([1.])}}
    """
    tree: dict[str, Any] = {}
    for path, array in arrays.items():
        *scopes, leaf = path.split("/")
        branch = tree
        for scope in scopes:
            branch = branch.setdefault(scope, {})
        branch[leaf] = array
    return tree
