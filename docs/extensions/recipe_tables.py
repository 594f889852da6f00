"""The tables of docs/reference/recipes.md, from the recipes and their published accuracies: this
file prints them.
"""

from collections.abc import Iterator

from lockstep.recipes.image_sizes import find_size, list_sizes
from lockstep.recipes.published import ORIGINS, RECIPES
from lockstep.recipes.published_accuracies import find_accuracies
from lockstep.recipes.recipe import Recipe

_HEADER = ("recipe", "top-1 %", "epochs", "images per step", "ingredients")
_REFERENCE_PIXELS = 224


def write_tables() -> str:
    """Return the tables as Markdown, one for each origin: every recipe with its published
    accuracies, cost and ingredients."""
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
        f"{recipe.global_batch_images:,}, {recipe.precision}",
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
    """Return the epochs; with the size in pixels and the epochs at 224 that have as many pixels, if
    the images have another size."""
    sizes = list_sizes(recipe)
    if sizes == [_REFERENCE_PIXELS]:
        return str(recipe.epochs)
    pixels = sum(find_size(recipe, epoch) ** 2 for epoch in range(recipe.epochs))
    shown = " to ".join(map(str, dict.fromkeys((sizes[0], sizes[-1]))))
    return f"{recipe.epochs} at {shown} ({pixels / _REFERENCE_PIXELS**2:.3g})"


def _list_ingredients(recipe: Recipe) -> Iterator[str]:
    """Yield what a recipe adds to SGD, cross-entropy, weight decay, random crops and flips."""
    if recipe.optimizer != "sgd":
        yield recipe.optimizer.upper()
    yield from _list_loss_rules(recipe)
    yield from (augmentation.name for augmentation in recipe.augmentations)
    if recipe.repeated_augmentation > 1:
        yield f"repeated {recipe.repeated_augmentation} times"
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
        yield "mirror images"


def _list_loss_rules(recipe: Recipe) -> Iterator[str]:
    if recipe.loss == "binary_cross_entropy":
        yield "binary cross-entropy"
    if recipe.label_smoothing:
        yield f"smoothing {recipe.label_smoothing:g}"


if __name__ == "__main__":
    print(write_tables(), end="")
