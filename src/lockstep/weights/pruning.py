"""2:4 sparsity of weights files: count the zeros of every group of four, write pruned weights."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.models.architectures import STEM_KERNELS
from lockstep.system.errors import CheckpointError, nearest
from lockstep.weights.calibration import UNCALIBRATED
from lockstep.weights.formats import lockstep_files
from lockstep.weights.opened_weights import LOCKSTEP, Weights
from lockstep.weights.opening import open_weights
from lockstep.weights.sparsity import ALGORITHMS, Zeros, count_zeros, make_masks, prune_tensors
from lockstep.weights.weights_choice import AnySource


def check_sparsity(source: AnySource) -> dict[str, Any]:
    """Return whether weights are 2:4 sparse, and the zeros of every tensor, as plain values that
    JSON can hold.

    `source` is a run, a checkpoint or another program's file, such as an ONNX export. Weights are
    2:4 if at least 2 of every 4 inputs are 0 in each kernel and classifier with at least 4 inputs,
    except in those that the recipe's `sparsity_excluded` names: by default the classifier. The stem
    is one of them if the recipe has four `stem_channels`. Another program's file has no recipe; its
    stem may be 2:4 or dense. Keys of the result:

    - `is_sparse`; `dense`: names of tensors that pruning covers and that are not 2:4.
    - `tensors`: for each name `groups` and `sparse_groups`, which have at least 2 zeros, `values`
      and `zeros`, all numbers, and `is_covered`, whether pruning covers it. The stem's groups are
      three inputs and a fourth one of zeros.
    - `source`, `origin`, `model`, and `sparsity`, the algorithm in the recipe of the weights,
      "none" if there is none.

    Raises `CheckpointError` if the weights cannot be read.
    """
    weights = open_weights(source, needs_classifier=False)
    counts = {}
    dense = []
    for name, zeros in count_zeros(weights.tensors).items():
        is_covered = _is_covered(weights, name, zeros)
        counts[name] = {**asdict(zeros), "is_covered": is_covered}
        if is_covered and not zeros.is_sparse:
            dense.append(name)
    return {
        "source": str(weights.source),
        "origin": weights.origin,
        "model": weights.recipe.fields()["model"],
        "sparsity": weights.recipe.sparsity,
        "is_sparse": not dense,
        "dense": dense,
        "tensors": counts,
    }


def _is_covered(weights: Weights, name: str, zeros: Zeros) -> bool:
    """Return whether pruning covers a tensor. In another program's file, it covers the stem if the
    stem is 2:4."""
    if name in weights.recipe.sparsity_excluded:
        return False
    if name not in STEM_KERNELS:
        return True
    if weights.origin == LOCKSTEP:
        return weights.recipe.stem_channels == 4
    return zeros.is_sparse


def prune(source: AnySource, target: str | Path, algorithm: str = "mask_1d") -> dict[str, Any]:
    """Write weights that are pruned once, without training, as a new safetensors file; return what
    was done.

    `algorithm` is one of `lockstep.weights.sparsity.ALGORITHMS`; the file's recipe has it as
    `sparsity`. What the recipe's `sparsity_excluded` names stays as it is, and so does the stem,
    unless the recipe has four `stem_channels`. Keys of the result: `written`, a path; `zeros`, the
    number of weights that were set to 0; `tensors`, the number of tensors; `remarks` on the source.

    Raises `CheckpointError` if the weights cannot be read, or if the file exists or has another
    suffix.
    """
    if algorithm not in ALGORITHMS:
        raise CheckpointError(
            f"there is no algorithm {algorithm!r}. {nearest(algorithm, ALGORITHMS)}"
        )
    lockstep_files.check_name(Path(target))
    weights = open_weights(source)
    recipe = weights.recipe.replace(sparsity=algorithm)
    masks = make_masks(weights.tensors, algorithm, recipe.sparsity_excluded, recipe.stem_channels)
    tensors = weights.tensors | prune_tensors(weights.tensors, masks)
    state = replace(weights.state, tensors=tensors)
    pruned = replace(weights, recipe=recipe, state=state, calibration=UNCALIBRATED)
    lockstep_files.write(Path(target), pruned)
    return {
        "written": str(target),
        "zeros": sum(int(mask.size - np.count_nonzero(mask)) for mask in masks.values()),
        "tensors": len(masks),
        "remarks": list(weights.remarks),
    }
