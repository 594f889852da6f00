"""Predict images: the most likely classes of each."""

import math
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import count, islice
from pathlib import Path
from typing import TYPE_CHECKING, Self

import numpy as np

from lockstep.inference.embeddings import add_features
from lockstep.inference.engines import ADVICE
from lockstep.inference.grad_cam import Explainer, make_explainer, overlay
from lockstep.inference.images import Image, find_path, list_images, read_square
from lockstep.inference.runtimes import NATIVE, start_import
from lockstep.inference.session import SessionOptions, open_session
from lockstep.inference.source import ModelSource
from lockstep.runs.recorder import Recorder
from lockstep.system.errors import DataError, DivergedError
from lockstep.system.machine import share_of_cores
from lockstep.system.ranks import is_leading
from lockstep.weights import Weights
from lockstep.weights.calibration import UNCALIBRATED, Calibration, compute_probabilities
from lockstep.weights.class_names import UNNAMED, assume_classes

if TYPE_CHECKING:
    from lockstep.inference.runtimes.exported import ExportedModel

_AHEAD = 2
"""This many batches are being decoded while one is computed."""
OnError = Callable[[str, str], None]
"""Called with the name of an image that cannot be read, and the reason."""


@dataclass(frozen=True)
class Prediction:
    """The most likely classes of one image, the top class first.

    >>> import lockstep
    >>> prediction = lockstep.load("run").predict("data/val/dots/00006.jpg", top=2)
    >>> prediction.path.name, len(prediction.classes), sum(prediction.probabilities) <= 1
    ('00006.jpg', 2, True)
    """

    path: Path | None
    """The path of the image; None for bytes, arrays and Pillow images."""
    classes: tuple[str, ...]
    """Names of the classes, or output numbers as text. A run has the names of its image folders."""
    probabilities: tuple[float, ...]
    """The probability of each class, from 0 to 1."""
    is_unknown: bool = False
    """Whether the top class is less probable than the model's `unknown_below`."""
    features: np.ndarray | None = field(default=None, compare=False, repr=False)
    """The input of the classifier, float32 [features], if you asked for it."""
    explanation: np.ndarray | None = field(default=None, compare=False, repr=False)
    """Grad-CAM of the top class over the image, if you asked for it: uint8 [size, size, 3]."""


class Predictor:
    """A model in a runtime, to predict any number of images; a context manager.

    Threads decode a batch of images, while the runtime computes the batch before. Results are
    computed when they are needed: at most three batches are in memory.
    """

    def __init__(
        self,
        source: ModelSource,
        options: SessionOptions,
        *,
        features: bool = False,
        explain: bool = False,
    ) -> None:
        """Open a model. Raises `BackendError` if its backend cannot explain, or is not used."""
        execution = options.execution
        start_import(options.runtime or NATIVE, execution)  # while weights are read
        exported = None if features or explain else source.find_exported_model(options)
        weights = open_for_prediction(source, options, exported)
        self._weights = weights
        self._batch_size = options.batch
        self.features = weights.recipe.spec.features if features else 0
        """The number of features of an image; 0 if predictions have none."""
        self.unknown_below = weights.calibration.unknown_below
        """An image is unknown if its top class is less probable than this; 0: none is."""
        computed = add_features(weights) if features else weights
        with ExitStack() as stack:
            session = stack.enter_context(open_session(computed, options, exported=exported))
            self._logits = session.predict
            self.runtime = session.runtime
            """The name of the runtime."""
            self._explainer: Explainer | None = None
            if explain:
                self._explainer = make_explainer(weights, execution.backend, session.world)
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
        """Yield the predictions of images in order; arguments and errors are those of `Model`."""
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
                best, probabilities = find_most_likely(logits[i], top, self._weights.calibration)
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
                batch.reasons[i] = f"cannot be read: {error}"


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


def open_for_prediction(
    source: ModelSource, options: SessionOptions, exported: "ExportedModel | None"
) -> Weights:
    """Return weights with names of classes, or what an exported model says of itself. Notes report
    remarks on the weights, and names that are assumed."""
    recorder = Recorder(options.listener if is_leading() else None)
    weights = source.choose_weights(exported)
    for remark in weights.remarks:
        recorder.note(remark)
    if weights.calibration != UNCALIBRATED:
        recorder.note(describe_calibration(weights.calibration))
    weights, note = name_classes(weights)
    if note:
        recorder.note(note)
    return weights


def find_most_likely(
    logits: np.ndarray, top: int, calibration: Calibration = UNCALIBRATED
) -> tuple[list[int], tuple[float, ...]]:
    """Return the numbers and probabilities of the `top` most likely classes of an image, from its
    logits [logits]."""
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


def name_classes(weights: Weights) -> tuple[Weights, str]:
    """Return the weights with names of classes, and a note if names are assumed or unknown, else
    ""."""
    if weights.classes:
        return weights, ""
    assumed = assume_classes(weights.recipe)
    if not assumed:
        return weights, f"{UNNAMED}; showing the numbers of the outputs"
    outputs = "1000 outputs"
    if weights.recipe.logits != 1000:
        outputs = "1001 outputs, the last unused, like NVIDIA's TensorFlow model"
    note = (
        f"the weights name no classes and have {outputs}; showing ImageNet's names. If these are"
        " wrong: --classes FILE"
    )
    return replace(weights, classes=assumed), note
