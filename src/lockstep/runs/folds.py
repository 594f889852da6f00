"""Cross-validation: a run for each fold of the training images, and the joint results."""

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypedDict

from lockstep.models.accuracy_interval import wilson
from lockstep.models.metrics import find_metric
from lockstep.recipes.best_evaluation import Selection
from lockstep.runs.events import Listener
from lockstep.runs.folder import holds_run
from lockstep.runs.image_results import count_known
from lockstep.runs.report import Report
from lockstep.runs.resuming import RunSettings
from lockstep.runs.train import run_training
from lockstep.runs.trust import OUTSIDE_FIELDS
from lockstep.system.errors import Interrupted, RecipeError, UserError
from lockstep.system.files import write_json
from lockstep.system.ranks import count_ranks
from lockstep.system.signals import StopRequests
from lockstep.weights import AnySource

FILE = "folds.json"


class FoldsReport(TypedDict):
    """The contents of folds.json. Every run counts with its best checkpoint."""

    folds: int
    selection: Selection
    values: list[float]
    """The selected value of every fold: percent, or a loss."""
    mean: float
    """Their mean."""
    standard_deviation: float
    """Their standard deviation, of K - 1 degrees of freedom."""
    top1_percent: float
    """Top-1 of all images together; each was for validation in one run."""
    top1_interval_percent: list[float]
    """Wilson's 95 % interval of `top1_percent`."""
    images: int
    trained_images: int
    """How many of the images are training images of the runs or of the starting weights."""
    best_steps: list[int]


def fold_folder(out: Path, number: int) -> Path:
    """Return the folder of a fold's run."""
    return out / f"fold-{number}"


def list_runs(folder: Path) -> list[Path]:
    """Return a run's folder, or the folders of the runs in a folder of runs, such as those of
    folds: fold-2 before fold-10. Nothing if it is neither."""
    if holds_run(folder):
        return [folder]
    folders = [path.parent for path in folder.glob("*/recipe.yaml")]
    return sorted(filter(holds_run, folders), key=lambda path: (len(path.name), path.name))


def train_folds(
    out: Path,
    folds: int,
    complete: Callable[[Path, dict[str, Any]], RunSettings],
    *,
    weights: AnySource | None = None,
    listener: Listener,
) -> FoldsReport | None:
    """Train the runs OUT/fold-1 to OUT/fold-K one after the other; write and return the joint
    results, or None if the command ends before all runs are finished.

    `complete` returns the settings of a run, from its folder and its recipe fields `folds` and
    `fold`. `listener` gets the events of all runs. Folds that are finished are not repeated. Raises
    `Interrupted` when a signal asks it to stop and everything is saved.
    """
    if count_ranks() > 1:
        raise UserError("--folds trains on one rank, but several were started; start one")
    if holds_run(out):
        raise UserError(f"{out} holds a run; give cross-validation a new folder: --out")
    reports: list[Report] = []
    with StopRequests() as stop:
        for number in range(1, folds + 1):
            settings = complete(fold_folder(out, number), {"folds": folds, "fold": number})
            if settings.execution.train_only:
                raise RecipeError("--folds needs evaluations, but train_only is set; unset it")
            for name in OUTSIDE_FIELDS:
                if getattr(settings.execution, name):
                    raise RecipeError(f"--folds would overwrite {name} with every run; unset it")
            lines = [f"fold {number} of {folds}: {settings.out}"]
            listener({"kind": "settled", "lines": lines})
            reports.append(run_training(settings, weights=weights, listener=listener))
            if stop.requested and number < folds:
                raise Interrupted(
                    f"stopped by {stop.name} after fold {number} of {folds}, saved in {out}; the"
                    " same command resumes from there",
                    stop.exit_code,
                )
    if not all(reports):
        return None
    summary = summarise_folds(reports, [fold_folder(out, k) for k in range(1, folds + 1)])
    write_json(out / FILE, summary)
    return summary


def summarise_folds(reports: Sequence[Report], folders: Sequence[Path] = ()) -> FoldsReport:
    """Return the joint results of the finished runs in these folders, by their best checkpoints."""
    bests: list[dict[str, Any]] = [dict(report["best"] or {}) for report in reports]
    selection = reports[0].get("selection", "top1")
    key = find_metric(selection).key
    values = [float(best[key]) for best in bests]
    images = sum(best["images"] for best in bests)
    hits = sum(round(best["top1_percent"] * best["images"] / 100) for best in bests)
    return {
        "folds": len(reports),
        "selection": selection,
        "values": values,
        "mean": statistics.fmean(values),
        "standard_deviation": statistics.stdev(values),
        "top1_percent": 100 * hits / images,
        "top1_interval_percent": [100 * bound for bound in wilson(hits, images)],
        "images": images,
        "trained_images": sum(map(count_known, folders)),
        "best_steps": [best["step"] for best in bests],
    }


def describe_folds(summary: FoldsReport) -> str:
    """Return the joint results in a line."""
    low, high = summary["top1_interval_percent"]
    values = summary["values"]
    metric = find_metric(summary["selection"])
    show = metric.format
    trained = ""
    if summary["trained_images"]:
        trained = (
            f", too high because {summary['trained_images']} of them were also training images of"
            " the runs or of their starting weights"
        )
    return (
        f"{summary['folds']} folds: mean {metric.title} {show(summary['mean'])},"
        f" {show(min(values))} to {show(max(values))} in single folds, standard deviation"
        f" {show(summary['standard_deviation'])}; top-1 of all {summary['images']} images together"
        f" {summary['top1_percent']:.2f} % ({low:.1f} to {high:.1f}, Wilson's 95 % interval)"
        f"{trained}"
    )
