"""Which tensors a step changes, and by which share of the learning rate.

The rate of a trained tensor is the schedule's times a factor: the multiplier of its longest prefix
in `lr_multipliers`, times lr_depth_decay ^ depth. The depth of a tensor is the number of sections
between it and the classifier: 0 in the classifier, 1 in the last block, 2 in the block before it,
and the number of blocks + 1 in the stem. Layer-wise decay: arXiv:1801.06146, arXiv:2106.08254.

A batch norm whose scale and bias are both frozen is frozen: it computes with its running
statistics, and these stay as they are.
"""

from lockstep.models.sections import count_parts, find_section, has_prefix, sections
from lockstep.recipes.recipe import Recipe


def rate_factors(recipe: Recipe) -> dict[str, float]:
    """Return the factor of the learning rate of every trained tensor, in the model's order of
    names. Parameters that are missing are frozen.

    >>> recipe = Recipe(frozen=["layer1"], lr_multipliers={"fc": 10}, lr_depth_decay=0.5)
    >>> factors = rate_factors(recipe)
    >>> factors["fc.bias"], factors["layer4.1.conv1.weight"], "layer1.0.conv1.weight" in factors
    (10.0, 0.25, False)
    """
    spec = recipe.spec
    depths = {section: depth for depth, section in enumerate(sections(spec))}
    factors = {}
    for tensor in spec.list_tensors(recipe.logits):
        name = tensor.name
        if not tensor.is_trained or any(has_prefix(name, prefix) for prefix in recipe.frozen):
            continue
        fitting = [prefix for prefix in recipe.lr_multipliers if has_prefix(name, prefix)]
        multiplier = 1.0
        if fitting:
            multiplier = recipe.lr_multipliers[max(fitting, key=count_parts)]
        factors[name] = multiplier * recipe.lr_depth_decay ** depths[find_section(name)]
    return factors


def frozen_norms(recipe: Recipe) -> frozenset[str]:
    """Return the names of the batch norms that are frozen, such as "layer1.0.bn1"."""
    factors = rate_factors(recipe)
    names = [conv.bn_name for conv in recipe.spec.list_convolutions()]
    return frozenset(
        name for name in names if f"{name}.weight" not in factors and f"{name}.bias" not in factors
    )


def changing_tensors(recipe: Recipe) -> list[str]:
    """Return the names of all tensors that a step changes, in the model's order: trained ones, and
    the statistics of batch norms that are not frozen."""
    factors = rate_factors(recipe)
    frozen = frozen_norms(recipe)
    return [
        tensor.name
        for tensor in recipe.list_tensors()
        if tensor.name in factors
        or (not tensor.is_trained and tensor.name.rpartition(".")[0] not in frozen)
    ]


def lowest_trained_section(recipe: Recipe) -> str:
    """Return the last section, from the classifier down, that has a trained tensor. Nothing below
    it needs a gradient."""
    trained = {find_section(name) for name in rate_factors(recipe)}
    return [name for name in sections(recipe.spec) if name in trained][-1]
