"""What a run is allowed to do and seldom means to: said before its first step."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from lockstep.models.metrics import top5_tells
from lockstep.recipes import Recipe
from lockstep.recipes.schedule import learning_rates, peak_lr, warmup_epochs

LARGEST_CHANGE = 0.25
"""By this share of the training size evaluation may be larger or smaller: the published recipes have the same size, and
models trained for larger evaluation images gain by about 1.15 to 1.3 (arXiv:1906.06423)."""
_NEAR_PEAK = 0.95
_NAMED = 5


@dataclass(frozen=True)
class Facts:
    """What is known of a run's images."""

    classes: Sequence[str]
    training: np.ndarray
    """int64 [classes]: training images of every class."""
    validation: np.ndarray
    """int64 [classes]: validation images of every class."""
    steps_per_epoch: int


def seldom_meant(recipe: Recipe, facts: Facts) -> list[str]:
    """Return what a recipe and its images make a run do that is allowed and seldom meant, a sentence each.

    >>> facts = Facts(["cat", "dog"], np.array([8, 8]), np.array([2, 0]), 4)
    >>> seldom_meant(Recipe(logits=2, global_batch_images=4), facts)
    ['top-5 of 2 classes tells nothing and is left out', 'no validation image of 1 of 2 classes: dog']
    """
    return [*_of_logits(recipe, facts), *_of_sizes(recipe), *_of_rates(recipe, facts), *_of_classes(facts)]


def _of_logits(recipe: Recipe, facts: Facts) -> Iterator[str]:
    classes = len(facts.classes)
    if classes + 1 < recipe.logits:  # NVIDIA's TensorFlow model has one more than classes
        yield f"the images have {classes} classes, the model {recipe.logits} logits: --set logits={classes}"


def _of_sizes(recipe: Recipe) -> Iterator[str]:
    trained, evaluated = recipe.image_size, recipe.eval_crop
    if abs(evaluated - trained) > LARGEST_CHANGE * trained:
        larger = "larger" if evaluated > trained else "smaller"
        yield (
            f"evaluation at {evaluated} px is more than a quarter {larger} than training at {trained} px: set image_size "
            "without eval_resize and eval_crop, which then follow it"
        )


def _of_rates(recipe: Recipe, facts: Facts) -> Iterator[str]:
    warmup, peak = warmup_epochs(recipe), peak_lr(recipe)
    if warmup >= recipe.epochs:
        yield (
            f"the warm-up of {warmup:g} epoch{'s' * (warmup != 1)} is not shorter than the run of {recipe.epochs}, so that "
            f"the learning rate never falls: --set warmup_epochs={recipe.epochs / 10:g}"
        )
        return
    highest = learning_rates(recipe, facts.steps_per_epoch).max()
    if highest < _NEAR_PEAK * peak:
        yield f"the learning rate never reaches its peak of {peak:.4g}: the highest is {highest:.4g}"


def _of_classes(facts: Facts) -> Iterator[str]:
    if len(facts.classes) == 1:
        yield f"all images are of one class, {facts.classes[0]}: there is nothing to tell apart"
    elif not top5_tells(len(facts.classes)):
        yield f"top-5 of {len(facts.classes)} classes tells nothing and is left out"
    for split, counts in (("training", facts.training), ("validation", facts.validation)):
        lacking = [facts.classes[i] for i in np.flatnonzero(counts == 0).tolist()]
        if lacking:
            more = f" and {len(lacking) - _NAMED} more" if len(lacking) > _NAMED else ""
            names = ", ".join(lacking[:_NAMED])
            yield f"no {split} image of {len(lacking)} of {len(facts.classes)} classes: {names}{more}"
