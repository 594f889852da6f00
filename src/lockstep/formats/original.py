"""What the readers of NVIDIA's checkpoints have in common."""

from collections.abc import Iterable
from dataclasses import dataclass

from lockstep.backends import State, check_fit
from lockstep.models import ModelSpec, Tensor, tensors
from lockstep.recipes import Recipe


@dataclass(frozen=True)
class Original:
    """A checkpoint of NVIDIA's in canonical form."""

    recipe: Recipe
    """The published recipe of its model, in fp32."""
    state: State
    """Momentum is empty if the checkpoint has none."""
    remarks: tuple[str, ...]
    """What a reader should know: what was matched by its structure, is left over, or is unlike the original."""


def about_momentum(missing: list[str], slots: int, kind: str) -> Iterable[str]:
    """Yield what is to say of velocities that are called `kind` and not all there."""
    if len(missing) == slots:
        yield f"there are no velocities ({kind})"
    elif missing:
        yield f"{len(missing)} of {slots} velocities are missing, such as {missing[0]}; the others were left out"


def left_over(others: list[str]) -> Iterable[str]:
    """Yield what is to say of variables that were not used."""
    if others:
        more = f" and {len(others) - 10} more" if len(others) > 10 else ""
        yield f"left over and not used: {', '.join(others[:10])}{more}"


def fitting(spec: ModelSpec, logits: int, state: State) -> list[Tensor]:
    """Return the tensors of a model. Raises `CheckpointError` if a state that shall be written has others."""
    expected = list(tensors(spec, logits))
    check_fit({tensor.name: tensor.shape for tensor in expected}, state.tensors, "weights")
    if state.momentum:
        check_fit({tensor.name: tensor.shape for tensor in expected if tensor.is_trained}, state.momentum, "momentum")
    return expected
