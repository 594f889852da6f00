"""Evaluate a run's weights on its validation images, and iterate over the images of an index."""

import math
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import cast

from lockstep.data import Batch
from lockstep.data.index import Index
from lockstep.data.loading.loaders import open_evaluation
from lockstep.models.metrics import measure
from lockstep.recipes import Execution, Recipe
from lockstep.recipes.order import order_evaluation_samples
from lockstep.runs.context import RunContext
from lockstep.runs.image_results import BEST_FILE, Results, write_results
from lockstep.runs.recorder import Recorder
from lockstep.runs.step_plan import explain_early_stop, is_evaluation_due
from lockstep.system import heartbeat
from lockstep.system.event_log import EvaluateEvent, read_log

_SETTLING = (
    " In the first epochs batch norm's statistics may not have settled: resume with --set"
    " evaluate_every_epochs=5."
)


def evaluate(run: RunContext, step: int) -> None:
    """Evaluate the trained weights and, if there is one, their moving average. The state must be
    saved already.

    Raises `DivergedError` if the loss of an image is not a finite number, except before the first
    step.
    """
    for weights in run.weights_to_evaluate:
        _evaluate_weights(run, step, weights)
    if run.leads and run.scores:
        index = run.sets.validation
        classes = tuple(index.classes)
        results = Results(step, index.digest, run.scores, classes)
        write_results(run.out, results)
        best = run.find_best()
        if best is not None and best["step"] == step and best["weights"] in run.scores:
            scores = {best["weights"]: run.scores[best["weights"]]}
            write_results(run.out, replace(results, scores=scores), BEST_FILE)


def _evaluate_weights(run: RunContext, step: int, weights: str) -> None:
    count = math.ceil(len(run.sets.validation) / (run.part_images * run.world.ranks))
    began = time.perf_counter()
    run.waited_sec = 0.0
    scores = run.engine.evaluate(_load_batches(run, weights, count), ema=weights == "ema")
    if run.is_stopping:
        run.interrupt(step)
    seconds = time.perf_counter() - began
    images = len(scores.labels)
    names = (run.recipe.selection, *run.execution.metrics)
    figures = measure(scores, len(run.sets.training.classes), names)
    problem = scores.describe_nonfinite()
    if problem is not None and step == 0:  # training may repair the starting weights
        run.recorder.warn("the starting weights give losses that are not finite")
        return
    if problem is not None:
        problem = f"the validation loss is not finite at step {step}: {problem}"
        run.diverge(step, problem, _SETTLING, weights=weights, **figures, images=images)
    if run.leads:
        samples = order_evaluation_samples(
            len(run.sets.validation), run.part_images, run.world.ranks
        )
        run.scores[weights] = scores.sort_by_sample(samples)
    event = {
        "kind": "evaluate",
        "step": step,
        "weights": weights,
        **figures,
        "images": images,
        "images_per_sec": images / seconds,
        "batches": count,
        "data_wait_share": run.waited_sec / seconds,
    }
    run.recorder.log(cast(EvaluateEvent, event))


def _load_batches(run: RunContext, weights: str, count: int) -> Iterator[Batch]:
    """Yield this rank's share of the validation images; end early once any rank was asked to stop.

    `count` is the number of batches.
    """
    place = {"rank": run.world.rank, "ranks": run.world.ranks}
    opening = open_evaluation(
        run.sets.validation, run.recipe, run.execution, run.part_images, **place
    )
    with opening as batches:
        timed = run.time_batches(batches)
        watched = run.recorder.watch(f"evaluating {weights} weights", timed, count)
        for number, batch in enumerate(watched):
            if run.should_stop():
                return
            heartbeat.note("evaluating" if number else "compiling", moved=True)
            yield batch


def watch_images(
    recorder: Recorder,
    what: str,
    index: Index,
    recipe: Recipe,
    execution: Execution,
    batch_images: int,
) -> Iterator[Batch]:
    """Yield the images of an index. The last batch may be padded with images of label -1.

    `what` names the work in the progress that the recorder passes on.
    """
    count = -(-len(index) // batch_images)
    with open_evaluation(index, recipe, execution, batch_images) as batches:
        for number, batch in enumerate(recorder.watch(what, batches, count)):
            heartbeat.note("evaluating" if number else "compiling", moved=True)
            yield batch


def lacks_evaluation(run: RunContext, step: int) -> bool:
    """Return whether an evaluation is due at this step and not complete in the log, because the
    run was stopped.

    The last evaluation is due until there is a report: the report needs more than the log holds.
    The same is true where early stopping ends the run. Weights that a run starts from are evaluated
    at step 0, if they can be.
    """
    if not is_evaluation_due(run, step):
        return False
    log = read_log(run.out / "log.jsonl", whole=True)
    if step == run.total_steps or explain_early_stop(run, log, step) is not None:
        return True
    logged = [e["weights"] for e in log if e["kind"] == "evaluate" and e["step"] == step]
    return logged != run.weights_to_evaluate
