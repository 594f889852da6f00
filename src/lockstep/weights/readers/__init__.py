"""Files of weights that other programs wrote or shall read. No framework is needed.

`tensor_bundle` is how TensorFlow stores named tensors, `paddle_pickle` how Paddle and `mxnet_params` how MXNet does;
`nvidia_tensorflow`, `nvidia_paddle` and `nvidia_mxnet` are which of them NVIDIA's models have. `mxnet_symbol` reads what an
MXNet graph computes with them.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from lockstep.system.errors import CheckpointError


def from_bfloat16(halves: np.ndarray) -> np.ndarray:
    """Return numbers of bfloat16, which NumPy has not, as float32; `halves` is their bits, uint16 of any shape."""
    return (halves.astype(np.uint32) << np.uint32(16)).view(np.float32)


def refuse_existing(*paths: Path) -> None:
    """Raise `CheckpointError` if one of the files is there: a conversion never replaces anything."""
    for path in paths:
        if path.exists():
            raise CheckpointError(f"{path} is there already; name a new file, or remove this one")


@contextmanager
def appearing(path: Path) -> Iterator[Path]:
    """Give another name to write a new file under.

    When the block ends it has its own name and is on the disk; after an error neither is there.
    """
    try:
        with replacing(path) as partial:
            yield partial
    except BaseException:
        with suppress(OSError):
            path.unlink()
        raise


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give another name to write a file under, which may be there already.

    When the block ends it has its own name and is on the disk; after an error the old file is what it was.
    """
    partial = path.with_name(f"{path.name}.partial")
    try:
        yield partial
        flush(partial)
        partial.replace(path)
        flush(path.parent)
    except BaseException:
        with suppress(OSError):
            partial.unlink()
        raise


def flush(path: Path) -> None:
    """Bring a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
