"""What the tests with other frameworks have in common: how they run, and the logits of what
Lockstep reads."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch

from lockstep.backends.torch import load_module
from lockstep.weights import Weights


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
