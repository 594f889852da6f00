"""The type of `report.json`, which `lockstep.runs.finish` builds; reading it, and comparing it with
published results."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NotRequired

from pydantic import BeforeValidator
from typing_extensions import TypedDict

from lockstep.models.accuracy_interval import wilson
from lockstep.models.class_metrics import ClassCounts, ClassSummary
from lockstep.recipes import Recipe
from lockstep.recipes.best_evaluation import Selection
from lockstep.recipes.published import OWN_RECIPES, RECIPES
from lockstep.system.event_log import Summary, find_field_problem
from lockstep.system.regular_files import RECORDS, read_regular
from lockstep.system.schema import Count, matches
from lockstep.system.strict_json import parsed
from lockstep.weights.checkpoint_choice import choose_weights

if TYPE_CHECKING:
    from lockstep.recipes.published_accuracies import Comparison
else:
    Comparison = Any  # checked by `is_comparison`

_CLASSES = 1000
"""The least number of logits of recipes with published accuracies."""


def _check_figures(results: Any) -> Any:
    """Raise `ValueError` if a figure is wrong, also one that not every evaluation has."""
    if isinstance(results, dict) and find_field_problem(results, ()) is not None:
        raise ValueError
    return results


class Evaluation(Summary):
    """The results of an evaluation."""

    step: int
    images_per_sec: NotRequired[float]
    batches: NotRequired[int]
    data_wait_share: NotRequired[float]
    elapsed_sec: NotRequired[float]
    """Seconds since the process began."""


class BestEvaluation(Evaluation):
    """The best evaluation of a run."""

    weights: NotRequired[str]
    """"trained" or "ema"; missing in older reports, in which it is "trained"."""


class Report(TypedDict):
    """The contents of report.json."""

    run: NotRequired[str]
    """The id of the run; missing in older reports."""
    recipe: str
    """The name of the recipe that the run uses or is based on; "" if it has none."""
    model: str | dict[str, Any]
    """A name, or the sections of a network that has none."""
    epochs: int
    steps: int
    final: dict[str, Annotated[Evaluation, BeforeValidator(_check_figures)]]
    """The evaluation of the last step by weights: "trained" and, if the recipe has a moving
    average, "ema". Empty if the run was not evaluated then (`train_only`)."""
    best: Annotated[BestEvaluation, BeforeValidator(_check_figures)] | None
    """The best evaluation by the recipe's `selection`; None if there was none."""
    selection: NotRequired[Selection]
    """The value that decides which evaluation is the best; missing in older reports: top1."""
    images_per_sec: float | None
    """Images trained on per second, without the first steps; None if there were too few steps."""
    data_wait_share: float | None
    """Share of the time in which the engine waited for images."""
    train_sec: float
    """Seconds of training in all processes, without evaluation and saving."""
    quarantined: int
    """Number of images that cannot be read and were left out."""
    classes: Sequence[str]
    per_class: dict[str, ClassCounts]
    """The last evaluation by weights and class."""
    class_summary: NotRequired[dict[str, ClassSummary]]
    """Recall and precision of the classes, and their means over classes, by weights."""
    device: str
    ranks: int
    published: NotRequired[Comparison | None]
    """The last top-1 next to the published ones of the recipe; None if nobody published an accuracy
    of it, or if the run was not evaluated at its end."""
    stopped_early: NotRequired[str]
    """Why early stopping ended the run before its last epoch."""
    restarts: NotRequired[Count]
    """How often a launcher has started all ranks again after a failure; missing if never."""
    top1_percent: NotRequired[float | None]
    """That of the best checkpoint, or of the best remaining one; None if none was evaluated. This
    and the next two fields are in the report that `lockstep.train` returns, not in report.json."""
    top1_interval_percent: NotRequired[list[float] | None]
    """The 95 % interval of `top1_percent`, from low to high. The best checkpoint was chosen on the
    same images, which makes both a little too high."""
    best_checkpoint: NotRequired[str]
    """The path of this checkpoint, or of the last one if none was evaluated. If its moving average
    is the best, this is its file."""


def add_best_checkpoint(report: Report, out: Path) -> Report:
    """Return the report of the run in `out` with its last three fields."""
    choice = choose_weights(out, None, None)
    best = choice.evaluation
    top1 = interval = None
    if best is not None:
        top1 = best["top1_percent"]
        bounds = wilson(round(top1 * best["images"] / 100), best["images"])
        interval = [100 * bound for bound in bounds]
    return report | {
        "top1_percent": top1,
        "top1_interval_percent": interval,
        "best_checkpoint": str(find_best_checkpoint(out)),
    }


def find_best_checkpoint(out: Path) -> Path:
    """Return the weights of a run that commands use: a checkpoint, or its moving average. Raises
    `CheckpointError` if there is none."""
    choice = choose_weights(out, None, None)
    return choice.path / "ema.safetensors" if choice.ema else choice.path


def compare_with_published(recipe: Recipe, report: Report) -> "Comparison | None":
    """Return the last top-1 of a finished run next to the published ones of its recipe.

    None if nobody published an accuracy of the recipe, or if the last step was not evaluated.
    """
    final = report["final"].get("trained")
    is_own = recipe.based_on not in RECIPES or recipe.based_on in OWN_RECIPES
    if final is None or (is_own and recipe.logits < _CLASSES):
        return None
    from lockstep.recipes.published_accuracies import compare_top1

    comparison = compare_top1(
        recipe,
        top1_percent=final["top1_percent"],
        precision=recipe.precision,
        images=final["images"],
        classes=len(report["classes"]),
    )
    if comparison is None or comparison["not_compared"] or "stopped_early" not in report:
        return comparison
    reason = f"early stopping ended this run before its {recipe.epochs} epochs"
    return comparison | {"interval_percent": [], "accuracies": [], "not_compared": reason}


def read_report(path: Path) -> Report | None:
    """Return the report of the run in a folder; None if the run is not finished or the file is not
    a report."""
    try:
        report = parsed(read_regular(path / "report.json", RECORDS))
    except (OSError, ValueError):
        return None
    return report if _is_report(report) else None


def _is_report(value: Any) -> bool:
    """Return whether a value is the report of a finished run."""
    if not matches(value, Report):
        return False
    if value["final"] and ("trained" not in value["final"] or value.get("best") is None):
        return False
    if value.get("published") is not None:
        from lockstep.recipes.published_accuracies import is_comparison

        if not is_comparison(value["published"]):
            return False
    lengths = {len(value["classes"])}
    for counts in value["per_class"].values():
        lengths.update(len(counts[name]) for name in counts.keys() & ClassCounts.__annotations__)
    return len(lengths) == 1
