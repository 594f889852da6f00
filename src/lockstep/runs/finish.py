"""The end of a run: whether it is reached, and `report.json`, which is built and written there."""

from collections.abc import Sequence
from typing import cast

from lockstep.models.class_metrics import summarise_classes
from lockstep.models.metrics import Scores
from lockstep.recipes.best_evaluation import describe_best
from lockstep.runs import last_step
from lockstep.runs.context import RunContext
from lockstep.runs.report import Evaluation, Report, compare_with_published, read_report
from lockstep.runs.save import drop_old_checkpoints
from lockstep.runs.worst_mistakes import load_worst_mistakes
from lockstep.system import heartbeat
from lockstep.system.event_log import EvaluateEvent, LogEvent, read_log
from lockstep.system.files import write_json
from lockstep.weights import checkpoint
from lockstep.weights.run_identity import settle_identity


def is_finished(run: RunContext, step: int) -> bool:
    """Return whether the run has its report and ends at this step: it is the last one, or early
    stopping decides so.

    A run that was not evaluated at its end (`train_only`) is finished only as long as it is not to
    be evaluated.
    """
    report = read_report(run.out)
    if report is None or report["steps"] != step:
        return False
    if step == run.total_steps:
        return run.execution.train_only or bool(report["final"])
    log = read_log(run.out / "log.jsonl", whole=True)
    return explain_early_stop(run, log, step) is not None


def report_again(run: RunContext) -> Report | None:
    """Return the report of a run that was finished before, and send it to the listener."""
    report = read_report(run.out)
    if run.leads:
        checkpoint.remove_unfinished(run.checkpoints)
    if report is not None:
        run.recorder.send({"kind": "already_finished", "report": report, "out": str(run.out)})
    return report


def find_early_stop(run: RunContext, step: int) -> str | None:
    """Return why early stopping ends the run at a step before its last one, or None. All ranks get
    the same answer."""
    reason = explain_early_stop(run, run.recorder.evaluations, step)
    if not run.world.any(run.leads and reason is not None):
        return None
    return reason or "early stopping"  # only rank 0 has a log


def explain_early_stop(run: RunContext, log: Sequence[LogEvent], step: int) -> str | None:
    """Return the reason that a log gives for early stopping at a step before the last one, or
    None."""
    if step == run.total_steps:
        return None
    recipe = run.recipe
    if step == 0 and leaves_only_probe(run):
        from lockstep.runs.starting_weights import starts_from_probe

        if starts_from_probe(run.out):
            return (
                "no training improves a linear probe on fixed features of images without"
                " augmentation"
            )
    epochs = recipe.early_stopping_epochs
    return last_step.explain_early_stop(log, step, run.steps_per_epoch, epochs, recipe.selection)


def leaves_only_probe(run: RunContext) -> bool:
    """Return whether a run trains the classifier alone, for the loss and on what a linear probe is
    fitted: cross-entropy, all images with equal weights, the same features in every epoch."""
    recipe = run.recipe
    trains_classifier = recipe.frozen == ("backbone",) and recipe.sparsity == "none"
    is_exact = not recipe.dropout and not recipe.stochastic_depth and recipe.quantisation == "none"
    is_augmented = recipe.varies_images or recipe.mixes_images
    is_weighted = recipe.class_weights != "none" or recipe.sampling != "plain"
    if recipe.loss != "cross_entropy" or is_augmented or is_weighted:
        return False
    if not (trains_classifier and is_exact):
        return False
    from lockstep.runs.linear_probe import MOST_IMAGES

    return len(run.sets.training) <= MOST_IMAGES


@heartbeat.saving()
def finish(run: RunContext, step: int, stopped_early: str | None) -> Report | None:
    """Write and return the report of a run that ends at a step, on rank 0. `stopped_early` is why
    it ends there."""
    if not run.leads:
        return None
    drop_old_checkpoints(run)  # the last evaluation may have made another one the best
    report = _build_report(run, step, stopped_early)
    write_json(run.out / "report.json", report)  # last: this file marks the run as finished
    is_synthetic = run.execution.loader == "synthetic"  # noise, which nobody wants to see
    if run.scores and run.execution.loggers and not is_synthetic:
        _show_mistakes(run, run.scores["trained"], step)
    run.recorder.send({"kind": "finish", "report": report, "out": str(run.out)})
    best = report["best"]
    if best is not None and best["step"] == 0 and step > 0:
        run.recorder.note(
            "training has not improved the weights that the run started from, which are kept as its"
            f" best checkpoint: {describe_best(best, run.recipe.selection)}"
        )
    return report


def _build_report(run: RunContext, step: int, stopped_early: str | None) -> Report:
    evaluations = run.recorder.evaluations
    best = run.find_best()
    final: dict[str, Evaluation] = {}
    for event in evaluations:
        if event["step"] == step:
            final[event["weights"]] = _select_results(event)
    classes = run.sets.training.classes
    per_class = {weights: scores.per_class(len(classes)) for weights, scores in run.scores.items()}
    report: Report = {
        "run": settle_identity(run.out).id,
        "recipe": run.recipe.based_on,
        "model": run.recipe.fields()["model"],
        "epochs": run.recipe.epochs,
        "steps": step,
        "final": final,
        "best": None if best is None else {**_select_results(best), "weights": best["weights"]},
        "selection": run.recipe.selection,
        "images_per_sec": run.throughput.images_per_sec,
        "data_wait_share": run.throughput.data_wait_share,
        "train_sec": run.recorder.train_sec,
        "quarantined": len(run.sets.training.quarantined) + len(run.sets.validation.quarantined),
        "classes": classes,
        "per_class": per_class,
        "class_summary": {name: summarise_classes(counts) for name, counts in per_class.items()},
        "device": run.world.device,
        "ranks": run.world.ranks,
    }
    if stopped_early is not None:
        report["stopped_early"] = stopped_early
    if run.recorder.restarts:
        report["restarts"] = run.recorder.restarts
    return report | {"published": compare_with_published(run.recipe, report)}


def _select_results(event: EvaluateEvent) -> Evaluation:
    results = {name: value for name, value in event.items() if name not in ("kind", "weights")}
    return cast(Evaluation, results)


def _show_mistakes(run: RunContext, scores: Scores, step: int) -> None:
    """Pass the worst mistakes to the loggers. The run is finished already: unreadable images cause
    only a warning."""
    try:
        pictures = load_worst_mistakes(run.sets.validation, run.recipe, scores)
    except Exception as error:  # anything that a decoder or a storage raises
        run.recorder.warn(f"the worst mistakes cannot be shown: {type(error).__name__}: {error}")
    else:
        run.recorder.show("mistakes", pictures, step)
