"""The tables of docs/reference/recipes.md, from the recipes and their published accuracies: this
file prints them.
"""

import inspect
import re
from collections.abc import Iterator
from typing import Any

from lockstep.recipes.augmentation import Augmentation
from lockstep.recipes.fields.updates import NOT_NAMED_BN
from lockstep.recipes.image_sizes import find_size, list_sizes
from lockstep.recipes.published import ORIGINS, RECIPES
from lockstep.recipes.published_accuracies import find_accuracies
from lockstep.recipes.recipe import Recipe
from lockstep.recipes.schedule import peak_lr, warmup_epochs
from lockstep.system.errors import RecipeError

_HEADER = (
    *("recipe", "top-1 %", "epochs x size", "model", "optimizer and rate", "regularisation"),
    *("images", "loss", "evaluation", "source"),
)
_REFERENCE_PIXELS = 224
_DECAYED = {
    frozenset({"conv_weight", "bn_scale", "bn_bias", "fc_weight", "fc_bias"}): "",
    frozenset({"conv_weight", "fc_weight", "fc_bias"}): " without batch norms",
    frozenset(NOT_NAMED_BN): " without batch norms outside of shortcuts",
    frozenset({"conv_weight", "bn_scale", "fc_weight"}): " without biases",
    frozenset({"conv_weight", "fc_weight"}): " without batch norms and biases",
}
"""Which tensors weight decay leaves out, by the roles that it applies to."""


def write_tables() -> str:
    """Return the tables as Markdown, one for each origin: every recipe with its published
    accuracies, cost, ingredients and source."""
    parts = []
    for origin in ORIGINS:
        lines = [f"## {origin}", "", f"| {' | '.join(_HEADER)} |", "|---" * len(_HEADER) + "|"]
        names = [name for name in RECIPES if RECIPES[name].origin == origin]
        lines += [f"| {' | '.join(_describe(name))} |" for name in names]
        parts.append("\n".join([*lines, ""]))
    return "\n".join(parts)


def _describe(name: str) -> tuple[str, ...]:
    recipe = RECIPES[name]()
    return (
        f"`{name}`",
        _describe_accuracies(name),
        _describe_cost(recipe),
        str(recipe.model),
        ", ".join(_list_update_rules(recipe)),
        ", ".join(_list_regularisation(recipe)),
        ", ".join(_list_image_changes(recipe)),
        ", ".join(_list_loss_rules(recipe)),
        _describe_evaluation(recipe),
        _find_source(name),
    )


def _describe_accuracies(name: str) -> str:
    """Return the published accuracies of a recipe: one as printed, several as a range."""
    rows = sorted(find_accuracies(name), key=lambda row: row.top1_percent)
    if not rows:
        return "-"
    if len(rows) == 1:
        return rows[0].figure()
    lowest = f"{rows[0].top1_percent:.2f}"
    highest = f"{rows[-1].top1_percent:.2f}"
    return lowest if lowest == highest else f"{lowest} to {highest}"


def _describe_cost(recipe: Recipe) -> str:
    """Return epochs and size in pixels, and how many epochs at 224 pixels have as many pixels."""
    sizes = list_sizes(recipe)
    shown = f"{recipe.epochs} x {' to '.join(map(str, dict.fromkeys((sizes[0], sizes[-1]))))}"
    if sizes == [_REFERENCE_PIXELS]:
        return shown
    pixels = sum(find_size(recipe, epoch) ** 2 for epoch in range(recipe.epochs))
    return f"{shown} ({pixels / _REFERENCE_PIXELS**2:.3g} x {_REFERENCE_PIXELS})"


def _list_update_rules(recipe: Recipe) -> Iterator[str]:
    yield f"SGD {recipe.momentum:g}" if recipe.optimizer == "sgd" else recipe.optimizer.upper()
    yield f"{peak_lr(recipe):.4g} for {recipe.global_batch_images:,} images"
    yield from _list_rates(recipe)
    if recipe.clip_norm:
        yield f"gradients limited to a norm of {recipe.clip_norm:g}"
    yield recipe.precision


def _list_rates(recipe: Recipe) -> Iterator[str]:
    decay: str = recipe.lr_decay
    if decay == "step":
        epochs = ", ".join(f"{epoch:g}" for epoch in recipe.lr_step_epochs)
        decay = f"times {recipe.lr_step_factor:g} after epochs {epochs}"
    elif recipe.lr_decay_from == "start":
        decay += " from the start"
    yield f"{decay} by {recipe.lr_unit}"
    if warmup_epochs(recipe):
        yield f"warm-up {warmup_epochs(recipe):g}"


def _list_regularisation(recipe: Recipe) -> Iterator[str]:
    decayed = _DECAYED[frozenset(recipe.weight_decay_roles)]
    yield f"weight decay {recipe.weight_decay:.3g}{decayed}"
    if recipe.stochastic_depth:
        yield f"stochastic depth {recipe.stochastic_depth:g}"
    if recipe.dropout:
        yield f"dropout {recipe.dropout:g}"
    if recipe.ema_decay:
        every = f" every {recipe.ema_every_steps} steps" if recipe.ema_every_steps > 1 else ""
        yield f"moving average {recipe.ema_decay:g}{every}"
    if recipe.sparsity != "none":
        yield f"2:4 sparsity ({recipe.sparsity})"
    if recipe.quantisation != "none":
        yield recipe.quantisation


def _list_image_changes(recipe: Recipe) -> Iterator[str]:
    yield f"crops from {100 * recipe.crop_area[0]:g} %"
    if recipe.training_interpolation == "random":
        yield "resized by a random filter"
    yield from map(_describe_augmentation, recipe.augmentations)
    if recipe.repeated_augmentation > 1:
        yield f"each image {recipe.repeated_augmentation} times in a step"
    if recipe.mixup_alpha:
        yield f"MixUp {recipe.mixup_alpha:g} by {recipe.mixup_coefficient}"
    if recipe.cutmix_alpha:
        yield f"CutMix {recipe.cutmix_alpha:g} by {recipe.mixup_coefficient}"


def _describe_augmentation(augmentation: Augmentation) -> str:
    """Return the name of an augmentation with the fields that a recipe must set for it."""
    fields = augmentation.fields()
    del fields["name"]
    for name in list(fields):
        others = {key: value for key, value in fields.items() if key != name}
        if _are_fields_of(augmentation, others):
            fields = others
    values = ", ".join(f"{name} {value}" for name, value in fields.items())
    return f"{augmentation.name} ({values})" if values else augmentation.name


def _are_fields_of(augmentation: Augmentation, fields: dict[str, Any]) -> bool:
    """Return whether these fields alone make the augmentation."""
    try:
        return type(augmentation)(**fields) == augmentation
    except RecipeError:
        return False


def _list_loss_rules(recipe: Recipe) -> Iterator[str]:
    yield recipe.loss.replace("_entropy", "-entropy").replace("_", " ")
    if recipe.label_smoothing:
        yield f"smoothing {recipe.label_smoothing:g}"
    if recipe.target_threshold:
        yield f"targets of 1 above {recipe.target_threshold:g}"


def _describe_evaluation(recipe: Recipe) -> str:
    parts = [f"{recipe.eval_crop} of {recipe.eval_resize}", recipe.interpolation]
    if recipe.eval_antialias:
        parts.append("filtered")
    if recipe.eval_flips:
        parts.append("mean with the mirror image")
    return ", ".join(parts)


def _find_source(name: str) -> str:
    """Return the sentence on the source in the docstring of a recipe."""
    about = " ".join(str(inspect.getdoc(RECIPES[name].load_function())).split())
    match = re.search(r"Source(?: and code)?: (.*?)\. (?=Cost:|- |[A-Z])", about)
    return match[1] if match else "-"


if __name__ == "__main__":
    print(write_tables(), end="")
