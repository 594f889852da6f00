"""What a weights file is, without converting it: origin, model, classes, arrays, oddities."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from lockstep.models.architectures import Role
from lockstep.system.text import list_first
from lockstep.weights.formats.account import Part
from lockstep.weights.opened_weights import Weights
from lockstep.weights.opening import open_weights
from lockstep.weights.weights_choice import AnySource

_SHOWN = 5
_NAMED = 3
_LONGEST = 80


def inspect(source: AnySource) -> dict[str, Any]:
    """Return what a run, a checkpoint or another program's file holds, as plain values that JSON
    can hold.

    - "stored" lists the arrays next to the weights as the file has them: "name", "dtype", "shape",
      and "tensors", the canonical names of what is made from each. "dtypes" counts the types of the
      used ones.
    - "account" lists what the reader did with other parts of the file: "name", "treatment" and
      "reason" (`lockstep.weights.formats.account.Part`).
    - "preprocessing_from" says where each value of "preprocessing" comes from: "file",
      "certificate", "user" or "assumed".

    Raises `CheckpointError` if it cannot be read.
    """
    weights = open_weights(source, ema=False, momentum=True, needs_classifier=False)
    state = weights.state
    return {
        "source": str(weights.source),
        "origin": weights.origin,
        "model": weights.recipe.fields()["model"],
        "logits": weights.recipe.logits if weights.has_classifier else None,
        "classes": list(weights.classes),
        "parameters": sum(
            value.size for name, value in weights.tensors.items() if "running_" not in name
        ),
        "tensors": len(weights.tensors),
        "dtypes": dict(Counter(array.dtype for array in weights.stored if array.tensors)),
        "stored": [asdict(array) for array in weights.stored],
        "account": [asdict(part) for part in weights.parts],
        "step": state.step or None,
        "epochs": weights.epochs,
        "velocities": bool(state.momentum),
        "moving_average": bool(state.ema),
        "loss_scale": state.scaler.get("scale"),
        "preprocessing": weights.recipe.preprocessing(),
        "preprocessing_from": dict(weights.preprocessing_from),
        "remarks": list(weights.remarks),
        "oddities": list(find_oddities(weights)),
    }


def group_by_kind(stored: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return numbers, types and the first names of the used arrays of each kind, given "stored" of
    `inspect`, for users."""
    groups: dict[str, list[Mapping[str, Any]]] = {
        "kernels": [],
        "batch norms": [],
        "classifier": [],
    }
    for array in stored:
        if array["tensors"]:
            groups[_find_kind(array)].append(array)
    return {kind: _summarise(arrays) for kind, arrays in groups.items() if arrays}


def group_parts(parts: Iterable[Part]) -> Iterator[tuple[str, str]]:
    """Yield, for users, how parts are treated, with the reason and the first names of each group:
    "folded", "into the classifier: Gather 'y'"."""
    groups: dict[tuple[str, str], list[str]] = {}
    for part in parts:
        groups.setdefault((part.treatment, part.reason), []).append(part.name[:_LONGEST])
    for (treatment, reason), names in groups.items():
        yield treatment, ": ".join(filter(None, (reason, list_first(names, _SHOWN))))


def _find_kind(array: Mapping[str, Any]) -> str:
    if array["tensors"][0].startswith("fc."):
        return "classifier"
    return "kernels" if len(array["shape"]) == 4 else "batch norms"


def _summarise(arrays: Sequence[Mapping[str, Any]]) -> str:
    counts = Counter(array["dtype"] for array in arrays)
    dtypes = ", ".join(f"{dtype} {count}" for dtype, count in counts.items())
    names = ", ".join(array["name"][:_LONGEST] for array in arrays[:_NAMED])
    return f"{dtypes}: {names}{', ...' if len(arrays) > _NAMED else ''}"


_ODDITIES: tuple[tuple[str, Role | None, Callable[[np.ndarray], Any]], ...] = (
    ("values that are not finite", None, lambda value: ~np.isfinite(value)),
    (
        "output channels whose weights are all 0",
        "conv_weight",
        lambda value: ~value.any(axis=(1, 2, 3)),
    ),
    ("scales of 0 in batch norm", "bn_scale", lambda value: value == 0),
    ("running variances of 0", "bn_var", lambda value: value == 0),
    ("running variances below 0", "bn_var", lambda value: value < 0),
)
"""What is odd in tensors of a role, or of any role, and where it is in an array."""


def find_oddities(weights: Weights) -> Iterator[str]:
    """Yield what is odd in the values: not finite, dead channels, batch norms that never saw an
    image or a variance of 0."""
    spec = weights.recipe.spec
    roles = {tensor.name: tensor.role for tensor in spec.list_tensors(weights.recipe.logits)}
    for oddity, role, find_odd in _ODDITIES:
        names = []
        for name, value in weights.tensors.items():
            if role in (None, roles.get(name)) and find_odd(value).any():
                names.append(name)
        if names:
            yield f"{oddity}: {list_first(names, _SHOWN)}"
    folded = {f"{name}.running_mean" for name in weights.folded_norms}
    names = [name for name in roles if roles[name] == "bn_mean" and name not in folded]
    means = [weights.tensors[name] for name in names]
    if means and not any(value.any() for value in means):
        yield "all running means are 0: batch norm never saw an image"
