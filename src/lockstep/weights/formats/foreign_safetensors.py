"""safetensors files of other programs with torchvision's names."""

from pathlib import Path

from lockstep.models.architectures import recognise
from lockstep.models.state import State
from lockstep.recipes import Recipe
from lockstep.system.errors import CheckpointError, RecipeError
from lockstep.weights import checkpoint
from lockstep.weights.formats.common import Original


def find(path: Path) -> Path | None:
    """Return the path if it is a file that ends in .safetensors; None otherwise."""
    return path if path.suffix == ".safetensors" and path.is_file() else None


def read(path: Path, *, momentum: bool = True) -> Original:
    """Read a file of tensors. Raises `CheckpointError` if they are of no known model."""
    tensors, _ = checkpoint.read_weights(path)
    tensors = {name: value for name, value in tensors.items() if not name.endswith("num_batches_tracked")}
    try:
        model, logits = recognise({name: value.shape for name, value in tensors.items()})
    except RecipeError as error:
        raise CheckpointError(f"{path}: {error}") from None
    return Original(Recipe(model=model, logits=logits, precision="fp32"), State(0, tensors, {}), (), "PyTorch")
