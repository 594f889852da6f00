"""Stochastic depth (arXiv:1603.09382): training uses only the shortcut of some residual blocks,
drawn for each image.

The rule is that of timm's `drop_path` and of torchvision's `StochasticDepth` in mode "row": the
probability rises linearly over all blocks, and what a block adds to an image that keeps it is
divided by 1 - probability. All images pass through the block and its batch norms.
"""

import numpy as np

from lockstep.recipes.recipe import Recipe


def drop_rates(recipe: Recipe) -> dict[str, float]:
    """Return the probability of each residual block to be dropped, by its name, in order.

    It is stochastic_depth * i / (blocks - 1) for block i, from 0. Every model has four blocks or
    more.

    >>> list(drop_rates(Recipe(model="resnet18", stochastic_depth=0.875)).values())[::3]
    [0.0, 0.375, 0.75]
    """
    names = [block.name for block in recipe.spec.list_blocks()]
    return {name: recipe.stochastic_depth * i / (len(names) - 1) for i, name in enumerate(names)}


def branch_factors(recipe: Recipe, kept_blocks: np.ndarray) -> np.ndarray:
    """Return the factors of what blocks add to their shortcuts: float32 [N, blocks].

    `kept_blocks` are bool [N, blocks], as in `lockstep.data.Batch`.
    """
    kept_share = 1 - np.array(list(drop_rates(recipe).values()))
    return (kept_blocks / kept_share).astype(np.float32)
