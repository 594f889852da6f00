"""Classes that both the weights and the images of a new run have, by name: the run starts with
their rows of the classifier."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from lockstep.data.class_order import describe_order
from lockstep.data.sources import CLASSES
from lockstep.system.text import format_count, list_first

_NAMED = 5
_KINDS = (
    ("keeps its output", "keep their outputs"),
    ("is new", "are new"),
    ("is gone", "are gone"),
)
CLASSIFIER = ("fc.weight", "fc.bias")


class NamedClassifier(NamedTuple):
    """The classifier of weights that name their classes."""

    classes: tuple[str, ...]
    weight: np.ndarray
    """float32 [outputs, features]; the first outputs are the classes."""
    bias: np.ndarray

    def match(self, classes: Sequence[str]) -> np.ndarray:
        """Return the output of each class, int64 [classes]; -1 if the weights do not have it. A
        name that several classes share does not count."""
        once = Counter(self.classes)
        known = {name: place for place, name in enumerate(self.classes) if once[name] == 1}
        wanted = Counter(classes)
        places = [known.get(name, -1) if wanted[name] == 1 else -1 for name in classes]
        return np.array(places, np.int64)

    def describe(self, classes: Sequence[str], places: np.ndarray) -> str:
        """Return the note on which classes are kept, new and gone."""
        kept = [classes[place] for place in np.flatnonzero(places >= 0).tolist()]
        new = [classes[place] for place in np.flatnonzero(places < 0).tolist()]
        gone = sorted(set(self.classes) - set(kept))
        parts = []
        for what, names in (("kept", kept), ("new", new), ("gone", gone)):
            parts.append(f"{len(names)} {what}")
            if names:
                parts[-1] += f" ({list_first(names, _NAMED)})"
        return f"classifier outputs by class name: {', '.join(parts)}"

    def fill(self, places: np.ndarray, others: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the tensors of a classifier: the rows of the classes that are known, and those of
        `others` for the rest."""
        filled = {}
        rows = np.flatnonzero(places >= 0)
        for name, values in zip(CLASSIFIER, (self.weight, self.bias), strict=True):
            filled[name] = others[name].copy()
            filled[name][rows] = values[places[rows]]
        return filled

    def begin_probe(self, places: np.ndarray, outputs: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the weight and the bias that a linear probe begins at. A new class begins at the
        mean of the classes that are kept, which favours none of them."""
        kept = places[places >= 0]
        weight = np.repeat(self.weight[kept].mean(axis=0, keepdims=True), outputs, axis=0)
        bias = np.repeat(self.bias[kept].mean(keepdims=True), outputs)
        tensors = self.fill(places, dict(zip(CLASSIFIER, (weight, bias), strict=True)))
        return tensors["fc.weight"].astype(np.float64), tensors["fc.bias"].astype(np.float64)


def name_classifier(
    classes: tuple[str, ...] | None, tensors: Mapping[str, np.ndarray], features: int
) -> NamedClassifier | None:
    """Return the classifier of weights with class names, if they have one for this number of
    features; otherwise None. Its numbers must be finite, as a search begins there."""
    weight, bias = (tensors.get(name, np.zeros(0)) for name in CLASSIFIER)
    has_rows = bias.ndim == 1 and weight.shape == (len(bias), features)
    if not classes or not has_rows or len(classes) > len(bias):
        return None
    if not (np.isfinite(weight).all() and np.isfinite(bias).all()):
        return None
    return NamedClassifier(classes, weight, bias)


def are_same_classes(own: Sequence[str], others: Sequence[str]) -> bool:
    """Return whether two lists have the same names: in one order, or each once."""
    is_unique = len(set(own)) == len(own)
    return tuple(own) == tuple(others) or (is_unique and sorted(own) == sorted(others))


def describe_positions(classes: Sequence[str], *, in_folders: bool) -> str:
    """Return the note on weights without class names, whose outputs stand for classes in their
    order. It names the order of folders if other programs number them differently."""
    note = "the weights do not name their classes: outputs are matched by position to the"
    note += f" {format_count(len(classes), 'class')} of the images"
    if in_folders and (order := describe_order(classes)):
        note += (
            f", in {order}; if the weights were trained in another order, write the folder names"
        )
        note += f" in that order into {CLASSES} next to the folders, and use a new --out"
    return note
