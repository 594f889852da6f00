"""Open what a run needs: recipe, images, starting weights, folder and engine."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lockstep import backends
from lockstep.backends import World
from lockstep.data.split import Sets, find_run_sources, open_sets
from lockstep.recipes import Execution, Recipe, format_value
from lockstep.recipes.my_images import OWN_IMAGES
from lockstep.recipes.order import check_batch_norm, check_shares, steps_per_epoch
from lockstep.recipes.schedule import learning_rates
from lockstep.runs import resuming
from lockstep.runs.context import RunContext, stop_before_training
from lockstep.runs.folder import (
    Changed,
    holds_run,
    open_run_folder,
    read_classes,
    refuse_another_recipe,
    suggest_run,
)
from lockstep.runs.loggers import check_installed
from lockstep.runs.recorder import Recorder
from lockstep.runs.resuming import RunSettings
from lockstep.system.errors import DataError, RecipeError
from lockstep.system.signals import StopRequests

if TYPE_CHECKING:
    from lockstep.runs.starting_weights import Start, StartSource


def check_paths(settings: RunSettings, source: "StartSource | None") -> None:
    """Raise `DataError` or `CheckpointError` if images or weights are missing, and `RecipeError` if
    another program's run resumes without a recipe, before a framework is imported."""
    validates = not settings.execution.train_only
    find_run_sources(settings.data, settings.wanted.division, validates=validates)
    if source is not None:
        if source.resumes and settings.recipe is None and not settings.chosen:
            raise RecipeError(
                "--resume-from needs --recipe: the recipe of the checkpoint's run, with its batch,"
                " epochs and schedule (lockstep recipes)"
            )
        source.check_exists()


@contextmanager
def open_run(
    settings: RunSettings,
    source: "StartSource | None",
    world: World,
    recorder: Recorder,
    stop: StopRequests,
    *,
    plan_rates: Callable[[Recipe, int], np.ndarray] = learning_rates,
) -> Iterator[RunContext]:
    """Open a run on this rank. Errors of settings come before the images are indexed.

    `plan_rates` returns the learning rates of the steps, from the recipe and the steps of an epoch.
    """
    out = settings.out
    execution = resuming.keep_parts(settings.execution, out, world.ranks)
    recipe = settings.recipe
    if world.rank == 0:
        if recipe is not None:
            # "balanced" becomes numbers once the images are counted, and is compared then.
            late = ("class_weights",) if recipe.class_weights == "balanced" else ()
            refuse_another_recipe(out, recipe, (*resuming.RESUMABLE, *late), settings.data)
        check_installed(execution.loggers_used)
    recipe, sets, start, notes = _settle_recipe(settings, source, execution, world, recorder, stop)
    images = len(sets.training)
    shares = {"ranks": world.ranks, "parts": execution.accumulation_steps}
    rates = plan_rates(recipe, steps_per_epoch(recipe, images, **shares))
    with ExitStack() as stack:
        changed: Changed = {}
        if world.rank == 0:
            explain = partial(
                resuming.explain_refusal, out, new=recipe, images=images, data=settings.data
            )
            changed = stack.enter_context(open_run_folder(out, recipe, explain))
        world.wait()  # if rank 0 cannot open the folder, the other ranks fail here
        engine = stack.enter_context(
            backends.load(execution.backend).engine(recipe, rates, world, execution)
        )
        run = RunContext(recipe, execution, world, engine, sets, out, stop, recorder, rates, start)
        run.notes += [*settings.notes, *sets.notes, *notes]
        for name, (before, after) in changed.items():
            old, new = (format_value(value) for value in (before, after))
            run.notes.append(f"{name} changes from {old} to {new}")
        yield run


def _settle_recipe(
    settings: RunSettings,
    source: "StartSource | None",
    execution: Execution,
    world: World,
    recorder: Recorder,
    stop: StopRequests,
) -> "tuple[Recipe, Sets, Start | None, list[str]]":
    """Return the recipe, which the images may decide, the images, the weights to start from, on
    rank 0, and notes."""
    out = settings.out
    recipe = settings.recipe
    notes: list[str] = []
    if recipe is not None:
        _check_recipe(recipe, execution, world)
        start = None if settings.counts_classes else _fit_start(recipe, source, world, out)
        is_strict = recipe.based_on not in OWN_IMAGES
        sets = _open_sets(settings, recipe, recorder, stop, execution, is_strict=is_strict)
        if settings.counts_classes:
            recipe, notes = _count_classes(recipe, sets)
            start = _fit_start(recipe, source, world, out)
    else:
        from lockstep.runs.recipe_from_images import choose_from_images

        wanted = settings.wanted.load_plug_ins()
        sets = _open_sets(settings, wanted, recorder, stop, execution)
        recipe = choose_from_images(
            settings.chosen,
            source,
            sets.training,
            settings.changes,
            execution,
            world,
            recorder,
            out,
        ).load_plug_ins()
        _check_recipe(recipe, execution, world)
        start = _fit_start(recipe, source, world, out)
    _check_logits(recipe, sets, settings)
    recipe = recipe.settle_class_weights(sets.training.rows["label"])
    return recipe, sets, start, notes


def _check_recipe(recipe: Recipe, execution: Execution, world: World) -> None:
    """Raise an error if a recipe cannot run with this execution on these ranks."""
    if recipe.early_stopping_epochs and execution.train_only:
        raise RecipeError(
            "early stopping needs evaluations, but train_only is set: --set"
            " early_stopping_epochs=0, or --set train_only=false"
        )
    check_shares(recipe, world.ranks * execution.accumulation_steps)
    check_batch_norm(recipe, world.ranks, execution.accumulation_steps)
    backends.check_options(execution.backend, recipe, on_gpu=world.on_gpu)


def _fit_start(
    recipe: Recipe, source: "StartSource | None", world: World, out: Path
) -> "Start | None":
    """Return the weights to start from, on rank 0. Raises an error if they do not fit."""
    if world.rank != 0 or (source is None and not recipe.needs_weights):
        return None
    from lockstep.runs.starting_weights import fit_start

    return fit_start(source, recipe, out)


def _count_classes(recipe: Recipe, sets: Sets) -> tuple[Recipe, list[str]]:
    """Return the recipe with as many logits as there are classes if it has more, and a note.

    NVIDIA's TensorFlow recipes keep their one logit more than classes.
    """
    classes = len(sets.training.classes)
    if recipe.logits <= classes + 1:
        return recipe, []
    note = (
        f"the model has one logit per class, {classes}, not the recipe's {recipe.logits}; to keep"
        f" those: --set logits={recipe.logits}"
    )
    return recipe.replace(logits=classes), [note]


def _open_sets(
    settings: RunSettings,
    recipe: Recipe,
    recorder: Recorder,
    stop: StopRequests,
    execution: Execution,
    *,
    is_strict: bool = False,
) -> Sets:
    """Return the training and validation images of a run; see `lockstep.data.split.open_sets`.

    Raises `Interrupted` if a stop is requested while they are indexed.
    """

    def progress(activity: str) -> Callable[[int, int], None]:
        show = recorder.progress(activity)

        def advance(done: int, total: int) -> None:
            show(done, total)
            stop_before_training(stop, activity)

        return advance

    return open_sets(
        settings.data,
        recipe.division,
        progress,
        validates=not execution.train_only,
        is_strict=is_strict,
        class_order=recipe.class_order,
        own_classes=read_classes(settings.out),
    )


def _check_logits(recipe: Recipe, sets: Sets, settings: RunSettings) -> None:
    """Raise `DataError` if the recipe has too few logits for the classes."""
    count = len(sets.training.classes)
    if count <= recipe.logits:
        return
    if holds_run(settings.out):
        raise DataError(
            f"{sets.data} has {count} classes, but the run in {settings.out} has"
            f" logits={recipe.logits}. Start a new run from its weights, which keeps the classes"
            f" that both have:\n  {suggest_run(settings.out, settings.data)}"
        )
    raise DataError(
        f"{sets.data} has {count} classes, but the recipe has logits={recipe.logits}: --set"
        f" logits={count}"
    )
