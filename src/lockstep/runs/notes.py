"""Notes before the first step: settings that are allowed but rarely intended."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from lockstep.backends import World
from lockstep.models.metrics import is_top5_informative
from lockstep.recipes import Execution, Recipe
from lockstep.recipes.schedule import learning_rates, peak_lr, warmup_epochs

_OF_THE_STEP = ("compile", "layout", "fused", "cuda_graph", "recompute")
"""Fields of the execution that change what a GPU computes in a step."""
LARGEST_CHANGE = 0.25
"""The evaluation size may differ from the training size by this share without a note. The published
recipes use the same size for both, and a larger evaluation size improves accuracy at about 1.15 to
1.3 times the training size (arXiv:1906.06423)."""
_NEAR_PEAK = 0.95
_NAMED = 5


@dataclass(frozen=True)
class RunFacts:
    """RunFacts about a run's images."""

    classes: Sequence[str]
    training: np.ndarray
    """int64 [classes]: number of training images of every class."""
    validation: np.ndarray
    """int64 [classes]: number of validation images of every class."""
    steps_per_epoch: int


def list_unusual_settings(recipe: Recipe, facts: RunFacts) -> list[str]:
    """Return a note for everything in a recipe and its images that is allowed but rarely intended.

    >>> facts = RunFacts(["cat", "dog"], np.array([8, 8]), np.array([2, 0]), 4)
    >>> list_unusual_settings(Recipe(logits=2, global_batch_images=4), facts)
    ['top-5 is left out: it means nothing with 2 classes', 'no validation images for 1 of 2 classes: dog']
    """
    return [
        *_of_logits(recipe, facts),
        *_of_sizes(recipe),
        *_of_rates(recipe, facts),
        *_of_classes(facts),
    ]


def note_determinism_cost(recipe: Recipe, execution: Execution, world: World) -> list[str]:
    """Return a note for a run on a GPU with `deterministic`: that it may cost time, and what to
    type to measure it."""
    if not world.on_gpu or not execution.deterministic:
        return []
    named = f" --model {recipe.model}" if isinstance(recipe.model, str) else ""
    images = recipe.global_batch_images // (world.ranks * execution.accumulation_steps)
    defaults = Execution()
    others = [
        (name, getattr(execution, name))
        for name in _OF_THE_STEP
        if getattr(execution, name) != getattr(defaults, name)
    ]
    settings = "".join(f" --set {name}={value}" for name, value in others)
    measured = (
        f"lockstep benchmark train --backend {execution.backend}{named} -b {images}{settings}"
    )
    return [
        "GPU kernels give the same bits every time (deterministic=true), so that a resumed run is"
        " the same run; faster ones may exist: --set deterministic=false. To measure it, with and"
        f" without that: {measured} --dtype {recipe.precision}"
    ]


def _of_logits(recipe: Recipe, facts: RunFacts) -> Iterator[str]:
    classes = len(facts.classes)
    if classes + 1 < recipe.logits:  # NVIDIA's TensorFlow model has one logit more than classes
        yield (
            f"the images have {classes} classes, but the model has {recipe.logits} logits: --set"
            f" logits={classes}"
        )


def _of_sizes(recipe: Recipe) -> Iterator[str]:
    trained = recipe.image_size
    evaluated = recipe.eval_crop
    if abs(evaluated - trained) > LARGEST_CHANGE * trained:
        larger = "larger" if evaluated > trained else "smaller"
        yield (
            f"evaluation at {evaluated} px is more than a quarter {larger} than training at"
            f" {trained} px: set image_size without eval_resize and eval_crop, which then follow it"
        )


def _of_rates(recipe: Recipe, facts: RunFacts) -> Iterator[str]:
    warmup = warmup_epochs(recipe)
    peak = peak_lr(recipe)
    if warmup >= recipe.epochs:
        yield (
            f"the warm-up of {warmup:g} epoch{'s' * (warmup != 1)} is not shorter than the run of"
            f" {recipe.epochs}: the learning rate never decreases; --set"
            f" warmup_epochs={recipe.epochs / 10:g}"
        )
        return
    highest = learning_rates(recipe, facts.steps_per_epoch).max()
    if highest < _NEAR_PEAK * peak:
        yield (
            f"the learning rate never reaches its peak of {peak:.4g}: the highest is {highest:.4g}"
        )


def _of_classes(facts: RunFacts) -> Iterator[str]:
    if len(facts.classes) == 1:
        yield f"all images are of one class, {facts.classes[0]}: there is nothing to classify"
    elif not is_top5_informative(len(facts.classes)):
        yield f"top-5 is left out: it means nothing with {len(facts.classes)} classes"
    for split, counts in (("training", facts.training), ("validation", facts.validation)):
        if not counts.any():
            continue  # images that are not read
        lacking = [facts.classes[i] for i in np.flatnonzero(counts == 0).tolist()]
        if lacking:
            more = f" and {len(lacking) - _NAMED} more" if len(lacking) > _NAMED else ""
            names = ", ".join(lacking[:_NAMED])
            yield (
                f"no {split} images for {len(lacking)} of {len(facts.classes)} classes:"
                f" {names}{more}"
            )
