"""Choose the values of `my-images` or `fine-tune` from the images, the device and the weights,
before a run."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.backends import World
from lockstep.data.index import Index
from lockstep.recipes import Execution, Recipe, fine_tune, my_images
from lockstep.recipes.my_images import Facts
from lockstep.recipes.order import steps_per_epoch
from lockstep.recipes.recipe import PREPROCESSING
from lockstep.recipes.schedule import peak_lr
from lockstep.runs.recorder import Recorder
from lockstep.runs.starting_weights import INVISIBLE_FIELDS, StartSource
from lockstep.system.errors import RecipeError
from lockstep.system.machine import fast_precision
from lockstep.system.text import format_count


def choose_from_images(
    name: str,
    source: StartSource | None,
    training: Index,
    changes: Mapping[str, Any],
    execution: Execution,
    world: World,
    recorder: Recorder,
    out: Path,
) -> Recipe:
    """Return one of the recipes for your own images, for a run's images and device, and send the
    choices to the listener.

    `name` may be "": then a run that starts from weights is fine-tuned. The weights of `source`
    decide some fields where `changes` do not. Raises `RecipeError` if `fine-tune` has no weights.
    """
    weights = source.weights.recipe if source is not None else None
    if not name:
        starts = source is not None and not source.resumes
        name = fine_tune.NAME if starts else my_images.NAME
    is_known = source is not None and source.knows(training.classes)
    facts = collect_facts(training, execution, world, is_known=is_known)
    check_has_weights(name, source)
    if weights is not None and name == fine_tune.NAME:
        recipe = fine_tune.choose_recipe(facts, weights, changes)
        decided = [*INVISIBLE_FIELDS, "image_size", *PREPROCESSING]
    else:
        decided = [] if weights is None else [*INVISIBLE_FIELDS]
        fields = {} if weights is None else weights.fields()
        recipe = my_images.choose_recipe(
            facts, {field: fields[field] for field in decided} | dict(changes)
        )
    recipe = recipe.rename(name)
    lines = explain_choices(recipe, facts, out)
    if weights is not None:
        lines += _explain_weights_fields(recipe, weights, decided)
    recorder.send({"kind": "settled", "lines": lines})
    return recipe


def check_has_weights(name: str | None, source: StartSource | None) -> None:
    """Raise `RecipeError` if `fine-tune` has no weights."""
    if name == fine_tune.NAME and source is None:
        raise RecipeError(
            f"the recipe {name} starts from trained weights, but none are given: add --weights NAME"
            " (lockstep weights lists names), or leave out --recipe"
        )


def _explain_weights_fields(recipe: Recipe, weights: Recipe, names: list[str]) -> list[str]:
    """Return a line that lists the fields that the weights decide, without those that have their
    usual value."""
    fields = recipe.fields()
    usual = Recipe().fields()
    values = []
    for name in dict.fromkeys(names):
        value = fields[name]
        is_decided = value == weights.fields()[name]
        if is_decided and (name == "model" or value != usual[name]):
            shown = "without a name" if isinstance(value, dict) else value
            values.append(f"{name} {shown}")
    return [f"  required by the weights: {', '.join(values)}"] if values else []


def collect_facts(
    training: Index, execution: Execution, world: World, *, is_known: bool = False
) -> Facts:
    """Return the facts that the recipe's values are chosen from."""
    return Facts(
        classes=len(training.classes),
        images=len(training),
        shorter_side=int(np.median(training.sizes.min(axis=1))),
        on_gpu=world.on_gpu,
        # fp16, on older GPUs, needs loss scaling
        precision="bf16" if fast_precision(world.on_gpu) == "bf16" else "fp32",
        decodes_small=execution.loader == "host",
        is_evaluated=not execution.train_only,
        is_known=is_known,
        units=world.ranks * execution.accumulation_steps,
    )


def say_where(out: Path) -> str:
    """Return the end of a line: where the values of a recipe are."""
    return f"; all values are in {out}/recipe.yaml, --set changes them"


def explain_choices(recipe: Recipe, facts: Facts, out: Path) -> list[str]:
    """Return two lines: what was chosen, and why."""
    steps = steps_per_epoch(recipe, facts.images)
    device = "GPU" if facts.on_gpu else "CPU"
    return [
        (
            f"{recipe.based_on}: {format_count(recipe.logits, 'logit')}, {recipe.image_size} px in"
            f" {recipe.precision}, {_count_epochs(recipe.epochs)} of"
            f" {format_count(steps, 'step')} of"
            f" {format_count(recipe.global_batch_images, 'image')}, peak learning rate"
            f" {peak_lr(recipe):.2g} after {_count_epochs(recipe.warmup_epochs)} of"
            f" warm-up{say_where(out)}"
        ),
        (
            f"  for {facts.images:,} training images of {format_count(facts.classes, 'class')},"
            f" typically {facts.shorter_side} px, on a {device} that is fast in {facts.precision}"
        ),
    ]


def _count_epochs(epochs: float) -> str:
    return f"{epochs:g} epoch{'' if epochs == 1 else 's'}"
