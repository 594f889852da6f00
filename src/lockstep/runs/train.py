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
    """Train a recipe on the training images of `data`, evaluate it on the validation images, and
    return the report: that of `out/report.json`, and three fields more: `top1_percent`, its 95 %
    interval `top1_interval_percent` and the path `best_checkpoint`, which `lockstep.load` takes.

    - `recipe` is a name, a file or a `Recipe`; by default `my-images`, or `fine-tune` with
      `weights`; their values are chosen from images, device and weights
      (docs/how-to/fine-tune.md). `changes` are new values for its fields.
    - `data` are `train` and `val` folders, or files in another storage format. `split` is the share
      set apart for validation if there are no validation images, 0.3 by default.
    - `out` is the run's folder. An existing run resumes bit for bit from its newest intact
      checkpoint; what is left out (`recipe`, `data`, `execution`) is as in its last command. A
      finished run returns its report at once.
    - `weights` is whatever `load` accepts, or a name such as
      "torchvision/resnet50.IMAGENET1K_V2". A new run starts from them at step 0.
    - `resume_from` is a checkpoint of another program, such as NVIDIA's code. A new run resumes
      where that program stopped (docs/how-to/resume-from.md).
    - `execution` can end a call before the run (`stop_after_epochs`, `stop_after_steps`); the
      report is then empty, and the same call resumes it.
    - `trust_run` uses what the folder of a run names outside of itself (files, images, addresses,
      modules), although no command on this machine has named it for this run.
    - `progress` shows a bar on a terminal or in a notebook, unless a `listener` gets events.

    With several processes (torchrun), every process calls this. On ranks other than 0 the report is
    empty, unless the run was finished before the call. Raises `UserError` for wrong arguments,
    `DivergedError` if a loss or a score is not finite, `Interrupted` when a signal asked it to stop
    and everything is saved.

    >>> import lockstep
    >>> report = lockstep.train("tiny.yaml", "data", "new-run")
    >>> low, high = report["top1_interval_percent"]
    >>> low < report["top1_percent"] < high, report["final"]["trained"]["images"]
    (True, 20)
    >>> model = lockstep.load(report["best_checkpoint"])
    >>> prediction = model.predict("data/val/dots/00006.jpg", top=3)
    >>> len(prediction.classes)
    3
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
