"""Tests for every engine: a run that starts from given weights and is pruned."""

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lockstep
from lockstep.models.state import State
from lockstep.recipes import Execution, Recipe
from lockstep.runs.starting_weights import read_masks
from lockstep.system.errors import Interrupted
from lockstep.weights import checkpoint
from tests.backends.cases import all_bits
from tests.backends.conftest import BACKENDS
from tests.backends.drawing import draw_state


@pytest.fixture(scope="module")
def weights(tiny_recipe: Recipe, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return weights without zeros."""
    path = tmp_path_factory.mktemp("weights") / "w.safetensors"
    about = {"recipe": tiny_recipe.fields(), "classes": []}
    checkpoint.write_weights(path, draw_state(tiny_recipe).tensors, about)
    return path


def end(run: Path) -> State:
    state = checkpoint.newest_intact(run / "checkpoints")[0]
    assert state is not None
    return state


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_what_was_pruned_stays_0_and_the_run_goes_on_to_the_same_bits(
    backend: str, weights: Path, textures: Path, tiny_recipe: Recipe, tmp_path: Path
) -> None:
    recipe = tiny_recipe.replace(
        sparsity="mask_2d_greedy", ema_decay=0.9, epochs=1, weight_decay=0.01
    )
    how = Execution(backend=backend, compile="off", reference_dtype="float32", log_every_steps=1)
    whole = tmp_path / "whole"
    parts = tmp_path / "parts"
    lockstep.train(recipe, textures, whole, weights=weights, execution=how)

    def stop(event: dict[str, Any]) -> None:
        if event["kind"] == "train" and event["step"] == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Interrupted):
        lockstep.train(recipe, textures, parts, weights=weights, execution=how, listener=stop)
    lockstep.train(recipe, textures, parts, execution=how)
    assert all_bits(end(parts)) == all_bits(end(whole))
    kept = read_masks(whole)
    assert len(kept) == 16
    for name, mask in kept.items():
        for values in (end(whole).tensors, end(whole).momentum, end(whole).ema):
            assert np.array_equal(values[name] != 0, mask), name
