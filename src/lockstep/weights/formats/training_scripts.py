"""What checkpoints of PyTorch hold in addition to weights: the optimizer, epochs, the loss scale.

The update of torch.optim.SGD is: velocity = momentum * velocity + (gradient + decay * weight);
weight -= lr * velocity. The learning rate is outside the velocity, as in the canonical form. An
optimizer numbers parameters in the order of its groups. NVIDIA's groups are: parameters with "bn"
in the name (so without those of `downsample.1`), without weight decay; the rest.

Sources: NVIDIA DeepLearningExamples, PyTorch/Classification/ConvNets: optimizers.py, training.py;
torchvision's references/classification/train.py; timm's checkpoint_saver.py; PyTorch's
optim/sgd.py.
"""

import math
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

import numpy as np

from lockstep.models.architectures import Tensor
from lockstep.system.text import format_count
from lockstep.weights.formats import numbers
from lockstep.weights.formats.account import describe_key
from lockstep.weights.formats.common import describe_missing_velocities, map_shapes

NVIDIA = "NVIDIA PyTorch"
OPTIMIZER = "optimizer"
SCALERS = ("scaler", "amp_scaler")
BEST = ("best_prec1", "best_acc1")
_VELOCITY = "momentum_buffer"


def list_groups(optimizer: Any) -> list[dict[Any, Any]]:
    """Return the parameter groups of an optimizer; empty if it is not PyTorch's."""
    groups = optimizer.get("param_groups") if isinstance(optimizer, dict) else None
    if not isinstance(groups, list):
        return []
    for group in groups:
        if not isinstance(group, dict) or not isinstance(group.get("params"), list):
            return []
    return groups


def split_nvidia_groups(trained: list[Tensor]) -> tuple[list[str], list[str]]:
    """Return the names of trained tensors in the order of NVIDIA's two groups: those with "bn" in
    the name, and the rest."""
    return _split(trained, _FIRST_GROUPS[0])


def _split(
    trained: list[Tensor], is_first: Callable[[Tensor], bool]
) -> tuple[list[str], list[str]]:
    groups: tuple[list[str], list[str]] = ([], [])
    for tensor in trained:
        groups[not is_first(tensor)].append(tensor.name)
    return groups


_FIRST_GROUPS: tuple[Callable[[Tensor], bool], ...] = (
    lambda tensor: "bn" in tensor.name,  # NVIDIA
    lambda tensor: len(tensor.shape) == 1,  # timm
    lambda tensor: len(tensor.shape) > 1,
    lambda tensor: not tensor.role.startswith("bn"),  # torchvision with --norm-weight-decay
)
"""What is in the first of two groups of known programs. The groups differ in size, so only those of
one program can fit."""


def read_velocities(
    optimizer: Any, trained: list[Tensor]
) -> tuple[dict[str, np.ndarray], list[str]]:
    """Return velocities by canonical name, and remarks. If they do not fit, there are none."""
    groups = list_groups(optimizer)
    kept = optimizer.get("state") if groups else None
    if not isinstance(kept, dict) or not kept:
        return {}, [f"there are no velocities ({OPTIMIZER})"]
    try:
        velocities = _order_velocities(kept, [group["params"] for group in groups], trained)
    except ValueError as error:
        return {}, [f"the velocities were left out: {error}"]
    names = [tensor.name for tensor in trained]
    missing = [name for name in names if name not in velocities]
    if missing:
        return {}, list(describe_missing_velocities(missing, len(names), _VELOCITY))
    remarks = []
    if any(group.get("nesterov") is True for group in groups):
        remarks.append("its optimizer used Nesterov momentum: the recipe needs nesterov: true")
    return {name: np.array(velocities[name], np.float32, order="C") for name in names}, remarks


def _order_velocities(
    kept: dict[Any, Any], slots: list[list[Any]], trained: list[Tensor]
) -> dict[str, np.ndarray]:
    """Return the velocities that an optimizer keeps, by canonical name. Raises `ValueError` if it
    is another optimizer, or if the order of its parameters is unknown."""
    sizes = list(map(len, slots))
    order: tuple[list[str], ...] = ([tensor.name for tensor in trained],)
    for is_first in _FIRST_GROUPS:
        if list(map(len, order)) != sizes:
            order = _split(trained, is_first)
    if list(map(len, order)) != sizes:
        raise ValueError(f"the optimizer's groups of {sizes} parameters fit no known program")
    velocities = {}
    keys: set[str] = set()
    for name, slot in zip(chain(*order), chain(*slots), strict=True):
        entry = kept.get(slot) if isinstance(slot, int) else None
        if not isinstance(entry, dict):
            continue
        keys.update(map(describe_key, entry))
        value = entry.get(_VELOCITY)
        if isinstance(value, np.ndarray) and numbers(value).dtype.kind == "f":
            velocities[name] = numbers(value)
    others = sorted(keys - {_VELOCITY})
    if others:
        raise ValueError(f"the optimizer is not SGD: it also keeps {', '.join(others[:3])}")
    shapes = map_shapes(trained)
    for name, velocity in velocities.items():
        if velocity.shape != shapes[name]:
            problem = f"{name} is {list(velocity.shape)}, expected {list(shapes[name])}"
            raise ValueError(f"their order is unknown: {problem}")
    return velocities


def _read_number(value: Any) -> float | None:
    """Return a finite number, also one in an array without axes; None for anything else."""
    if isinstance(value, np.ndarray) and value.ndim == 0 and numbers(value).dtype.kind in "iuf":
        value = numbers(value).item()
    if not isinstance(value, int | float) or isinstance(value, bool) or abs(value) >= 2**53:
        return None
    return float(value) if math.isfinite(value) else None


def read_epochs(root: Mapping[Any, Any], origin: str) -> tuple[int | None, str]:
    """Return the number of epochs done, None if it is unknown, and a remark on when a file was
    saved.

    NVIDIA's code stores the number of the next epoch, as PyTorch's ImageNet example does.
    torchvision's script and timm store that of the last one. Both count from 0.
    """
    no_step = "no step is stored"
    stored = _read_number(root.get("epoch"))
    if stored is None or stored != int(stored) or stored < 0:
        return None, no_step
    done = int(stored)
    if origin in ("torchvision", "timm"):
        done += 1
    elif origin != NVIDIA and root.keys().isdisjoint(BEST):
        return None, f"{no_step}; it names epoch {done}, which may be the last or the next"
    remark = f"{no_step}; it was saved after {format_count(done, 'epoch')}"
    best = next((_read_number(root[key]) for key in BEST if key in root), None)
    if best:
        remark += f"; the best top-1 until then was {best:.2f} %"
    return done, remark


def read_scaler(root: Mapping[Any, Any]) -> dict[str, float]:
    """Return the loss scale as in `State.scaler`; empty if there is none, or no number above 0."""
    stored: Any = next((root[key] for key in SCALERS if isinstance(root.get(key), dict)), {})
    scale = _read_number(stored.get("scale")) or 0.0
    steps = _read_number(stored.get("_growth_tracker")) or 0.0
    if scale <= 0 or steps < 0:
        return {}
    return {"scale": scale, "good_steps": steps, "bad_steps": 0.0}
