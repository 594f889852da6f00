"""The state of an engine that holds it in vectors (`Layout`)."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from lockstep.backends.shared.formulas import Kept
from lockstep.backends.shared.layout import Group, Layout
from lockstep.models.state import State, check_fit, check_masks


class VectorState:
    """Reads, writes and masks a state.

    A backend sets the attributes. It defines how its framework copies a vector to the host
    (`_copy_to_array`) and fills it (`_fill`), and where masks remove weights (`_load_removed`,
    `_clear_removed`).
    """

    layout: Layout
    values: Any
    """The vector of all tensors."""
    velocity: Any
    second_moments: Any | None
    """As long as `velocity`; None if the optimizer has none."""
    ema: Any | None
    """The vector of the moving averages; None without `ema_decay`."""
    scale: Any
    """The loss scale."""
    done: int = 0
    """Number of steps done."""
    _removed: Any | None = None
    """Where masks remove weights. It is as long as `velocity`."""

    def read(self) -> State:
        """Return a copy of the state."""
        tensors = self.layout.arrays(self._copy_to_array(self.values))
        momentum = self.layout.arrays(self._copy_to_array(self.velocity))
        average, second_moments = (
            {} if vector is None else self.layout.arrays(self._copy_to_array(vector))
            for vector in (self.ema, self.second_moments)
        )
        return State(self.done, tensors, momentum, average, self.scale.read(), second_moments)

    def write(self, state: State) -> None:
        """Replace the state. Raises `CheckpointError` if it does not fit."""
        check_fit(self.layout.shapes, state.tensors, "tensors")
        check_fit(self.layout.parameter_shapes(), state.momentum, "momentum")
        check_fit({} if self.ema is None else self.layout.shapes, state.ema, "moving averages")
        moments = {} if self.second_moments is None else self.layout.parameter_shapes()
        check_fit(moments, state.second_moments, "second moments")
        self._fill(self.values, self.layout.vector(state.tensors))
        self._fill(self.velocity, self.layout.vector(state.momentum))
        if self.ema is not None:
            self._fill(self.ema, self.layout.vector(state.ema))
        if self.second_moments is not None:
            self._fill(self.second_moments, self.layout.vector(state.second_moments))
        self.scale.write(state.scaler)
        self.done = state.step
        self._apply_masks()

    def mask(self, masks: Mapping[str, np.ndarray]) -> None:
        """Keep weights at 0 where a mask is False. The masks replace all masks set before."""
        check_masks(self.layout.parameter_shapes(), masks)
        self._removed = self._load_removed(self.layout.find_removed(masks)) if masks else None
        self._apply_masks()

    def _find_parts(self, group: Group) -> tuple[Any, Kept]:
        """Return the weights of a group and what the optimizer keeps for them: views."""
        vectors = [self.values, self.velocity]
        if self.second_moments is not None:
            vectors.append(self.second_moments)
        weights, *kept = [vector[self.layout.trained_place][group.place] for vector in vectors]
        return weights, Kept(*kept)

    def _apply_masks(self) -> None:
        if self._removed is not None:
            for vector in (self.values, self.velocity, self.second_moments, self.ema):
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
