"""The recipe `fine-tune`: your own images, from weights that are trained already. Its values are
chosen from the weights, the images and the device."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lockstep.models.architectures import MODELS
from lockstep.models.operations import forward_macs
from lockstep.recipes.my_images import Facts, check_changes, choose_batch, choose_regularisation
from lockstep.recipes.recipe import Recipe, following_fields

NAME = "fine-tune"
_LARGEST_RATIO = 1.5
"""Evaluation may use images this many times as large as training. The largest ratio of known
weights is 1.4 (timm's a3_in1k)."""


@dataclass(frozen=True)
class _Device:
    """Limits for a run on a device."""

    batch: int
    passes: int
    """Training images times epochs, for ResNet-50 at 224 px; networks that compute less per image
    get more. `epochs` limits the number of epochs."""
    epochs: tuple[int, int]


_LIGHT_MACS = 250_000_000
"""A network with fewer multiply-adds per image trains for up to twice the epochs: it learns slower,
and gained three points in measurements (benchmarks/notes/fine-tuning.md). ResNet-18 at 64 px has
150 million, ResNet-50 340 million."""
_CPU = _Device(batch=32, passes=5_000, epochs=(5, 20))
_GPU = _Device(batch=64, passes=100_000, epochs=(10, 20))
_LEAST_PATIENCE = 10
"""Epochs without a better evaluation that end a run: three quarters of the epochs, at least this
many, because the small rates at the end often bring the best one."""
_RATE = 0.004
"""Peak learning rate at 8 images and `_MANY_EPOCHS`; it grows with the batch, up to
`_LARGEST_BATCH_OF_RATE`."""
_LARGEST_BATCH_OF_RATE = 32
"""The rate grows up to this many images in a step: no larger steps were measured."""
_MANY_EPOCHS = 8
"""With fewer epochs the peak rate is half: the first epochs at a large rate cost accuracy that only
more epochs make up for."""
_KNOWN_RATE = 0.0005
"""The peak rate for weights of the same classes, which have little to learn, with any epochs."""


def choose_recipe(
    facts: Facts, weights: Recipe, changes: Mapping[str, Any] | None = None
) -> Recipe:
    """Return the recipe for some images, a device and weights. Fields in `changes` are kept, and
    the others follow from them.

    `weights` is the recipe of the weights. It decides the network and how images are prepared.
    Raises `RecipeError` if a changed field is wrong.
    """
    changes = following_fields(dict(changes or {}))
    checked = check_changes(changes)
    device = _GPU if facts.on_gpu else _CPU
    batch = choose_batch(facts, device.batch)
    if "global_batch_images" in changes:
        batch = checked.global_batch_images
    size = checked.image_size if "image_size" in changes else _choose_size(weights)
    own_epochs = _choose_epochs(device, facts.images, weights, size)
    epochs = checked.epochs if "epochs" in changes else own_epochs
    rate = _RATE if epochs >= _MANY_EPOCHS else _RATE / 2
    if facts.is_known:
        rate = _KNOWN_RATE
    recipe = Recipe(
        model=weights.model,
        padding=weights.padding,
        bn_epsilon=weights.bn_epsilon,
        logits=facts.classes,
        epochs=epochs,
        global_batch_images=batch,
        lr=float(f"{rate * min(batch, _LARGEST_BATCH_OF_RATE) / 8:.3g}"),
        lr_scaling="none",
        lr_depth_decay=0.9,
        momentum=0.9,
        warmup_epochs=1.0 if epochs > 1 else 0.1,
        ema_decay=0.99,
        linear_probe=True,
        early_stopping_epochs=max(_LEAST_PATIENCE, epochs * 3 // 4) if facts.is_evaluated else 0,
        precision=facts.precision,
        loss_scaling="dynamic",
        image_size=size,
        **_prepare_images_as(weights, keeps_size="image_size" not in changes),
        dct_scaling=facts.decodes_small and facts.shorter_side >= 4 * size,
        exif_orientation=True,
        temperature_scaling=True,
        **choose_regularisation(facts.images),
    ).replace(**changes)
    if recipe.frozen != ("backbone",):
        return recipe
    # Neither features nor images change: the linear probe is the whole run.
    return recipe.replace(**{"crop_area": (1.0, 1.0), "flip_probability": 0.0} | changes)


def _choose_size(weights: Recipe) -> int:
    """Return the size of the images that weights were trained with. The size of their evaluation
    stands in if the file has only that."""
    trained = weights.image_size
    evaluated = weights.eval_crop
    return trained if trained <= evaluated <= _LARGEST_RATIO * trained else evaluated


def _choose_epochs(device: _Device, images: int, weights: Recipe, size: int) -> int:
    """Return the epochs that a device has time for, never fewer than with ResNet-50 at 224 px."""
    largest = forward_macs(MODELS["resnet50"], 224, 1000)
    macs = forward_macs(weights.spec, size, weights.logits)
    passes = device.passes * max(largest / macs, 1.0)
    most = device.epochs[1] * (2 if macs < _LIGHT_MACS else 1)
    return min(max(round(passes / max(images, 1)), device.epochs[0]), most)


def _prepare_images_as(weights: Recipe, *, keeps_size: bool) -> dict[str, Any]:
    """Return the fields of a recipe that prepare images as for the weights, with or without the
    sizes of evaluation."""
    names = ["mean", "std", "interpolation", "antialias", "eval_antialias"]
    names += ["eval_side_rounding", "eval_offset_rounding", "eval_sampling"]
    if keeps_size:
        names += ["eval_resize", "eval_crop"]
    return {name: getattr(weights, name) for name in names}


def fine_tune() -> Recipe:
    """ResNet-50 v1.5 on your own images from trained weights: values chosen from weights, images
    and device before the run (docs/how-to/fine-tune.md).

    Shown for 1,000 photos of 10 classes and weights of ImageNet on a CPU without bf16. `lockstep
    train --data DATA --weights NAME --out RUN` chooses the values for your images and weights.
    Source: Lockstep's own, from the papers below. Tested on small samples only.

    - logits: the number of classes.
    - model, padding, bn_epsilon and the preprocessing: those of the weights; image_size is the size
      that they were trained with.
    - exif_orientation: true, because phones store photos on their side.
    - precision, global_batch_images, crop_area, dct_scaling and weight_decay: as in `my-images`, at
      most 64 images on a GPU.
    - epochs: 5,000 image passes in 5 to 20 epochs on a CPU, 100,000 in 10 to 20 epochs on a GPU, up
      to 40 with a network that has fewer than 250 million multiply-adds per image;
      more passes for networks and image sizes that need fewer operations than ResNet-50 at 224 px.
    - lr: 0.004 at 8 images, half of it with fewer than 8 epochs, and 0.0005 for weights that name
      the same classes: all are measured (benchmarks/notes/fine-tuning.md). It grows with the batch
      (arXiv:1706.02677), up to 32 images, with momentum 0.9.
    - lr_depth_decay: 0.9, so that the stem of ResNet-50 has a sixth of the classifier's rate: lower
      layers fit other images as they are (arXiv:1801.06146, section 3.2).
    - warmup_epochs: 1.
    - ema_decay: 0.99. The average of the last hundred steps smooths small batches (timm and
      torchvision average, too); where it is better than the trained weights, it is the best
      checkpoint.
    - early_stopping_epochs: three quarters of the epochs, at least 10.
    - temperature_scaling: true, as in `my-images`.
    - crop_area and flip_probability: no augmentation if `frozen` is "backbone". Then the linear
      probe is the whole run.
    - linear_probe: true; the first part of LP-FT (arXiv:2202.10054).
    - All other fields are as published.
    """
    return choose_recipe(
        Facts(classes=10, images=1000, shorter_side=400, on_gpu=False, precision="fp32"), Recipe()
    )
