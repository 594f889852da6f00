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


def choose_from_images(
    training: Index,
    changes: Mapping[str, Any],
    execution: Execution,
    world: World,
    recorder: Recorder,
    out: Path,
    weights_fields: Mapping[str, Any],
) -> Recipe:
    """Return the recipe `my-images` for a run's images and device, and send the choices to the
    listener.

    `weights_fields` are the fields that the starting weights decide where `changes` do not; empty
    without such weights.
    """
    facts = collect_facts(training, execution, on_gpu=world.on_gpu, ranks=world.ranks)
    decided = {name: value for name, value in weights_fields.items() if name not in changes}
    recipe = choose_recipe(facts, decided | dict(changes)).rename(NAME)
    lines = [*explain_choices(recipe, facts, out), *_explain_weights_fields(decided)]
    recorder.send({"kind": "settled", "lines": lines})
    return recipe


def _explain_weights_fields(fields: Mapping[str, Any]) -> list[str]:
    """Return a line that names the fields that the starting weights decide, without those that have
    their usual value."""
    usual = Recipe().fields()
    values = []
    for name, value in fields.items():
        if name == "model" or value != usual[name]:
            shown = "without a name" if isinstance(value, dict) else value
            values.append(f"{name} {shown}")
    return [f"  as the given weights need it: {', '.join(values)}"] if values else []


def collect_facts(training: Index, execution: Execution, *, on_gpu: bool, ranks: int) -> Facts:
    """Return the facts that the recipe's values are chosen from."""
    return Facts(
        classes=len(training.classes),
        images=len(training),
        shorter_side=int(np.median(training.sizes.min(axis=1))),
        on_gpu=on_gpu,
        # fp16, on older GPUs, needs loss scaling
        precision="bf16" if fast_precision(on_gpu) == "bf16" else "fp32",
        decodes_small=execution.loader == "host",
        units=ranks * execution.accumulation_steps,
    )


def explain_choices(recipe: Recipe, facts: Facts, out: Path) -> list[str]:
    """Return two lines: what was chosen, and why."""
    steps = steps_per_epoch(recipe, facts.images)
    device = "GPU" if facts.on_gpu else "CPU"
    return [
        (
            f"{NAME}: {recipe.logits} logits, {recipe.image_size} px in {recipe.precision},"
            f" {_count_epochs(recipe.epochs)} of {steps} steps of {recipe.global_batch_images}"
            f" images, peak learning rate {peak_lr(recipe):.2g} after"
            f" {_count_epochs(recipe.warmup_epochs)} of warm-up"
        ),
        (
            f"  for {facts.images:,} training images of {facts.classes} classes, typically"
            f" {facts.shorter_side} px, on a {device} that is fast in {facts.precision}; all values"
            f" are in {out}/recipe.yaml, --set changes them"
        ),
    ]


def _count_epochs(epochs: float) -> str:
    return f"{epochs:g} epoch{'' if epochs == 1 else 's'}"
