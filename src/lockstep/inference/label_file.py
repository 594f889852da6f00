"""Which outputs are right for the images of a test set, as a file or a mapping says it
(docs/how-to/test-sets.md).

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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.data.index import Index
from lockstep.inference.answers import Answers
from lockstep.system.errors import DataError
from lockstep.system.regular_files import TEXT, explain_failure, read_regular
from lockstep.system.strict_json import parsed
from lockstep.system.text import escape_halves
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
_NUMBER = re.compile(r"(\d+)(\.[^./]*)?$")
_Outputs = tuple[int, ...]


@dataclass(frozen=True)
class LabelFile:
    """Labels as they were read; outputs are not looked up."""

    source: str
    """What messages call it."""
    labels: Mapping[str, Any] | Sequence[Any] = field(default_factory=dict)
    restrict: Any = False

    def find_outputs(self, value: Any, names: Mapping[str, int], count: int, what: str) -> _Outputs:
        """Return the outputs that a value names, sorted. `what` it is for begins a message; `names`
        are outputs by name, and `count` is their number.

        Raises `DataError` for anything else than outputs of the model.
        """
        outputs = set()
        for item in value if isinstance(value, list | tuple) else [value]:
            output = names.get(item, -1) if isinstance(item, str) else item
            if type(output) is not int or not 0 <= output < count:
                raise DataError(
                    f"{self.source}: {what:.200} has the output {item!r:.80}, which the model does"
                    f" not have; expected numbers from 0 to {count - 1}, or names of its classes"
                )
            outputs.add(output)
        return tuple(sorted(outputs))


def read_labels(labels: Labels) -> LabelFile:
    """Return the labels of a file or a mapping. Raises `DataError` if a file cannot be read or is
    not of the form."""
    source = "the labels"
    value: Any = labels
    if isinstance(labels, str | Path):
        source = str(labels)
        try:
            value = parsed(read_regular(labels, TEXT))
        except OSError as error:
            reason = explain_failure(error)
            raise DataError(f"{source}: {reason}; expected JSON: {_FORM}") from None
        except ValueError as error:
            raise DataError(f"{source} is not JSON: {error}; expected {_FORM}") from None
    is_object = isinstance(value, Mapping)
    if is_object and value.keys() <= {"labels", "restrict"}:
        file = LabelFile(source, value.get("labels", {}), value.get("restrict", False))
    else:
        file = LabelFile(source, value)
    if not isinstance(file.labels, Mapping | list | tuple):
        raise DataError(f"{source} holds no object and no list of labels; expected {_FORM}")
    if not isinstance(file.restrict, bool | list | tuple):
        expected = "expected true, false or a list of outputs"
        raise DataError(f"{source}: restrict is {file.restrict!r:.80}; {expected}")
    return file


@dataclass(frozen=True)
class LabelledImages:
    """The right outputs of all images of a data set."""

    file: LabelFile
    by_class: list[_Outputs | None]
    """None: neither the file nor a name says which outputs are right."""
    by_image: dict[str, _Outputs]
    """By the names of images; they take precedence."""
    counted: _Outputs
    """The outputs that the model chooses from."""
    own: dict[str, int]
    """The outputs of classes whose names say so."""

    def list_outputs(self, index: Index) -> list[_Outputs]:
        """Return the right outputs of each image of an index. Raises `DataError` if an image has
        none."""
        names = map(index.name, range(len(index))) if self.by_image else iter([""] * len(index))
        right = []
        for name, label in zip(names, index.rows["label"].tolist(), strict=True):
            outputs = self.by_image.get(name, self.by_class[label])
            if outputs is None:
                raise DataError(
                    f"{self.file.source} says nothing on the class {index.classes[label]!r:.80},"
                    " which is not a class of the model; expected its outputs, or [] to leave its"
                    " images out"
                )
            right.append(outputs)
        return right

    def describe(self, index: Index, samples: np.ndarray) -> str:
        """Return the remark on how many images of an index count. Raises `DataError` if none."""
        source = self.file.source
        if not len(samples):
            raise DataError(
                f"{source} has no right output for any image of {index.source.title}; expected some"
            )
        text = f"labels are those of {source}: {len(samples)} of {len(index)} images count"
        if self.file.restrict is False:
            return text
        return f"{text}, and the model chooses from {len(self.counted)} of its outputs"

    def build_answers(self, index: Index, count: int) -> tuple[np.ndarray, Answers]:
        """Return which images of an index have right outputs, int64 [images], and these outputs of
        the `count` of the model."""
        rows: dict[_Outputs, int] = {}
        kinds = np.full(len(index), -1)
        for sample, outputs in enumerate(self.list_outputs(index)):
            if outputs:
                kinds[sample] = rows.setdefault(outputs, len(rows))
        right = np.zeros((len(rows), count), bool)
        for outputs, row in rows.items():
            right[row, list(outputs)] = True
        counted = np.zeros(count, bool)
        counted[list(self.counted)] = True
        samples = np.flatnonzero(kinds >= 0)
        labels = index.rows["label"][samples].astype(np.int32)
        answers = Answers(
            kinds[samples],
            right,
            labels,
            counted,
            self._find_classes(index, count),
        )
        return samples, answers

    def _find_classes(self, index: Index, count: int) -> np.ndarray:
        """Return the class that each output stands for; the number of classes for none. If there
        are several, it is the first."""
        classes = np.full(count, len(index.classes), np.int32)
        for label in reversed(range(len(index.classes))):
            name = escape_halves(index.classes[label])
            own = (self.own[name],) if name in self.own else ()
            classes[list(self.by_class[label] or own)] = label
        return classes


def match_label_file(file: LabelFile, index: Index, weights: Weights) -> LabelledImages:
    """Return the right outputs of all images of a data set.

    Classes that the file does not name keep the output of their own name, if there is one. Raises
    `DataError` if the file names what the data set or the model does not have.
    """
    count = weights.recipe.logits
    names = _name_outputs(index, weights)
    by_class = list(map(partial(_get_own, names), index.classes))
    by_image: dict[str, _Outputs] = {}
    if isinstance(file.labels, Mapping):
        spellings = map(escape_halves, index.classes)
        places = dict(zip(spellings, range(len(index.classes)), strict=True))
        images: dict[str, list[str]] | None = None
        for key, value in file.labels.items():
            outputs = file.find_outputs(value, names, count, repr(key))
            if escape_halves(str(key)) in places:
                by_class[places[escape_halves(str(key))]] = outputs
                continue
            images = _name_images(index) if images is None else images
            for image in _find_images(file, key, images, index):
                by_image[image] = outputs
    else:
        by_image = _match_numbers(file, file.labels, index, names, count)
    labelled = LabelledImages(file, by_class, by_image, tuple(range(count)), names)
    if file.restrict is False:
        return labelled
    right: set[int] = set().union(*set(labelled.list_outputs(index)))
    counted = right
    if file.restrict is not True:
        counted = set(file.find_outputs(list(file.restrict), names, count, "restrict"))
    if not right <= counted:
        raise DataError(
            f"{file.source}: restrict leaves out the output {min(right - counted)}, which is right"
            " for an image; expected all right outputs"
        )
    return LabelledImages(file, by_class, by_image, tuple(sorted(counted)), names)


def _get_own(names: Mapping[str, int], name: str) -> _Outputs | None:
    output = names.get(escape_halves(name))
    return None if output is None else (output,)


def _name_outputs(index: Index, weights: Weights) -> dict[str, int]:
    """Return the outputs of a model by the names of its classes, and by those of the data set that
    mean them: ids, words and numbers of ImageNet's classes, or numbers that the images store."""
    classes = weights.classes or assume_classes(weights.recipe)
    lists: list[Sequence[str]] = [classes]
    if are_imagenet(classes):
        words = "\n".join(imagenet_names())
        lists += [find_imagenet(index.classes) or (), imagenet_synsets()]
        lists += [words.split("\n"), words.replace(" ", "_").split("\n")]
    if index.numbered:
        lists.insert(0, index.classes[: weights.recipe.logits])
    names: dict[str, int] = {}
    for spellings in lists:
        for output, name in enumerate(spellings):
            names.setdefault(escape_halves(name), output)
    return names


def _name_images(index: Index) -> dict[str, list[str]]:
    """Return the names of all images, also of those that cannot be read, by their names with and
    without folders."""
    images = defaultdict(list)
    names = [*map(index.name, range(len(index))), *(bad.file for bad in index.quarantined)]
    for name in filter(None, names):
        own = escape_halves(name)
        for spelling in {own, own.rpartition("/")[2]}:
            images[spelling].append(name)
    return images


def _find_images(
    file: LabelFile, key: Any, images: Mapping[str, list[str]], index: Index
) -> Iterable[str]:
    """Return the image that a key names. Raises `DataError` unless it is one."""
    matches = images.get(escape_halves(str(key)), [])
    if len(matches) == 1:
        return matches
    title = index.source.title
    if matches:
        raise DataError(
            f"{file.source} names {key!r:.200}, and {title} has {len(matches)} images of this name;"
            f" expected CLASS/IMAGE, such as {escape_halves(matches[0])!r:.200}"
        )
    examples = list(map(escape_halves, [*index.classes[:2], *filter(None, [index.name(0)])]))
    raise DataError(
        f"{file.source} names {key!r:.200}, which is not a class or an image of {title}; expected"
        f" names such as {', '.join(map(repr, examples)):.400}"
    )


def _match_numbers(
    file: LabelFile, items: Sequence[Any], index: Index, names: Mapping[str, int], count: int
) -> dict[str, _Outputs]:
    """Return the outputs of all images by the numbers at the end of their names, 1 for the first
    item of a list. Raises `DataError` if a name has no number, or not its own."""
    by_image: dict[str, _Outputs] = {}
    owners: dict[int, str] = {}
    for name in map(index.name, range(len(index))):
        digits = _NUMBER.search(name)
        number = int(digits[1][-18:]) if digits else 0
        if not 1 <= number <= len(items):
            raise DataError(
                f"{file.source} lists {len(items)} images by number, and {name!r:.200} has no"
                " number from 1 to this at its end, as ILSVRC2012_val_00000001.JPEG has"
            )
        other = owners.setdefault(number, name)
        if other != name:
            raise DataError(
                f"{file.source} lists images by number, and {other!r:.200} and {name!r:.200} have"
                " the same; expected the images that were listed"
            )
        item = items[number - 1]
        by_image[name] = file.find_outputs(item, names, count, f"item {number - 1}")
    return by_image
