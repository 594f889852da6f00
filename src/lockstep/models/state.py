"""The training state in canonical form: torchvision's names, OIHW kernels, (out, in) classifier,
float32."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from lockstep.system.errors import CheckpointError, nearest


@dataclass(frozen=True)
class State:
    """Everything that training changes, at the end of a step."""

    step: int
    """Number of optimizer steps done."""
    tensors: dict[str, np.ndarray]
    """Parameters and batch norm statistics."""
    momentum: dict[str, np.ndarray]
    """Velocity v of every parameter; `Optimizer.velocity` says what that is. SGD's is without the
    learning rate (w -= lr * v)."""
    ema: dict[str, np.ndarray] = field(default_factory=dict)
    """Moving averages of `tensors`; empty if the recipe has no moving average."""
    scaler: dict[str, float] = field(default_factory=dict)
    """Loss scaling: `scale`, and the numbers of consecutive `good_steps` and `bad_steps`; empty
    without dynamic scaling."""
    second_moments: dict[str, np.ndarray] = field(default_factory=dict)
    """Mean of the squared gradients of every parameter, not corrected for bias; empty if the
    optimizer has none."""


def check_names(expected: Iterable[str], values: Iterable[str], what: str) -> None:
    """Raise `CheckpointError` unless two sets of names are the same."""
    missing = sorted({*expected} - {*values})
    unknown = sorted({*values} - {*expected})
    if missing or unknown:
        hint = nearest(unknown[0], expected) if unknown else ""
        raise CheckpointError(
            f"{what}: missing {missing[:3] or 'nothing'}, unknown {unknown[:3] or 'nothing'}."
            f" {hint}"
        )


def check_fit(
    expected: Mapping[str, tuple[int, ...]], values: Mapping[str, np.ndarray], what: str
) -> None:
    """Raise `CheckpointError` unless arrays have exactly these names and shapes."""
    check_names(expected, values, what)
    for name, shape in expected.items():
        if values[name].shape != shape:
            raise CheckpointError(f"{what}: {name} is {values[name].shape}, expected {shape}")


def check_masks(parameters: Mapping[str, tuple[int, ...]], masks: Mapping[str, np.ndarray]) -> None:
    """Raise `CheckpointError` unless every mask belongs to a parameter and has its shape."""
    for name, mask in masks.items():
        if name not in parameters:
            raise CheckpointError(
                f"masks: there is no parameter {name!r}. {nearest(name, parameters)}"
            )
        if mask.shape != parameters[name]:
            raise CheckpointError(f"masks: {name} is {mask.shape}, expected {parameters[name]}")
