"""The end of a run: whether it is reached, a temperature for the probabilities of the best
checkpoint, and `report.json`, which is built and written there."""

from dataclasses import replace
from itertools import takewhile
from typing import cast

from lockstep.models.class_metrics import summarise_classes
from lockstep.recipes.best_evaluation import describe_best
from lockstep.runs.context import RunContext
from lockstep.runs.evaluate import watch_images
from lockstep.runs.image_results import load_worst_mistakes
from lockstep.runs.report import Evaluation, Report, compare_with_published, read_report
from lockstep.runs.save import drop_old_checkpoints
from lockstep.runs.step_plan import explain_early_stop
from lockstep.system import heartbeat
from lockstep.system.event_log import EvaluateEvent, measure_throughput, read_log
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


def finish(run: RunContext, step: int, stopped_early: str | None) -> Report | None:
    """Do what follows the last step of a run, and return its report, on rank 0. `stopped_early` is
    why it ends there."""
    _calibrate_best(run, step)
    return _write_report(run, step, stopped_early) if run.leads else None


def _calibrate_best(run: RunContext, step: int) -> None:
    """Fit a temperature to the best checkpoint of a run that ends at this step, if the recipe wants
    one, and write it into the checkpoint's folder.

    Rank 0 computes, with an engine that nobody needs for training any more; the others wait. Raises
    `Interrupted` if a stop is requested; the same command then begins here again.
    """
    if not run.recipe.temperature_scaling or run.execution.train_only:
        return
    is_complete = not run.leads or _calibrate(run)
    if run.world.any(not is_complete):
        run.interrupt(step)


def _calibrate(run: RunContext) -> bool:
    """Return whether all was done before a stop was requested."""
    from lockstep.runs.calibrated_results import add_calibrated
    from lockstep.weights.calibration import (
        collect_logits,
        describe_fit,
        fit_temperature,
        write_calibration,
    )

    best = run.find_best()
    if best is None:
        return True
    step = best["step"]
    folder = checkpoint.checkpoint_path(run.checkpoints, step)
    state, _ = checkpoint.load(folder)
    for weights in run.weights_to_evaluate:
        is_average = weights == "ema"
        tensors = state.ema if is_average else state.tensors
        run.engine.write(replace(state, tensors=tensors))
        images = watch_images(
            run.recorder,
            f"calibrating {weights}",
            run.sets.validation,
            run.recipe,
            run.execution,
            run.part_images,
        )
        before_stop = takewhile(lambda _: not run.stop.requested, images)
        logits, labels = collect_logits(run.engine.predict, before_stop)
        if run.stop.requested:
            return False
        fit, reason = fit_temperature(logits, labels)
        detail = f"{describe_fit(fit, reason)} (step {step}, {weights} weights)"
        run.recorder.send({"kind": "detail", "message": detail})
        if fit is not None:
            file = checkpoint.find_weights_file(folder, ema=is_average)
            write_calibration(file, fit)
            add_calibrated(file, logits, labels, fit["temperature"])
    return True


@heartbeat.saving()
def _write_report(run: RunContext, step: int, stopped_early: str | None) -> Report:
    drop_old_checkpoints(run)  # the last evaluation may have made another one the best
    report = _build_report(run, step, stopped_early)
    write_json(run.out / "report.json", report)  # last: this file marks the run as finished
    is_synthetic = run.execution.loader == "synthetic"  # noise, which nobody wants to see
    if run.scores and run.execution.loggers and not is_synthetic:
        _show_mistakes(run, step)
    run.recorder.send({"kind": "finish", "report": report, "out": str(run.out)})
    best = report["best"]
    if best is not None and best["step"] == 0 and step > 0:
        run.recorder.note(
            "training did not improve the starting weights, which remain the best checkpoint:"
            f" {describe_best(best, run.recipe.selection)}"
        )
    return report


def _build_report(run: RunContext, step: int, stopped_early: str | None) -> Report:
    evaluations = run.recorder.evaluations
    best = run.find_best()
    log = read_log(run.out / "log.jsonl", whole=True)
    images_per_sec, data_wait_share = measure_throughput(log)
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
        "images_per_sec": images_per_sec,
        "data_wait_share": data_wait_share,
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


def _show_mistakes(run: RunContext, step: int) -> None:
    """Pass the worst mistakes to the loggers. The run is finished already: unreadable images cause
    only a warning."""
    try:
        pictures = load_worst_mistakes(run.sets.validation, run.recipe, run.scores["trained"])
    except Exception as error:  # anything that a decoder or a storage raises
        run.recorder.warn(f"cannot show the worst mistakes: {type(error).__name__}: {error}")
    else:
        run.recorder.show("mistakes", pictures, step)
