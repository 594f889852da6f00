"""What is served: weights or an exported model in a runtime, opened by the thread that computes
with it."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from lockstep.backends import FRAMEWORKS
from lockstep.inference.grad_cam import Explainer, make_explainer
from lockstep.inference.prediction import open_for_prediction
from lockstep.inference.session import Session, SessionOptions, open_session
from lockstep.inference.source import ModelSource
from lockstep.recipes import Recipe
from lockstep.system.errors import UserError
from lockstep.system.ranks import count_ranks
from lockstep.weights.calibration import Calibration

_NAMELESS = "model"
"""The name of a model that is not one of `lockstep.models.architectures.MODELS`, as in `lockstep
export --to triton`."""


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
    calibration: Calibration
    """What turns the logits into probabilities."""
    explains: bool
    """Whether it can compute Grad-CAM."""


class Served:
    """A model in its runtime. Only the thread that opened it may use it."""

    def __init__(self, about: About, runtime: Session, backend: str) -> None:
        self.about = about
        self._runtime = runtime
        self._backend = backend
        self._explainer: Explainer | None = None

    def predict(self, images: np.ndarray) -> np.ndarray:
        """Return logits, float32 [N, logits], of uint8 images [N, size, size, 3]."""
        return self._runtime.predict(images)

    def explain(self, images: np.ndarray, classes: np.ndarray) -> np.ndarray:
        """Return Grad-CAM, float32 [N, height, width]. The first call takes longer: it copies the
        weights.

        Raises `BackendError` if the runtime cannot.
        """
        if self._explainer is None:
            self._explainer = make_explainer(
                self._runtime.weights, self._backend, self._runtime.world
            )
        return self._explainer.heat(images, classes)


@contextmanager
def open_model(source: ModelSource, options: SessionOptions, name: str | None) -> Iterator[Served]:
    """Yield a model that has computed its first batches. `name` is None for the name of its
    architecture.

    Raises what `Model.predict` raises, and `UserError` under a launcher.
    """
    if count_ranks() > 1:
        raise UserError(
            "a server computes in one process, but a launcher started several; start it without one"
        )
    backend = options.execution.backend
    exported = source.find_exported_model(options)
    weights = open_for_prediction(source, options, exported)
    with open_session(weights, options, exported=exported, shares_cores=True) as runtime:
        recipe = runtime.weights.recipe
        known = recipe.model if isinstance(recipe.model, str) and exported is None else _NAMELESS
        about = About(
            name=name or known,
            source=str(weights.source),
            runtime=runtime.runtime,
            precision=recipe.precision,
            recipe=recipe,
            classes=weights.classes,
            calibration=weights.calibration,
            explains=runtime.world is not None and FRAMEWORKS[backend].explains,
        )
        served = Served(about, runtime, backend)
        for images in sorted({1, options.batch}):
            served.predict(np.zeros((images, recipe.eval_crop, recipe.eval_crop, 3), np.uint8))
        yield served
