"""safetensors files of other programs: the tensors of a module of PyTorch."""

from pathlib import Path

from lockstep.system.regular_files import WEIGHTS, open_regular
from lockstep.weights import checkpoint
from lockstep.weights.formats.common import Original
from lockstep.weights.formats.torch_models import of_state_dict


def find(path: Path) -> Path | None:
    """Return the path if it is a file of safetensors by its content or its name; None otherwise."""
    return (
        path if path.is_file() and (path.suffix == ".safetensors" or is_safetensors(path)) else None
    )


def is_safetensors(path: Path) -> bool:
    """Return whether a file begins as safetensors do: with the length of its header, and the
    header's first character."""
    with open_regular(path, WEIGHTS) as file:
        begin = file.read(9)
    return (
        len(begin) == 9
        and begin[8:] == b"{"
        and int.from_bytes(begin[:8], "little") <= path.stat().st_size - 8
    )


def read(path: Path, *, momentum: bool = True) -> Original:
    """Read a file of tensors. Raises `CheckpointError` if it is damaged, incomplete or of another
    model."""
    stored, _ = checkpoint.read_weights(path, as_stored=True)
    return of_state_dict(path, stored)
