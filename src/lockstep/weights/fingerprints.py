"""Fingerprints of files, and of what a reader gets from them, so that two readers can be compared
bit for bit."""

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.system.regular_files import WEIGHTS, open_regular


def compute_fingerprints(value: Any) -> dict[str, str]:
    """Return type, shape and SHA-256 of each array below dicts, lists and tuples, and the text of
    each other value.

    Names are the keys and positions on the way to a value, such as
    `optimizer/state/0/momentum_buffer`. Tensors of a framework count as arrays if NumPy can convert
    them. The byte order of an array does not matter.
    """
    return dict(_walk(value, ""))


def _walk(value: Any, name: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping | list | tuple):
        pairs = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, part in pairs:
            yield from _walk(part, f"{name}/{key}" if name else str(key))
    elif hasattr(value, "__array__"):
        array = np.asarray(value)
        array = np.asarray(array, array.dtype.newbyteorder("<"), order="C")
        digest = hashlib.sha256(array.tobytes()).hexdigest()
        yield name, f"{array.dtype.name} {list(array.shape)} {digest}"
    else:
        yield name, repr(value)


def hash_files(path: Path) -> dict[str, str]:
    """Return the SHA-256 of a file, or of the files of a folder or prefix, by name."""
    if path.is_file():
        files = [path]
    elif path.is_dir():
        files = sorted(path.iterdir())
    else:
        files = sorted(path.parent.iterdir())
        files = list(filter(lambda file: file.name.startswith(f"{path.name}."), files))
    digests = {}
    for file in files:
        if file.is_file() and not file.name.endswith(".certificate.json"):
            digests[file.name] = hash_file(file)
    return digests


def hash_file(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal digits."""
    with open_regular(path, WEIGHTS) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
