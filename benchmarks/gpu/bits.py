"""Whether two runs of an engine are the same to the last bit."""

import hashlib

import numpy as np

from benchmarks.gpu.engines import Lockstep
from lockstep.models.state import State
from lockstep.recipes.initial_weights import initial_state


def digest_of_state(state: State) -> str:
    """Return a digest that is equal only if every bit of two states is equal."""
    found = hashlib.sha256(repr((state.step, state.scaler)).encode())
    for part in (state.tensors, state.momentum, state.ema):
        for name, value in part.items():
            found.update(
                f"{name} {value.shape} {value.dtype}".encode()
                + np.ascontiguousarray(value).tobytes()
            )
    return found.hexdigest()


def same_bits(contender: Lockstep, steps: int) -> bool:
    """Return whether an engine ends with the same losses and the same state, to the last bit, if it
    starts again."""
    ends = []
    for _ in range(2):
        contender.prepare()
        contender.engine.write(initial_state(contender.recipe))
        contender.step = 0
        losses = contender.train(steps).losses
        ends.append((losses.tobytes(), digest_of_state(contender.engine.read())))
    return ends[0] == ends[1]
