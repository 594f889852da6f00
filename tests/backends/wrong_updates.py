"""Engines with a wrong rule of SGD each, for `test_faults`."""

import numpy as np

from lockstep.backends.reference import functions as f
from lockstep.backends.reference.engine import ReferenceEngine
from tests.backends.wrong import Array


class DecaysShortcuts(ReferenceEngine):
    """Treats the batch norm of a shortcut as a kernel, because of its name."""

    def _update(self, gradients: dict[str, Array], step: int) -> None:
        decay = self._recipe.weight_decay
        summed = {
            name: decay * self._tensors[name] if "downsample.1" in name else 0 for name in gradients
        }
        super()._update(
            {name: gradient + summed[name] for name, gradient in gradients.items()}, step
        )


class DecaysApart(ReferenceEngine):
    """Applies weight decay to the weights instead of the gradients."""

    def _update(self, gradients: dict[str, Array], step: int) -> None:
        rate = float(self._learning_rates[step])
        decayed = [name for name in gradients if name in self._decayed]
        without = {name: -self._recipe.weight_decay * self._tensors[name] for name in decayed}
        before = {name: rate * self._recipe.weight_decay * self._tensors[name] for name in decayed}
        super()._update(
            {name: gradient + without.get(name, 0) for name, gradient in gradients.items()}, step
        )
        for name in decayed:
            self._tensors[name] = (self._tensors[name] - before[name]).astype(np.float32)


class RateInside(ReferenceEngine):
    """Updates by v = m * v + rate * g; w -= v. It reads and writes v / rate, so that a single step
    is right."""

    _last: float | None = None

    def _update(self, gradients: dict[str, Array], step: int) -> None:
        rate = float(self._learning_rates[step])
        ratio = np.float32((self._last or rate) / rate)
        self._velocity = {name: value * ratio for name, value in self._velocity.items()}
        super()._update(gradients, step)
        self._last = rate


class Nesterov(ReferenceEngine):
    """Updates by w -= rate * (g + m * v)."""

    def _update(self, gradients: dict[str, Array], step: int) -> None:
        rate = float(self._learning_rates[step])
        before = {name: value.copy() for name, value in self._tensors.items()}
        old = {name: value.copy() for name, value in self._velocity.items()}
        super()._update(gradients, step)
        for name, v in self._velocity.items():
            gradient = v - self._recipe.momentum * old[name]
            self._tensors[name] = (
                before[name] - rate * (gradient + self._recipe.momentum * v)
            ).astype(np.float32)


class WeightsInHalf(ReferenceEngine):
    """Keeps its weights in the precision of the computation."""

    def _update(self, gradients: dict[str, Array], step: int) -> None:
        super()._update(gradients, step)
        for name in self._velocity:
            self._tensors[name] = f.round_to(self._tensors[name], self._recipe.precision)
