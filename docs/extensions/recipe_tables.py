"""The tables of docs/reference/recipes.md, from the recipes and their published accuracies: this
file prints them.
"""

from collections.abc import Iterator

from lockstep.recipes.image_sizes import find_size, list_sizes
from lockstep.recipes.published import ORIGINS, RECIPES
from lockstep.recipes.published_accuracies import find_accuracies
from lockstep.recipes.recipe import Recipe
from lockstep.recipes.schedule import peak_lr

_HEADER = ("recipe", "top-1 %", "epochs x size", "optimizer and rate", "what it adds")
_REFERENCE_PIXELS = 224


def write_tables() -> str:
    """Return the tables as Markdown, one for each origin: every recipe with its published
    accuracies, cost, optimizer and ingredients."""
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
        _describe_updates(recipe),
        ", ".join(_list_ingredients(recipe)),
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


def _describe_updates(recipe: Recipe) -> str:
    """Return the optimizer with its rate for a number of images, and the precision."""
    rate = f"{peak_lr(recipe):.4g} for {recipe.global_batch_images:,} images"
    return f"{recipe.optimizer.upper()}, {rate}, {recipe.precision}"


def _list_ingredients(recipe: Recipe) -> Iterator[str]:
    """Yield what a recipe adds to cross-entropy, weight decay, random crops and flips."""
    yield from _list_loss_rules(recipe)
    yield from (augmentation.name for augmentation in recipe.augmentations)
    if recipe.repeated_augmentation > 1:
        yield f"each image {recipe.repeated_augmentation} times in a step"
    if recipe.mixup_alpha:
        yield f"MixUp {recipe.mixup_alpha:g}"
    if recipe.cutmix_alpha:
        yield f"CutMix {recipe.cutmix_alpha:g}"
    if recipe.stochastic_depth:
        yield f"stochastic depth {recipe.stochastic_depth:g}"
    if recipe.ema_decay:
        yield f"moving average {recipe.ema_decay:g}"
    if recipe.sparsity != "none":
        yield "2:4 sparsity"
    if recipe.quantisation != "none":
        yield recipe.quantisation
    if recipe.eval_flips:
        yield "evaluation with the mirror image"


def _list_loss_rules(recipe: Recipe) -> Iterator[str]:
    if recipe.loss == "binary_cross_entropy":
        yield "binary cross-entropy"
    if recipe.label_smoothing:
        yield f"smoothing {recipe.label_smoothing:g}"


if __name__ == "__main__":
    print(write_tables(), end="")
