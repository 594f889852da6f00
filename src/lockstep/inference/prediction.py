"""Predict images: the most likely classes of each."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from lockstep import backends
from lockstep.backends import Engine
from lockstep.data.decoding.augment import decode_into, resampling
from lockstep.data.decoding.decode import check
from lockstep.inference.loaded_engine import ADVICE, engine_with, in_usable_precision
from lockstep.recipes import Execution
from lockstep.recipes.order import centre_plan
from lockstep.runs.events import Listener
from lockstep.runs.recorder import Recorder
from lockstep.system.errors import DataError, DivergedError
from lockstep.weights.class_names import Classes, assumed_classes
from lockstep.weights.opening import Opened, open_weights


@dataclass(frozen=True)
class Prediction:
    """The most likely classes of one image, the likeliest first."""

    path: Path
    classes: tuple[str, ...]
    """Class names, or numbers as text where the names are unknown. Names of a run are those of its folders of images."""
    probabilities: tuple[float, ...]


def predict(
    source: str | Path,
    images: Sequence[str | Path],
    *,
    top: int = 5,
    which: str = "newest",
    ema: bool = False,
    model: str | None = None,
    classes: Classes | None = None,
    precision: str | None = None,
    execution: Execution | None = None,
    listener: Listener | None = None,
) -> list[Prediction]:
    """Return the `top` likeliest classes of every image file. Images are preprocessed as in the recipe's evaluation.

    >>> import lockstep
    >>> [found] = lockstep.predict("run", ["data/val/dots/00006.jpg"], top=3)
    >>> len(found.classes), found.probabilities[0] >= found.probabilities[1]
    (3, True)

    `model` names the model of a file that fits several, such as resnet50 and resnet50-v1.
    `classes` replaces the names of the classes: names, class 0 first, or a file that lists them. By default they are those
    of the weights. If the weights name none and have 1000 outputs, ImageNet's names are assumed. `precision` replaces the
    recipe's precision. By default, fp32 replaces a precision that this processor only emulates. `listener` gets notes about
    the weights, names that are assumed, and precision.

    Raises `DataError` that names the first file that is not an image, or if `classes` does not fit the weights, and
    `DivergedError` if a logit is not a finite number.
    """
    weights = open_weights(source, which=which, ema=ema, model=model).with_classes(classes)
    execution = execution or Execution()
    paths = [Path(image) for image in images]
    world = backends.load(execution.backend).world(execution)
    try:
        recorder = Recorder(listener if world.rank == 0 else None)
        for remark in weights.remarks:
            recorder.note(remark)
        weights = _with_names(in_usable_precision(weights, precision, world, execution, recorder), recorder)
        with engine_with(weights, world, execution) as engine:
            return [found for path in paths for found in _predicted(weights, engine, path, top)]
    finally:
        world.close()


def _with_names(weights: Opened, recorder: Recorder) -> Opened:
    """Return the weights with names of classes; where these are assumed, a note says so."""
    assumed = () if weights.classes else assumed_classes(weights.recipe)
    if not assumed:
        return weights
    which = "1000 outputs" if weights.recipe.logits == 1000 else "1001 outputs as NVIDIA's TensorFlow model, the last unused"
    recorder.note(
        f"the weights name no classes and have {which}; shows ImageNet's names. If these are other classes: --classes FILE"
    )
    return replace(weights, classes=assumed)


def _predicted(weights: Opened, engine: Engine, path: Path, top: int) -> Iterator[Prediction]:
    logits = engine.predict(_prepared(weights, path)[None])[0].astype(np.float64)
    if not np.isfinite(logits).all():
        raise DivergedError(f"{path}: the logits of {weights.source} are not finite numbers. {ADVICE}")
    likelihoods = np.exp(logits - logits.max())
    likelihoods /= likelihoods.sum()
    best = np.argsort(-likelihoods, kind="stable")[:top]
    names = dict(enumerate(weights.classes))
    yield Prediction(path, tuple(names.get(int(i), str(i)) for i in best), tuple(likelihoods[best].tolist()))


def _prepared(weights: Opened, path: Path) -> np.ndarray:
    try:
        data = path.read_bytes()
        size = check(data)  # decoding alone would fill the missing part of a truncated file with grey
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise DataError(f"{path} is not an image that can be read: {error}") from None
    recipe = weights.recipe
    plan = centre_plan(recipe, np.zeros(1, np.int64), np.array([size]))
    out = np.empty((recipe.eval_crop, recipe.eval_crop, 3), np.uint8)
    window, resized, offset = (tuple(column[0].tolist()) for column in (plan.windows, plan.resized, plan.offsets))
    decode_into(
        data,
        size,
        window,
        resized,
        offset,
        flip=False,
        **resampling(recipe, evaluation=True),
        out=out,
    )
    return out
