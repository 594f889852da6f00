"""Choose the values of `my-images` from the images and the device, before a run."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.backends import World
from lockstep.data.index import Index
from lockstep.recipes import Execution, Recipe
from lockstep.recipes.my_images import NAME, Facts, choose_recipe
from lockstep.recipes.order import steps_per_epoch
from lockstep.recipes.schedule import peak_lr
from lockstep.runs.recorder import Recorder
from lockstep.system.machine import fast_precision


def settle(
    training: Index,
    changes: Mapping[str, Any],
    execution: Execution,
    world: World,
    recorder: Recorder,
    out: Path,
    of_weights: Mapping[str, Any],
) -> Recipe:
    """Return the recipe `my-images` for a run's images and device, and send the choices to the
    listener.

    `of_weights` are the fields that given weights decide where `changes` do not; empty if none are
    given.
    """
    facts = collect_facts(training, execution, on_gpu=world.on_gpu, ranks=world.ranks)
    taken = {name: value for name, value in of_weights.items() if name not in changes}
    recipe = choose_recipe(facts, taken | dict(changes)).rename(NAME)
    recorder.tell(
        {
            "kind": "settled",
            "lines": [*explain_choices(recipe, facts, out), *_explained_weights(taken)],
        }
    )
    return recipe


def _explained_weights(taken: Mapping[str, Any]) -> list[str]:
    """Return a line that says which fields the given weights decide, without those that have their
    usual value."""
    usual = Recipe().fields()
    unusual = {
        name: value for name, value in taken.items() if name == "model" or value != usual[name]
    }
    values = [
        f"{name} {value if not isinstance(value, dict) else 'without a name'}"
        for name, value in unusual.items()
    ]
    return [f"  as the given weights need it: {', '.join(values)}"] if values else []


def collect_facts(training: Index, execution: Execution, *, on_gpu: bool, ranks: int) -> Facts:
    """Return the facts that the recipe's values are chosen from."""
    return Facts(
        classes=len(training.classes),
        images=len(training),
        shorter_side=int(np.median(training.sizes.min(axis=1))),
        on_gpu=on_gpu,
        precision=(
            "bf16" if fast_precision(on_gpu) == "bf16" else "fp32"
        ),  # fp16 on older GPUs needs loss scaling
        decodes_small=execution.loader == "host",
        units=ranks * execution.accumulation_steps,
    )


def explain_choices(recipe: Recipe, facts: Facts, out: Path) -> list[str]:
    """Return two lines: what was chosen, and why."""
    steps = steps_per_epoch(recipe, facts.images)
    plural = "" if recipe.epochs == 1 else "s"
    return [
        (
            f"{NAME}: {recipe.logits} logits, {recipe.image_size} px in {recipe.precision},"
            f" {recipe.epochs} epoch{plural} of {steps} steps of {recipe.global_batch_images}"
            f" images, peak learning rate {peak_lr(recipe):.2g} after {recipe.warmup_epochs:g} of"
            " warm-up"
        ),
        (
            f"  for {facts.images:,} training images of {facts.classes} classes, typically"
            f" {facts.shorter_side} px, on a {'GPU' if facts.on_gpu else 'CPU'} that is fast in"
            f" {facts.precision}; all values are in {out}/recipe.yaml, --set changes them"
        ),
    ]
