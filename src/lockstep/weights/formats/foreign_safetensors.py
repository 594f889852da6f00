"""safetensors files of other programs: the tensors of a PyTorch module, or Flax's variables."""

from pathlib import Path
from typing import Any

from safetensors import safe_open

from lockstep.weights import checkpoint
from lockstep.weights.formats import is_safetensors
from lockstep.weights.formats.flax_models import are_flax, read_variables
from lockstep.weights.formats.torch_models import read_state_dict
from lockstep.weights.opened_weights import Weights
from lockstep.weights.weights_choice import DEFAULT_CHOICE, WeightsChoice

NAME = "safetensors"


matches = is_safetensors


def find(path: Path) -> Path | None:
    """Return the path if it is a `.safetensors` file; None otherwise."""
    return path if path.suffix == ".safetensors" and path.is_file() else None


def read(path: Path, *, momentum: bool = True, choice: WeightsChoice = DEFAULT_CHOICE) -> Weights:
    """Read a file of tensors. Raises `CheckpointError` if it is damaged, incomplete or of another
    model."""
    stored, _ = checkpoint.read_weights(path, as_stored=True)
    if are_flax(stored):
        return read_variables(path, stored, momentum=momentum, choice=choice)
    return read_state_dict(path, add_metadata(path, stored), choice=choice)


def add_metadata(path: Path, stored: dict[str, Any]) -> dict[str, Any]:
    """Return the tensors of a file, next to its metadata if that says more than what wrote it."""
    with safe_open(path, framework="numpy") as file:
        metadata = file.metadata() or {}
    if metadata.keys() <= {"certificate", "format"}:
        return stored
    return {"state_dict": stored, "metadata": metadata}
