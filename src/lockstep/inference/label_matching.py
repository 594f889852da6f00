"""Which output of a model is the class of an image: by the names of classes, by their numbers, or
by their positions, which proves nothing.

Weights without names of classes were trained on folders in an order that only their program knows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from lockstep.data.class_folders import list_class_folders
from lockstep.data.class_order import describe_order, list_orders
from lockstep.data.images import Progress, are_numbers_of, printable
from lockstep.data.index import Index, open_index, relabel_index, subset
from lockstep.data.sources import FOLDER, Source
from lockstep.models.accuracy_interval import format_accuracy, wilson
from lockstep.models.metrics import Scores
from lockstep.system.errors import DataError
from lockstep.system.strict_json import to_json
from lockstep.system.text import escape_halves, format_count, list_first
from lockstep.weights import Weights, class_names

if TYPE_CHECKING:
    from lockstep.inference.label_file import Answers

_NAMED = 5
_BY_NUMBER = (
    "labels are matched by number: the weights name no classes, so folder n stands for output n,"
    " counted from 0; --classes FILE names the outputs"
)


@dataclass(frozen=True)
class Matched:
    """Images whose labels are outputs of weights."""

    index: Index
    remark: str
    """How labels were matched if it is not by name; "" if it is."""
    is_proven: bool
    """Whether names say which output a class is."""
    left_out: str = ""
    """Which images are left out because the weights do not have their classes."""
    answers: "Answers | None" = None
    """The right outputs of the images, if a file of labels names them; else they are the labels."""


def match_labels(source: Source, weights: Weights, progress: Progress | None = None) -> Matched:
    """Return the images of a source with labels that are outputs of weights.

    - Names on both sides are matched by name, and ImageNet's classes by id, word or number.
    - Images that store numbers are matched by number.
    - Otherwise classes are matched by position if there is one for each output, or else by number
      if their names are numbers of outputs.

    Images of classes that the weights, which name theirs, do not know are left out. Raises
    `DataError` if nothing says which output a class is.
    """
    classes = weights.classes
    if source.format == FOLDER:
        # Weights have names that every encoding can write; those of folders can be any bytes.
        names = {escape_halves(name): name for name in list_class_folders(source.root)}
        classes = tuple(names.get(name, name) for name in classes)
    is_imagenet = class_names.are_imagenet(classes or class_names.assume_classes(weights.recipe))
    index = open_index(source, progress=progress)
    left_out = ""
    if classes:
        index, left_out = _leave_out_unknown(index, classes, weights, is_imagenet=is_imagenet)
    if classes and not is_imagenet:
        index = relabel_index(index, classes)
        remark = _describe_numbers(index, classes) or _describe_absent(index)
        return Matched(index, remark, is_proven=True, left_out=left_out)
    if index.numbered:
        index = relabel_index(index, classes or index.classes)
        return Matched(index, _describe_numbers(index, classes), is_proven=True)
    places = class_names.find_imagenet(index.classes) if is_imagenet else None
    if places is not None and not set(index.classes) <= set(classes):
        remark = "the folders are named by ImageNet's ids, words or numbers, and matched by them"
        if not classes:
            remark = f"the weights name no classes; {remark}"
        remark += _suggest_restriction(index)
        index = relabel_index(index, places)
        return Matched(index, remark, is_proven=bool(classes), left_out=left_out)
    if classes:
        remark = _suggest_restriction(index).removeprefix("; ")
        index = relabel_index(index, classes)
        return Matched(index, remark, is_proven=True, left_out=left_out)
    logits = weights.recipe.logits
    if len(index.classes) == logits:
        return Matched(index, _describe_positions(index), is_proven=False)
    numbers = class_names.place_numbers(index.classes, logits)
    if numbers is None:
        raise DataError(
            f"{source.title} has {format_count(len(index.classes), 'class')}, and the weights have"
            f" {format_count(logits, 'output')} without names, so it is unknown which output stands"
            f" for which class; add --classes FILE, which names all {logits} outputs (in"
            f" evaluate, also {_suggest_labels(index.classes, range(logits))})"
        )
    return Matched(relabel_index(index, numbers), _BY_NUMBER, is_proven=False)


def _leave_out_unknown(
    index: Index, classes: tuple[str, ...], weights: Weights, *, is_imagenet: bool
) -> tuple[Index, str]:
    """Return the images of classes that the weights know by these names, or as ImageNet's, and
    which others are left out; "" if none is."""
    if index.numbered or are_numbers_of(index, classes):
        return index, ""
    known = set(classes)
    if is_imagenet and known.isdisjoint(index.classes):
        known = {name for name in index.classes if class_names.find_imagenet([name])}
    counts = np.bincount(index.rows["label"], minlength=len(index.classes))
    unknown = [n for n in np.flatnonzero(counts).tolist() if index.classes[n] not in known]
    if not unknown:
        return index, ""
    samples = np.flatnonzero(~np.isin(index.rows["label"], unknown))
    names = list_first([printable(index.classes[n]) for n in unknown], _NAMED)
    what = f"classes that {weights.source} does not know ({names})"
    count = format_count(len(index) - len(samples), "image")
    kept = tuple(filter(known.__contains__, index.classes))
    left_out = f"left out: {count} of {what}"
    if not len(samples):
        left_out += "; if the weights use other names for them, map the names: "
        left_out += _suggest_labels(index.classes, classes)
    return relabel_index(subset(index, samples), kept), left_out


def _suggest_labels(classes: Sequence[str], outputs: Sequence[object]) -> str:
    """Return the option that says which outputs classes are, with the first as an example."""
    output = outputs[0]
    if class_names.place_numbers(classes, len(outputs)):
        output = outputs[int(classes[0])]
    return f"--labels FILE, such as {to_json({printable(classes[0]): output})}"


def _suggest_restriction(index: Index) -> str:
    """Return the end of a remark on images of some of ImageNet's classes; "" if they have all."""
    if len(index.classes) >= len(class_names.imagenet_names()):
        return ""
    return (
        f"; they have {len(index.classes)} of its classes, and the model chooses from all. To let"
        ' it choose from these only: --labels FILE, which contains {"restrict": true}'
    )


def _describe_numbers(index: Index, classes: tuple[str, ...]) -> str:
    """Return the remark on images that store numbers of classes; "" on others, and if the weights
    have the same numbers as names."""
    numbers = tuple(map(str, range(len(classes))))
    if not index.numbered or classes == numbers:
        return ""
    return "labels are matched by number: the images do not name their classes"


def _describe_absent(index: Index) -> str:
    """Return the remark on classes that the weights know and no image is of; "" without any."""
    absent = sorted(set(range(len(index.classes))).difference(index.rows["label"].tolist()))
    if not absent or len(absent) == len(index.classes):
        return ""
    names = list_first([printable(index.classes[n]) for n in absent], _NAMED)
    return f"no images of {names}, which the weights know; if folders have other names, rename them"


def _describe_positions(index: Index) -> str:
    order = describe_order(index.classes) or "the order of their list"
    if list(index.classes) == sorted(index.classes) and not list_orders(index.classes):
        order = "alphabetical order"
    count = len(index.classes)
    return (
        "labels are matched by position: the weights name no classes, so the"
        f" {format_count(count, 'folder')}, in {order}, stand for the"
        f" {format_count(count, 'output')}; --classes FILE names the outputs"
    )


def compare_orders(scores: Scores, matched: Matched) -> list[dict[str, Any]]:
    """Return the top-1 of an evaluation in the orders in which programs number class folders; empty
    if labels are proven, or the order makes no difference.

    Each is a mapping of `order`, `top1_percent`, `top1_interval_percent` and `counts`: whether it
    is the order of the result.
    """
    own = describe_order(matched.index.classes)
    if matched.is_proven or not own:
        return []
    accuracies = []
    for order, names in list_orders(matched.index.classes).items():
        places = {name: place for place, name in enumerate(names)}
        outputs = np.array([places[name] for name in matched.index.classes])
        hits = int((scores.predictions == outputs[scores.labels]).sum())
        images = len(scores.labels)
        accuracies.append(
            {
                "order": order,
                "top1_percent": 100 * hits / images,
                "top1_interval_percent": [100 * bound for bound in wilson(hits, images)],
                "counts": order == own,
            }
        )
    return accuracies


def describe_orders(orders: list[dict[str, Any]], images: int) -> str:
    """Return the remark on the two accuracies of `compare_orders`. If their intervals do not
    overlap, the weights were probably trained in the better order."""
    worse, better = sorted(orders, key=lambda order: order["top1_percent"])
    parts = []
    for order in (better, worse):
        counts = ", which this result uses" if order["counts"] else ""
        accuracy = format_accuracy(order["top1_percent"], images)
        parts.append(f"{accuracy} in {order['order']}{counts}")
    accuracies = f"top-1 is {'; '.join(parts)}"
    if worse["top1_interval_percent"][1] >= better["top1_interval_percent"][0]:
        return f"the class order is uncertain: {accuracies}"
    if better["counts"]:
        return f"the class order fits the images: {accuracies}"
    return (
        f"WARNING: the class order is probably wrong: {accuracies}; to use the better order, list"
        " the folders in that order: --classes FILE"
    )
