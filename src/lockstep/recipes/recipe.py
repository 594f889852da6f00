"""Recipe: every choice that decides the result of a run. How it is carried out is in `lockstep.recipes.execution`.

The published recipes are in `lockstep.recipes.published`; what each field means is said once, here.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, PrivateAttr, model_validator

from lockstep.models.architectures import ModelSpec, Role, model_spec, parameter_count, tensors
from lockstep.recipes import limits
from lockstep.recipes.settings import Settings
from lockstep.system.errors import nearest

Fraction = Annotated[float, Field(ge=0, le=1)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Colour = tuple[Positive, Positive, Positive]
EVAL_RATIO = 256 / 224
"""What the published recipes resize to for evaluation, over what they cut out."""


class Recipe(Settings):
    """Everything that decides the numbers of a run, apart from the images themselves."""

    # The model.
    model: str | ModelSpec = "resnet50"
    """A name from `lockstep.models.architectures.MODELS`, or the fields of a `ModelSpec`."""
    logits: Annotated[int, Field(ge=1), limits.LOGITS] = 1000
    """Outputs of the classifier. At least the number of classes; NVIDIA's TensorFlow model has 1001, the last unused."""
    padding: Literal["symmetric", "same"] = "symmetric"
    """"same": TensorFlow's SAME, which pads one more row behind than before where the stride is 2."""
    bn_momentum: Fraction = 0.1
    """Weight of the new batch in the running statistics (PyTorch's sense; other frameworks call 0.9 the same)."""
    bn_epsilon: Positive = 1e-5
    """Added to the variance."""
    batch_norm: Literal["local", "synchronised"] = "local"
    """Statistics over one rank's share of a step (as in the originals) or over the global batch of all ranks."""
    conv_init: Literal["normal", "truncated_normal"] = "normal"
    """He initialisation, variance 2 / fan; the truncated normal (at two deviations) is widened to that variance."""
    conv_init_fan: Literal["in", "out"] = "in"
    """Whether the variance of initial kernels counts the values that enter an output or that leave an input."""
    fc_init: Literal["uniform", "as_conv"] = "uniform"
    """Classifier weight: uniform in ±1/sqrt(fan in), or drawn as the convolutions are."""
    fc_bias_init: Literal["zero", "uniform"] = "zero"
    """Classifier bias: 0, or uniform in ±1/sqrt(fan in) (PyTorch's default)."""
    zero_init_last_bn: bool = False
    """Whether the last batch norm of every block starts with scale 0, so that a block starts as the identity."""

    # How long, how much, how fast.
    epochs: Annotated[int, Field(ge=1), limits.EPOCHS] = 90
    """Times the training images are gone through; the images of a last step that is not full are left out."""
    global_batch_images: Annotated[int, Field(ge=1), limits.GLOBAL_BATCH] = 256
    """Images of one optimizer step, over all ranks and accumulation."""
    lr: Positive = 0.256
    """Peak learning rate; at `lr_batch_images` images a step if `lr_scaling` is "linear"."""
    lr_scaling: Literal["linear", "none"] = "linear"
    """"linear": the peak is lr * global_batch_images / lr_batch_images. "none": lr is taken as it stands."""
    lr_batch_images: Annotated[int, Field(ge=1), limits.GLOBAL_BATCH] = 256
    """Images of a step that `lr` is meant for."""
    lr_unit: Literal["step", "epoch"] = "step"
    """Whether the rate changes every step or stays through an epoch."""
    warmup_epochs: Annotated[NotNegative, limits.EPOCHS] = 5.0
    """Length of the linear rise from `warmup_start_lr` to the peak; 0: none."""
    warmup_start_lr: NotNegative = 0.0
    """Where the rise begins."""
    warmup_counts_from: Literal[0, 1] = 0
    """Position of the first unit on the warm-up line: 0 starts at `warmup_start_lr`, 1 one increment above it."""
    warmup_from_batch_images: Annotated[int, Field(ge=0), limits.COUNTED] = 0
    """Warm up only if a step has at least so many images ("512 and up" on NVIDIA's pages)."""
    lr_decay: Literal["cosine", "linear", "step"] = "cosine"
    """How the rate falls from the peak; formulas in `lockstep.recipes.schedule`."""
    lr_decay_from: Literal["warmup_end", "start"] = "warmup_end"
    """Where the cosine or line begins; from "start" the rate jumps down where the warm-up ends."""
    lr_end: NotNegative = 0.0
    """Where cosine and line end."""
    lr_step_epochs: tuple[Annotated[NotNegative, limits.EPOCHS], ...] = ()
    """Epochs after which "step" multiplies the rate by `lr_step_factor`."""
    lr_step_factor: Positive = 0.1
    """What the rate is multiplied by after each of `lr_step_epochs`."""

    # The optimizer: SGD with momentum, the learning rate outside the velocity (v = m*v + g; w -= lr*v).
    momentum: Fraction = 0.875
    """m in v = m*v + g; w -= lr*v."""
    weight_decay: NotNegative = 1 / 32768
    """Coupled: added to the gradient as weight_decay * w, for tensors of `weight_decay_roles` alone."""
    weight_decay_roles: tuple[Role, ...] = ("conv_weight", "fc_weight", "fc_bias")
    """What a tensor must be to be decayed; batch norm's scale and bias have roles of their own, in shortcuts too."""
    label_smoothing: Fraction = 0.1
    """Target = (1 - s) * one-hot + s / logits."""
    mixup_alpha: Annotated[float, Field(ge=0, le=4)] = 0.0
    """MixUp (arXiv:1710.09412) with coefficients from Beta(alpha, alpha); 0: no MixUp."""
    mixup_coefficient: Literal["batch", "sample"] = "batch"
    """One coefficient for all images of a step (of every rank), or one for each image."""
    mixup_pairing: Literal["permutation", "reverse"] = "permutation"
    """An image's partner in the batch: by a random permutation, or by reversing the batch."""
    ema_decay: Fraction = 0.0
    """Moving average of weights and statistics, mu_t = min(ema_decay, (1 + t) / (10 + t)); 0: none."""

    # Pruning.
    sparsity: Literal["none", "mask_1d", "mask_2d_greedy", "mask_2d_best"] = "none"
    """2:4 structured sparsity (arXiv:2104.08378): the weights a run starts from are pruned by this algorithm of
    `lockstep.weights.sparsity`, and what was pruned stays 0. It needs trained weights to start from (`train --weights`)."""
    sparsity_excluded: tuple[str, ...] = ("fc.weight",)
    """Names of tensors that are not pruned; NVIDIA's PaddlePaddle code leaves out the classifier."""

    # Precision.
    precision: Literal["fp32", "tf32", "bf16", "fp16"] = "fp16"
    """Of convolutions and products; weights, statistics and updates are float32 always. "tf32" is float32 with
    TensorFloat-32 products where a GPU has them."""
    loss_scaling: Literal["none", "static", "dynamic"] = "none"
    """Applied in fp16 only. "dynamic" skips a step with a gradient that is not finite, and adapts the scale."""
    loss_scale: Positive = 128.0
    """The scale, or the first one if it is dynamic."""
    loss_scale_growth: Annotated[float, Field(gt=1)] = 2.0
    """What a dynamic scale is multiplied by after `loss_scale_growth_steps` steps without overflow."""
    loss_scale_growth_steps: Annotated[int, Field(ge=1), limits.COUNTED] = 1000
    """See `loss_scale_growth`."""
    loss_scale_backoff: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """What a dynamic scale is multiplied by after overflows."""
    loss_scale_backoff_steps: Annotated[int, Field(ge=1), limits.COUNTED] = 1
    """Consecutive overflowing steps after which the scale is multiplied by `loss_scale_backoff`."""

    # The images.
    image_size: Annotated[int, Field(ge=32), limits.SIDE] = 224
    """Height and width of a training image in pixels. Where it is set and neither `eval_resize` nor `eval_crop` is,
    evaluation follows: its crop has this size, and it resizes to 256/224 of it."""
    crop_area: tuple[Positive, Positive] = (0.08, 1.0)
    """Range of the random crop's share of the image's area."""
    crop_aspect: tuple[Positive, Positive] = (3 / 4, 4 / 3)
    """Range of the random crop's width over height, drawn evenly in its logarithm."""
    crop_attempts: Annotated[int, Field(ge=1), limits.ATTEMPTS] = 100
    """Draws of area and aspect until one fits into the image; then the largest centred crop is taken."""
    flip_probability: Fraction = 0.5
    """Share of training images that are mirrored left to right."""
    mean: Colour = (123.675, 116.28, 103.53)
    """Of red, green, blue on the scale 0 to 255."""
    std: Colour = (58.395, 57.12, 57.375)
    """Of red, green, blue on the scale 0 to 255; images are normalised as (x - mean) / std."""
    antialias: bool = False
    """Whether the bilinear resize filters when it shrinks (Pillow's way) or samples four pixels (OpenCV's)."""
    dct_scaling: bool = False
    """Whether a JPEG whose crop is at least twice as large as the output is decoded at 1/2, 1/4 or 1/8 of its size, as
    libjpeg can: faster for large photos, and it filters as it shrinks. Training and evaluation see other pixels with it."""
    eval_resize: Annotated[int, Field(ge=32), limits.SIDE] = 256
    """Evaluation: the shorter side is resized to so many pixels, the other in proportion (rounded down) ..."""
    eval_crop: Annotated[int, Field(ge=32), limits.SIDE] = 224
    """... and the centre so large is cut out."""

    validation_share: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the images that is set apart for validation where a data set has no validation images (`train --split`), by
    the hash of each image's name: `lockstep.data.split`. 0: none, the data set has validation images."""

    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Decides initial weights, order, crops, flips and MixUp; nothing else is random."""

    _based_on: str = PrivateAttr(default="")

    @property
    def based_on(self) -> str:
        """The recipe that this one is, or a variant of: a published name, or that of a file without suffix; "" if unknown.

        It decides nothing: recipes with the same fields are equal.
        """
        return self._based_on

    def named(self, name: str) -> Self:
        """Return a copy that is based on the recipe of this name."""
        copy = self.model_copy()
        copy._based_on = name
        return copy

    def replace(self, /, **changes: Any) -> Self:
        """Return a copy with some fields changed, validated again; it is based on the same recipe.

        Evaluation follows `image_size` as documented there.
        """
        return super().replace(**changes | eval_sizes(changes)).named(self.based_on)

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.__dict__ == other.__dict__

    @model_validator(mode="before")
    @classmethod
    def _evaluation_follows(cls, fields: dict[str, Any]) -> dict[str, Any]:
        return fields | eval_sizes(fields)

    @model_validator(mode="after")
    def _fields_fit_together(self) -> Self:
        count = parameter_count(model_spec(self.model), self.logits)
        if count > limits.MOST_PARAMETERS:
            raise ValueError(
                f"the model has {count:,} parameters with {self.logits} logits; expected at most {limits.MOST_PARAMETERS:,} "
                "(4 GB, and as much for gradients and velocities)"
            )
        if self.crop_area[0] > self.crop_area[1] or self.crop_area[1] > 1:
            raise ValueError(f"crop_area must be a rising range within 0 to 1, not {list(self.crop_area)}")
        if self.crop_aspect[0] > self.crop_aspect[1]:
            raise ValueError(f"crop_aspect must be a rising range, not {list(self.crop_aspect)}")
        if self.eval_crop > self.eval_resize:
            raise ValueError(f"eval_crop ({self.eval_crop}) must fit into eval_resize ({self.eval_resize})")
        if 0 < self.mixup_alpha < 0.01:
            raise ValueError(f"mixup_alpha must be 0 or at least 0.01, not {self.mixup_alpha}")
        if self.lr_decay == "step" and not self.lr_step_epochs:
            raise ValueError('lr_decay "step" needs lr_step_epochs, such as [30, 60, 80]')
        known = [tensor.name for tensor in tensors(model_spec(self.model), self.logits)]
        for name in self.sparsity_excluded:
            if name not in known:
                raise ValueError(f"sparsity_excluded: the model has no tensor {name!r}. {nearest(name, known)}")
        return self


def eval_sizes(fields: dict[str, Any]) -> dict[str, int]:
    """Return the sizes of evaluation that follow from `image_size`; none if that is not set, or if one of them is."""
    size = fields.get("image_size")
    if not isinstance(size, int) or size < 32 or "eval_resize" in fields or "eval_crop" in fields:
        return {}  # a wrong size is complained of once
    return {"eval_resize": round(size * EVAL_RATIO), "eval_crop": size}


def difference(a: Recipe, b: Recipe) -> dict[str, tuple[Any, Any]]:
    """Return the fields in which two recipes differ, with both values, in the order of the fields."""
    left, right = a.fields(), b.fields()
    return {name: (left[name], right[name]) for name in left if left[name] != right[name]}
