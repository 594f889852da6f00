"""The state of an engine that holds it in vectors (`Layout`)."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from lockstep.backends.shared.layout import Layout
from lockstep.models.state import State, check_fit, check_masks


class VectorState:
    """Reads, writes and masks the state of an engine.

    The engine sets the attributes. It defines how its framework copies a vector to the host
    (`_copy_to_array`) and fills it (`_fill`), and where masks remove weights (`_load_removed`,
    `_clear_removed`).
    """

    _layout: Layout
    _values: Any
    """The vector of all tensors."""
    _velocity: Any
    _ema: Any | None
    _removed: Any | None
    """Where masks remove weights. It is as long as `_velocity`."""
    _scale: Any
    _done: int

    def read(self) -> State:
        """Return a copy of the state."""
        tensors = self._layout.arrays(self._copy_to_array(self._values))
        momentum = self._layout.arrays(self._copy_to_array(self._velocity))
        average = {}
        if self._ema is not None:
            average = self._layout.arrays(self._copy_to_array(self._ema))
        return State(self._done, tensors, momentum, average, self._scale.read())

    def write(self, state: State) -> None:
        """Replace the state. Raises `CheckpointError` if a name is missing or unknown, or a shape
        does not fit."""
        check_fit(self._layout.shapes, state.tensors, "tensors")
        check_fit(self._layout.parameter_shapes(), state.momentum, "momentum")
        check_fit({} if self._ema is None else self._layout.shapes, state.ema, "moving averages")
        self._fill(self._values, self._layout.vector(state.tensors))
        self._fill(self._velocity, self._layout.vector(state.momentum))
        if self._ema is not None:
            self._fill(self._ema, self._layout.vector(state.ema))
        self._scale.write(state.scaler)
        self._done = state.step
        self._apply_masks()

    def mask(self, masks: Mapping[str, np.ndarray]) -> None:
        """Keep weights at 0 where a mask is False. The masks replace all masks set before."""
        check_masks(self._layout.parameter_shapes(), masks)
        self._removed = self._load_removed(self._layout.find_removed(masks)) if masks else None
        self._apply_masks()

    def _apply_masks(self) -> None:
        if self._removed is not None:
            for vector in (self._values, self._velocity, self._ema):
                if vector is not None:
                    self._clear_removed(vector, self._removed)

    def _copy_to_array(self, vector: Any) -> np.ndarray:
        raise NotImplementedError

    def _fill(self, vector: Any, values: np.ndarray) -> None:
        raise NotImplementedError

    def _load_removed(self, removed: np.ndarray) -> Any:
        raise NotImplementedError

    def _clear_removed(self, vector: Any, removed: Any) -> None:
        """Set weights at the beginning of a vector to 0 where masks remove them."""
        raise NotImplementedError
