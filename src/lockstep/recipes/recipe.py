"""Recipe: every choice that decides the result of a run. Execution: how it is run.

Both are frozen pydantic models: a variant is `recipe.replace(epochs=50)`, a wrong value is a `RecipeError`. The published
recipes are in `lockstep.recipes.published`; what each field means is said once, here.
"""

import dataclasses
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr, ValidationError, model_validator

from lockstep.models.architectures import ModelSpec, Role, model_spec, parameter_count, tensors
from lockstep.recipes import limits
from lockstep.recipes.synonyms import fields_meant, instead_of_setting
from lockstep.system.errors import RecipeError, nearest
from lockstep.system.plain_yaml import MOST_CHARACTERS, read_yaml

Fraction = Annotated[float, Field(ge=0, le=1)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Colour = tuple[Positive, Positive, Positive]
EVAL_RATIO = 256 / 224
"""What the published recipes resize to for evaluation, over what they cut out."""


class _Settings(BaseModel):
    """A frozen set of fields with clear errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    def __init__(self, /, **fields: Any) -> None:
        try:
            super().__init__(**fields)
        except ValidationError as error:
            found = [problem for problem in error.errors() if problem["loc"] != _NOT_A_NAME]
            problems = [_explain(type(self), problem) for problem in found[:_MOST_PROBLEMS]]
            more = [f"... and {len(found) - _MOST_PROBLEMS} more"] * (len(found) > _MOST_PROBLEMS)
            raise RecipeError("\n".join(problems + more)) from None

    @classmethod
    def of(cls, fields: dict[str, Any]) -> Self:
        """Build from plain values; `RecipeError` names every unknown field and wrong value."""
        strange = [name for name in fields if not isinstance(name, str)]
        if strange:
            raise RecipeError(f"there is no field {strange[0]!r}: names of fields are words")
        return cls(**fields)

    def replace(self, /, **changes: Any) -> Self:
        """Return a copy with some fields changed, validated again."""
        return self.of(self.fields() | changes)

    def fields(self) -> dict[str, Any]:
        """Return the fields as plain values (numbers, strings, lists), in order."""
        return self.model_dump(mode="json")

    def to_yaml(self) -> str:
        """Return the fields as YAML, in order."""
        return yaml.safe_dump(self.fields(), sort_keys=False, default_flow_style=None, allow_unicode=True)


_MOST_SHOWN = 100
"""Characters of a wrong value in a message."""
_MOST_PROBLEMS = 10
"""Named of one recipe; the nearest names are looked for of each."""
# A model that is given by its fields is no name; what is wrong with the fields is the complaint that helps.
_NOT_A_NAME = ("model", "str")


def _explain(cls: type[BaseModel], problem: Any) -> str:
    place = [str(part) for part in problem["loc"]]
    if place[:2] == ["model", ModelSpec.__name__]:
        del place[1]
    where = ".".join(place)
    if problem["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        known = [field.name for field in dataclasses.fields(ModelSpec)] if len(place) > 1 else list(cls.model_fields)
        meant = fields_meant(place[-1], known)
        hint = f"Did you mean {' or '.join(meant)}?" if meant else nearest(place[-1], known)
        return f"there is no field {where!r}. {hint}"
    message = problem["msg"].removeprefix("Value error, ")
    return f"{where}: {message}, not {_shown(problem['input'])}" if where else message


def _shown(value: object) -> str:
    try:
        text = repr(value)
    except ValueError:  # an integer of thousands of digits
        return "an integer that is too long to write"
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]} ..."


class Recipe(_Settings):
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
        return super().replace(**changes | _eval_sizes(changes)).named(self.based_on)

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.__dict__ == other.__dict__

    @model_validator(mode="before")
    @classmethod
    def _evaluation_follows(cls, fields: dict[str, Any]) -> dict[str, Any]:
        return fields | _eval_sizes(fields)

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


def _eval_sizes(fields: dict[str, Any]) -> dict[str, int]:
    """Return the sizes of evaluation that follow from `image_size`; none if that is not set, or if one of them is."""
    size = fields.get("image_size")
    if not isinstance(size, int) or size < 32 or "eval_resize" in fields or "eval_crop" in fields:
        return {}  # a wrong size is complained of once
    return {"eval_resize": round(size * EVAL_RATIO), "eval_crop": size}


def _switch(value: object) -> object:
    """YAML reads the words on and off as true and false."""
    return ("off", "on")[value] if isinstance(value, bool) else value


class Execution(_Settings):
    """How a run is carried out. Backend, device and compiler change rounding, nothing more; accumulation, and the number of
    ranks, also change which images a local batch norm normalises together."""

    backend: str = "torch"
    """The framework; see `lockstep doctor`."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """"auto": a GPU if there is one."""
    compile: Annotated[Literal["auto", "on", "off"], BeforeValidator(_switch)] = "auto"
    """Whether the framework's compiler is used. "auto": where it pays: on GPUs, for Paddle and MXNet everywhere, and for
    PyTorch on processors without AVX-512 if an epoch in fp32 is long enough to repay compiling (docs/numerics.md)."""
    layout: Literal["auto", "nhwc", "nchw"] = "auto"
    """Whether channels are the last axis of activations in memory. "auto": as suits engine and device. PyTorch's engine has
    both; the others have what suits them and refuse the other."""
    reference_dtype: Literal["float64", "float32"] = "float64"
    """What the reference engine computes in; other engines take no notice."""
    deterministic: bool = True
    """On a GPU: only kernels that give the same bits every time. Without it a resumed run is equal within rounding."""
    distributed: Literal["native", "horovod"] = "native"
    """What adds up over ranks: the framework's own way, or Horovod, which TensorFlow's engine has too."""
    all_reduce_mb: Annotated[int, Field(ge=1), limits.EXCHANGE_MB] = 25
    """MB of gradients that are added up over ranks in one exchange. Horovod and MXNet, which add up all in one, take no
    notice."""
    accumulation_steps: Annotated[int, Field(ge=1), limits.GLOBAL_BATCH] = 1
    """Parts a rank's share of a step is computed in, one after the other."""
    loader: Literal["host", "dali", "dali-gpu", "synthetic"] = "host"
    """What decodes images: Lockstep's own threads, NVIDIA's DALI on the CPU or the GPU, or nothing ("synthetic": noise)."""
    loader_threads: Annotated[int, Field(ge=0), limits.THREADS] = 0
    """Threads that decode images; 0: one for each core that the ranks on a machine leave to each other."""
    loader_batches: Annotated[int, Field(ge=1), limits.BATCHES_AHEAD] = 2
    """Batches decoded ahead."""
    profile_step: Annotated[int, Field(ge=0), limits.STEPS] | None = None
    """The first step that the framework's profiler traces; steps count from 0. None: none is."""
    profile_steps: Annotated[int, Field(ge=1), limits.TRACED_STEPS] = 1
    """How many are traced from there on."""
    loggers: tuple[Literal["tensorboard", "mlflow", "wandb"], ...] = ("tensorboard",)
    """Where figures go besides the run's own log."""
    log_every_steps: Annotated[int, Field(ge=1), limits.STEPS] = 10
    """Steps after which losses are read from the device and logged."""
    save_every_steps: Annotated[int, Field(ge=0), limits.STEPS] = 0
    """Besides the end of every epoch; 0: only there."""
    evaluate_every_epochs: Annotated[int, Field(ge=1), limits.EPOCHS] = 1
    """The last epoch is always evaluated."""
    keep_checkpoints: Annotated[int, Field(ge=1), limits.STEPS] = 2
    """The newest so many are kept, and the best."""
    model_prefix: str = ""
    """Where the weights at the end of every epoch are written as MXNet's Module has them besides: PREFIX-symbol.json and
    PREFIX-0001.params, counted from 1. Nowhere if it is empty."""

    @property
    def traced_steps(self) -> range:
        """The steps that are traced."""
        return range(0) if self.profile_step is None else range(self.profile_step, self.profile_step + self.profile_steps)


def load_recipe(source: str | Path | Recipe) -> Recipe:
    """Return a recipe from a published name, a YAML file, a run's folder or a recipe itself.

    A YAML file holds fields of `Recipe`; the optional key `base` names the recipe it starts from: a published one, or a
    file as seen from this one. The optional key `based_on` is a name and changes nothing; in a run's folder it is that of
    the recipe it was started with. Raises `RecipeError`.
    """
    return source if isinstance(source, Recipe) else _load(str(source), Path(), ())


def _load(source: str, folder: Path, seen: tuple[Path, ...]) -> Recipe:
    """Load a published recipe or a file in `folder`; `seen` are the files whose base it is, directly or not."""
    from lockstep.recipes.published import RECIPES

    if source in RECIPES:
        return RECIPES[source]().named(source)
    path = folder / source
    if (path / "recipe.yaml").is_file():
        path = path / "recipe.yaml"
    if not path.is_file():
        raise RecipeError(f"there is no recipe and no file {source!r}. {nearest(source, RECIPES)}")
    if path.resolve() in seen:
        raise RecipeError(f"{path} is its own base")
    try:
        fields = _fields_in(path)
        base, name = fields.pop("base", None), _name_of(path, fields.pop("based_on", None))
        if base is not None:
            fields = _load(str(base), path.parent, (*seen, path.resolve())).fields() | fields | _eval_sizes(fields)
        return Recipe.of(fields).named(name)
    except RecipeError as error:
        raise RecipeError(f"{path}: {error}") from None


def _name_of(path: Path, noted: object) -> str:
    """Return the name of the recipe in a file, where `noted` is its `based_on`; a run that noted none has none."""
    if noted is not None and not isinstance(noted, str):
        raise RecipeError(f"based_on: expected the name of a recipe, not {noted!r:.60}")
    return noted if noted is not None else path.stem if path.name != "recipe.yaml" else ""


def _fields_in(path: Path) -> dict[str, Any]:
    try:
        with path.open(encoding="utf-8") as file:
            fields = read_yaml(file.read(MOST_CHARACTERS + 1))
    except (ValueError, OSError) as error:
        raise RecipeError(f"cannot be read as YAML: {error}") from None
    if not isinstance(fields, dict):
        raise RecipeError(f"expected fields of a recipe (such as `epochs: 50`), found {fields!r:.60}")
    return fields


def parse_settings(settings: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split `field=value` texts into changes of a recipe and changes of an execution. Values are YAML.

    >>> parse_settings(["epochs=2", "mean=[1, 2, 3]", "log_every_steps=1"])
    ({'epochs': 2, 'mean': [1, 2, 3]}, {'log_every_steps': 1})
    """
    recipe: dict[str, Any] = {}
    execution: dict[str, Any] = {}
    for setting in settings:
        name, equals, text = setting.partition("=")
        if not equals:
            raise RecipeError(f"expected field=value, found {setting!r}")
        try:
            value = read_yaml(text)
        except ValueError as error:
            raise RecipeError(f"{name}: {text!r:.60} is not a value: {error}") from None
        if name in Recipe.model_fields:
            recipe[name] = value
        elif name in Execution.model_fields:
            execution[name] = value
        else:
            hint = instead_of_setting(name, text, [*Recipe.model_fields, *Execution.model_fields])
            raise RecipeError(f"there is no field {name!r}. {hint or '`lockstep recipes fields` describes all.'}")
    return recipe, execution


def difference(a: Recipe, b: Recipe) -> dict[str, tuple[Any, Any]]:
    """Return the fields in which two recipes differ, with both values, in the order of the fields."""
    left, right = a.fields(), b.fields()
    return {name: (left[name], right[name]) for name in left if left[name] != right[name]}
