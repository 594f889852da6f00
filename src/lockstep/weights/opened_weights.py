"""`Weights`: what a file of any origin holds once it is opened."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np

from lockstep.models.quantisation import Scales
from lockstep.models.state import State
from lockstep.recipes import Recipe
from lockstep.weights.calibration import UNCALIBRATED, Calibration
from lockstep.weights.class_names import check_classes
from lockstep.weights.formats import dtype_name
from lockstep.weights.formats.account import Part
from lockstep.weights.formats.common import Shape
from lockstep.weights.preprocessing import FIELDS, list_assumed

if TYPE_CHECKING:
    from lockstep.weights.original import Original
    from lockstep.weights.weights_choice import WeightsChoice

Place = Literal["file", "certificate", "user", "assumed"]
"""Where a value of the preprocessing comes from."""
LOCKSTEP = "Lockstep"
"""`Weights.origin` of weights that Lockstep wrote."""


@dataclass(frozen=True)
class Stored:
    """An array as a file has it."""

    name: str
    """Its name in the file."""
    dtype: str
    """Its type in the file: "float32", "float16", "bfloat16", "int64", ..."""
    shape: Shape
    """Its shape in the file, which may have another order of axes than the canonical one."""
    tensors: tuple[str, ...] = ()
    """The canonical names of the tensors that are made from it; empty if it is not used."""


@dataclass(frozen=True)
class Weights:
    """Weights in canonical form, and what is needed to use them."""

    recipe: Recipe
    """The recipe that Lockstep trained them with. For another program's weights: NVIDIA's published
    recipe of the model if NVIDIA's code wrote them, else the default one; in fp32."""
    state: State
    """The weights. Momentum, moving average and step are those of the source if they were requested
    and it has them. Without a classifier there is no `fc.*`, and `recipe.logits` has no meaning."""
    classes: tuple[str, ...]
    """Names of the classes; empty if unknown."""
    source: Path
    """The file, the checkpoint's folder, or the prefix of several files."""
    origin: str
    """The program whose names and layouts they have: "Lockstep", "torchvision", "timm",
    "transformers", "Keras", "ONNX", "TensorFlow", "PaddleClas", "paddle.vision", "Gluon", "Flax",
    "torchax", "NVIDIA PyTorch", "NVIDIA TensorFlow", "NVIDIA Paddle", "NVIDIA MXNet", or "PyTorch"
    for any other program with it."""
    remarks: tuple[str, ...] = ()
    """Remarks for the user: what was matched by structure, is left over, or differs from the
    original."""
    epochs: int | None = None
    """Number of whole epochs done; None if it is unknown."""
    preprocessing_from: Mapping[str, Place] = field(default_factory=dict)
    """Where each value of the preprocessing comes from, by field. `open_weights` completes what a
    reader says."""
    stated: frozenset[str] = frozenset()
    """The fields of the preprocessing that the file says; others are assumed."""
    assumed_as: str = ""
    """The row of `known_preprocessing.KNOWN`, or the origin with one, that is assumed for other
    fields, if the reader knows it better than the origin says; "" otherwise."""
    parts: tuple[Part, ...] = ()
    """What the reader did with nodes, layers and tensors of the file, apart from computing with
    them. Next to `stored`, this accounts for all of the file."""
    stored: tuple[Stored, ...] = ()
    """The arrays next to the weights in the file, in its order, used or not; those of an optimizer
    or of a moving average are left out."""
    original: "Original | None" = None
    """The network as the program that wrote it computes it; None if that is not known here."""
    others: tuple[Path, ...] = ()
    """Files that were read in addition to `source`, such as timm's `config.json`."""
    scales: Scales = field(default_factory=dict)
    """Scales of the inputs of all quantised layers; empty if the recipe is not quantised."""
    calibration: Calibration = UNCALIBRATED
    """What turns the logits into probabilities."""
    checkpoint_file: Path | None = None
    """Lockstep's checkpoint file that holds them; None if they are from elsewhere."""

    @property
    def has_preprocessing(self) -> bool:
        """Whether the file says all of the preprocessing, so that nothing of it is assumed."""
        return self.stated.issuperset(FIELDS)

    @property
    def ignored(self) -> tuple[str, ...]:
        """Names of the parts of the file that the user left out, at this or an earlier reading."""
        return tuple(part.name for part in self.parts if part.treatment == "ignored")

    @property
    def tensors(self) -> dict[str, np.ndarray]:
        """Parameters and batch norm statistics."""
        return self.state.tensors

    @property
    def folded_norms(self) -> tuple[str, ...]:
        """Names of the batch norms that are folded into convolutions. A bias is left of them, and
        otherwise the identity as readers write it."""
        variance = np.float32(1 - self.recipe.bn_epsilon)
        names = []
        for conv in self.recipe.spec.list_convolutions():
            mean = self.tensors[f"{conv.bn_name}.running_mean"]
            if (mean == 0).all() and (
                self.tensors[f"{conv.bn_name}.running_var"] == variance
            ).all():
                names.append(conv.bn_name)
        return tuple(names)

    @property
    def has_classifier(self) -> bool:
        """Whether the weights have a classifier."""
        return "fc.bias" in self.tensors

    def describe_preprocessing(self) -> dict[str, Any]:
        """Return the preprocessing of an evaluation, as exported programs store it, and as
        "assumed" the names of its fields that are assumed, if any."""
        description = self.recipe.preprocessing()
        if assumed := list_assumed(self.preprocessing_from):
            description["assumed"] = assumed
        return description

    def replace_precision(self, precision: str | None) -> Self:
        """Return the weights with a recipe of this precision; None keeps the recipe's precision."""
        if precision is None:
            return self
        return replace(self, recipe=self.recipe.replace(precision=precision))

    def apply_choice(self, choice: "WeightsChoice") -> Self:
        """Return the weights with the names of classes and the threshold of a choice; None of these
        keeps their own. Raises `DataError` if the names do not fit."""
        classes = self.classes
        if choice.classes is not None:
            classes = check_classes(choice.classes, self.recipe.logits, classes)
        calibration = self.calibration
        if choice.unknown_below is not None:
            calibration = replace(calibration, unknown_below=choice.unknown_below)
        return replace(self, classes=classes, calibration=calibration)

    def add_remarks(self, *remarks: str) -> Self:
        """Return the weights with more remarks."""
        return replace(self, remarks=(*self.remarks, *remarks))


def list_arrays(
    arrays: Iterable[tuple[str, str, Shape]], sources: Iterable[tuple[str, str]]
) -> tuple[Stored, ...]:
    """Return the arrays of a file from their names, types and shapes.

    `sources` has pairs of a canonical tensor and an array that it is made of.
    """
    users: dict[str, list[str]] = {}
    for tensor, name in sources:
        users.setdefault(name, []).append(tensor)
    stored = []
    for name, dtype, shape in arrays:
        stored.append(Stored(name, dtype, shape, tuple(users.get(name, ()))))
    return tuple(stored)


def describe_arrays(arrays: Mapping[str, np.ndarray]) -> Iterable[tuple[str, str, Shape]]:
    """Yield name, type and shape of arrays that are as their file has them."""
    for name, value in arrays.items():
        yield name, dtype_name(value.dtype), value.shape
