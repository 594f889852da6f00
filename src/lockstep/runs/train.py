"""`lockstep.train`: open a run, and train."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from lockstep import backends
from lockstep.recipes import Execution, Recipe
from lockstep.runs.begin import begin
from lockstep.runs.context import RunContext
from lockstep.runs.finish import is_finished, report_again
from lockstep.runs.initial_state import find_state
from lockstep.runs.loop import train_from
from lockstep.runs.opening import check_paths, open_run
from lockstep.runs.recorder import Recorder, show_progress
from lockstep.runs.report import Report, add_best_checkpoint
from lockstep.runs.resuming import RunSettings, complete_settings
from lockstep.system.signals import StopRequests

if TYPE_CHECKING:
    from lockstep.runs.events import Listener
    from lockstep.runs.starting_weights import StartSource
    from lockstep.weights import AnySource


def train(
    recipe: str | Path | Recipe | None = None,
    data: str | Path | None = None,
    out: str | Path | None = None,
    *,
    changes: Mapping[str, Any] | None = None,
    split: float | None = None,
    weights: "AnySource | None" = None,
    resume_from: str | Path | None = None,
    execution: Execution | None = None,
    listener: "Listener | None" = None,
    trust_run: bool = False,
    progress: bool = True,
) -> Report:
    """Train a recipe on a data set, and evaluate it on the validation images.

    Args:
        recipe: A name, a file or a `Recipe`; by default `my-images`, or with `weights` `fine-tune`.
            A run that resumes takes what you leave out from its folder (also `data`; `execution`
            only without `recipe`).
        data: A folder with `train` and `val`, or files in another storage format.
        out: The run's folder. A run in it resumes from its newest intact checkpoint, bit for bit.
        changes: New values for fields of the recipe.
        split: The share to hold out if there are no validation images; by default 0.3.
        weights: Whatever `load` accepts; a new run starts from them (docs/how-to/fine-tune.md).
        resume_from: A checkpoint of another program, to continue it (docs/how-to/resume-from.md).
        execution: How the run computes, and whether this call ends early (`stop_after_epochs`).
        listener: A function to call with events.
        trust_run: Whether to use files, images, addresses and modules that the run's folder names.
        progress: Whether to show a bar, unless there is a `listener`.

    Returns:
        The report, as in `out/report.json`, with `top1_percent`, its 95 % `top1_interval_percent`,
        and `best_checkpoint`, a path for `load`. Empty if the call ended early. Under torchrun,
        call it in every process; only rank 0 gets the report, unless the run was finished before.

    Raises:
        UserError: An argument is wrong.
        DivergedError: A loss or a score is not finite.
        Interrupted: A signal asked the run to stop; everything is saved.

    >>> import lockstep
    >>> report = lockstep.train("tiny.yaml", "data", "new-run")
    >>> report["final"]["trained"]["images"], lockstep.load(report["best_checkpoint"]).origin
    (20, 'Lockstep')
    """
    if out is None:
        raise TypeError("train() needs out, the run's folder")
    changes = dict(changes or {}) | ({} if split is None else {"validation_share": split})
    settings = complete_settings(out, recipe, data, execution, changes=changes, trust_run=trust_run)
    with show_progress(listener, progress=progress) as listener:
        report = run_training(settings, weights, resume_from, listener=listener)
    return add_best_checkpoint(report, settings.out) if report else report


def run_training(
    settings: RunSettings,
    weights: "AnySource | None" = None,
    resume_from: "AnySource | None" = None,
    *,
    listener: "Listener | None" = None,
) -> Report:
    """Train with complete settings; the rest is as in `train`."""
    model = settings.wanted.model
    source: StartSource | None = None
    if weights is not None or resume_from is not None:
        from lockstep.runs.starting_weights import find_start

        source = find_start(weights, resume_from, model)
    execution = settings.execution
    check_paths(settings, source)
    with StopRequests() as stop:
        world = backends.load(execution.backend).world(execution)
        try:
            audience = listener if world.rank == 0 else None
            with Recorder(audience, execution.loggers_used) as recorder:
                if settings.origins:
                    recorder.send(
                        {"kind": "settings", "out": str(settings.out), "origins": settings.origins}
                    )
                with open_run(settings, source, world, recorder, stop) as run:
                    return _train(run) or cast(Report, {})
        finally:
            world.close()


def _train(run: RunContext) -> Report | None:
    """Train to the end of the run or of this command. Return the report of a finished run."""
    with run.keep_copies():
        state, damaged = find_state(run)
        if run.world.any(run.leads and is_finished(run, state.step)):
            return report_again(run)
        begin(run, state, damaged)
        return train_from(run, state.step)
