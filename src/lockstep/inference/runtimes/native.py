"""The engine of a backend (`lockstep.backends`), as a runtime."""

from typing import Self

import numpy as np

from lockstep import backends
from lockstep.inference.engines import load_engine
from lockstep.inference.runtimes import NATIVE, RuntimeSetup


class Native:
    """An engine of a backend, and the world that it computes in."""

    name = NATIVE

    def __init__(self, setup: RuntimeSetup) -> None:
        self.precision = setup.weights.recipe.precision
        self._world = backends.load(setup.execution.backend).world(setup.execution)
        self.device = self._world.device
        self.on_gpu = self._world.on_gpu
        try:
            self._engine = load_engine(setup.weights, self._world, setup.execution)
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
