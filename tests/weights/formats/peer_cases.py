"""What the tests with other frameworks have in common: how they run, and the logits of what
Lockstep reads."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch

from lockstep.backends.torch import load_module
from lockstep.models.state import State
from lockstep.recipes import Recipe
from lockstep.weights import Weights
from tests.weights.formats.cases import state_of


def run_peer(
    script: str,
    command: str,
    folder: Path,
    *,
    python: Path | str = sys.executable,
    **environment: str,
) -> None:
    """Run a script of `peers` without a GPU, with a command and a folder, in its own process."""
    program = [python, Path(__file__).parent / "peers" / script, command, folder]
    variables = os.environ | {"CUDA_VISIBLE_DEVICES": ""} | environment
    result = subprocess.run(program, capture_output=True, text=True, env=variables, timeout=300)
    assert result.returncode == 0, result.stderr[-3000:]


def save_images(folder: Path, *shape: int) -> None:
    """Write the images that both programs evaluate."""
    images = np.random.default_rng(5).standard_normal(shape).astype(np.float32)
    np.save(folder / "images.npy", images)


def logits(original: Weights, images: np.ndarray) -> np.ndarray:
    """Return PyTorch's logits [N, logits] of images [N, 3, H, W]."""
    module = load_module(original.recipe, original.state.tensors)
    with torch.inference_mode():
        return module(torch.from_numpy(np.ascontiguousarray(images))).numpy()


def state_of_peers(recipe: Recipe) -> State:
    """Return values of a size that keeps probabilities away from 0 and 1, and velocities."""
    random = np.random.default_rng(11)
    values = {}
    for tensor in recipe.list_tensors():
        if len(tensor.shape) > 1:
            value = random.standard_normal(tensor.shape) * (2 / np.prod(tensor.shape[1:])) ** 0.5
        else:
            value = random.uniform(0.5, 1.5, tensor.shape)
            value -= 0 if tensor.role in ("bn_scale", "bn_var") else 1
        value = value / 5 if tensor.name == "fc.weight" else value
        values[tensor.name] = value.astype(np.float32)
    return State(0, values, state_of(recipe).momentum)


def assert_near(actual: np.ndarray, expected: np.ndarray, bound: float = 1e-5) -> None:
    """Assert equality to a share of the largest value; different images differ by much more."""
    largest = np.abs(expected).max()
    assert np.isfinite(largest)
    assert np.ptp(expected, axis=0).max() > 1e-3 * largest
    assert np.abs(actual - expected).max() < bound * largest
