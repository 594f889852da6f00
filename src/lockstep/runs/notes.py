"""Notes before the first step: settings that are allowed but rarely intended."""

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from lockstep.backends import World
from lockstep.backends.emulation import find_emulation
from lockstep.data.images import printable
from lockstep.data.sources import name_folder
from lockstep.recipes import Execution, Recipe
from lockstep.recipes.my_images import NAME as MY_IMAGES
from lockstep.recipes.my_images import OWN_IMAGES
from lockstep.recipes.published import RECIPES
from lockstep.recipes.schedule import learning_rates, peak_lr, warmup_epochs
from lockstep.runs.context import RunContext
from lockstep.runs.image_results import count_copies, find_trained
from lockstep.runs.step_plan import find_last_step
from lockstep.system.text import format_count, list_first
from lockstep.weights import checkpoint

_STEP_FIELDS = ("compile", "layout", "fused", "cuda_graph", "recompute")
"""Fields of the execution that change what a GPU computes in a step."""
LARGEST_GROWTH = 1.4
"""Largest size of evaluation over that of training that is not noted. `resnet50-rsb-a3` has it; a
larger size improves accuracy up to about 1.3 times training's (arXiv:1906.06423)."""
SMALLEST_SHARE = 0.75
"""Smallest size of evaluation over that of training that is not noted."""
FEW_IMAGES = 100_000
"""With fewer training images than this, ImageNet's weights are suggested. arXiv:1805.08974 compares
them with random ones on twelve data sets of 2,040 to 75,750 training images."""
_USUAL_WEIGHTS = "torchvision/resnet50.IMAGENET1K_V2"
"""The weights to suggest for their own model, as the documentation does, and for a model that has
none."""
_ROUGH = 50
"""With fewer validation images than this, the interval of a top-1 of 80 % is wider than 20 points.
"""
_NEAR_PEAK = 0.95
_NAMED = 5


@dataclass(frozen=True)
class RunFacts:
    """What the notes are based on: facts about a run's images."""

    classes: Sequence[str]
    training: np.ndarray
    """int64 [classes]: number of training images of every class."""
    validation: np.ndarray
    """int64 [classes]: number of validation images of every class."""
    steps_per_epoch: int


def collect_notes(run: RunContext, step: int) -> list[str]:
    """Return the notes for a run at this step: on how it begins, on settings that are allowed but
    rarely intended, and on this command. What its log has noted before is left out."""
    notes = []
    traced = run.execution.traced_steps
    if traced and not set(traced) & set(range(step, run.total_steps)):
        notes.append(
            f"steps {traced.start} to {traced.stop - 1} are not traced: this command trains steps"
            f" {step} to {run.total_steps - 1}"
        )
    end = find_last_step(step, run.total_steps, run.steps_per_epoch, run.execution)
    if end < run.total_steps:
        notes.append(
            f"this command stops after step {end} of {run.total_steps}; repeat it to resume"
        )
    emulated = find_emulation(
        run.recipe.precision, on_gpu=run.world.on_gpu, backend=run.execution.backend
    )
    facts = _collect_facts(run)
    settings = [*note_single_class(facts), *_note_known_images(run)]
    if emulated is not None:
        instead = f"--set precision={emulated.instead}"
        settings.append(f"{emulated}; {emulated.instead} is not: {instead}")
    settings += [*list_unusual_settings(run.recipe, facts), *run.notes]
    if step == 0 and not checkpoint.steps(run.checkpoints):  # it starts from random weights
        settings += suggest_weights(run.recipe, len(run.sets.training))
    return [note for note in settings if note not in run.recorder.notes] + notes


def _note_known_images(run: RunContext) -> Iterator[str]:
    """Yield notes if validation images are also training images of this run, or of the one that it
    starts from."""
    validation = run.sets.validation
    copies = count_copies(run.sets)
    if copies:
        yield (
            f"{copies:,} of {len(validation):,} validation images are copies of training images,"
            " so the accuracy is too high; to list them: lockstep data check"
            f" {shlex.quote(name_folder(run.sets.data))}"
        )
    known = 0 if run.start is None else find_trained(run.start.checkpoint_file, validation).sum()
    if known:
        yield (
            f"the starting weights were trained on {known:,} of {len(validation):,} validation"
            " images (same bytes), so the accuracy is too high; use other validation images"
        )


def _collect_facts(run: RunContext) -> RunFacts:
    training, validation = (
        np.bincount(index.rows["label"], minlength=len(index.classes))
        for index in (run.sets.training, run.sets.validation)
    )
    names = [printable(name) for name in run.sets.training.classes]
    return RunFacts(names, training, validation, run.steps_per_epoch)


def list_unusual_settings(recipe: Recipe, facts: RunFacts) -> list[str]:
    """Return a note for everything in a recipe and its images that is allowed but rarely intended.

    >>> facts = RunFacts(["cat", "dog"], np.array([8, 8]), np.array([2, 0]), 4)
    >>> for note in list_unusual_settings(Recipe(logits=2, global_batch_images=4), facts):
    ...     print(note)
    no validation images for 1 of 2 classes: dog
    """
    return [
        *_check_logits(recipe, facts),
        *_check_validation(recipe, facts),
        *_check_sizes(recipe),
        *_check_rates(recipe, facts),
        *_check_balance(recipe),
        *_check_classes(facts),
    ]


def suggest_weights(recipe: Recipe, images: int) -> list[str]:
    """Return a note for a run of few images from random weights, if published weights of its model
    would probably help. There is none for a recipe that the user wrote, or the demo's.

    >>> suggest_weights(Recipe(model="resnet50").rename("my-images"), 500)[0][:68]
    'with 500 images, training from published weights is usually better a'
    """
    if recipe.based_on not in RECIPES or recipe.based_on == "demo" or images >= FEW_IMAGES:
        return []
    from lockstep.weights.known_weights import read_known_weights

    known = read_known_weights()
    names = [
        name for name, weights in known.items() if weights.model == recipe.model and weights.is_free
    ]
    without = "" if recipe.based_on == MY_IMAGES else " without --recipe"
    best = max(names, key=lambda name: known[name].top1_percent, default=_USUAL_WEIGHTS)
    if _USUAL_WEIGHTS in names:
        best = _USUAL_WEIGHTS
    return [
        f"with {images:,} images, training from published weights is usually better and faster than"
        f" from random ones: --weights {best}{without}; lockstep weights lists others"
    ]


def note_determinism_cost(recipe: Recipe, execution: Execution, world: World) -> list[str]:
    """Return a note for a run on a GPU with `deterministic`: that it may cost time, and what to
    type to measure it."""
    if not world.on_gpu or not execution.deterministic:
        return []
    images = recipe.global_batch_images // (world.ranks * execution.accumulation_steps)
    command = f"lockstep benchmark train --backend {execution.backend}"
    if isinstance(recipe.model, str):
        command += f" --model {recipe.model}"
    command += f" -b {images}"
    defaults = Execution()
    for name in _STEP_FIELDS:
        value = getattr(execution, name)
        if value != getattr(defaults, name):
            is_axis = name in ("compile", "layout")
            command += f" --{name} {value}" if is_axis else f" --set {name}={value}"
    return [
        "GPU kernels are deterministic, so that a resumed run is bit-identical; others may be"
        " faster: --set deterministic=false. To compare, run this with and without that:"
        f" {command} --dtype {recipe.precision}"
    ]


def _check_balance(recipe: Recipe) -> Iterator[str]:
    if recipe.sampling != "plain" and recipe.class_weights != "none":
        yield f"sampling={recipe.sampling} and class_weights both favour rare classes: use one"


def _check_logits(recipe: Recipe, facts: RunFacts) -> Iterator[str]:
    classes = len(facts.classes)
    if classes + 1 < recipe.logits:  # NVIDIA's TensorFlow model has one logit more than classes
        yield (
            f"the images have {format_count(classes, 'class')}, but the model has"
            f" {format_count(recipe.logits, 'logit')}: --set logits={classes}"
        )


def _check_sizes(recipe: Recipe) -> Iterator[str]:
    for epoch, size in recipe.image_sizes[-1:]:
        if epoch >= recipe.epochs:
            yield (
                f"image_sizes has {size} px from epoch {epoch} on, but the run ends after"
                f" {recipe.epochs}: set more epochs, or other sizes"
            )
    trained = recipe.image_size
    evaluated = recipe.eval_crop
    change = ""
    if evaluated > LARGEST_GROWTH * trained:
        change = "more than 1.4 times"
    if evaluated < SMALLEST_SHARE * trained:
        change = "less than 3/4 of"
    if change:
        yield (
            f"the evaluation size, {evaluated} px, is {change} the training size, {trained} px:"
            " set only image_size; eval_resize and eval_crop then follow it"
        )


def _check_rates(recipe: Recipe, facts: RunFacts) -> Iterator[str]:
    warmup = warmup_epochs(recipe)
    peak = peak_lr(recipe)
    if warmup >= recipe.epochs:
        yield (
            f"the warm-up of {warmup:g} epoch{'s' * (warmup != 1)} lasts the whole run of"
            f" {recipe.epochs}, so the learning rate never decreases; --set"
            f" warmup_epochs={recipe.epochs / 10:g}"
        )
        return
    highest = learning_rates(recipe, facts.steps_per_epoch).max()
    if highest < _NEAR_PEAK * peak:
        yield (
            f"the learning rate never reaches its peak of {peak:.4g}: the highest is {highest:.4g};"
            " check lr_decay_from, lr_step_epochs and warmup_epochs"
        )


def note_single_class(facts: RunFacts) -> Iterator[str]:
    """Yield the first note of a run with one class: its top-1 of 100 % means nothing."""
    if len(facts.classes) == 1:
        yield (
            f"all images are of one class, {facts.classes[0]}, so every accuracy is 100 %; put the"
            " images of each class in a separate folder"
        )


def _check_classes(facts: RunFacts) -> Iterator[str]:
    yield from _note_similar_names(facts.classes)
    for split, counts in (("training", facts.training), ("validation", facts.validation)):
        if not counts.any():
            continue  # images that are not read
        lacking = [facts.classes[i] for i in np.flatnonzero(counts == 0).tolist()]
        if lacking:
            yield (
                f"no {split} images for {len(lacking)} of {len(facts.classes)} classes:"
                f" {list_first(lacking, _NAMED)}"
            )


def _check_validation(recipe: Recipe, facts: RunFacts) -> Iterator[str]:
    images = int(facts.validation.sum())
    if (
        recipe.based_on in OWN_IMAGES
        and not recipe.folds
        and 0 < images < _ROUGH
        and len(facts.classes) > 1
    ):
        yield (
            f"{format_count(images, 'validation image')} give only rough accuracies, as the"
            " intervals show; --folds 5 with a new --out validates on all images but those"
            " of a val, in five runs"
        )


def _note_similar_names(classes: Sequence[str]) -> Iterator[str]:
    """Yield a note for classes whose names differ only in capital letters or spaces."""
    alike: dict[str, list[str]] = {}
    for name in classes:
        alike.setdefault("".join(name.split()).casefold(), []).append(name)
    for names in alike.values():
        if len(names) > 1:
            yield (
                f"the names of {len(names)} classes differ only in capital letters or spaces:"
                f" {', '.join(names)}; if they are one class, merge the folders"
            )
