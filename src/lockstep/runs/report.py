"""The report of a finished run, `report.json`, and how its recipe differs from the published one."""

from collections.abc import Mapping, Sequence
from typing import Any

from lockstep.models.metrics import Scores, Throughput
from lockstep.recipes import Recipe, difference
from lockstep.recipes.published import RECIPES
from lockstep.weights.opening import best_step


def report_of(
    recipe: Recipe,
    evaluations: list[dict[str, Any]],
    *,
    steps: int,
    throughput: Throughput,
    train_sec: float,
    quarantined: int,
    classes: Sequence[str],
    scores: Mapping[str, Scores],
    device: str,
    ranks: int,
) -> dict[str, Any]:
    """Return the report of a run. `evaluations` are its log's evaluation entries; `scores` are of the last evaluation."""
    last = evaluations[-1]["step"]
    return {
        "recipe": recipe.based_on,
        "model": recipe.fields()["model"],
        "epochs": recipe.epochs,
        "steps": steps,
        "final": {each["weights"]: _without(each, "kind", "weights") for each in evaluations if each["step"] == last},
        "best": _without(_entry_of(evaluations, best_step(evaluations)), "kind", "weights"),
        "images_per_sec": throughput.images_per_sec,
        "data_wait_share": throughput.data_wait_share,
        "train_sec": train_sec,
        "quarantined": quarantined,
        "classes": classes,
        "per_class": {weights: found.per_class(len(classes)) for weights, found in scores.items()},
        "device": device,
        "ranks": ranks,
    }


def changed_fields(recipe: Recipe) -> dict[str, Any]:
    """Return the fields in which a recipe differs from the published one it is based on; empty if it is based on none."""
    if recipe.based_on not in RECIPES:
        return {}
    return {name: own for name, (_, own) in difference(RECIPES[recipe.based_on](), recipe).items()}


def _entry_of(evaluations: list[dict[str, Any]], step: int | None) -> dict[str, Any]:
    return next(entry for entry in evaluations if entry["step"] == step and entry["weights"] == "trained")


def _without(entry: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in entry.items() if name not in names}
