"""Paddle's files of named arrays (`.pdparams`, `.pdopt`). They are pickles; none of their code is
run.

`pickles` interprets them, with the few calls that store arrays.

A file is a dict of names and arrays:

- `paddle.static.save` stores NumPy arrays.
- `paddle.save` stores tuples (parameter's name, array), and before Paddle 2.1 arrays and a dict of
  the parameters' names.
- With protocols 2 and 3, an array of more than 1 GiB is stored in slices.

Source: Paddle's framework/io.py and io_utils.py.
"""

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from pickletools import genops
from typing import Any

import numpy as np

from lockstep.weights.formats.lfs_pointers import read_whole
from lockstep.weights.formats.pickles import (
    BUILTINS,
    NUMPY,
    Refused,
    Rules,
    Unbuilt,
    check_shape,
    check_type,
    interpret,
    name_members,
    naming_refusal,
)

_NAMES = "StructuredToParameterName@@"
_SLICES = "UnpackBigParamInfor@@"
_PROTOCOL = 4
"""The newest protocol that every version of Paddle reads."""
_FIRST_KEYS = ("BINUNICODE", "SHORT_BINUNICODE", "STOP")
"""What comes after the dict: a text, or the end of a dict without entries."""
_WITHOUT_VALUE = ("PROTO", "FRAME", "MEMOIZE", "BINPUT", "LONG_BINPUT", "MARK")
"""Instructions that make no value."""


@dataclass(frozen=True)
class Contents:
    """What a file holds."""

    arrays: dict[str, np.ndarray]
    """Arrays as they are stored, read-only; bfloat16 as its bits, uint16."""
    parameters: dict[str, str]
    """For arrays that have their layer's name: the name of the parameter, which the optimizer uses.
    """
    others: tuple[str, ...]
    """Names of values that are not arrays."""


def is_paddle(head: bytes) -> bool:
    """Return whether a file that begins so is Paddle's: a pickled dict whose first key is a text.

    PyTorch's older files begin with a pickled number, and its others are archives. Pickle's
    instructions without a version are text: they are not looked for in files of other kinds.
    """
    if not head.startswith(pickle.PROTO):
        return False
    try:
        names = (instruction.name for instruction, _, _ in genops(head))
        values = (name for name in names if name not in _WITHOUT_VALUE)
        return next(values) == "EMPTY_DICT" and next(values) in _FIRST_KEYS
    except (ValueError, StopIteration):
        return False


def load(path: Path) -> Contents:
    """Read a file. Raises `CheckpointError` if it is damaged or asks for anything except arrays of
    numbers."""
    data = read_whole(path)
    with naming_refusal(path, "a Paddle file", "paddle.save"):
        return _read_contents(interpret(data, _RULES), len(data))


def dump(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write a file that every version of Paddle and NumPy reads."""
    with path.open("wb") as file:
        _Pickler(file, _PROTOCOL).dump(dict(arrays))


class _Pickler(pickle.Pickler):
    """Stores arrays by their constructor. NumPy's own format names a module that older or newer
    versions do not have."""

    def reducer_override(self, value: object) -> Any:
        if not isinstance(value, np.ndarray):
            return NotImplemented
        dtype = value.dtype.newbyteorder("<")
        return np.ndarray, (value.shape, dtype.str, np.asarray(value, dtype).tobytes())


def _read_contents(root: Any, size: int) -> Contents:
    """Return the contents of a file of `size` bytes from the object that it made."""
    values = check_type(dict, root)
    arrays = {}
    parameters = {}
    others = []
    for name, value in values.items():
        if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], str):
            parameters[name], value = value
        if isinstance(value, np.ndarray | Unbuilt):
            arrays[name] = check_type(np.ndarray, None if isinstance(value, Unbuilt) else value)
        elif name not in (_NAMES, _SLICES):
            others.append(name)
    # Many arrays may share the same bytes of the file. Their copies might not fit into memory.
    if sum(array.nbytes for array in arrays.values()) > size:
        raise ValueError(f"its arrays have more bytes than its own {size}")
    for name, parts in check_type(dict, values.get(_SLICES, {})).items():
        arrays[name] = _join_slices(arrays, check_type(dict, parts))
    for name, parameter in check_type(dict, values.get(_NAMES, {})).items():
        parameters[name] = check_type(str, parameter)
    named = {name: parameters[name] for name in arrays if name in parameters}
    return Contents(arrays, named, tuple(others))


def _join_slices(arrays: dict[str, np.ndarray], parts: dict[str, Any]) -> np.ndarray:
    """Return an array joined from its slices, and remove the slices."""
    slices = [arrays.pop(check_type(str, name)) for name in check_type(list, parts["slices"])]
    return np.concatenate(slices).reshape(check_shape(parts["OriginShape"]))


def _name_in_scope(expression: Any = None, scope: Any = None, _: Any = None) -> Any:
    """Replace `eval`: Paddle stores the tensor of a static program as the value of `data`. Nothing
    is evaluated."""
    if expression != "data" or not isinstance(scope, dict) or list(scope) != ["data"]:
        raise Refused("builtins.eval of an expression")
    return scope["data"]


_CALLS = {
    **NUMPY,
    "collections.OrderedDict": lambda: {},
    **name_members(BUILTINS, {"tuple": lambda items=(): check_type(tuple, items)}),
    **name_members(BUILTINS, {"eval": _name_in_scope, "bytes": lambda: b""}),
}
"""What a file may ask for, and the functions that replace it."""
_RULES = Rules(_CALLS)
