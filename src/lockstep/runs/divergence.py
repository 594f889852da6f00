"""Messages for losses, scores and weights that are not finite: where they are, the last good
checkpoint, what to do."""

from pathlib import Path

import numpy as np

from lockstep.backends import Interval
from lockstep.models.metrics import Scores
from lockstep.recipes import Recipe
from lockstep.weights import checkpoint


def describe_bad_losses(interval: Interval, recipe: Recipe, checkpoints: Path) -> str | None:
    """Return a message that names an interval's first loss that is not finite, and what to do; None
    if all are finite."""
    bad = np.flatnonzero(~np.isfinite(interval.losses))
    if not len(bad):
        return None
    last = interval.first + len(interval.losses) - 1
    return (
        f"the loss is {interval.losses[bad[0]]} at step {interval.first + bad[0]}, within steps"
        f" {interval.first} to {last}. {_name_last_good(checkpoints, last + 1)} {_advise(recipe)}"
    )


def describe_bad_weights(step: int, recipe: Recipe, checkpoints: Path) -> str:
    """Return the message for weights that are not finite after a step, with what to do."""
    return (
        f"the weights are not finite numbers after step {step}."
        f" {_name_last_good(checkpoints, step)} {_advise(recipe)}"
    )


def describe_bad_scores(scores: Scores, step: int, recipe: Recipe, checkpoints: Path) -> str | None:
    """Return how many images' losses are not finite in an evaluation, and what to do; None if all
    are finite."""
    problem = describe_nonfinite(scores)
    if problem is None:
        return None
    return (
        f"the validation loss is not finite at step {step}: {problem}."
        f" {_name_last_good(checkpoints, step)} {_advise(recipe)} In the first epochs batch norm's"
        " statistics may not have settled: resume with --set evaluate_every_epochs=5."
    )


def describe_nonfinite(scores: Scores) -> str | None:
    """Return for how many images the loss or confidence is not finite, and the first such value;
    None if all are finite.

    >>> numbers, infinite = np.ones(2, np.float32), np.array([1, np.inf], np.float32)
    >>> describe_nonfinite(Scores(infinite, numbers, numbers, numbers, numbers))
    'it is inf for 1 of 2 images'
    """
    for values in (scores.losses, scores.confidences):
        bad = values[~np.isfinite(values)]
        if len(bad):
            return f"it is {bad[0]} for {len(bad)} of {len(values)} images"
    return None


def _name_last_good(checkpoints: Path, before: int) -> str:
    """Return the newest checkpoint before a step, as a sentence."""
    steps = [step for step in checkpoint.steps(checkpoints) if step < before]
    if not steps:
        return "Last good checkpoint: none."
    path = checkpoint.checkpoint_path(checkpoints, steps[-1])
    return f"Last good checkpoint: {path} (start another run from its weights with --weights)."


def _advise(recipe: Recipe) -> str:
    advice = "Try a lower lr or a longer warm-up"
    if recipe.precision in ("fp32", "tf32"):
        return f"{advice}."
    if recipe.precision != "fp16":
        return f"{advice}, or precision=fp32."
    if recipe.loss_scaling == "dynamic":
        return f"{advice}, or precision=bf16."
    return f"{advice}, or loss_scaling=dynamic or precision=bf16."
