"""What a weights file is, without converting it: origin, model, classes, names and types of its
arrays, oddities."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.models.architectures import Role, model_spec, tensors
from lockstep.weights.opened_weights import Weights
from lockstep.weights.opening import open_weights
from lockstep.weights.preprocessing import FIELDS

_SHOWN = 5
_NAMED = 3
_LONGEST = 80


def inspect(
    source: str | Path, *, checkpoint: str = "newest", model: str | None = None
) -> dict[str, Any]:
    """Return what a run, a checkpoint or another program's file holds, as plain values that JSON
    can hold.

    `model` names the model of a file that fits several. "stored" lists the arrays next to the
    weights as the file has them: "name", "dtype", "shape", and "tensors", the canonical names of
    what is made of each; empty if it is not used. "dtypes" counts the types of those that are used.

    Raises `CheckpointError` if it cannot be read.
    """
    opened = open_weights(
        source, checkpoint=checkpoint, momentum=True, model=model, needs_classifier=False
    )
    state = opened.state
    return {
        "source": str(opened.source),
        "origin": opened.origin,
        "model": opened.recipe.fields()["model"],
        "logits": opened.recipe.logits if "fc.bias" in opened.tensors else None,
        "classes": list(opened.classes),
        "parameters": sum(
            value.size for name, value in opened.tensors.items() if "running_" not in name
        ),
        "tensors": len(opened.tensors),
        "dtypes": dict(Counter(each.dtype for each in opened.stored if each.tensors)),
        "stored": [asdict(each) for each in opened.stored],
        "step": state.step or None,
        "epochs": opened.epochs,
        "velocities": bool(state.momentum),
        "moving_average": bool(state.ema),
        "loss_scale": state.scaler.get("scale"),
        "preprocessing": {name: opened.recipe.fields()[name] for name in FIELDS},
        "remarks": list(opened.remarks),
        "oddities": list(oddities(opened)),
    }


def by_kind(stored: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return numbers, types and the first names of the arrays of each kind, given "stored" of
    `inspect`, for users."""
    kinds: dict[str, list[Mapping[str, Any]]] = {}
    for each in stored:
        kinds.setdefault(_kind(each), []).append(each)
    return {kind: _few(kinds[kind]) for kind in _KINDS if kind in kinds}


_KINDS = ("kernels", "batch norms", "classifier", "not used")


def _kind(each: Mapping[str, Any]) -> str:
    if not each["tensors"]:
        return "not used"
    if each["tensors"][0].startswith("fc."):
        return "classifier"
    return "kernels" if len(each["shape"]) == 4 else "batch norms"


def _few(found: Sequence[Mapping[str, Any]]) -> str:
    counts = ", ".join(
        f"{dtype} {count}" for dtype, count in Counter(each["dtype"] for each in found).items()
    )
    names = ", ".join(each["name"][:_LONGEST] for each in found[:_NAMED])
    return f"{counts}: {names}{', ...' if len(found) > _NAMED else ''}"


def oddities(opened: Weights) -> Iterator[str]:
    """Yield what is odd in the values: not finite, dead channels, batch norms that never saw an
    image or a variance of 0."""
    roles: dict[str, Role] = {
        tensor.name: tensor.role
        for tensor in tensors(model_spec(opened.recipe.model), opened.recipe.logits)
    }
    found = {
        "values that are not finite": [
            n for n, v in opened.tensors.items() if not np.isfinite(v).all()
        ],
        "output channels whose weights are all 0": [
            name
            for name, value in opened.tensors.items()
            if roles.get(name) == "conv_weight"
            and not np.abs(value).reshape(len(value), -1).any(axis=1).all()
        ],
        "scales of 0 in batch norm": _with_zeros(opened, roles, "bn_scale"),
        "running variances of 0": _with_zeros(opened, roles, "bn_var"),
        "running variances below 0": [
            name
            for name, value in opened.tensors.items()
            if roles.get(name) == "bn_var" and (value < 0).any()
        ],
    }
    for what, names in found.items():
        if names:
            more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            yield f"{what}: {', '.join(names[:_SHOWN])}{more}"
    means = [v for n, v in opened.tensors.items() if roles.get(n) == "bn_mean"]
    if means and not any(value.any() for value in means):
        yield "all running means are 0: batch norm never saw an image"


def _with_zeros(opened: Weights, roles: dict[str, Role], role: Role) -> list[str]:
    return [
        name
        for name, value in opened.tensors.items()
        if roles.get(name) == role and (value == 0).any()
    ]
