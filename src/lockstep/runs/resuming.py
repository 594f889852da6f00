"""Resuming an existing run: whatever is not given is taken from its folder, and its schedule may
change.

A run can resume with another schedule, such as more epochs, if the learning rates of all completed
steps stay the same, bit for bit. The run's results so far are then also the new recipe's results.
"""

import json
import shlex
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.data.images import printable
from lockstep.data.sources import find_url
from lockstep.data.split import TYPICAL_SHARE, choose_share
from lockstep.recipes import Execution, Recipe, difference, format_value, load_recipe
from lockstep.recipes.my_images import OWN_IMAGES, check_changes
from lockstep.recipes.order import steps_per_epoch
from lockstep.recipes.published import RECIPES
from lockstep.recipes.recipe import GEOMETRY, eval_fields
from lockstep.recipes.schedule import learning_rates
from lockstep.runs.environment import read_environment
from lockstep.runs.folder import (
    explain_logits,
    holds_run,
    refuse_another_recipe,
    refuse_slim,
    suggest_run,
)
from lockstep.runs.trust import accept, list_links, list_names, require_word
from lockstep.system.errors import CheckpointError, DataError, RecipeError, as_path
from lockstep.weights import checkpoint

Require = Callable[[Path, Iterable[str]], None]
"""Refuses what a run's folder names, as `require_word` does."""
SCHEDULE = (
    *("epochs", "lr", "lr_scaling", "lr_batch_images", "lr_unit"),
    *("warmup_epochs", "warmup_start_lr", "warmup_counts_from", "warmup_from_batch_images"),
    *("lr_decay", "lr_decay_from", "lr_end", "lr_step_epochs", "lr_step_factor"),
)
"""Recipe fields that determine the learning rates and nothing else."""
RESUMABLE = (*SCHEDULE, "early_stopping_epochs")
"""Recipe fields that may change when a run resumes, if its learning rates so far stay the same."""
_COMMAND_FIELDS = ("profile_step", "profile_steps", "stop_after_epochs", "stop_after_steps")
"""Execution fields that concern a single command; they are not kept when a run resumes."""


@dataclass(frozen=True)
class RunSettings:
    """What a run is trained with."""

    out: Path
    recipe: Recipe | None
    """None means a new run with a recipe whose values are chosen from the images."""
    chosen: str
    """Name of that recipe, `my-images` or `fine-tune`; "" where the user leaves it open."""
    counts_classes: bool
    """Whether the model of a new run gets as many logits as there are classes if the recipe has
    more: a published recipe, named by a user who does not set `logits`."""
    changes: Mapping[str, Any]
    """New values for fields of the recipe; they are already in `recipe` if there is one."""
    data: Path
    execution: Execution
    origins: dict[str, str]
    """What was taken from the run's folder, in words. Keys are none or some of "recipe",
    "evaluation", "data" and "execution"."""
    notes: tuple[str, ...] = ()
    """Notes on the defaults of a new run."""

    @property
    def wanted(self) -> Recipe:
        """The recipe, or before it is chosen one with the fields in `changes`. Raises `RecipeError`
        if one of them is wrong."""
        return self.recipe or check_changes(self.changes)


def complete_settings(
    out: str | Path,
    recipe: str | Path | Recipe | None = None,
    data: str | Path | None = None,
    execution: Execution | None = None,
    *,
    changes: Mapping[str, Any] | None = None,
    how: Mapping[str, Any] | None = None,
    trust_run: bool = False,
) -> RunSettings:
    """Return the settings of a run; whatever is not given is taken from the last command of the run
    in `out`.

    `changes` are new values for recipe fields, `how` for execution fields; the latter are used only
    if `execution` is not given. If a recipe is given, nothing of the execution is taken from the
    run. If it is given by name, the run keeps the geometry of its evaluations.

    Unless `trust_run` is set, what the folder names outside of itself must have been named for this
    run on this machine before (`lockstep.runs.trust`). The modules of the user's own
    augmentations are imported. Raises `RecipeError` if they cannot be, `DataError` if there are no
    images and no run to take them from, `CheckpointError` if the run's folder cannot be read.
    """
    out = as_path(out, "out")
    changes = changes or {}
    how = how or {}
    require = accept if trust_run else require_word
    require(out, list_links(out) if holds_run(out) else ())  # refuses checkpoints of two runs
    name = recipe if isinstance(recipe, str) else ""
    chosen = name if name in OWN_IMAGES else ""
    counts_classes = name in RECIPES and "logits" not in changes
    own = None if recipe is None or chosen else load_recipe(recipe)
    store = _find_store(out, execution, how, require)
    origins = find_newer_copy(store, out, partial(_refuse_copy, own, changes), trust_run)
    there = None
    if not isinstance(recipe, Recipe) and holds_run(out):
        there = load_recipe(out / "recipe.yaml")
    kept: dict[str, Any] = {}
    if recipe is None and there is not None:
        based_on = f" ({printable(there.based_on)})" if there.based_on else ""
        origins["recipe"] = f"the run's recipe{based_on}"
        if execution is None:
            kept = {name: value for name, value in last_execution(out).items() if name not in how}
    require(out, list_names(kept))
    settled = own or there
    if settled is not None:
        _require_modules(settled, out if own is None else recipe, changes, require)
        settled = settled.replace(**changes).load_plug_ins()
        if recipe is not None and there is not None:
            settled, geometry = _keep_shape(there, settled, changes, counts_classes)
            origins |= geometry
    if data is None:
        refuse_slim(out)  # first: its images may be gone, too
        data = find_last_data(out, require)
        origins["data"] = f"images {printable(str(data))}"
    if execution is None:
        execution = Execution.of(kept | dict(how))
        origins |= _list_unusual(kept)
    is_counted = counts_classes and there is None
    fields = (out, settled, chosen, is_counted, changes, as_path(data, "data"), execution, origins)
    return _set_share_apart(RunSettings(*fields))


def _set_share_apart(settings: RunSettings) -> RunSettings:
    """Return the settings with a share to hold out for validation if the data set has no
    validation images and nothing sets the share. A run that has begun keeps its own."""
    is_set = "validation_share" in settings.changes or settings.wanted.division
    if is_set or settings.execution.train_only:
        return settings
    share = choose_share(settings.data)
    notes: tuple[str, ...] = ()
    if share and holds_run(settings.out):
        share = load_recipe(settings.out / "recipe.yaml").validation_share
    elif share:
        notes = (
            f"{printable(str(settings.data))} has no validation images: about {100 * share:g} % of"
            f" its images, chosen by name, are held out; --split {TYPICAL_SHARE} changes that",
        )
    if not share:
        return settings
    change = {"validation_share": share}
    recipe = settings.recipe
    return replace(
        settings,
        recipe=recipe if recipe is None else recipe.replace(**change),
        changes=dict(settings.changes) | change,
        notes=notes,
    )


def _require_modules(
    own: Recipe, source: object, changes: Mapping[str, Any], require: Require
) -> None:
    """Require the user's confirmation of the modules that a recipe from a folder imports."""
    if isinstance(source, str | Path) and Path(source).is_dir() and "augmentations" not in changes:
        require(Path(source), list_names({}, recipe=own))


def _refuse_copy(own: Recipe | None, changes: Mapping[str, Any], copied: Path) -> None:
    """Raise `RecipeError` if a copy, fetched into a temporary folder, is of a run with a different
    recipe than the command's. Fields that are settled later are compared later."""
    if own is not None:
        late = ("logits", "class_weights", "eval_antialias", *GEOMETRY)
        refuse_another_recipe(copied, own.replace(**changes), (*RESUMABLE, *late))


def _find_store(
    out: Path, execution: Execution | None, how: Mapping[str, Any], require: Require
) -> str:
    """Return the address of the run's copy in an object store; "" if it has none."""
    if execution is not None:
        return execution.checkpoint_store
    field = "checkpoint_store"
    if field in how:
        return how[field] if isinstance(how[field], str) else ""  # refused with the other fields
    last: dict[str, Any] = {}
    with suppress(CheckpointError):  # of a damaged file, which not every command needs
        last = last_execution(out) if holds_run(out) else {}
    url = str(last.get(field, ""))
    require(out, list_names({field: url}))
    return url


def find_newer_copy(
    url: str, folder: Path, check: Callable[[Path], None], is_trusted: bool
) -> dict[str, str]:
    """Return what `fetch_run` took, as in `RunSettings.origins`. Raises `DataError` also where the
    folder cannot be written to."""
    if not url:
        return {}
    from lockstep.runs.run_copies import fetch_run

    try:
        step = fetch_run(url, folder, check, is_trusted)
    except OSError as error:
        raise DataError(f"the run in {url} cannot be fetched into {folder}: {error}") from None
    return {} if step is None else {"copy": f"the checkpoint of step {step} in {url}"}


def _list_unusual(execution: Mapping[str, Any]) -> dict[str, str]:
    """Return the fields of an execution that do not have their defaults, with their values, as in
    `RunSettings.origins`."""
    defaults = Execution().fields()
    unusual = ", ".join(
        f"{name}={format_value(value)}"
        for name, value in execution.items()
        if value != defaults[name]
    )
    return {"execution": unusual} if unusual else {}


def _keep_shape(
    there: Recipe, new: Recipe, changes: Mapping[str, Any], counts_classes: bool
) -> tuple[Recipe, dict[str, str]]:
    """Return the new recipe with the geometry of evaluation of the run's recipe, `there`, and with
    `counts_classes` at most its logits; and what the geometry keeps, as in `RunSettings.origins`.

    Fields that `changes` set stay as they are. So does all geometry if the run cannot resume with
    this recipe for another reason.
    """
    if counts_classes:
        new = new.replace(logits=min(new.logits, there.logits))
    free = {"eval_antialias", *GEOMETRY} - changes.keys() - eval_fields(dict(changes)).keys()
    changed = difference(there, new)
    kept = {name: before for name, (before, _) in changed.items() if name in free}
    if not kept or changed.keys() - kept.keys() - set(RESUMABLE):
        return new, {}
    geometry = ", ".join(f"{name}={value}" for name, value in kept.items())
    return new.replace(**kept), {"evaluation": f"evaluation settings {geometry}"}


def last_execution(out: Path) -> dict[str, Any]:
    """Return the last execution of the run in a folder, as fields of `Execution`; empty if the run
    never began.

    Fields that this version does not know, and fields that concern a single command, are left out.
    """
    recorded = read_environment(out).get("execution", {})
    fields = {
        name: value
        for name, value in recorded.items()
        if name in Execution.model_fields and name not in _COMMAND_FIELDS
    }
    try:
        settled = Execution.of(fields).fields()
        return {name: value for name, value in settled.items() if name in fields}
    except RecipeError as error:
        raise CheckpointError(
            f"{out / 'environment.json'}: execution: {error}; restore it or remove it"
        ) from None


def keep_parts(execution: Execution, out: Path, ranks: int) -> Execution:
    """Return the execution of a run that resumes on this many ranks: with `keep_global_batch`, in
    as many parts as before.

    The parts of a step are the ranks times the accumulation steps. Raises `RecipeError` if the
    ranks cannot share them.
    """
    there = read_environment(out) if execution.keep_global_batch and holds_run(out) else {}
    before = there.get("ranks")
    if before is None:
        return execution
    parts = before * last_execution(out).get("accumulation_steps", 1)
    if parts % ranks:
        possible = [str(count) for count in range(1, parts + 1) if parts % count == 0]
        raise RecipeError(
            f"{out} computes a step in {parts} parts, which {ranks} ranks cannot share equally; use"
            f" {', '.join(possible)} ranks, or leave out --keep-global-batch"
        )
    return execution.replace(accumulation_steps=parts // ranks)


def find_last_data(out: Path, require: Require = require_word) -> Path:
    """Return the data set of the run in a folder. Raises `DataError` if it is unknown or gone, and
    what `require` raises if no command on this machine has named it."""
    if not holds_run(out):
        raise DataError(
            f"there is no run in {out}; a new run needs images: --data DATA, in Python data=DATA"
        )
    data = read_environment(out).get("data")
    if data is None:
        raise DataError(
            f"{out} does not say which images it was trained on; add --data DATA, in Python"
            " data=DATA"
        )
    if find_url(data) is None and not Path(data).exists():
        raise DataError(
            f"{out} was trained on {data}, which does not exist; give the path of its images:"
            " --data DATA"
        )
    require(out, list_names({}, data))
    return Path(data)


def explain_refusal(
    out: Path, there: Recipe, new: Recipe, images: int, data: str | Path = "DATA"
) -> str | None:
    """Return why the run in `out` cannot resume with another recipe, in sentences; None if it can.

    `there` is the run's recipe, `new` the other one, `images` the number of training images in
    `data`. An empty string means that fields that cannot change differ.
    """
    changed = difference(there, new)
    if set(changed) - set(RESUMABLE):
        return explain_logits(out, changed, data)
    per_epoch = steps_per_epoch(there, images)
    done = max(checkpoint.steps(out / "checkpoints"), default=0)
    if new.epochs * per_epoch < done:
        return (
            f"That run is at step {done}, but epochs={new.epochs} ends at {new.epochs * per_epoch}."
        )
    before, after = (learning_rates(recipe, per_epoch)[:done] for recipe in (there, new))
    if before.tobytes() == after.tobytes():
        return None
    step = int(np.flatnonzero(before != after)[0])
    run = shlex.quote(str(out))
    settings = [
        f"{name}={json.dumps(value, allow_nan=False)}" for name, (_, value) in changed.items()
    ]
    return (
        f"That run is at step {done}, but the new schedule changes learning rates before it: that"
        f" of step {step} was {before[step]:.6g} and would be {after[step]:.6g}.\nTo start a new"
        f" run from its weights, at step 0:\n  {suggest_run(out, data)} --recipe {run} "
        + " ".join(f"--set {shlex.quote(setting)}" for setting in settings)
    )
