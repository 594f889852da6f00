"""Losses, scores and weights that are not finite end a run."""

import json
from pathlib import Path

import numpy as np
import pytest

import lockstep
from lockstep.recipes import Execution, Recipe
from lockstep.recipes.initial_weights import initial_tensors
from lockstep.system.errors import DivergedError
from lockstep.system.event_log import read_log
from lockstep.weights import checkpoint
from tests.runs.cases import EXECUTION, read_state


def test_weights_of_nan_are_not_saved(textures: Path, tiny_recipe: Recipe, tmp_path: Path) -> None:
    recipe = tiny_recipe.replace(lr=3e38, warmup_epochs=0, weight_decay=1.0)
    execution = Execution(save_every_steps=1)
    with pytest.raises(DivergedError, match="Last good checkpoint: none"):
        lockstep.train(recipe, textures, tmp_path / "run", execution=execution)
    assert checkpoint.steps(tmp_path / "run" / "checkpoints") == []


def test_a_loss_of_nan_stops_the_run(textures: Path, tiny_recipe: Recipe, tmp_path: Path) -> None:
    recipe = tiny_recipe.replace(lr=1e30, warmup_epochs=1.5, warmup_start_lr=1e-3, epochs=3)
    message = r"within steps \d+ to \d+.*Last good checkpoint"
    with pytest.raises(DivergedError, match=message) as error:
        lockstep.train(recipe, textures, tmp_path / "run", execution=EXECUTION)
    assert error.value.exit_code == 3
    last = read_log(tmp_path / "run" / "log.jsonl")[-1]
    assert (last["kind"], last["message"]) == ("diverged", str(error.value))
    assert None in last["losses"]
    assert last["not_finite"]["losses"] in ("inf", "nan")
    for step in checkpoint.steps(tmp_path / "run" / "checkpoints"):
        state = read_state(tmp_path / "run", step)
        for value in (*state.tensors.values(), *state.momentum.values()):
            assert np.isfinite(value).all()


def test_an_infinite_loss_ends_a_run(textures: Path, tiny_recipe: Recipe, tmp_path: Path) -> None:
    recipe = tiny_recipe.replace(epochs=1, lr=1e-6)
    values = initial_tensors(recipe)
    values["bn1.running_mean"][:] = -3e38  # training does not use it
    start = tmp_path / "start.safetensors"
    checkpoint.write_weights(start, values, {"recipe": recipe.fields(), "classes": []})
    run = tmp_path / "run"
    message = r"not finite at step 7: .* of 20 images.*Last good checkpoint: \S+step-00000000 "
    with pytest.raises(DivergedError, match=message):
        lockstep.train(recipe, textures, run, weights=start)
    assert checkpoint.steps(run / "checkpoints") == [0, 7]
    assert not (run / "report.json").exists()
    *_, line = (run / "log.jsonl").read_text().splitlines()
    last = json.loads(line, parse_constant=pytest.fail)
    assert (last["kind"], last["loss"], last["step"]) == ("diverged", None, 7)
    with pytest.raises(DivergedError, match="of 20 images"):
        lockstep.load(run).evaluate(textures).to_json()
    with pytest.raises(DivergedError, match="logits"):
        list(lockstep.load(run).predict([next((textures / "val").rglob("*.jpg"))]))
