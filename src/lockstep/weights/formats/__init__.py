"""Read and write weights files of other programs. No framework is needed.

| format of named arrays | models in it |
|---|---|
| TensorFlow: `tensor_bundle` | `nvidia_tensorflow`, `shape_matching` |
| Paddle: `paddle_pickle` | `nvidia_paddle` |
| PyTorch: `torch_file`, `torch_pickle` | `torch_models`, `training_scripts`, `torch_writer` |
| MXNet: `mxnet_params`; the graph: `mxnet_symbol` | `nvidia_mxnet`, by `network_walk` |
| Keras: `keras_variables`, after `keras_process` | `keras_file`, by `keras_layers`, the same |
| Flax: `msgpack_tree`; NumPy; both by `flax_file` | `flax_models`, `torch_models` |
| ONNX: `onnx_graph`; its preprocessing: `onnx_metadata` | `onnx_weights`, by `network_walk` |
| TensorFlow's graphs: `tensorflow_graph`, `tensorflow_nodes` | `tensorflow_weights`, the same |

`format_list` lists all formats in the order in which they are tried. `lockstep_files` are
Lockstep's own. `timm_folder` is the folder of timm and of the Hugging Face Hub, with its
`timm_config`; `transformers_folder` is that of transformers. `pickles` interprets the pickles of
Paddle and PyTorch.
"""

import struct
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.system.errors import CheckpointError

BFLOAT16 = np.dtype([("bfloat16", "<u2")])
"""The type of arrays that hold bfloat16 numbers as a file has them, since NumPy has no bfloat16.
`numbers` converts them."""


def numbers(values: np.ndarray) -> np.ndarray:
    """Return an array with its bfloat16 numbers as float32, in the same shape; any other array
    unchanged."""
    if values.dtype != BFLOAT16:
        return values
    return np.asarray(widen_bfloat16(values["bfloat16"]))


def dtype_name(dtype: "np.dtype[Any]") -> str:
    """Return the name of a type of numbers, whatever its byte order: "float32", "bfloat16", ..."""
    return "bfloat16" if dtype == BFLOAT16 else dtype.name


def widen_bfloat16(halves: np.ndarray) -> np.ndarray:
    """Return bfloat16 numbers as float32, since NumPy has no bfloat16; `halves` holds their bits,
    uint16 of any shape."""
    return (halves.astype(np.uint32) << np.uint32(16)).view(np.float32)


DAMAGE = (
    *(ValueError, LookupError, TypeError, ArithmeticError, RuntimeError, EOFError),
    *(struct.error, zlib.error, zipfile.BadZipFile),
)
"""What parsers and `zipfile` raise for damaged files, in addition to `OSError`."""


@contextmanager
def naming_damage(
    path: Path, kind: str, damage: tuple[type[Exception], ...] = DAMAGE
) -> Iterator[None]:
    """Raise `CheckpointError` that names a file for the errors of its reader: those of `damage` say
    that it is not of its `kind`, such as "a Paddle file", any other `OSError` that it cannot be
    read."""
    try:
        yield
    except damage as error:
        raise CheckpointError(
            f"{path} is damaged or not {kind}: {error}. Copy it again, or use an earlier"
            " checkpoint."
        ) from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from None


@contextmanager
def naming_target(path: Path) -> Iterator[None]:
    """Raise `CheckpointError` that names a file for the `OSError` of its writer."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"{path!s:.200} cannot be written: {error.strerror or error}"
        ) from None


class ByteReader:
    """Reads bytes in order."""

    def __init__(self, data: bytes | memoryview) -> None:
        self._data = memoryview(data)
        self._offset = 0

    @property
    def left(self) -> int:
        """The number of bytes that were not read."""
        return len(self._data) - self._offset

    def take(self, size: int, what: str = "a value") -> memoryview:
        """Return the next bytes. Raises `ValueError` if fewer are left."""
        if size > self.left:
            raise ValueError(
                f"{what} needs {size} bytes from byte {self._offset} on, but {self.left} are left"
            )
        self._offset += size
        return self._data[self._offset - size : self._offset]

    def numbers(self, layout: str, what: str = "a value") -> tuple[Any, ...]:
        """Return the next numbers; `layout` is a format of `struct`. Raises as `take` does."""
        return struct.unpack(layout, self.take(struct.calcsize(layout), what))

    def number(self, kind: str, what: str = "a value") -> Any:
        """Return the next number as `numbers` does."""
        return self.numbers(kind, what)[0]


def is_safetensors(head: bytes, path: Path) -> bool:
    """Return whether a file begins as safetensors do: with the length of its header, and the
    header's first character. `head` is its beginning."""
    length = int.from_bytes(head[:8], "little")
    return head[8:9] == b"{" and length <= path.stat().st_size - 8


MOST_ARRAYS = 20_000
"""A file of weights may have at most this many arrays. A ResNet-152 with velocities and averages
has 3,000. Comparing the arrays with every model, and listing those that do not fit, takes time and
memory for each."""


def refuse_many(path: Path | str, arrays: int) -> None:
    """Raise `CheckpointError` if a file has more arrays than weights have."""
    if arrays > MOST_ARRAYS:
        raise CheckpointError(
            f"{path} has {arrays:,} arrays; expected at most {MOST_ARRAYS:,}: a ResNet-152 with"
            " velocities and averages has 3,000; name a file of one network's weights"
        )


def refuse_existing(*paths: Path) -> None:
    """Raise `CheckpointError` if one of the files exists: a conversion never overwrites anything,
    nor a link to nothing."""
    for path in paths:
        with naming_target(path):
            exists = path.exists() or path.is_symlink()
        if exists:
            raise CheckpointError(f"{path} already exists; name a new file, or remove this one")
