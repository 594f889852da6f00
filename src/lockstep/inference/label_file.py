"""Which outputs are right for the images of a test set, from a file or a mapping
(docs/how-to/test-sets.md), and the scores of a model by them.

- `{"labels": LABELS, "restrict": RESTRICT}`; both can be missing. A file that is only LABELS is
  accepted.
- LABELS is an object: the name of a class or an image to an output or a list of them; an empty list
  leaves the images out. Or it is a list: item n - 1 is for the image with number n at the end of
  its name.
- RESTRICT is true (to all outputs that are right for an image), false or a list of outputs.

An output is its number, or the name of its class.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.backends.reference.functions import rank_labels
from lockstep.data import Batch
from lockstep.data.index import Index
from lockstep.inference.session import Session
from lockstep.models.metrics import Scores
from lockstep.recipes.order import order_evaluation_samples
from lockstep.system.errors import DataError, UserError, nearest
from lockstep.system.regular_files import TEXT, explain_failure, read_regular
from lockstep.system.strict_json import parsed
from lockstep.system.text import escape_halves, format_count
from lockstep.weights import Weights
from lockstep.weights.class_names import (
    are_imagenet,
    assume_classes,
    find_imagenet,
    imagenet_names,
    imagenet_synsets,
)

Labels = Mapping[str, Any] | Sequence[Any] | str | Path
"""Labels as the module describes them, or the path of a file with them."""
_FORM = '{"labels": {"CLASS or IMAGE": [OUTPUT, ...]}, "restrict": true or [OUTPUT, ...]}'
_FIELDS = ("labels", "restrict")
_OF_FIELDS = (bool, Mapping)
"""What only a field can hold: outputs are numbers, names or lists."""
_NUMBER = re.compile(r"(\d+)(\.[^./]*)?$")
_MOST_ROWS = 8192
"""Logits of about this many images are in memory at once."""
_Outputs = tuple[int, ...]
_Find = Callable[[Any, str], _Outputs]
"""Returns the outputs that a value of the file names; the text is what they are for."""


@dataclass(frozen=True)
class Answers:
    """The right outputs of images, and those that a model chooses from."""

    right: list[_Outputs]
    """Those that are right for each image."""
    labels: np.ndarray
    """int [images]: the class of each image in the data set."""
    counted: np.ndarray
    """bool [outputs]: whether the model may choose an output."""
    classes: np.ndarray
    """int [outputs]: the class in the data set that an output stands for; the number of classes
    if it stands for none."""

    def describe(self, source: str, images: int) -> str:
        """Return the remark on how many of the images, and of the outputs, count."""
        every = format_count(images, "image")
        text = f"labels come from {source}: {len(self.right)} of {every} count"
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
        is_right = np.zeros(logits.shape, bool)
        for row, sample in zip(is_right, samples.tolist(), strict=True):
            row[list(self.right[sample])] = True
        labels = self.labels[samples]
        rights = np.where(is_right, logits, -np.inf)
        outputs = logits.argmax(axis=1)
        with np.errstate(invalid="ignore"):
            total = np.logaddexp.reduce(logits, axis=1)
            losses = total - np.logaddexp.reduce(rights, axis=1)
            confidences = np.exp(logits.max(axis=1) - total)
        hits = is_right[np.arange(len(samples)), outputs]
        ranks = rank_labels(logits, rights.argmax(axis=1))
        predictions = np.where(hits, labels, self.classes[outputs])
        return np.stack([losses, ranks, predictions, labels, confidences], axis=1)

    def evaluate(self, session: Session, batches: Iterator[Batch], batch: int) -> Scores:
        """Return the scores of all images, from logits that a session computes part by part.
        `batch` is the number of images in a batch of a rank."""
        tables = [np.zeros((0, 5))]
        done = 0
        while done < len(self.right):
            part = islice(batches, max(1, _MOST_ROWS // (batch * session.ranks)))
            logits = session.evaluate(part, with_logits=True).logits
            if logits is None or not len(logits):
                break
            samples = done + order_evaluation_samples(len(logits), batch, session.ranks)
            tables.append(self.score(logits, samples))
            done += len(logits)
        return Scores.unpack_table(np.concatenate(tables))


@dataclass(frozen=True)
class LabelFile:
    """Labels as they were read; outputs are not looked up."""

    source: str
    """What messages call it."""
    labels: Mapping[str, Any] | Sequence[Any]
    restrict: Any


def read_labels(labels: Labels, *, calibrates: bool = False) -> LabelFile:
    """Return the labels of a file or a mapping. Raises `DataError` if a file cannot be read or is
    not of the form, and `UserError` if the evaluation calibrates, which needs one class an image.
    """
    if calibrates:
        raise UserError(
            "a temperature is fitted to the classes of the images; leave out --labels, or"
            " --calibrate and --precision-at"
        )
    source = "the argument labels"
    value: Any = labels
    if isinstance(labels, str | Path):
        source = str(labels)
        try:
            value = parsed(read_regular(labels, TEXT))
        except OSError as error:
            reason = explain_failure(error)
            raise DataError(f"{source}: {reason}; expected JSON: {_FORM}") from None
        except ValueError as error:
            raise DataError(f"{source} cannot be read as JSON: {error}; expected {_FORM}") from None
    file = LabelFile(source, value, restrict=False)
    if isinstance(value, Mapping) and any(isinstance(item, _OF_FIELDS) for item in value.values()):
        for key in value.keys() - set(_FIELDS):
            advice = nearest(str(key), _FIELDS)
            raise DataError(f"{source} has the field {key!r:.80}; expected {_FORM}. {advice}")
    if isinstance(value, Mapping) and value.keys() <= set(_FIELDS):
        file = LabelFile(source, value.get("labels", {}), value.get("restrict", False))
    if not isinstance(file.labels, Mapping | list | tuple):
        raise DataError(f"{source} is neither an object nor a list of labels; expected {_FORM}")
    if not isinstance(file.restrict, bool | list | tuple):
        expected = "expected true, false or a list of outputs"
        raise DataError(f"{source}: restrict is {file.restrict!r:.80}; {expected}")
    return file


def answer_images(
    file: LabelFile, whole: Index, part: Index, weights: Weights
) -> tuple[np.ndarray, Answers]:
    """Return which images of a part of a data set have right outputs, int64 [images], and these
    outputs.

    Classes that the file does not name keep the output of their own name, if there is one. Raises
    `DataError` if the file names what the data set or the model does not have.
    """
    outputs = weights.recipe.logits
    names = _name_outputs(whole, weights)
    find = partial(_find_outputs, file, names, outputs)
    own = map(names.get, map(escape_halves, whole.classes))
    by_class: list[_Outputs | None] = [None if output is None else (output,) for output in own]
    if isinstance(file.labels, Mapping):
        by_image = _match_names(file, whole, find, by_class)
    else:
        by_image = _match_numbers(file, whole, find)
    right = _list_right(file, whole, by_class, by_image)
    counted: set[int] = set(range(outputs))
    if file.restrict is not False:
        every = set().union(*set(right))
        counted = every if file.restrict is True else set(find(file.restrict, "restrict"))
        if not every <= counted:
            raise DataError(
                f"{file.source}: restrict leaves out output {min(every - counted)}, which is right"
                " for an image; expected all right outputs"
            )
    if part is not whole:
        right = _list_right(file, part, by_class, by_image)
    samples = np.flatnonzero(list(map(bool, right)))
    if not len(samples):
        raise DataError(
            f"{file.source} has no right output for any image of {part.source.title}; expected at"
            " least one"
        )
    classes = np.full(outputs, len(part.classes))
    for label in reversed(range(len(part.classes))):
        classes[list(by_class[label] or ())] = label
    is_counted = np.isin(np.arange(outputs), list(counted))
    labels = part.rows["label"][samples]
    return samples, Answers(list(filter(None, right)), labels, is_counted, classes)


def _find_outputs(
    file: LabelFile, names: Mapping[str, int], count: int, value: Any, what: str
) -> _Outputs:
    """Return the outputs that a value names, sorted. Raises `DataError` for anything else than
    outputs of the model."""
    outputs = set()
    for item in value if isinstance(value, list | tuple) else [value]:
        output = names.get(item, -1) if isinstance(item, str) else item
        if type(output) is not int or not 0 <= output < count:
            raise DataError(
                f"{file.source}: {what:.200} has the output {item!r:.80}, which the model does not"
                f" have; expected numbers from 0 to {count - 1}, or names of its classes"
            )
        outputs.add(output)
    return tuple(sorted(outputs))


def _name_outputs(index: Index, weights: Weights) -> dict[str, int]:
    """Return the outputs of a model by the names of its classes, and by those of the data set that
    mean them: ids, words and numbers of ImageNet's classes, or numbers that the images store."""
    classes = weights.classes or assume_classes(weights.recipe)
    lists: list[Sequence[str]] = [classes]
    if are_imagenet(classes):
        lists += [find_imagenet(index.classes) or (), imagenet_synsets(), imagenet_names()]
    if index.numbered:
        lists.insert(0, index.classes[: weights.recipe.logits])
    names: dict[str, int] = {}
    for spellings in lists:
        for output, name in enumerate(spellings):
            names.setdefault(escape_halves(name), output)
    return names


def _match_names(
    file: LabelFile, index: Index, find: _Find, by_class: list[_Outputs | None]
) -> dict[str, _Outputs]:
    """Put the outputs of the classes that a file names into `by_class`; return those of images.
    Raises `DataError` if a name is neither a class nor one image, or if two names are the same one.
    """
    places = dict(zip(map(escape_halves, index.classes), range(len(by_class)), strict=True))
    by_image: dict[str, _Outputs] = {}
    images: dict[str, list[str]] = defaultdict(list)
    if not set(map(str, file.labels)) <= places.keys():
        bad = map(attrgetter("file"), index.quarantined)
        for name in filter(None, [*map(index.name, range(len(index))), *bad]):
            own = escape_halves(name)
            for spelling in {own, own.rpartition("/")[2]}:
                images[spelling].append(name)
    labels: Any = file.labels
    keys: dict[str, Any] = {}
    for key, value in labels.items():
        spelling = escape_halves(str(key))
        outputs = find(value, repr(key))
        name = spelling
        if spelling in places:
            by_class[places[spelling]] = outputs
        elif len(images.get(spelling, [])) == 1:
            [name] = images[spelling]
            by_image[name] = outputs
        else:
            what = "is not a class or an image"
            if spelling in images:
                what = f"is the name of {len(images[spelling])} images"
            example = escape_halves(index.name(0) or index.classes[0])
            raise DataError(
                f"{file.source} names {key!r:.200}, which {what} of {index.source.title}; expected"
                f" CLASS or CLASS/IMAGE, such as {example!r:.200}, or the fields"
                f" {' and '.join(_FIELDS)}"
            )
        if keys.setdefault(name, key) != key:
            raise DataError(
                f"{file.source} names {name!r:.200} twice, as {keys[name]!r:.200} and as"
                f" {key!r:.200}; leave one of them out"
            )
    return by_image


def _match_numbers(file: LabelFile, index: Index, find: _Find) -> dict[str, _Outputs]:
    """Return the outputs of all images by the numbers at the end of their names, 1 for the first
    item of a list. Raises `DataError` if a name has no number, or not its own."""
    items: Any = file.labels
    owners: dict[int, str] = {}
    for name in map(index.name, range(len(index))):
        digits = _NUMBER.search(name)
        number = int(digits[1][-18:]) if digits else 0
        if not 1 <= number <= len(items):
            raise DataError(
                f"{file.source} lists images by number, but the name {name!r:.200} does not end in"
                f" a number from 1 to {len(items)}, as ILSVRC2012_val_00000001.JPEG does"
            )
        if owners.setdefault(number, name) != name:
            raise DataError(
                f"{file.source} lists images by number, but {owners[number]!r:.200} and"
                f" {name!r:.200} have the same number; expected the images that were listed"
            )
    return {name: find(items[n - 1], f"item {n - 1}") for n, name in owners.items()}


def _list_right(
    file: LabelFile,
    index: Index,
    by_class: list[_Outputs | None],
    by_image: Mapping[str, _Outputs],
) -> list[_Outputs]:
    """Return the right outputs of each image of an index. Raises `DataError` if nothing says which
    they are."""
    right = []
    for sample, label in enumerate(index.rows["label"].tolist()):
        name = index.name(sample) if by_image else ""
        outputs = by_image.get(name, by_class[label])
        if outputs is None:
            raise DataError(
                f"{file.source} has no entry for the class {index.classes[label]!r:.80}, which is"
                " not a class of the model; expected its outputs, or [] to leave its images out"
            )
        right.append(outputs)
    return right
