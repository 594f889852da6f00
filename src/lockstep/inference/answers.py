"""Scores of images that can have several right outputs, by a model that can be restricted to some
of its outputs."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np

from lockstep.backends.reference.functions import rank_labels
from lockstep.data import Batch
from lockstep.models.metrics import Scores
from lockstep.recipes.order import order_evaluation_samples

_MOST_ROWS = 8192
"""Logits of about this many images are in memory at once."""


@dataclass(frozen=True)
class Answers:
    """The right outputs of images, and those that a model chooses from."""

    kinds: np.ndarray
    """int64 [images]: the row of `right` for each image."""
    right: np.ndarray
    """bool [kinds, outputs]: whether an output is right."""
    labels: np.ndarray
    """int [images]: the class of each image in the data set."""
    counted: np.ndarray
    """bool [outputs]: whether the model may choose an output."""
    classes: np.ndarray
    """int [outputs]: the class in the data set that an output stands for; the number of classes
    if it stands for none."""

    def describe(self, source: str, images: int) -> str:
        """Return the remark on how many of the images, and of the outputs, count."""
        text = f"labels are those of {source}: {len(self.kinds)} of {images} images count"
        if self.counted.all():
            return text
        return f"{text}, and the model chooses from {self.counted.sum()} of its outputs"

    def score(self, logits: np.ndarray, samples: np.ndarray) -> np.ndarray:
        """Return a table of the scores of some images from their logits [N, outputs].

        The softmax is that of the outputs that count. The loss is minus the logarithm of the
        probability of all right outputs together. The rank is that of the best right output. The
        prediction is a class of the data set: the image's own if it is right.
        """
        logits = np.where(self.counted, logits.astype(np.float64), -np.inf)
        is_right = self.right[self.kinds[samples]]
        labels = self.labels[samples]
        rights = np.where(is_right, logits, -np.inf)
        outputs = logits.argmax(axis=1)
        with np.errstate(invalid="ignore"):
            total = _add_exponentials(logits)
            losses = total - _add_exponentials(rights)
            confidences = np.exp(logits.max(axis=1) - total)
        hits = is_right[np.arange(len(samples)), outputs]
        ranks = rank_labels(logits, rights.argmax(axis=1))
        predictions = np.where(hits, labels, self.classes[outputs])
        return np.stack([losses, ranks, predictions, labels, confidences], axis=1)

    def evaluate(
        self, evaluate: Callable[..., Scores], batches: Iterator[Batch], batch: int, ranks: int
    ) -> Scores:
        """Return the scores of all images, whose logits `evaluate` computes part by part. `batch`
        is the number of images in a batch of a rank."""
        tables = [np.zeros((0, 5))]
        done = 0
        while done < len(self.kinds):
            part = islice(batches, max(1, _MOST_ROWS // (batch * ranks)))
            logits = evaluate(part, with_logits=True).logits
            if logits is None or not len(logits):
                break
            samples = done + order_evaluation_samples(len(logits), batch, ranks)
            tables.append(self.score(logits, samples))
            done += len(logits)
        return Scores.unpack_table(np.concatenate(tables))


def _add_exponentials(values: np.ndarray) -> np.ndarray:
    """Return the logarithm of the sum of exponentials of each row."""
    largest = values.max(axis=1)
    sums: np.ndarray = largest + np.log(np.exp(values - largest[:, None]).sum(axis=1))
    return sums
