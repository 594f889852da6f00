"""safetensors files of other programs: the tensors of a module of PyTorch."""

from pathlib import Path

from lockstep.weights import checkpoint
from lockstep.weights.formats.common import Original
from lockstep.weights.formats.torch_models import of_state_dict


def find(path: Path) -> Path | None:
    """Return the path if it is a file of safetensors, by its content; None otherwise."""
    if not path.is_file():
        return None
    with path.open("rb") as file:
        begin = file.read(9)
    # The length of the header, and its first character. The header of an empty file is missing.
    is_one = len(begin) == 9 and begin[8:] == b"{" and int.from_bytes(begin[:8], "little") <= path.stat().st_size - 8
    return path if is_one or path.suffix == ".safetensors" else None


def read(path: Path, *, momentum: bool = True) -> Original:
    """Read a file of tensors. Raises `CheckpointError` if it is damaged, incomplete or of another model."""
    stored, _ = checkpoint.read_weights(path)
    return of_state_dict(path, stored)
