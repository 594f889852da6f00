"""Part: two processes on one GPU by gloo, against one process in two parts; with several GPUs,
NCCL."""

import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu.engines import Lockstep, held_batch, recipe_of
from benchmarks.gpu.timing import Ground, Say
from lockstep import backends
from lockstep.recipes import Recipe
from lockstep.verification.bounds import BOUNDS, distance

STEPS = 4
BATCH = 32


def measure(ground: Ground, say: Say) -> None:
    """Write a row for two ranks on one device, and with several GPUs one for a rank on each."""
    import torch

    gpus = torch.cuda.device_count() if ground.device == "cuda" else 0
    say(
        {"what": "ranks", "exchange": "gloo", "ranks": 2, "devices": 1}
        | _ranks(ground, 2, shares_device=True)
    )
    if gpus > 1:
        say(
            {"what": "ranks", "exchange": "nccl", "ranks": gpus, "devices": gpus}
            | _ranks(ground, gpus, shares_device=False)
        )
    elif ground.device == "cuda":
        say(
            {
                "what": "ranks",
                "exchange": "nccl",
                "status": "missing",
                "reason": "needs two GPUs, and there is one",
            }
        )


def recipe_for(ground: Ground, ranks: int) -> Recipe:
    """Return the recipe of a rank. At this rate, rounding does not lead to another trajectory
    within the steps."""
    recipe = recipe_of(ground, "resnet50", "fp32", BATCH)
    images = recipe.global_batch_images
    return recipe.replace(global_batch_images=max(images // ranks, 2) * ranks, weight_decay=0.0)


def _ranks(ground: Ground, ranks: int, *, shares_device: bool) -> dict[str, Any]:
    """Return how far the ranks' weights are from those of one process that takes as many parts, and
    their speed."""
    recipe = recipe_for(ground, ranks)
    with tempfile.TemporaryDirectory() as folder:
        order = {
            "device": ground.device,
            "tiny": ground.tiny,
            "ranks": ranks,
            "shares_device": shares_device,
            "out": folder,
        }
        code = backends.load("torch").launch(
            ranks, ["-m", "benchmarks.gpu.rank_process", json.dumps(order)], "native"
        )
        if code:
            raise RuntimeError(f"a rank ended with exit code {code}; its message is in the log")
        with np.load(Path(folder) / "0.npz") as stored:
            moved = {name: stored[name] for name in stored.files if name != "images_per_sec"}
            rate = float(stored["images_per_sec"])
    alone = Lockstep(recipe, ground, name="one process", compile="off", accumulation_steps=ranks)
    start = alone.engine.read().tensors
    alone.train(STEPS)
    end = alone.engine.read()
    expected = {name: end.tensors[name] - start[name] for name in end.momentum}
    # Ranks and parts compute with the same kernels at the same size, so only the order of a sum
    # differs. The angle of two updates would not do: it is small even if all ranks take the same
    # images.
    far = distance(moved, expected)
    bound = BOUNDS["trajectory"].value
    has_moved = any(value.any() for value in moved.values())
    return {
        "largest_difference": far,
        "bound": bound,
        "passed": far <= bound and has_moved,
        "images_per_sec": rate,
    }


def work_as_rank(order: dict[str, Any]) -> None:
    """Take steps as one of the ranks; rank 0 writes how far the weights moved."""
    from lockstep.backends.torch.engine import TorchEngine
    from lockstep.backends.torch.world import TorchWorld
    from lockstep.data import Batch
    from lockstep.recipes import Execution
    from lockstep.recipes.initial_weights import initial_state

    class OnOneDevice(TorchWorld):
        """Ranks that share a GPU. NCCL refuses that, so they exchange through gloo."""

        def _meet(self, backend: str) -> None:
            super()._meet("gloo")

    if order["shares_device"]:
        os.environ["LOCAL_RANK"] = "0"
    ground = Ground(order["device"], order["tiny"], time.monotonic() + 600, order["out"])
    recipe = recipe_for(ground, order["ranks"])
    execution = Execution.of({"backend": "torch", "device": ground.device, "compile": "off"})
    world = (OnOneDevice if order["shares_device"] else TorchWorld)(execution)
    engine = TorchEngine(recipe, np.full(100, 1e-3), world, execution)
    state = initial_state(recipe)
    engine.write(state)
    whole = held_batch(recipe)
    own = _share(len(whole.labels), world.rank, world.ranks)
    batch = Batch(whole.images[own], whole.labels[own], is_held=True)
    began = time.perf_counter()
    engine.fetch(engine.train([batch] * STEPS, 0))
    rate = STEPS * len(whole.labels) / (time.perf_counter() - began)
    end = engine.read()
    if world.rank == 0:
        moved = {name: end.tensors[name] - state.tensors[name] for name in end.momentum}
        np.savez(Path(order["out"]) / "0.npz", images_per_sec=rate, **moved)
    world.wait()
    world.close()


def _share(images: int, rank: int, ranks: int) -> slice:
    """Return the images of a rank: the same ones as those of one process's part with this number."""
    each = images // ranks
    return slice(rank * each, (rank + 1) * each)
