"""`lockstep.train`: open what a run needs, and train."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple, cast

from lockstep import backends
from lockstep.backends import World
from lockstep.data.split import Sets, open_sets
from lockstep.recipes import Execution, Recipe
from lockstep.recipes.my_images import check_given_fields
from lockstep.recipes.order import check_batch_norm, check_shares, steps_per_epoch
from lockstep.recipes.schedule import learning_rates
from lockstep.runs import resuming
from lockstep.runs.driver import Driver
from lockstep.runs.events import Listener
from lockstep.runs.folder import RunFolder, refuse_another_recipe
from lockstep.runs.loggers import check_installed
from lockstep.runs.recipe_from_images import settle
from lockstep.runs.recorder import Recorder
from lockstep.runs.report import Report
from lockstep.runs.resuming import Asked
from lockstep.runs.starting_weights import Start, fields_of, fit_start, open_given
from lockstep.system.errors import DataError, Interrupted, UserError
from lockstep.system.signals import StopRequests


def train(
    recipe: str | Path | Recipe | None = None,
    data: str | Path | None = None,
    out: str | Path | None = None,
    *,
    changes: Mapping[str, Any] | None = None,
    split: float | None = None,
    weights: str | Path | None = None,
    resume_from: str | Path | None = None,
    execution: Execution | None = None,
    listener: Listener | None = None,
) -> Report:
    """Train a recipe on the training images of `data`, evaluate it on the validation images, and
    return the report.

    - `recipe` is a name, a file or a `Recipe`. The default is `my-images`: its values are chosen
      from the images and the device before the run and written to `out/recipe.yaml`
      (docs/my-images.md).
    - `data` holds `train` and `val` as folders of classes, or files in another storage format
      (docs/data.md).
    - `out` is the run's folder. The report is also in `out/report.json`.
    - `changes` are new values for fields of the recipe.
    - `split` sets this share of the images apart for validation if `data` has no validation images.
      It sets the recipe's `validation_share`.
    - `weights` is whatever `evaluate` accepts. A new run starts from these weights instead of the
      recipe's initial ones, at step 0 and with velocities of 0. A classifier for another number of
      logits is initialised again. A recipe with `sparsity` or `quantisation` needs `weights`.
      Without `recipe`, the weights decide the model, and mean, standard deviation and interpolation
      of the images.
    - `resume_from` is a checkpoint of another program, such as NVIDIA's code. A new run resumes
      where that program stopped, with its velocities, moving average, loss scale and step or epoch,
      as far as the checkpoint has them; notes say what it lacks.

    Called again with the same arguments, it resumes from the newest intact checkpoint in `out`, bit
    for bit as if it had never stopped. `execution` can end a call before the run
    (`stop_after_epochs`, `stop_after_steps`); the report is then empty, and the same call resumes
    it. A finished run returns its report at once. With several processes (torchrun), every process
    calls this.

    An existing run needs only `out`. Without `recipe` it resumes with its own recipe, and with its
    own execution if none is given. Without `data` it resumes with its own images. The schedule may
    change, for example to more epochs, if the learning rates of all completed steps stay the same
    (`lockstep.runs.resuming`). It does not need `weights`, and refuses weights that it was not
    started from.

    Raises `UserError` for wrong arguments, `DivergedError` if a loss or a score is not finite,
    `Interrupted` when a signal asked it to stop and everything is saved.

    On ranks other than 0 the report is empty, unless the run was finished before the call.

    >>> import lockstep
    >>> report = lockstep.train("tiny.yaml", "data", "new-run")
    >>> report["final"]["trained"]["images"]
    20
    """
    if out is None:
        raise TypeError("train() needs out, the run's folder")
    changes = dict(changes or {}) | ({} if split is None else {"validation_share": split})
    out = Path(out)
    asked = resuming.complete_settings(out, recipe, data, execution, changes=changes)
    if weights is not None and resume_from is not None:
        raise UserError(
            "--weights and --resume-from are both given: a run starts from weights, or resumes from"
            " a checkpoint"
        )
    given = (
        _Given(Path(weights or resume_from or ""), resume_from is not None)
        if weights or resume_from
        else None
    )
    with StopRequests() as stop:
        world = backends.load(asked.execution.backend).world(asked.execution)
        try:
            with Recorder(
                listener if world.rank == 0 else None, asked.execution.loggers_used
            ) as recorder:
                return _carry_out(asked, out, changes, given, world, recorder, stop)
        finally:
            world.close()


class _Given(NamedTuple):
    """What a new run starts from."""

    path: Path
    resumes: bool
    """Whether it resumes where the checkpoint's program stopped."""


def _carry_out(
    asked: Asked,
    out: Path,
    changes: Mapping[str, Any],
    given: _Given | None,
    world: World,
    recorder: Recorder,
    stop: StopRequests,
) -> Report:
    execution = resuming.keep_parts(asked.execution, out, world.ranks)
    leads = world.rank == 0
    units = world.ranks * execution.accumulation_steps
    if leads and asked.recipe:  # first, so that nothing else about another recipe is reported
        refuse_another_recipe(out, asked.recipe, resuming.SCHEDULE)
    if leads:
        check_installed(execution.loggers_used)
    if asked.taken:
        recorder.tell({"kind": "taken", "out": str(out), "taken": asked.taken})

    opened = (
        open_given(given.path, resumes=given.resumes) if given and asked.recipe is None else None
    )
    of_weights = fields_of(opened) if opened else {}
    weights = opened or (given and given.path)

    def start_of(recipe: Recipe) -> Start | None:
        check_shares(recipe, units)
        check_batch_norm(recipe, world.ranks, execution.accumulation_steps)
        backends.refuse_quantisation(recipe, execution.backend)
        return (
            fit_start(weights, recipe, out, resumes=bool(given and given.resumes))
            if leads
            else None
        )

    start = (
        start_of(asked.recipe) if asked.recipe else None
    )  # before the indexing, so that errors come early
    share = (asked.recipe or check_given_fields(changes)).validation_share
    sets = _open_sets(asked.data, share, recorder, stop, validates=not execution.train_only)
    recipe = asked.recipe or settle(
        sets.training, changes, execution, world, recorder, out, of_weights
    )
    start = start if asked.recipe else start_of(recipe)
    check_logits(recipe, sets)
    images = len(sets.training)
    rates = learning_rates(recipe, steps_per_epoch(recipe, images))
    folder = RunFolder(
        out, recipe, lambda there: resuming.explain_refusal(out, there, recipe, images)
    )
    with folder if leads else nullcontext():
        world.wait()  # if rank 0 cannot open the folder, the other ranks fail here
        with backends.load(execution.backend).engine(recipe, rates, world, execution) as engine:
            driver = Driver(recipe, execution, world, engine, sets, out, stop, recorder)
            driver.start_notes += _changes(folder.changed)
            return driver.carry_out(rates, start) or cast(Report, {})


def _open_sets(
    data: Path, share: float, recorder: Recorder, stop: StopRequests, *, validates: bool
) -> Sets:
    """Return the training and validation images of a run; see `lockstep.data.split.open_sets`.

    Raises `Interrupted` if a stop is requested while they are indexed.
    """

    def progress(what: str) -> Callable[[int, int], None]:
        show = recorder.progress(what)

        def advance(done: int, total: int) -> None:
            show(done, total)
            if stop.requested:
                raise Interrupted(
                    f"stopped by {stop.name} while {what}; nothing is trained yet", stop.exit_code
                )

        return advance

    return open_sets(data, share, progress, validates=validates)


def check_logits(recipe: Recipe, sets: Sets) -> None:
    """Raise `DataError` if the recipe has too few logits for the classes."""
    count = len(sets.training.classes)
    if count > recipe.logits:
        raise DataError(
            f"{sets.data} has {count} classes, but the recipe has {recipe.logits} logits: --set"
            f" logits={count}"
        )


def _changes(changed: dict[str, tuple[Any, Any]]) -> list[str]:
    """Return notes on a run that resumes with another schedule."""
    return [
        f"{name} is {new} from here on; until here it was {old}"
        for name, (old, new) in changed.items()
    ]
