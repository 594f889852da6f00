"""Activation recomputation: a residual block keeps only its input, and is computed again in the
backward pass."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def recompute_block(block: nn.Module, *inputs: Tensor | None) -> Tensor:
    """Return the output of a block. Until the backward pass, it keeps its inputs alone.

    The block draws no random numbers, and leaves its inputs as they are. Its batch norms, of any
    kind, move running statistics only in the first of the two passes.
    """
    # A compiled graph moves the statistics once: its backward pass computes only what it needs.
    if torch.compiler.is_compiling():
        return checkpoint(block, *inputs, use_reentrant=False, preserve_rng_state=False)
    return checkpoint(
        block,
        *inputs,
        use_reentrant=False,
        preserve_rng_state=False,
        context_fn=lambda: (nullcontext(), keep_statistics(block)),
    )


@contextmanager
def keep_statistics(block: nn.Module) -> Iterator[None]:
    """Let a block's batch norms write to other memory than to their running statistics.

    They get memory, because the second pass must keep the same tensors as the first: batch norms
    without statistics keep fewer. Frozen batch norms, which are in evaluation mode, read theirs.
    """
    kept = []
    for module in block.modules():
        if not module.training:
            continue
        for name, value in module.named_buffers(recurse=False):
            if name in _STATISTICS:
                kept.append((module, name, value))
    for module, name, value in kept:
        setattr(module, name, torch.empty_like(value))
    try:
        yield
    finally:
        for module, name, value in kept:
            setattr(module, name, value)
