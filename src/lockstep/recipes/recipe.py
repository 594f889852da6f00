"""Recipe: every choice that decides the result of a run. How a run is carried out is in
`lockstep.recipes.execution`.

The published recipes are in `lockstep.recipes.published`. The meaning of each field is documented
here alone.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import BeforeValidator, Field, PrivateAttr, model_validator

from lockstep.models.architectures import (
    ListedRole,
    ModelSpec,
    Tensor,
    model_spec,
    parameter_count,
    tensors,
)
from lockstep.models.sections import check_prefixes, has_prefix
from lockstep.recipes import limits
from lockstep.recipes.best_evaluation import Selection
from lockstep.recipes.class_weights import balance_classes, check_class_weights
from lockstep.recipes.field_validation import Settings
from lockstep.recipes.folds import Fold
from lockstep.system.errors import nearest

Fraction = Annotated[float, Field(ge=0, le=1)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Colour = tuple[NotNegative, NotNegative, NotNegative]
Deviation = tuple[Positive, Positive, Positive]
ClassWeights = Annotated[
    Literal["none", "balanced"] | tuple[NotNegative, ...], BeforeValidator(check_class_weights)
]
Prefixes = Annotated[
    tuple[str, ...], BeforeValidator(lambda value: (value,) if isinstance(value, str) else value)
]
"""Prefixes of the names of tensors (`lockstep.models.sections`). A single one may stand alone."""
EVAL_RATIO = 256 / 224
"""Size after the resize over size of the crop, in the evaluation of the published recipes."""
PREPROCESSING = (
    *("mean", "std", "interpolation", "antialias", "eval_resize", "eval_crop"),
    *("eval_antialias", "eval_side_rounding", "eval_offset_rounding", "eval_sampling"),
    "exif_orientation",
)
"""The fields that are the preprocessing of an evaluation; `antialias` is that of training."""

GEOMETRY = ("eval_side_rounding", "eval_offset_rounding", "eval_sampling")
"""The fields of the geometry of evaluation. Their defaults are the geometry of torchvision and
timm."""


class Recipe(Settings):
    """Everything that decides the numbers of a run, apart from the images themselves."""

    # The model.
    model: str | ModelSpec = "resnet50"
    """Name of a model in `lockstep.models.architectures.MODELS`, or the fields of a `ModelSpec`."""
    logits: Annotated[int, Field(ge=1), limits.LOGITS] = 1000
    """Number of outputs of the classifier, at least the number of classes. NVIDIA's TensorFlow
    model has 1001 and leaves the last unused."""
    padding: Literal["symmetric", "same"] = "symmetric"
    """"symmetric": all sides are padded equally. "same": TensorFlow's SAME, which pads one row and
    one column more at the end than at the start where the stride is 2."""
    bn_momentum: Fraction = 0.1
    """Weight of the new batch in the running statistics, as in PyTorch. Other frameworks write 0.9
    for PyTorch's 0.1."""
    bn_epsilon: Positive = 1e-5
    """Value that batch norm adds to the variance."""
    batch_norm: Literal["local", "synchronised"] = "local"
    """"local": statistics over one rank's share of a step, as in the originals. "synchronised":
    statistics over the global batch of all ranks."""
    conv_init: Literal["normal", "truncated_normal"] = "normal"
    """Distribution of the initial kernels: He initialisation with variance 2 / fan.
    "truncated_normal" is cut off at two standard deviations and widened to the same variance."""
    conv_init_fan: Literal["in", "out"] = "in"
    """The fan in the variance of initial kernels. "in": the number of values that enter an output.
    "out": the number of values that leave an input."""
    fc_init: Literal["uniform", "as_conv"] = "uniform"
    """Initial weight of the classifier. "uniform": uniform in ±1/sqrt(fan in). "as_conv": drawn
    like the kernels of convolutions."""
    fc_bias_init: Literal["zero", "uniform"] = "zero"
    """Initial bias of the classifier. "zero": 0. "uniform": uniform in ±1/sqrt(fan in), PyTorch's
    default."""
    stem_channels: Literal[3, 4] = 3
    """Number of input channels of the stem in the original. 4: the original pads images with a
    channel of zeros. A model has three channels here in both cases, because weights of the fourth
    have no effect: they get no gradient, and weight decay makes them a millionth of their initial
    values in 90 epochs. But they count twice. Initial kernels of the stem have a fan in of 196
    instead of 147. And 2:4 sparsity prunes the stem too: its groups are red, green, blue and a
    weight of 0. By mask_1d, the smallest of the three colours becomes 0."""
    zero_init_last_bn: bool = False
    """Whether the last batch norm of every block starts with scale 0. A block then starts as the
    identity."""

    # How long, how much, how fast.
    epochs: Annotated[int, Field(ge=1), limits.EPOCHS] = 90
    """Number of passes over the training images. In every epoch, the images of a last step that is
    not full are left out. NVIDIA's PaddlePaddle and MXNet code fill that step with images that they
    train on twice."""
    global_batch_images: Annotated[int, Field(ge=1), limits.GLOBAL_BATCH] = 256
    """Number of images in one optimizer step, over all ranks and accumulation steps."""
    lr: Positive = 0.256
    """Peak learning rate. If `lr_scaling` is "linear", it is the peak for `lr_batch_images` images
    a step."""
    lr_scaling: Literal["linear", "none"] = "linear"
    """"linear": the peak is lr * global_batch_images / lr_batch_images. "none": the peak is lr."""
    lr_batch_images: Annotated[int, Field(ge=1), limits.GLOBAL_BATCH] = 256
    """Number of images in a step for which `lr` is meant. It is used if `lr_scaling` is "linear".
    """
    lr_unit: Literal["step", "epoch"] = "step"
    """"step": the learning rate changes every step. "epoch": it stays the same through an epoch."""
    warmup_epochs: Annotated[NotNegative, limits.EPOCHS] = 5.0
    """Length of the warm-up in epochs: the learning rate rises linearly from `warmup_start_lr` to
    the peak. 0: none."""
    warmup_start_lr: NotNegative = 0.0
    """Learning rate at which the warm-up begins."""
    warmup_counts_from: Literal[0, 1] = 0
    """Position of the first step (or epoch, as in `lr_unit`) on the line of the warm-up. 0: at
    `warmup_start_lr`. 1: one increment above it."""
    warmup_from_batch_images: Annotated[int, Field(ge=0), limits.COUNTED] = 0
    """The warm-up is used only if a step has at least this many images ("512 and up" on NVIDIA's
    pages)."""
    lr_decay: Literal["cosine", "linear", "polynomial", "exponential", "step"] = "cosine"
    """How the learning rate falls from the peak. The formulas are in `lockstep.recipes.schedule`.
    """
    lr_decay_from: Literal["warmup_end", "start"] = "warmup_end"
    """Where the decay begins, unless it is "step". "warmup_end": where the warm-up ends. "start":
    at the first step, so the rate jumps down where the warm-up ends."""
    lr_end: NotNegative = 0.0
    """Learning rate at which the decay ends, unless it is "step". The decay "exponential" needs one
    above 0."""
    lr_power: Positive = 2.0
    """Power of the decay "polynomial". 1 is the decay "linear"."""
    lr_step_epochs: tuple[Annotated[NotNegative, limits.EPOCHS], ...] = ()
    """Epochs after which the decay "step" multiplies the learning rate by `lr_step_factor`."""
    lr_step_factor: Positive = 0.1
    """Factor by which the decay "step" multiplies the learning rate after each of `lr_step_epochs`.
    """

    # The optimizer: SGD with momentum, the learning rate outside the velocity (v = m*v + g; w -=
    # lr*v).
    momentum: Fraction = 0.875
    """Momentum m of SGD: v = m*v + g; w -= lr*v."""
    nesterov: bool = False
    """Whether weights move by Nesterov's momentum: w -= lr*(g + m*v), with the velocity v = m*v + g
    after this step. It is `--nesterov` of NVIDIA's PyTorch code. No published recipe uses it."""
    weight_decay: NotNegative = 1 / 32768
    """Coupled weight decay: weight_decay * w is added to the gradient, only for tensors whose role
    is in `weight_decay_roles`."""
    weight_decay_roles: tuple[ListedRole, ...] = ("conv_weight", "fc_weight", "fc_bias")
    """Roles of the tensors that weight decay applies to. `bn_scale` and `bn_bias` are the scales
    and biases of all batch norms; `shortcut_bn_scale` and `shortcut_bn_bias` are only those of the
    batch norms in shortcuts."""
    label_smoothing: Fraction = 0.1
    """Label smoothing s: target = (1 - s) * one-hot + s / logits."""
    class_weights: ClassWeights = "none"
    """Weights of the classes in the training loss. The loss of an image is the sum over classes k
    of -weight[k] * target[k] * log p[k], with the target after label smoothing and MixUp. The loss
    of a step is the mean over its images, as in PyTorch's CrossEntropyLoss(weight) with
    probabilities as targets. Numbers: one for each logit. "balanced": images / (classes * images of
    the class), counted in the training images when the run begins; its recipe.yaml has the numbers.
    A class without images gets 1. "none": all are 1. The loss of a validation is not weighted."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Probability that a feature of an image is set to 0 in front of the classifier, in training.
    The other features are divided by 1 - dropout (arXiv:1207.0580). 0: no dropout."""
    mixup_alpha: Annotated[float, Field(ge=0, le=4)] = 0.0
    """Alpha of MixUp (arXiv:1710.09412): coefficients are drawn from Beta(alpha, alpha). 0: no
    MixUp."""
    mixup_coefficient: Literal["batch", "sample"] = "batch"
    """MixUp's coefficients. "batch": one for all images of a step, the same on every rank.
    "sample": one for each image."""
    mixup_pairing: Literal["permutation", "reverse"] = "permutation"
    """How MixUp chooses an image's partner in the batch. "permutation": by a random permutation.
    "reverse": by reversing the batch."""
    ema_decay: Fraction = 0.0
    """Decay of the moving average of weights and statistics: mu_t = min(ema_decay, (1 + t) / (10 +
    t)). 0: no average. It is updated once in a step, with any number of accumulation parts.
    NVIDIA's PyTorch code updates it after every part, so that its average follows the weights
    faster if it accumulates."""

    # From trained weights (`train --weights`).
    linear_probe: bool = False
    """Whether a run from weights that do not tell its classes apart starts from a linear probe: the
    classifier that fits the features of the training images best, without augmentation
    (`lockstep.runs.linear_probe`). If false, it starts from the recipe's initial classifier."""

    # Which tensors are trained, and at which rates (`lockstep.recipes.trained_tensors`).
    frozen: Prefixes = ()
    """Tensors that training leaves as they are, with their moving averages: prefixes of their names
    in whole parts, such as "layer1" or "layer4.0.bn1", or "backbone" for all but the classifier. A
    batch norm whose scale and bias are both frozen computes with its running statistics, which
    stay. Nothing is computed backwards below the lowest trained tensor."""
    lr_multipliers: Mapping[str, Positive] = Field(default_factory=dict)
    """Factors of the learning rate by prefix, as in `frozen`. The longest prefix of a tensor's name
    counts; without one the factor is 1. {"backbone": 0.1, "layer4": 0.5}: the classifier learns at
    the full rate, the last stage at half of it, and the rest at a tenth."""
    lr_depth_decay: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Factor of the learning rate for every step down from the classifier: the rate of a tensor is
    multiplied by lr_depth_decay ^ depth. The depth is 0 in the classifier, 1 in the last block, and
    the number of blocks + 1 in the stem. 1: the same rate everywhere."""

    # Pruning.
    sparsity: Literal["none", "mask_1d", "mask_2d_greedy", "mask_2d_best"] = "none"
    """2:4 structured sparsity (arXiv:2104.08378). This algorithm of `lockstep.weights.sparsity`
    prunes the weights that a run starts from. Pruned weights stay 0. It needs trained weights to
    start from (`train --weights`)."""
    sparsity_excluded: tuple[str, ...] = ("fc.weight",)
    """Names of tensors that are not pruned. NVIDIA's PaddlePaddle code does not prune the
    classifier."""

    # Quantisation.
    quantisation: Literal["none", "int8"] = "none"
    """"int8": convolutions and the classifier compute with weights and inputs rounded to int8, in
    training and evaluation (`lockstep.models.quantisation`). It needs trained weights to start from
    (`train --weights`)."""
    calibration_images: Annotated[int, Field(ge=1), limits.COUNTED] = 512
    """Number of training images, in the order of the first epoch, from which the scales of inputs
    are found before the first step. It is used if `quantisation` is "int8"."""

    # The best checkpoint, and an early end.
    selection: Selection = "top1"
    """The value of an evaluation that decides which checkpoint is the best one, and when early
    stopping ends the run. "top1": the share of images that are classified correctly.
    "balanced_accuracy": the mean of the classes' recalls. "macro_f1": the mean of their F1. "loss":
    the mean loss, of which the lowest is the best. The trained weights and, if there is one, their
    moving average are compared alike. An equal value is no improvement."""
    early_stopping_epochs: Annotated[int, Field(ge=0), limits.EPOCHS] = 0
    """The run ends at the first evaluation that is this many epochs or more after the best one. The
    evaluation at step 0 counts. 0: the run ends with its last epoch."""

    # Precision.
    precision: Literal["fp32", "tf32", "bf16", "fp16"] = "fp16"
    """Precision of convolutions and matrix products. Weights, statistics and updates are always
    float32. "tf32" is float32 with TensorFloat-32 products where a GPU has them. With "fp16",
    evaluations are in fp32."""
    loss_scaling: Literal["none", "static", "dynamic"] = "none"
    """Loss scaling, applied in fp16 only. "static": the scale is constant. "dynamic": a step with a
    gradient that is not finite is skipped, and the scale is adapted."""
    loss_scale: Positive = 128.0
    """The loss scale. With dynamic loss scaling, the initial one."""
    loss_scale_growth: Annotated[float, Field(gt=1)] = 2.0
    """Factor by which a dynamic loss scale is multiplied after `loss_scale_growth_steps` steps
    without overflow."""
    loss_scale_growth_steps: Annotated[int, Field(ge=1), limits.COUNTED] = 1000
    """Number of consecutive steps without overflow after which a dynamic loss scale is multiplied
    by `loss_scale_growth`."""
    loss_scale_backoff: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """Factor by which a dynamic loss scale is multiplied after `loss_scale_backoff_steps` steps
    with overflow."""
    loss_scale_backoff_steps: Annotated[int, Field(ge=1), limits.COUNTED] = 1
    """Number of consecutive steps with overflow after which a dynamic loss scale is multiplied by
    `loss_scale_backoff`."""

    # The images.
    sampling: Literal["plain", "balanced", "square_root"] = "plain"
    """How often an epoch has the images of each class. "plain": every image comes once. "balanced":
    every class comes equally often. "square_root": a class comes in proportion to the square root
    of its number of images (arXiv:1805.00932). An epoch has as many images as there are. The images
    of a rare class come several times in it, equally often up to once more. Of a frequent class,
    some images are left out, others in each epoch."""
    image_size: Annotated[int, Field(ge=32), limits.SIDE] = 224
    """Height and width of a training image in pixels. If it is set and neither `eval_resize` nor
    `eval_crop` is, evaluation follows it: `eval_crop` is this size and `eval_resize` is 256/224 of
    it."""
    crop_area: tuple[Positive, Positive] = (0.08, 1.0)
    """Range of the random crop's area, as a share of the image's area."""
    crop_aspect: tuple[Positive, Positive] = (3 / 4, 4 / 3)
    """Range of the random crop's aspect ratio, width over height. The logarithm of the ratio is
    drawn uniformly."""
    crop_attempts: Annotated[int, Field(ge=1), limits.ATTEMPTS] = 100
    """Number of times that area and aspect ratio are drawn until a crop fits into the image. If
    none fits, the largest centred crop is used."""
    flip_probability: Fraction = 0.5
    """Probability that a training image is mirrored left to right."""
    mean: Colour = (123.675, 116.28, 103.53)
    """Mean of red, green and blue on the scale 0 to 255. Images are normalised as (x - mean) / std.
    """
    std: Deviation = (58.395, 57.12, 57.375)
    """Standard deviation of red, green and blue on the scale 0 to 255. Images are normalised as (x
    - mean) / std."""
    interpolation: Literal["bilinear", "bicubic"] = "bilinear"
    """Interpolation of the resize, in training and in evaluation. With `antialias` it is Pillow's
    filter of this name, else OpenCV's: "bilinear" weighs 4 pixels and "bicubic" 16, with a = -0.75
    in the cubic (Pillow: a = -0.5)."""
    antialias: bool = False
    """Whether the resize filters when it shrinks an image, as Pillow does. If false, it samples 4
    or 16 pixels, as OpenCV does (see `interpolation`). If it is set and `eval_antialias` is not,
    evaluation follows it."""
    dct_scaling: bool = False
    """Whether a JPEG whose crop is at least twice as large as the output is decoded at 1/2, 1/4 or
    1/8 of its size, as libjpeg can. This is faster for large photos and filters while it shrinks.
    It changes the pixels that training and evaluation see."""
    exif_orientation: bool = False
    """Whether a photo is turned or mirrored as its EXIF orientation says, in training and in
    evaluation. If false, it is used as it is stored."""
    eval_resize: Annotated[int, Field(ge=32), limits.SIDE] = 256
    """Evaluation: the shorter side of an image is resized to this many pixels, the other in
    proportion (rounded as in `eval_side_rounding`)."""
    eval_crop: Annotated[int, Field(ge=32), limits.SIDE] = 224
    """Evaluation: after the resize, a centred square of this many pixels a side is cut out."""
    eval_antialias: bool = False
    """Evaluation: whether the resize filters, as `antialias` says for training."""
    eval_side_rounding: Literal["down", "nearest", "float32_down"] = "down"
    """Evaluation: how the sides are rounded after the resize. "down": as torchvision. "nearest": to
    the nearest number, halves up, as DALI. "float32_down": down, computed in float32 as NVIDIA's
    TensorFlow code; a side of 376 pixels then becomes 255 instead of 256."""
    eval_offset_rounding: Literal["even", "up", "down"] = "even"
    """Evaluation: how half a pixel in the place of the crop is rounded. "even": to the even number,
    as torchvision. "up": as DALI. "down": as NVIDIA's TensorFlow code."""
    eval_sampling: Literal["half_pixel", "half_pixel_symmetric", "asymmetric"] = "half_pixel"
    """Evaluation: where the resize samples, in ONNX's words. "half_pixel": the image fills the
    rounded sides, as with Pillow and OpenCV. "half_pixel_symmetric": both directions have the scale
    of the shorter side, from the image's centre, as DALI's `subpixel_scale`. "asymmetric": pixel i
    is sampled at i times the scale, as TensorFlow 1's `resize_bilinear`."""

    validation_share: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the images that `train --split` sets aside for validation if a data set has no
    validation images. The hash of each image's name decides (`lockstep.data.split`). 0: none,
    because the data set has validation images."""

    temperature_scaling: bool = False
    """Whether a temperature is fitted to the validation images when the run ends, by which the
    best checkpoint's logits are divided for probabilities (arXiv:1706.04599). No accuracy and no
    loss depends on it."""

    folds: Annotated[int, Field(ge=0, le=1000)] = 0
    """Number of folds of a cross-validation (`train --folds`). The hash of the images' names and
    `seed` divides the training images into this many parts, with equally many of each class. 0:
    none."""
    fold: Annotated[int, Field(ge=0, le=1000)] = 0
    """Number of the part that is for validation, from 1 to `folds`. 0: none."""

    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed of the random numbers. It decides initial weights, order, crops, flips, MixUp and
    dropout. Nothing else is random."""

    _based_on: str = PrivateAttr(default="")

    @property
    def based_on(self) -> str:
        """Name of the recipe that this one is or was changed from: a published name, or a file's
        name without suffix.

        "" if it is unknown. The name changes no result: recipes with the same fields are equal.
        """
        return self._based_on

    def rename(self, name: str) -> Self:
        """Return a copy whose `based_on` is this name."""
        copy = self.model_copy()
        copy._based_on = name
        return copy

    def replace(self, /, **changes: Any) -> Self:
        """Return a copy with some fields changed, validated again, and with the same `based_on`.

        Fields of evaluation follow `image_size` and `antialias` as documented there.
        """
        return super().replace(**changes | eval_fields(changes)).rename(self.based_on)

    @property
    def division(self) -> float | Fold:
        """What is set apart for validation: a share of the images, or a fold of them; 0.0: none."""
        return Fold(self.fold, self.folds, self.seed) if self.folds else self.validation_share

    def preprocessing(self) -> dict[str, Any]:
        """Return the fields `PREPROCESSING`, as exported programs store them."""
        fields = self.fields()
        return {name: fields[name] for name in PREPROCESSING}

    def evaluation_recipe(self) -> Self:
        """Return the recipe that evaluations compute with: in fp32 instead of fp16, and otherwise
        this one.

        Until batch norm's running statistics have settled, activations of a deep model exceed
        65,504, the largest number of fp16. Then logits and losses are NaN, or wrong where a
        framework's ReLU turns NaN into 0.
        """
        return self.replace(precision="fp32") if self.precision == "fp16" else self

    def settle_class_weights(self, labels: np.ndarray) -> Self:
        """Return the recipe of a run on training images with these labels, integers [images]:
        `class_weights` "balanced" becomes numbers."""
        if self.class_weights != "balanced":
            return self
        return self.replace(class_weights=balance_classes(labels, self.logits))

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
    def _evaluation_follows(cls, fields: dict[str, Any]) -> dict[str, Any]:
        return fields | eval_fields(fields)

    @model_validator(mode="after")
    def _fields_fit_together(self) -> Self:
        count = parameter_count(model_spec(self.model), self.logits)
        if count > limits.MOST_PARAMETERS:
            raise ValueError(
                f"the model has {count:,} parameters with {self.logits} logits; expected at most"
                f" {limits.MOST_PARAMETERS:,} (4 GB, and as much for gradients and velocities)"
            )
        if self.folds and not (self.folds >= 2 and 1 <= self.fold <= self.folds):
            raise ValueError(f"fold {self.fold} of {self.folds}: expected 1 to folds, of 2 or more")
        if self.folds and self.validation_share:
            raise ValueError(
                "folds and validation_share (--split) exclude each other; set only one"
            )
        if self.crop_area[0] > self.crop_area[1] or self.crop_area[1] > 1:
            raise ValueError(
                f"crop_area must be a rising range within 0 to 1, not {list(self.crop_area)}"
            )
        if self.crop_aspect[0] > self.crop_aspect[1]:
            raise ValueError(f"crop_aspect must be a rising range, not {list(self.crop_aspect)}")
        if self.eval_crop > self.eval_resize:
            raise ValueError(
                f"eval_crop ({self.eval_crop}) must fit into eval_resize ({self.eval_resize})"
            )
        weights = self.class_weights
        if not isinstance(weights, str) and len(weights) != self.logits:
            raise ValueError(
                f"class_weights has {len(weights)} numbers; expected one for each of the"
                f" {self.logits} logits (for {len(weights)} classes, set logits={len(weights)} too)"
            )
        if 0 < self.mixup_alpha < 0.01:
            raise ValueError(f"mixup_alpha must be 0 or at least 0.01, not {self.mixup_alpha}")
        if self.lr_decay == "exponential" and self.lr_end == 0:
            raise ValueError(
                'lr_decay "exponential" needs an lr_end above 0, such as a thousandth of the peak'
            )
        if self.lr_decay == "step" and not self.lr_step_epochs:
            raise ValueError('lr_decay "step" needs lr_step_epochs, such as [30, 60, 80]')
        table = list(tensors(model_spec(self.model), self.logits))
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


def difference(a: Recipe, b: Recipe) -> dict[str, tuple[Any, Any]]:
    """Return the fields in which two recipes differ, with both values, in order."""
    right = b.fields()
    pairs = {name: (value, right[name]) for name, value in a.fields().items()}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
