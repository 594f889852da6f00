"""Recipe: every choice that decides the result of a run. How a run is carried out is in
`lockstep.recipes.execution`.

The published recipes are in `lockstep.recipes.published`. The meaning of each field is documented
in `lockstep.recipes.fields` alone.
"""

from collections.abc import Iterator
from typing import Any, Self

import numpy as np
from pydantic import PrivateAttr, model_validator

from lockstep.models.architectures import ModelSpec, Tensor, model_spec
from lockstep.models.sections import check_prefixes, has_prefix
from lockstep.recipes import limits
from lockstep.recipes.augmentation_list import load_plug_ins
from lockstep.recipes.class_weights import balance_classes
from lockstep.recipes.field_validation import Settings
from lockstep.recipes.fields.compression import CompressionFields
from lockstep.recipes.fields.evaluation import EvaluationFields
from lockstep.recipes.fields.images import ImageFields
from lockstep.recipes.fields.learning_rate import LearningRateFields
from lockstep.recipes.fields.loss import LossFields
from lockstep.recipes.fields.model import ModelFields
from lockstep.recipes.fields.precision import PrecisionFields
from lockstep.recipes.fields.run import RunFields
from lockstep.recipes.fields.updates import UpdateFields
from lockstep.recipes.folds import Fold
from lockstep.system.errors import nearest

EVAL_RATIO = 256 / 224
"""Ratio of resize to crop in the evaluation of the published recipes."""
PREPROCESSING = (
    *("mean", "std", "interpolation", "antialias", "eval_resize", "eval_crop"),
    *("eval_antialias", "eval_side_rounding", "eval_offset_rounding", "eval_sampling"),
    "exif_orientation",
)
"""The fields of the preprocessing of an evaluation; `antialias` is that of training."""

GEOMETRY = ("eval_side_rounding", "eval_offset_rounding", "eval_sampling")
"""The fields of the geometry of evaluation. Their defaults are the geometry of torchvision and
timm."""


class Recipe(  # pydantic lists the fields of the last base first
    RunFields,
    EvaluationFields,
    ImageFields,
    PrecisionFields,
    CompressionFields,
    UpdateFields,
    LossFields,
    LearningRateFields,
    ModelFields,
):
    """All values that decide the numbers of a run, apart from the images themselves.

    >>> import lockstep
    >>> lockstep.load_recipe("resnet50-paddle-90ep").replace(epochs=50).based_on
    'resnet50-paddle-90ep'
    """

    _based_on: str = PrivateAttr(default="")

    @property
    def based_on(self) -> str:
        """The name of the published recipe or the file that this one comes from; "" if unknown."""
        return self._based_on

    def rename(self, name: str) -> Self:
        """Return a copy whose `based_on` is this name."""
        copy = self.model_copy()
        copy._based_on = name
        return copy

    def replace(self, /, **changes: Any) -> Self:
        """Return a copy with new values, and those that follow from them; `based_on` stays."""
        return super().replace(**following_fields(changes)).rename(self.based_on)

    @property
    def spec(self) -> ModelSpec:
        """The architecture of `model`."""
        return model_spec(self.model)

    def list_tensors(self) -> Iterator[Tensor]:
        """Yield every tensor of the model, in torchvision's and timm's order of names."""
        return self.spec.list_tensors(self.logits)

    @property
    def division(self) -> float | Fold:
        """What to hold out for validation: a share of the images or a fold; 0.0 for nothing."""
        return Fold(self.fold, self.folds, self.seed) if self.folds else self.validation_share

    @property
    def needs_weights(self) -> bool:
        """Whether a run with this recipe starts from trained weights."""
        is_compressed = self.sparsity != "none" or self.quantisation != "none"
        return bool(self.frozen) or self.linear_probe or is_compressed

    def preprocessing(self) -> dict[str, Any]:
        """Return the fields that decide how an evaluation prepares images."""
        fields = self.fields()
        return {name: fields[name] for name in PREPROCESSING}

    def evaluation_recipe(self) -> Self:
        """Return the recipe of evaluations: fp32 instead of fp16 (docs/explanation/numerics.md)."""
        return self.replace(precision="fp32") if self.precision == "fp16" else self

    def settle_class_weights(self, labels: np.ndarray) -> Self:
        """Return a copy with "balanced" class weights as numbers, from the labels of all images."""
        if self.class_weights != "balanced":
            return self
        return self.replace(class_weights=balance_classes(labels, self.logits))

    def load_plug_ins(self) -> Self:
        """Import your own augmentations, and return the recipe with all of their fields.

        Raises:
            RecipeError: An augmentation cannot be imported, or one of its fields is wrong.
        """
        if not self.augmentations:
            return self
        return self.replace(augmentations=load_plug_ins(self.augmentations))

    def decays(self, tensor: Tensor) -> bool:
        """Return whether weight decay applies to a tensor of the model."""
        return tensor.is_listed(self.weight_decay_roles)

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.__dict__ == other.__dict__

    def __hash__(self) -> int:
        multipliers = frozenset(self.lr_multipliers.items())
        return hash(tuple((self.__dict__ | {"lr_multipliers": multipliers}).values()))

    @model_validator(mode="before")
    @classmethod
    def _fields_follow(cls, fields: dict[str, Any]) -> dict[str, Any]:
        return following_fields(fields)

    @model_validator(mode="after")
    def _fields_fit_together(self) -> Self:
        if self.image_sizes and self.quantisation != "none":
            raise ValueError(
                "quantisation finds the scales of layers on images of one size before the first"
                " step; leave out image_sizes, or quantise a run that starts from its weights"
            )
        count = self.spec.count_parameters(self.logits)
        if count > limits.MOST_PARAMETERS:
            raise ValueError(
                f"the model has {count:,} parameters with {self.logits} logits; expected at most"
                f" {limits.MOST_PARAMETERS:,} (4 GB, and as much for gradients and velocities)"
            )
        if self.repeated_augmentation > self.global_batch_images:
            raise ValueError(
                f"repeated_augmentation ({self.repeated_augmentation}) fills a step of"
                f" {self.global_batch_images} images with copies of one; expected at most"
                " global_batch_images"
            )
        weights = self.class_weights
        if not isinstance(weights, str) and len(weights) != self.logits:
            raise ValueError(
                f"class_weights has length {len(weights)}; expected one number for each of"
                f" {self.logits} logits (for {len(weights)} classes, set logits={len(weights)} too)"
            )
        table = list(self.list_tensors())
        known = [tensor.name for tensor in table]
        for name in self.sparsity_excluded:
            if name not in known:
                raise ValueError(
                    f"sparsity_excluded: the model has no tensor {name!r}. {nearest(name, known)}"
                )
        trained = [tensor.name for tensor in table if tensor.is_trained]
        check_prefixes("frozen", self.frozen, trained)
        check_prefixes("lr_multipliers", self.lr_multipliers, trained)
        for prefix in self.frozen:
            trained = [name for name in trained if not has_prefix(name, prefix)]
        if not trained:
            raise ValueError("frozen: no tensor is left to train; leave out a prefix, such as 'fc'")
        return self


def following_fields(fields: dict[str, Any]) -> dict[str, Any]:
    """Return fields plus those that follow from them: `image_size` is the last of `image_sizes`, or
    the only size if it is set alone; evaluation follows as in `eval_fields`."""
    sizes = fields.get("image_sizes")
    if "image_size" in fields and "image_sizes" not in fields:
        fields = fields | {"image_sizes": []}
    if sizes and isinstance(sizes, list | tuple) and "image_size" not in fields:
        last = sizes[-1]
        if isinstance(last, list | tuple) and len(last) == 2:  # else it is refused as a size
            fields = fields | {"image_size": last[1]}
    return fields | eval_fields(fields)


def eval_fields(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of evaluation that follow from others of these fields.

    `eval_resize` and `eval_crop` follow `image_size` if neither is set, and `eval_antialias`
    follows `antialias`.
    """
    followed: dict[str, Any] = {}
    if "antialias" in fields and "eval_antialias" not in fields:
        followed["eval_antialias"] = fields["antialias"]
    size = fields.get("image_size")
    if not isinstance(size, int) or size < 32 or "eval_resize" in fields or "eval_crop" in fields:
        return followed  # a wrong size is reported once, by `image_size`
    return followed | {"eval_resize": round(size * EVAL_RATIO), "eval_crop": size}


def own_geometry(recipe: Recipe) -> dict[str, str]:
    """Return the fields of `GEOMETRY` that do not have their defaults, with their values."""
    values = {name: getattr(recipe, name) for name in GEOMETRY}
    defaults = Recipe.model_fields
    return {name: value for name, value in values.items() if value != defaults[name].default}


def list_subjects() -> dict[str, list[str]]:
    """Return the names of all fields by their subject, in order.

    >>> list(list_subjects())[:2], list_subjects()["compression"][0]
    (['model', 'learning rate'], 'sparsity')
    """
    return {
        fields.__module__.rpartition(".")[2].replace("_", " "): list(fields.model_fields)
        for fields in reversed(Recipe.__bases__)
        if issubclass(fields, Settings)
    }


def difference(a: Recipe, b: Recipe) -> dict[str, tuple[Any, Any]]:
    """Return the fields in which two recipes differ, with both values, in order."""
    right = b.fields()
    pairs = {name: (value, right[name]) for name, value in a.fields().items()}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
