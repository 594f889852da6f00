"""What every use of trained weights needs: the precision to compute in, and an engine that holds
the weights."""

from typing import cast

import numpy as np

from lockstep import backends
from lockstep.backends import Engine, QuantisingEngine
from lockstep.backends.emulation import find_emulation
from lockstep.recipes import Execution
from lockstep.recipes.initial_weights import initial_state
from lockstep.runs.recorder import Recorder
from lockstep.system.errors import BackendError
from lockstep.weights import Weights

ADVICE = "Try --set precision=fp32, or another checkpoint: --checkpoint with an earlier step."
"""What to do if results are not finite numbers."""


def choose_precision(
    weights: Weights,
    requested: str | None,
    execution: Execution,
    recorder: Recorder,
    *,
    on_gpu: bool,
) -> Weights:
    """Return the weights in the requested precision; without one in the recipe's, or in fp32 if
    that would be emulated."""
    precision = requested or weights.recipe.precision
    emulated = find_emulation(precision, on_gpu=on_gpu, backend=execution.backend)
    if emulated is None:
        return weights.replace_precision(requested)
    if requested is not None:
        recorder.note(f"{emulated}: --set precision=fp32 gives the same results within rounding")
        return weights.replace_precision(requested)
    recorder.note(
        f"computing in fp32, because {emulated}. To keep the recipe's precision:"
        f" --set precision={precision}"
    )
    return weights.replace_precision("fp32")


def load_engine(weights: Weights, world: backends.World, execution: Execution) -> Engine:
    """Return an engine that holds the weights, and quantises if they were trained that way.

    Raises `BackendError` if the engine cannot quantise.
    """
    if weights.scales and not backends.FRAMEWORKS[execution.backend].quantises:
        able = " or ".join(name for name, row in backends.FRAMEWORKS.items() if row.quantises)
        raise BackendError(
            f"the weights were trained for {weights.recipe.quantisation}, which the"
            f" {execution.backend} backend does not compute; use --backend {able}; in Python, on"
        )
    recipe = weights.recipe.replace(ema_decay=0.0)
    engine = backends.load(execution.backend).engine(recipe, np.zeros(1), world, execution)
    engine.write(initial_state(recipe, weights.tensors))
    if weights.scales:
        cast(QuantisingEngine, engine).quantise(weights.scales)
    return engine
