"""Which checkpoints a run keeps and reads, and what is written after each."""

from pathlib import Path

import lockstep
from lockstep.recipes import Execution, Recipe
from lockstep.weights import checkpoint
from lockstep.weights.formats import mxnet_params
from tests.runs.cases import (
    EXECUTION,
    Event,
    assert_same_run,
    newest_step,
    read_state,
    stop_at,
    train_until,
)


def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_is_used(
    uninterrupted: Path, textures: Path, tiny_recipe: Recipe, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    train_until(stop_at("save", 9), tiny_recipe, textures, run, execution=EXECUTION)
    newest = checkpoint.checkpoint_path(run / "checkpoints", newest_step(run))
    weights_file = newest / "model.safetensors"
    weights_file.write_bytes(weights_file.read_bytes()[:-1] + b"\xff")
    events: list[Event] = []
    lockstep.train(tiny_recipe, textures, run, execution=EXECUTION, listener=events.append)
    start = next(event for event in events if event["kind"] == "start")
    assert newest.name in start["damaged"][0]
    assert_same_run(run, uninterrupted)


def test_old_checkpoints_are_removed(textures: Path, tiny_recipe: Recipe, tmp_path: Path) -> None:
    run = tmp_path / "run"
    recipe = tiny_recipe.replace(epochs=4, lr=0.02)
    report = lockstep.train(recipe, textures, run, execution=Execution(keep_checkpoints=1))
    assert checkpoint.steps(run / "checkpoints") == sorted({report["best"]["step"], 28})


def test_mxnet_gets_every_epoch(textures: Path, tiny_recipe: Recipe, tmp_path: Path) -> None:
    prefix = tmp_path / "for mxnet" / "model"
    execution = Execution(keep_checkpoints=3, save_every_steps=5, model_prefix=str(prefix))
    lockstep.train(tiny_recipe, textures, tmp_path / "run", execution=execution)
    written = sorted(path.name for path in prefix.parent.iterdir())
    assert written == [
        "model-0001.momentum.params",
        "model-0001.params",
        "model-0002.momentum.params",
        "model-0002.params",
        "model-symbol.json",
    ]
    names = {
        "arg:stage2_unit1_conv1sc_weight": "layer2.0.downsample.0.weight",
        "aux:bn0_moving_var": "bn1.running_var",
    }
    for epoch in (1, 2):
        arrays = mxnet_params.load(prefix.with_name(f"model-000{epoch}.params"))
        tensors = read_state(tmp_path / "run", 7 * epoch).tensors
        for theirs, ours in names.items():
            assert arrays[theirs].tobytes() == tensors[ours].tobytes()
