"""The engine of a framework (`lockstep.backends`), as an engine of inference."""

from typing import Self

import numpy as np

from lockstep import backends
from lockstep.inference.engines import NATIVE, Order
from lockstep.inference.loaded_engine import engine_with


class Native:
    """An engine of a backend, and the world that it computes in."""

    name = NATIVE

    def __init__(self, order: Order) -> None:
        self.precision = order.weights.recipe.precision
        self._world = backends.load(order.execution.backend).world(order.execution)
        self.device = self._world.device
        self.on_gpu = self._world.on_gpu
        try:
            self._engine = engine_with(order.weights, self._world, order.execution)
        except BaseException:
            self._world.close()
            raise

    def __enter__(self) -> Self:
        self._engine.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        try:
            self._engine.__exit__(*error)
        finally:
            self._world.close()

    def predict(self, images: np.ndarray) -> np.ndarray:
        """Return logits, float32 [N, logits], of uint8 images [N, size, size, 3]."""
        return self._engine.predict(images)


def opened(order: Order) -> Native:
    """Return the engine of the execution's backend."""
    return Native(order)
