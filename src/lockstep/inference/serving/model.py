"""What is served: weights or an exported model in a runtime, opened by the thread that computes
with it."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.backends import FRAMEWORKS
from lockstep.inference.computation import Computing, computing
from lockstep.inference.explanation import Explainer, explainer_of
from lockstep.inference.prediction import to_predict
from lockstep.inference.runtimes import AUTO, NATIVE
from lockstep.recipes import Execution, Recipe
from lockstep.runs.events import Listener
from lockstep.runs.recorder import Recorder
from lockstep.system.errors import UserError
from lockstep.weights import Classes, Preprocessing

_NAMELESS = "model"
"""The name of a model that is not one of `lockstep.models.architectures.MODELS`, as in `lockstep
export --to triton`."""


@dataclass(frozen=True)
class Source:
    """What to serve, and how to compute. The fields are the arguments of `lockstep.predict`."""

    source: str | Path
    checkpoint: str = "newest"
    ema: bool = False
    model: str | None = None
    classes: Classes | None = None
    precision: str | None = None
    runtime: str | None = None
    execution: Execution | None = None
    preprocessing: Preprocessing | None = None


@dataclass(frozen=True)
class About:
    """What is known of a model that is served."""

    name: str
    source: str
    runtime: str
    precision: str
    recipe: Recipe
    """Preprocessing and number of logits."""
    classes: tuple[str, ...]
    """Names of the classes; empty if unknown."""
    explains: bool
    """Whether it can compute Grad-CAM."""


class Served:
    """A model in its runtime. Only the thread that opened it may use it."""

    def __init__(self, about: About, found: Computing, backend: str) -> None:
        self.about = about
        self._found = found
        self._backend = backend
        self._explainer: Explainer | None = None

    def predict(self, images: np.ndarray) -> np.ndarray:
        """Return logits, float32 [N, logits], of uint8 images [N, size, size, 3]."""
        return self._found.predict(images)

    def explain(self, images: np.ndarray, classes: np.ndarray) -> np.ndarray:
        """Return Grad-CAM, float32 [N, height, width]. The first call takes longer: it copies the
        weights.

        Raises `BackendError` if the runtime cannot.
        """
        if self._explainer is None:
            self._explainer = explainer_of(self._found.weights, self._backend, self._found.world)
        return self._explainer.heat(images, classes)


@contextmanager
def opened(
    given: Source, name: str | None, listener: Listener | None, *, most_images: int
) -> Iterator[Served]:
    """Yield a model that has computed its first batches. `name` is None for the name of its
    architecture.

    Raises what `lockstep.predict` raises, and `UserError` under a launcher.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError(
            "a server computes in one process, but a launcher started several; start it without the"
            " launcher"
        )
    execution = given.execution or Execution()
    recorder = Recorder(listener)
    chosen: dict[str, Any] = {
        "checkpoint": given.checkpoint,
        "ema": given.ema,
        "model": given.model,
        "classes": given.classes,
    }
    chosen["preprocessing"] = given.preprocessing
    weights, exported = to_predict(given.source, given.runtime, execution, recorder, **chosen)
    runtime = given.runtime or (AUTO if exported else NATIVE)
    size: dict[str, Any] = {"most_images": most_images, "exported": exported, "shares_cores": True}
    with computing(runtime, weights, given.precision, execution, listener, **size) as found:
        recipe = found.weights.recipe
        explains = found.world is not None and FRAMEWORKS[execution.backend].explains
        known = recipe.model if isinstance(recipe.model, str) and exported is None else _NAMELESS
        classes = weights.classes
        source = str(weights.source)
        about = About(
            name or known, source, found.runtime, recipe.precision, recipe, classes, explains
        )
        served = Served(about, found, execution.backend)
        for images in sorted({1, most_images}):
            served.predict(np.zeros((images, recipe.eval_crop, recipe.eval_crop, 3), np.uint8))
        yield served
