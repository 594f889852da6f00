"""Recognise the format of a weights file by its first or last bytes, never by its suffix alone."""

import struct
import zipfile
from pathlib import Path
from typing import Literal

Kind = Literal["PyTorch", "Keras", "safetensors", "Paddle", "MXNet", "ONNX", "TensorFlow"]

_ZIP = b"PK\x03\x04"
_HDF5 = b"\x89HDF\r\n\x1a\n"
_MXNET = struct.pack("<Q", 0x112)
"""The number that begins MXNet's lists of arrays."""
_LEGACY_TORCH = b"\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."
"""The number, as a pickle, that begins PyTorch's files before version 1.6. The protocol stands before it."""
_TABLE = struct.pack("<Q", 0xDB4775248B80FB57)
"""The number that ends a LevelDB table, such as the index of a TensorFlow checkpoint."""
_LONGEST_HEADER = 100_000_000
"""safetensors allows no longer header, in bytes."""


def kind_of(path: Path) -> Kind | None:
    """Return which format a file has; None if it has none of them. Raises `OSError` if it cannot be read."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(64)
        file.seek(max(size - len(_TABLE), 0))
        end = file.read()
    if start.startswith(_ZIP):
        return _archive(path)
    if start.startswith(_HDF5):
        return "Keras"
    if start[:1] == b"\x80":
        return "PyTorch" if start[2:].startswith(_LEGACY_TORCH) else "Paddle"
    if start.startswith(_MXNET):
        return "MXNet"
    if end == _TABLE:
        return "TensorFlow"
    if len(start) > 8 and start[8:9] == b"{" and struct.unpack("<Q", start[:8])[0] <= min(size - 8, _LONGEST_HEADER):
        return "safetensors"
    return "ONNX" if _begins_as_onnx(start) else None


def _archive(path: Path) -> Kind | None:
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except (zipfile.BadZipFile, ValueError, NotImplementedError):
        return None
    if any(name.count("/") == 1 and name.endswith("/data.pkl") for name in names):
        return "PyTorch"
    return "Keras" if "model.weights.h5" in names else None


def _begins_as_onnx(start: bytes) -> bool:
    """Return whether bytes begin as a model of ONNX: field 1, its version, then the producer's name or another field."""
    return len(start) > 3 and start[0] == 0x08 and start[1] < 0x80 and start[2] in (0x12, 0x1A, 0x22, 0x28, 0x32, 0x3A, 0x42)
