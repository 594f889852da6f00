"""The recipe `my-images`: ResNet-50 v1.5 on your own images. Its values are chosen from the images
and the device."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from lockstep.recipes.recipe import Recipe, following_fields

NAME = "my-images"
OWN_IMAGES = (NAME, "fine-tune")
"""The recipes for your own images, whose values are chosen from these. They leave out empty class
folders and folders inside class folders with a note; others refuse them."""
_MANY = 100_000
"""With at least this many training images, the crops and the weight decay of the published recipes
are used."""
_LEAST_STEPS = 16
"""An epoch has at least this many steps if there are enough images."""


@dataclass(frozen=True)
class Facts:
    """The facts that decide the recipe's values."""

    classes: int
    images: int
    """Number of training images."""
    shorter_side: int
    """Shorter side of an image in pixels: the median over the images."""
    on_gpu: bool
    precision: Literal["fp32", "bf16"]
    """The precision that is fast on the device."""
    decodes_small: bool = True
    """Whether the loader can decode JPEGs at a fraction of their size."""
    is_evaluated: bool = True
    """Whether the run evaluates, so that it can stop early."""
    is_known: bool = False
    """Whether the weights that the run starts from tell these classes apart."""
    units: int = 1
    """Number of equal parts that the images of a step must divide into: ranks times accumulation
    steps."""


@dataclass(frozen=True)
class _Device:
    """Limits for a run on a device."""

    image_size: int
    batch: int
    passes: int
    """Training images times epochs. `epochs` limits the number of epochs."""
    epochs: tuple[int, int]


_CPU = _Device(image_size=64, batch=32, passes=50_000, epochs=(10, 100))
_GPU = _Device(image_size=224, batch=128, passes=2_000_000, epochs=(90, 200))


def check_changes(changes: Mapping[str, Any]) -> Recipe:
    """Return a recipe with these fields. Raises `RecipeError` if one is wrong.

    Fields that must fit values not chosen yet are left out: `eval_resize` and `eval_crop` (the
    image size), `class_weights` (the number of logits), and fields that name tensors (the model).
    """
    late = ["eval_resize", "eval_crop", "class_weights"]
    late += ["frozen", "lr_multipliers", "sparsity_excluded"]
    return Recipe.of({name: value for name, value in changes.items() if name not in late})


def choose_recipe(facts: Facts, changes: Mapping[str, Any] | None = None) -> Recipe:
    """Return the recipe for some images and a device. Fields in `changes` are kept, and the others
    follow from them.

    Raises `RecipeError` if a changed field is wrong.
    """
    changes = following_fields(dict(changes or {}))
    checked = check_changes(changes)
    device = _GPU if facts.on_gpu else _CPU

    def choose(name: str, own: Any) -> Any:
        return getattr(checked, name) if name in changes else own

    typical_size = max(32 * round(facts.shorter_side / 32), 64)
    size = choose("image_size", min(typical_size, device.image_size))
    batch = choose("global_batch_images", choose_batch(facts, device.batch))
    passes = max(round(device.passes / facts.images), device.epochs[0])
    epochs = choose("epochs", min(passes, device.epochs[1]))
    return Recipe(
        logits=facts.classes,
        zero_init_last_bn=True,
        epochs=epochs,
        global_batch_images=batch,
        lr=float(f"{0.256 * batch / 256:.3g}"),
        lr_scaling="none",
        warmup_epochs=min(5.0, max(round(epochs / 18), 1)) if epochs > 1 else 0.1,
        precision=facts.precision,
        loss_scaling="dynamic",
        image_size=size,
        antialias=True,
        dct_scaling=facts.decodes_small and facts.shorter_side >= 4 * size,
        exif_orientation=True,
        temperature_scaling=True,
        **choose_regularisation(facts.images),
    ).replace(**changes)


def choose_regularisation(images: int) -> dict[str, Any]:
    """Return the fields that keep a network from learning its training images by heart."""
    if images >= _MANY:
        return {"crop_area": (0.08, 1.0), "weight_decay": 1 / 32768}
    return {"crop_area": (0.35, 1.0), "weight_decay": 1e-4}


def choose_batch(facts: Facts, most: int) -> int:
    """Return the images of a step, at most `most`: a power of two that leaves an epoch several
    steps, rounded up to a multiple of units."""
    wanted = min(max(facts.images // _LEAST_STEPS, 8), most, max(facts.images, 1))
    power = 2 ** int(math.log2(wanted))
    return -(-power // facts.units) * facts.units


def my_images() -> Recipe:
    """ResNet-50 v1.5 on your own images: values chosen from images and device before the run
    (docs/how-to/random-weights.md).

    Shown for 1,000 photos of 10 classes on a CPU without bf16. `lockstep train --data DATA --out
    RUN` chooses the values for your images. Source: Lockstep's own, from the published recipes and
    the demo. Tested on small samples only.

    - logits: the number of classes.
    - precision: bf16 where the device multiplies it in hardware, else fp32.
    - image_size: the shorter side of a typical image in steps of 32 px; 64 to 224 (published) on a
      GPU, 64 (demo) on a CPU.
    - global_batch_images: 1/16 of the images as a power of two; 8 to 128 on a GPU, 8 to 32 on a
      CPU.
    - epochs: 2,000,000 image passes in 90 (published) to 200 epochs on a GPU, 50,000 in 10 to 100
      epochs on a CPU.
    - lr: 0.256 at 256 images, in proportion to the batch (published).
    - warmup_epochs: 5 of 90 (published), in proportion; 1 to 5.
    - crop_area and weight_decay: as published for 100,000 images or more. For fewer images, the
      crop area is from 35 % (demo) and weight decay is 1e-4 (arXiv:1512.03385).
    - antialias: true, because photos shrink a lot.
    - dct_scaling: true for images that are at least four times as large as image_size.
    - exif_orientation: true, because phones store photos on their side.
    - temperature_scaling: true, so that probabilities of new photos are reliable
      (arXiv:1706.04599).
    - zero_init_last_bn: true, so that short runs start well (arXiv:1706.02677).
    - All other fields are as published.
    """
    return choose_recipe(
        Facts(classes=10, images=1000, shorter_side=400, on_gpu=False, precision="fp32")
    )


def demo() -> Recipe:
    """ResNet-50 v1.5 on the demo's drawn textures at 48 px: above 90 in a minute or two on 2 cores.

    Source: Lockstep's own, for the 1,100 images of `lockstep demo`. The command sets `logits` to
    its five classes and `precision` to one that the machine multiplies in hardware. Wide crops keep
    the period of a texture visible.
    """
    return Recipe().replace(
        logits=10,
        zero_init_last_bn=True,
        epochs=5,
        global_batch_images=16,
        lr=0.02,
        lr_scaling="none",
        warmup_epochs=1.0,
        precision="bf16",
        image_size=48,
        crop_area=(0.5, 1.0),
        eval_resize=54,
        eval_crop=48,
    )
