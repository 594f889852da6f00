"""Give the engine the state that a run begins or resumes with: of the newest checkpoint, of given
weights, or the initial one."""

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.data.sources import FOLDER, name_folder
from lockstep.data.split import UNREAD, same_images
from lockstep.models.state import State
from lockstep.recipes.initial_weights import initial_state
from lockstep.runs.context import RunContext
from lockstep.runs.folder import suggest_run
from lockstep.runs.image_results import (
    IMAGES_FILE,
    compare_images,
    list_images,
    list_seen,
    read_sample,
)
from lockstep.runs.save import check_mxnet_prefix, write_checkpoint
from lockstep.system.errors import CheckpointError, DataError
from lockstep.weights import checkpoint

if TYPE_CHECKING:
    from lockstep.runs.starting_weights import Start


def find_state(run: RunContext) -> tuple[State, list[str]]:
    """Return the state that a run begins or resumes with, and the reasons why newer checkpoints
    were skipped."""
    _require_same_images(run)
    if run.recipe.linear_probe:
        from lockstep.runs.linear_probe import start_from_probe

        start_from_probe(run)
    if run.leads:
        check_mxnet_prefix(run)
        _write_first_checkpoint(run, run.start)
    run.world.wait()  # wait: the other ranks read what rank 0 has written
    state, damaged = _read_state(run)
    if not run.world.same(state.step):
        raise CheckpointError(
            f"ranks find different checkpoints in {run.out}; all ranks must share this folder"
        )
    return state, damaged


def _require_same_images(run: RunContext) -> None:
    """Raise `DataError` if another rank has different images: a step would have some twice and miss
    others. Ranks on several machines each list a store."""
    digest = hashlib.sha256(run.data_digest.encode()).digest()
    if not run.world.same(int.from_bytes(digest[:7], "big")):
        raise DataError(
            f"ranks find different images in {run.sets.name}; expected the same on every machine."
            " Start again once nothing writes to the data set"
        )


def _write_first_checkpoint(run: RunContext, start: "Start | None") -> None:
    """Write the first checkpoint of a new run from given weights; refuse weights that a resumed run
    was not started from."""
    is_started = bool(checkpoint.steps(run.checkpoints))
    if not is_started:
        _remove_unstarted(run.out)
    if start is None:
        return
    from lockstep.runs import starting_weights

    if is_started:
        starting_weights.refuse_other_weights(run.out, start)
        return
    if start.folded_norms:
        from lockstep.runs.input_statistics import unfold_start

        start = unfold_start(run, start)
    images = run.sets.training
    values, notes = starting_weights.write_start(
        run.out, run.recipe, start, images.classes, in_folders=images.source.format == FOLDER
    )
    state, more_notes = starting_weights.build_first_state(
        run.recipe, values, start, run.steps_per_epoch
    )
    run.notes += notes + more_notes
    run.details += start.details
    list_seen(run.out, start.checkpoint_file)
    if run.recipe.quantisation != "none":
        from lockstep.runs.input_statistics import calibrate

        run.engine.write(state)
        run.scales = calibrate(run)
    write_checkpoint(run, state)


def _remove_unstarted(run: Path) -> None:
    """Remove the files of a command that was killed before its run was started."""
    for name in ("start.json", "masks.safetensors", IMAGES_FILE):
        # older versions wrote to the last of these names
        for leftover in (name, f".{name}.partial", f"{name}.partial"):
            (run / leftover).unlink(missing_ok=True)


def _read_state(run: RunContext) -> tuple[State, list[str]]:
    """Return the newest intact checkpoint's state, or the initial one, and the reasons why newer
    ones were skipped."""
    state, digest, damaged = checkpoint.newest_intact(run.checkpoints)
    changes = compare_images(run.out, run.sets) if state is not None else ""
    if state is not None and (changes or not same_images(digest, run.data_digest)):
        raise CheckpointError(
            f"{run.out} was trained or evaluated on images that differ from those in"
            f" {run.sets.training.source.title}{f': {changes}' if changes else ''}. Restore its"
            " images, or start a new run from its weights with a new --out:\n"
            f"  {suggest_run(run.out, name_folder(run.sets.data))}"
        )
    if run.leads:
        list_images(run.out, run.sets, is_new=state is None)
    if state is None:
        return initial_state(run.recipe), damaged
    if run.execution.loader != "synthetic":
        for index in (run.sets.training, run.sets.validation):
            read_sample(index, state.step)
    if run.data_digest.endswith(f" {UNREAD}"):
        # so that later checkpoints still say which validation images the run had
        run.data_digest = digest
    return state, damaged


def load_state(run: RunContext, state: State) -> None:
    """Give the engine a state, and the masks and scales that belong to it."""
    run.engine.write(state)
    if run.recipe.sparsity != "none":
        from lockstep.runs.starting_weights import read_masks

        run.engine.mask(read_masks(run.out))
    if run.recipe.quantisation != "none":
        from lockstep.runs.input_statistics import quantise

        run.scales = quantise(run, state.step)
