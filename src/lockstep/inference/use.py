"""Use trained weights: evaluate them on a folder of images, predict images, load them as a module."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lockstep import backends
from lockstep.backends import Engine
from lockstep.backends.emulation import emulation
from lockstep.data.decoding.decode import check, decode_into
from lockstep.data.index import open_index
from lockstep.data.loading.loaders import loader_of
from lockstep.data.sources import Source, find_source, find_split, holds_split
from lockstep.data.split import divided, whole_source
from lockstep.models.state import State
from lockstep.recipes import Execution, Recipe
from lockstep.recipes.initial import zero_momentum
from lockstep.recipes.order import centre_plan, evaluation_plans
from lockstep.runs.divergence import not_finite
from lockstep.runs.recorder import Listener, Recorder
from lockstep.system.defaults import DEFAULT_BACKEND
from lockstep.system.errors import DataError, DivergedError
from lockstep.weights.opening import Weights, open_weights


@dataclass(frozen=True)
class Prediction:
    """The most likely classes of one image, the likeliest first."""

    path: Path
    classes: tuple[str, ...]
    """Class names, or numbers as text where the names are unknown."""
    probabilities: tuple[float, ...]


def load(source: str | Path, *, backend: str = DEFAULT_BACKEND, which: str = "newest", ema: bool = False) -> Any:
    """Return the framework's own module with the weights of a run, a checkpoint or a safetensors file.

    For PyTorch this is an ordinary `torch.nn.Module` with torchvision's names, in evaluation mode. It maps normalised
    float32 images [N, 3, H, W] to logits [N, logits]. `which` is "newest", "best" or a step's number; `ema` loads the
    moving average.

    >>> import lockstep, torch
    >>> module = lockstep.load("run")
    >>> module(torch.zeros(2, 3, 64, 64)).shape
    torch.Size([2, 10])
    """
    weights = open_weights(source, which=which, ema=ema)
    return backends.load(backend).load_module(weights.recipe, weights.tensors)


def predict(
    source: str | Path,
    images: Sequence[str | Path],
    *,
    top: int = 5,
    which: str = "newest",
    ema: bool = False,
    precision: str | None = None,
    execution: Execution | None = None,
    listener: Listener | None = None,
) -> list[Prediction]:
    """Return the `top` likeliest classes of every image file. Images are preprocessed as in the recipe's evaluation.

    >>> import lockstep
    >>> [found] = lockstep.predict("run", ["data/val/dots/00006.jpg"], top=3)
    >>> len(found.classes), found.probabilities[0] >= found.probabilities[1]
    (3, True)

    `precision` replaces the recipe's precision. By default, fp32 replaces a precision that this processor only emulates,
    and `listener` gets a note about it. Raises `DataError` that names the first file that is not an image,
    `DivergedError` if a logit is not a finite number.
    """
    weights = open_weights(source, which=which, ema=ema)
    execution = execution or Execution()
    paths = [Path(image) for image in images]
    world = backends.load(execution.backend).world(execution)
    try:
        weights = _settled(weights, precision, world, execution, Recorder(listener if world.rank == 0 else None))
        with _engine(weights, world, execution) as engine:
            return [found for path in paths for found in _predicted(weights, engine, path, top)]
    finally:
        world.close()


_ADVICE = "Try --set precision=fp32, or another checkpoint: --checkpoint best or an earlier step."


def _predicted(weights: Weights, engine: Engine, path: Path, top: int) -> Iterator[Prediction]:
    logits = engine.predict(_prepared(weights, path)[None])[0].astype(np.float64)
    if not np.isfinite(logits).all():
        raise DivergedError(f"{path}: the logits of {weights.source} are not finite numbers. {_ADVICE}")
    likelihoods = np.exp(logits - logits.max())
    likelihoods /= likelihoods.sum()
    best = np.argsort(-likelihoods, kind="stable")[:top]
    names = dict(enumerate(weights.classes))
    yield Prediction(path, tuple(names.get(int(i), str(i)) for i in best), tuple(likelihoods[best].tolist()))


def _prepared(weights: Weights, path: Path) -> np.ndarray:
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
    how = {"antialias": recipe.antialias, "dct_scaling": recipe.dct_scaling}
    decode_into(data, size, window, resized, offset, flip=False, **how, out=out)
    return out


def _settled(
    weights: Weights, asked: str | None, world: backends.World, execution: Execution, recorder: Recorder
) -> Weights:
    """Return the weights in the requested precision; without one in the recipe's, or in fp32 if that would be emulated."""
    precision = asked or weights.recipe.fields()["precision"]
    emulated = emulation(precision, on_gpu=world.on_gpu, backend=execution.backend)
    if emulated is None:
        return weights.in_precision(asked)
    if asked is not None:
        recorder.note(f"{emulated}: --set precision=fp32 gives the same results within rounding")
        return weights.in_precision(asked)
    recorder.note(f"computes in fp32; {emulated}. To keep the recipe's precision: --set precision={precision}")
    return weights.in_precision("fp32")


def _engine(weights: Weights, world: backends.World, execution: Execution) -> Engine:
    recipe = weights.recipe.replace(ema_decay=0.0)
    engine = backends.load(execution.backend).engine(recipe, np.zeros(1), world, execution)
    engine.write(State(0, weights.tensors, zero_momentum(recipe)))
    return engine


def _evaluated(data: Path, recipe: Recipe, split: float | None) -> tuple[Source, float]:
    """Return the images, and the share of them that is set apart for validation; 0 means all are evaluated."""
    if split is None and holds_split(data, "val"):
        return find_split(data, "val"), 0.0
    share = recipe.validation_share if split is None else recipe.replace(validation_share=split).validation_share
    return whole_source(data) if share or split is not None else find_source(data), share


def evaluate(
    source: str | Path,
    data: str | Path,
    *,
    which: str = "newest",
    ema: bool = False,
    precision: str | None = None,
    split: float | None = None,
    batch_images: int = 32,
    execution: Execution | None = None,
    listener: Listener | None = None,
) -> dict[str, Any]:
    """Return accuracy, loss and per-class counts on the validation images of `data`, or on all images if it has none.

    If `data` has no validation images and the weights come from a run that set a share of its images apart for validation,
    that share is evaluated. `split` is a different share; 0 evaluates all images.

    Every image counts once. `precision` replaces the recipe's precision. By default, fp32 replaces a precision that this
    processor only emulates, and `listener` gets a note about it. With several processes (torchrun), every process calls
    this and gets the result. Raises `DivergedError` if a loss is not a finite number.

    >>> import lockstep
    >>> result = lockstep.evaluate("run", "data", which="best")
    >>> result["images"], 0 <= result["top1_percent"] <= result["top5_percent"] <= 100
    (20, True)
    """
    weights, execution = open_weights(source, which=which, ema=ema), execution or Execution()
    data = Path(data)
    images, share = _evaluated(data, weights.recipe, split)
    world = backends.load(execution.backend).world(execution)
    recorder = Recorder(listener if world.rank == 0 else None)
    try:
        weights = _settled(weights, precision, world, execution, recorder)
        recipe = weights.recipe
        index = open_index(images, classes=weights.classes or None, progress=recorder.progress("indexing"))
        remarks = list(weights.remarks)
        if share:
            images_in_all, index = len(index), divided(index, share)[1]
            remarks.append(
                f"evaluates the share of {share:g} that is set apart for validation, {len(index)} of {images_in_all} "
                "images; --split 0 evaluates all"
            )
        if len(index.classes) > recipe.logits:
            raise DataError(f"{images.named} has {len(index.classes)} classes, but the model has {recipe.logits} logits")
        total = math.ceil(len(index) / (batch_images * world.ranks))
        plans = evaluation_plans(recipe, index.sizes, batch_images, rank=world.rank, ranks=world.ranks)
        with (
            _engine(weights, world, execution) as engine,
            loader_of(index, recipe, execution, size=recipe.eval_crop) as loader,
        ):
            scores = engine.evaluate(recorder.watched("evaluating", loader.batches(plans), total))
    finally:
        world.close()
    if found := not_finite(scores):
        raise DivergedError(f"the loss of {weights.source} on {images.named} is not finite: {found}. {_ADVICE}")
    return {
        "source": str(weights.source),
        "remarks": remarks,
        "data": images.named,
        "precision": recipe.precision,
        **scores.counts().summary(),
        "quarantined": index.listed_quarantine(),
        "classes": index.classes,
        "per_class": scores.per_class(len(index.classes)),
    }
