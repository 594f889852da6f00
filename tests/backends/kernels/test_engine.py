"""Whole steps of PyTorch's engine with fused kernels against its plain path."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from lockstep.backends import torch as torch_backend
from lockstep.backends.torch.fused_batch_norm import FusedBatchNorm
from lockstep.models.state import State
from lockstep.recipes import Execution, Recipe
from lockstep.verification.bounds import BOUNDS, distance
from tests.backends.cases import statistics
from tests.backends.drawing import draw_batch, draw_images, draw_steady_state
from tests.backends.kernels.device import DEVICE, NARROW
from tests.soak import in_a_soak

RECIPE = NARROW.replace(image_size=32, eval_crop=32, stochastic_depth=0.6)


def train(
    recipe: Recipe = RECIPE, steps: int = 1, **how: Any
) -> tuple[np.ndarray, State, np.ndarray]:
    """Return the losses of some steps, the state after them, and logits."""
    execution = Execution.of({"device": DEVICE, "compile": "off"} | how)
    with torch_backend.engine(
        recipe, np.full(steps, 1e-4), torch_backend.world(execution), execution
    ) as engine:
        fused = [module for module in engine.model.modules() if isinstance(module, FusedBatchNorm)]
        assert len(fused) == (12 if execution.fused == "on" else 0)
        engine.write(draw_steady_state(recipe))
        batches = [draw_batch(recipe, 4, seed, size=8) for seed in range(steps)]
        losses = engine.fetch(engine.train(batches, 0)).losses
        return losses, engine.read(), engine.predict(draw_images(2, 8))


def check(
    fused: tuple[np.ndarray, State, np.ndarray], plain: tuple[np.ndarray, State, np.ndarray]
) -> None:
    assert fused[0] == pytest.approx(plain[0], rel=BOUNDS["loss"].value)
    assert distance(fused[1].momentum, plain[1].momentum) < BOUNDS["gradient"].value
    assert distance(statistics(fused[1]), statistics(plain[1])) < BOUNDS["statistics"].value
    assert distance(fused[2], plain[2]) < BOUNDS["logits"].value
    assert fused[1].tensors.keys() == plain[1].tensors.keys()


def test_a_step_with_fused_kernels_is_that_of_the_plain_path() -> None:
    recipe = RECIPE.replace(clip_norm=0.01)
    check(train(recipe, fused="on"), train(recipe, fused="off"))


@in_a_soak
@pytest.mark.parametrize(
    "changes", [{"accumulation_steps": 2}, {"recompute": "blocks"}, {"compile": "on"}], ids=str
)
def test_steps_that_are_taken_in_other_ways_are_those_of_the_plain_path(
    changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if DEVICE == "cpu":  # the compiler's last stage would make C++; the graphs are the same
        monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    check(train(fused="on", steps=2, **changes), train(fused="off", steps=2, **changes))
