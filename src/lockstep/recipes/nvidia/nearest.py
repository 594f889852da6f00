"""The published recipe that is nearest to given fields, and the fields to set on it."""

import math
from collections.abc import Callable
from functools import cache
from typing import Any

from lockstep.recipes.published import NVIDIA_RECIPES, RECIPES
from lockstep.recipes.recipe import Recipe, difference, eval_fields
from lockstep.recipes.schedule import peak_lr, warmup_epochs

_LR = ("lr", "lr_scaling", "lr_batch_images")
_IDLE: dict[str, Callable[[Recipe], bool]] = {
    "lr_step_epochs": lambda recipe: recipe.lr_decay != "step",
    "lr_step_factor": lambda recipe: recipe.lr_decay != "step",
    "lr_decay_from": lambda recipe: recipe.lr_decay == "step" or warmup_epochs(recipe) == 0,
    "lr_end": lambda recipe: recipe.lr_decay == "step",
    "warmup_from_batch_images": lambda recipe: recipe.warmup_epochs == 0,
    "warmup_start_lr": lambda recipe: warmup_epochs(recipe) == 0,
    "warmup_counts_from": lambda recipe: warmup_epochs(recipe) == 0,
    "mixup_coefficient": lambda recipe: recipe.mixup_alpha == 0,
    "mixup_pairing": lambda recipe: recipe.mixup_alpha == 0,
    "weight_decay_roles": lambda recipe: recipe.weight_decay == 0,
    "sparsity_excluded": lambda recipe: recipe.sparsity == "none",
    "loss_scaling": lambda recipe: recipe.precision != "fp16",
    "loss_scale": lambda recipe: recipe.precision != "fp16" or recipe.loss_scaling == "none",
    **dict.fromkeys(
        (
            "loss_scale_growth",
            "loss_scale_growth_steps",
            "loss_scale_backoff",
            "loss_scale_backoff_steps",
        ),
        lambda recipe: recipe.precision != "fp16" or recipe.loss_scaling != "dynamic",
    ),
}
"""Fields that change nothing in some recipes, with the test for such a recipe."""


def find_changes(base: Recipe, wanted: Recipe) -> dict[str, Any]:
    """Return the fewest fields to set on `base` so that it computes the same as `wanted`, as plain
    values.

    Fields that change nothing in `wanted` are left out. `seed` is compared like all others.
    """
    unneeded = {name for name, is_idle in _IDLE.items() if is_idle(wanted)}
    scale = wanted.global_batch_images / base.lr_batch_images if base.lr_scaling == "linear" else 1
    if math.isclose(base.lr * scale, peak_lr(wanted), rel_tol=1e-9):
        unneeded.update(_LR)
    elif wanted.lr_scaling == "none":
        unneeded.add("lr_batch_images")
    if wanted.global_batch_images >= max(
        base.warmup_from_batch_images, wanted.warmup_from_batch_images
    ):
        unneeded.add("warmup_from_batch_images")
    sizes = eval_fields({"image_size": wanted.image_size})
    if base.image_size != wanted.image_size and sizes.items() <= wanted.fields().items():
        unneeded.update(sizes)
    differences = difference(base, wanted)
    return {name: new for name, (_, new) in differences.items() if name not in unneeded}


def nearest_recipe(wanted: Recipe, framework: str) -> tuple[str, dict[str, Any]]:
    """Return the name of the example's recipe with the fewest fields to set, and these fields.

    `framework` is part of the names of the example's recipes, such as "paddle". Those of the wanted
    model come first. A quantised recipe is none to change into one that is not.
    """

    def keep_if_any(is_wanted: Callable[[str, Recipe], bool]) -> dict[str, Recipe]:
        return {name: base for name, base in bases.items() if is_wanted(name, base)} or bases

    bases = _list_published()
    bases = keep_if_any(lambda _, base: base.quantisation in ("none", wanted.quantisation))
    bases = keep_if_any(lambda name, _: f"-{framework}-" in name)
    bases = keep_if_any(lambda _, base: base.model == wanted.model)
    changes = {name: find_changes(base, wanted) for name, base in bases.items()}
    best = min(changes, key=lambda name: len(changes[name]))
    return best, changes[best]


@cache
def _list_published() -> dict[str, Recipe]:
    return {name: RECIPES[name]() for name in NVIDIA_RECIPES}
