"""Predict images: the most likely classes of each."""

import math
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import count, islice
from pathlib import Path
from typing import Any, Self

import numpy as np

from lockstep.inference.computation import find_exported_model, open_computation
from lockstep.inference.embeddings import add_features, count_features
from lockstep.inference.grad_cam import Explainer, make_explainer, overlay
from lockstep.inference.images import Image, find_path, list_images, read_square
from lockstep.inference.loaded_engine import ADVICE
from lockstep.inference.runtimes import AUTO, NATIVE, start_import
from lockstep.inference.runtimes.exported import ExportedModel
from lockstep.inference.selection import is_default, open_source, replace_threshold
from lockstep.models.calibration import UNCALIBRATED, Calibration, compute_probabilities
from lockstep.recipes import Execution
from lockstep.runs.events import Listener
from lockstep.runs.recorder import Recorder
from lockstep.system.errors import DataError, DivergedError, UserError
from lockstep.system.machine import share_of_cores
from lockstep.system.ranks import is_leading
from lockstep.weights import AnySource, Classes, Preprocessing, Weights, WeightsChoice, choose
from lockstep.weights.class_names import UNNAMED, assume_classes

BATCH = 32
"""Images in a batch, by default."""
_AHEAD = 2
"""This many batches are being decoded while one is computed."""
OnError = Callable[[str, str], None]
"""Called with the name of an image that cannot be read, and the reason."""


@dataclass(frozen=True)
class Prediction:
    """The most likely classes of one image, the likeliest first."""

    path: Path | None
    """The image's path; None for images that were given as bytes, arrays or images of Pillow."""
    classes: tuple[str, ...]
    """Class names, or numbers as text where the names are unknown. Names of a run are those of its
    folders of images."""
    probabilities: tuple[float, ...]
    is_unknown: bool = False
    """Whether the likeliest class is less probable than the threshold."""
    features: np.ndarray | None = field(default=None, compare=False, repr=False)
    """The features before the classifier, float32 [features], of a `Predictor` with `features`."""
    explanation: np.ndarray | None = field(default=None, compare=False, repr=False)
    """The image as the model sees it, with Grad-CAM of the likeliest class over it, of a
    `Predictor` with `explain`: uint8 RGB [size, size, 3]."""


class Predictor:
    """Weights in a runtime, to predict any number of images; a context manager.

    >>> import lockstep
    >>> with lockstep.Predictor("run") as predictor:
    ...     [found] = predictor.predict("data/val/dots/00006.jpg", top=3)
    ...     [logits] = predictor.logits("data/val/dots/00006.jpg")
    >>> len(found.classes), logits.shape
    (3, (10,))

    An image is a path, the bytes of an image file, an image of Pillow, or an array or a tensor of
    any library: RGB [height, width, 3] or [3, height, width], in uint8 or in floats from 0 to 1.
    One image or any number of them may be given, also as an array [N, ...]. Threads decode `batch`
    images at a time, while the runtime computes the batch before. Results are computed when they
    are needed: at most three batches are in memory.
    """

    def __init__(
        self,
        source: AnySource,
        *,
        checkpoint: str | None = None,
        ema: bool | None = None,
        model: str | None = None,
        classes: Classes | None = None,
        precision: str | None = None,
        batch: int = BATCH,
        features: bool = False,
        explain: bool = False,
        unknown_below: float | None = None,
        runtime: str | None = None,
        execution: Execution | None = None,
        preprocessing: Preprocessing | None = None,
        listener: Listener | None = None,
    ) -> None:
        """Open weights as `lockstep.predict` does, with the same arguments and errors.

        With `features`, every prediction has the features of its image. With `explain`, it has a
        picture of what speaks for the likeliest class. Raises `BackendError` if the backend cannot
        explain, or another runtime would predict.
        """
        if batch < 1:
            raise UserError(f"batch is {batch}; expected at least 1")
        execution = execution or Execution()
        start_import(runtime or NATIVE, execution)  # while weights are read, on another core
        recorder = Recorder(listener if is_leading() else None)
        choice = choose(source, checkpoint, ema, model, preprocessing)
        may_export = not (features or explain)
        weights, exported = open_for_prediction(
            choice, runtime, execution, recorder, classes, unknown_below, as_exported=may_export
        )
        self._weights = weights
        self._batch_size = batch
        self.features = count_features(weights) if features else 0
        """The number of features of an image; 0 if predictions have none."""
        self.unknown_below = weights.calibration.unknown_below
        """An image is unknown if its likeliest class is less probable than this; 0: none is."""
        name = runtime or (AUTO if exported else NATIVE)
        computed = add_features(weights) if features else weights
        sizes: dict[str, Any] = {"most_images": batch, "exported": exported}
        with ExitStack() as stack:
            computation = stack.enter_context(
                open_computation(name, computed, precision, execution, listener, **sizes)
            )
            self._logits = computation.predict
            self.runtime = computation.runtime
            """The name of the runtime."""
            self._explainer: Explainer | None = None
            if explain:
                self._explainer = make_explainer(weights, execution.backend, computation.world)
            self._threads = execution.loader_threads or share_of_cores()
            self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="lockstep-predict")
            stack.callback(self._pool.shutdown, wait=True, cancel_futures=True)
            self._stack = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the runtime and end the threads."""
        self._stack.close()

    def predict(
        self, images: Image | Iterable[Image], top: int = 5, *, on_error: OnError | None = None
    ) -> Generator[Prediction, None, None]:
        """Yield the `top` likeliest classes of every image, in order.

        `on_error` is called with the name and the reason for every image that cannot be read; the
        other images are predicted. Without it, the first such image raises `DataError`. Raises
        `DivergedError` if a logit is not a finite number.
        """
        names = dict(enumerate(self._weights.classes))
        for batch in self._batches(images, on_error):
            outputs = self._logits(batch.pixels)
            for label, row in zip(batch.labels, outputs, strict=True):
                if not np.isfinite(row).all():
                    raise DivergedError(
                        f"{label}: the logits of {self._weights.source} are not finite numbers."
                        f" {ADVICE}"
                    )
            features, logits = np.split(outputs, [self.features], axis=1)
            pictures = None
            if self._explainer is not None:
                heat = self._explainer.heat(batch.pixels, logits.argmax(axis=1))
                pictures = overlay(batch.pixels, heat)
            for i, path in enumerate(batch.paths):
                best, probabilities = find_likeliest(logits[i], top, self._weights.calibration)
                classes = tuple(names.get(number, str(number)) for number in best)
                row = None
                if self.features:
                    row = features[i].copy()  # a part of the array would keep all of it
                picture = None if pictures is None else pictures[i]
                is_unknown = bool(probabilities) and probabilities[0] < self.unknown_below
                yield Prediction(path, classes, probabilities, is_unknown, row, picture)

    def logits(
        self, images: Image | Iterable[Image], *, on_error: OnError | None = None
    ) -> Generator[np.ndarray, None, None]:
        """Yield the logits of every image, float32 [logits], in order. `on_error` is that of
        `predict`."""
        for batch in self._batches(images, on_error):
            yield from self._logits(batch.pixels)[:, self.features :]

    def _batches(
        self, images: Image | Iterable[Image], on_error: OnError | None
    ) -> Iterator["_Batch"]:
        """Yield batches of images that could be read, decoded ahead."""
        every = list_images(images)
        numbers = count(0, self._batch_size)
        groups = iter(lambda: list(islice(every, self._batch_size)), [])
        started = deque(self._start(group, next(numbers)) for group in islice(groups, _AHEAD))
        try:
            while started:
                batch = started.popleft()
                for task in batch.work:
                    task.result()
                started.extend(self._start(group, next(numbers)) for group in islice(groups, 1))
                for i in sorted(batch.reasons):
                    if on_error is None:
                        raise DataError(f"{batch.labels[i]}: {batch.reasons[i]}")
                    on_error(batch.labels[i], batch.reasons[i])
                if len(batch.reasons) < len(batch.labels):
                    yield batch.drop_unreadable()
        finally:
            for batch in started:
                for task in batch.work:
                    task.cancel()

    def _start(self, images: list[Image], first: int) -> "_Batch":
        size = self._weights.recipe.eval_crop
        paths = [find_path(image) for image in images]
        labels = []
        for number, path in enumerate(paths, start=first):
            labels.append(f"images[{number}]" if path is None else str(path))
        batch = _Batch(labels, paths, np.empty((len(images), size, size, 3), np.uint8))
        # One task for each image wastes the threads' time; too few tasks leave threads idle at the
        # end of a batch.
        count = math.ceil(len(images) / (4 * self._threads))
        for begin in range(0, len(images), count):
            some = images[begin : begin + count]
            batch.work.append(self._pool.submit(self._read, batch, some, begin))
        return batch

    def _read(self, batch: "_Batch", images: list[Image], first: int) -> None:
        for i, image in enumerate(images, start=first):
            try:
                read_square(image, self._weights.recipe, batch.pixels[i])
            except OSError as error:
                batch.reasons[i] = error.strerror or str(error)
            except ValueError as error:
                batch.reasons[i] = f"not an image that can be read: {error}"


@dataclass
class _Batch:
    """Images that are being decoded."""

    labels: list[str]
    """What messages call the images."""
    paths: list[Path | None]
    pixels: np.ndarray
    """uint8 [images, size, size, 3]."""
    reasons: dict[int, str] = field(default_factory=dict)
    """Why images could not be read, by position."""
    work: list[Future[None]] = field(default_factory=list)

    def drop_unreadable(self) -> "_Batch":
        """Return the batch without images that could not be read."""
        if not self.reasons:
            return self
        kept = [i for i in range(len(self.labels)) if i not in self.reasons]
        return _Batch(
            [self.labels[i] for i in kept], [self.paths[i] for i in kept], self.pixels[kept]
        )


def predict(
    source: AnySource,
    images: Image | Iterable[Image],
    *,
    top: int = 5,
    checkpoint: str | None = None,
    ema: bool | None = None,
    model: str | None = None,
    classes: Classes | None = None,
    precision: str | None = None,
    batch: int = BATCH,
    unknown_below: float | None = None,
    runtime: str | None = None,
    execution: Execution | None = None,
    preprocessing: Preprocessing | None = None,
    listener: Listener | None = None,
) -> list[Prediction]:
    """Return the `top` likeliest classes of every image. Images are preprocessed as in the recipe's
    evaluation.

    Images are those that a `lockstep.Predictor` takes: paths, bytes, arrays, tensors and images of
    Pillow. It also keeps the runtime for further images, and gives results one by one.

    >>> import lockstep
    >>> [found] = lockstep.predict("run", "data/val/dots/00006.jpg", top=3)
    >>> len(found.classes), found.probabilities[0] >= found.probabilities[1]
    (3, True)

    `checkpoint` of a run is "newest", "best" or a step's number. By default it is the best one, or
    the newest one of a run that was never evaluated. `ema` chooses the moving average (True) or the
    trained weights (False), by default whichever is better in the best checkpoint. `model` names
    the model of a file that fits several, such as resnet50 and resnet50-v1.
    `preprocessing` is how images are prepared, as in `lockstep.evaluate`. `classes` replaces the
    names of the classes: names, class 0 first, or a file that lists them. By default they are those
    of the weights. If the weights name none and have 1000 outputs, ImageNet's names are assumed.
    An image whose likeliest class is less probable than `unknown_below` is unknown; by default that
    is the checkpoint's threshold. `precision` replaces the recipe's precision. By default, fp32
    replaces a precision that this processor only emulates. `runtime` is "native" (the execution's
    backend; the default), another runtime such as "onnxruntime", or "auto", the fastest one that is
    installed. An exported ONNX model runs as it is, unless `runtime` is "native". `listener` gets
    notes about the weights, names that are assumed, the precision and the runtime.

    Raises `DataError` that names the first file that is not an image, or if `classes` does not fit
    the weights, and `DivergedError` if a logit is not a finite number.
    """
    with Predictor(
        source,
        checkpoint=checkpoint,
        ema=ema,
        model=model,
        classes=classes,
        precision=precision,
        batch=batch,
        unknown_below=unknown_below,
        runtime=runtime,
        execution=execution,
        preprocessing=preprocessing,
        listener=listener,
    ) as predictor:
        return list(predictor.predict(images, top))


def open_for_prediction(
    choice: WeightsChoice,
    runtime: str | None,
    execution: Execution,
    recorder: Recorder,
    classes: Classes | None,
    unknown_below: float | None,
    *,
    as_exported: bool = True,
) -> tuple[Weights, ExportedModel | None]:
    """Return weights with names of classes, and the exported model if the source is one and is to
    run as it is. Such a model has no weights.

    Notes report remarks on the weights, and names that are assumed. The arguments and errors are
    those of `predict`.
    """
    exported = None
    if as_exported and is_default(choice):
        exported = find_exported_model(Path(choice.source), runtime, execution)
    weights = open_source(choice) if exported is None else exported.about
    weights = replace_threshold(weights, unknown_below)
    for remark in weights.remarks:
        recorder.note(remark)
    if weights.calibration != UNCALIBRATED:
        recorder.note(describe_calibration(weights.calibration))
    return _name_classes(weights.replace_classes(classes), recorder), exported


def find_likeliest(
    logits: np.ndarray, top: int, calibration: Calibration = UNCALIBRATED
) -> tuple[list[int], tuple[float, ...]]:
    """Return the numbers of the `top` likeliest classes of an image, and their probabilities, from
    its logits [logits]."""
    probabilities = compute_probabilities(logits, calibration.temperature)
    best = np.argsort(-probabilities, kind="stable")[:top]
    return best.tolist(), tuple(probabilities[best].tolist())


def describe_calibration(calibration: Calibration) -> str:
    """Return how probabilities are computed, and when an image is unknown, for people."""
    parts = []
    if calibration.temperature != 1:
        parts.append(
            f"probabilities are calibrated: logits are divided by {calibration.temperature:.3g}"
        )
    if calibration.unknown_below:
        parts.append(f"images below {100 * calibration.unknown_below:.2f} % are unknown")
    return "; ".join(parts)


def _name_classes(weights: Weights, recorder: Recorder) -> Weights:
    """Return the weights with names of classes; a note reports names that are assumed."""
    assumed = () if weights.classes else assume_classes(weights.recipe)
    if not (assumed or weights.classes):
        recorder.note(f"{UNNAMED}; shows the numbers of the outputs")
    if not assumed:
        return weights
    outputs = "1000 outputs"
    if weights.recipe.logits != 1000:
        outputs = "1001 outputs as NVIDIA's TensorFlow model, the last unused"
    recorder.note(
        f"the weights name no classes and have {outputs}; shows ImageNet's names. If these are"
        " other classes: --classes FILE"
    )
    return replace(weights, classes=assumed)
