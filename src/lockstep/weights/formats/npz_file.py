"""Read and write archives of `numpy.savez` and `numpy.savez_compressed`: an array a member.

No pickle is read: arrays of objects are refused.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from lockstep.system.npz import NUMBERS, read_npz
from lockstep.system.regular_files import WEIGHTS, open_regular
from lockstep.weights.formats import BFLOAT16, MOST_ARRAYS, naming_damage

_MEMBER = ".npy"
_BEGIN = b"PK\x03\x04"
_MOST_GROWTH = 16
"""Compressed weights are hardly smaller. What grows more was made to fill the memory."""


def is_npz(head: bytes) -> bool:
    """Return whether a file that begins so is an archive whose first member is an array."""
    length = int.from_bytes(head[26:28], "little")
    return head.startswith(_BEGIN) and head[30 : 30 + length].endswith(_MEMBER.encode())


def load(path: Path) -> dict[str, np.ndarray]:
    """Return the arrays by name. They are read-only, and of the types of the file.

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


def dump(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write arrays as `numpy.savez` does."""
    with path.open("wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]
