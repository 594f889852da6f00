"""Part: what the engine says when memory is short, and that it goes on afterwards."""

import resource
from typing import Any

import numpy as np

from benchmarks.gpu.engines import held_batch, open_engine, recipe_of
from benchmarks.gpu.timing import Ground, Say
from lockstep.data import Batch
from lockstep.recipes import Recipe
from lockstep.system.errors import BackendError

EXPECTED = ("too little memory", "--set accumulation_steps=2")
FITS = {"cuda": 16, "cpu": 4}
TOO_MANY = {"cuda": 8192, "cpu": 4096}
SPARE_BYTES = 192 * 2**20
BATCHES = (256, 512, 1024, 1536, 2048, 3072, 4096)


def measure(ground: Ground, say: Say) -> None:
    """Write a row with the message, and on a GPU the largest of some batches that fits."""
    recipe = recipe_of(
        ground, "resnet50", "bf16" if ground.device == "cuda" else "fp32", FITS[ground.device]
    )
    if ground.device == "cpu":
        recipe = recipe.replace(image_size=64)
    with open_engine(recipe, ground.device, compile="off", deterministic=False) as engine:
        engine.fetch(engine.train([held_batch(recipe)], 0))
        if ground.device == "cpu":
            _limit_address_space()
        said = _said(engine, _large(recipe, TOO_MANY[ground.device]))
        after = engine.fetch(engine.train([held_batch(recipe)], 1)).losses
    is_right = all(words in said for words in EXPECTED)
    say(
        {
            "what": "out of memory",
            "said": said[:800],
            "is_right": is_right,
            "goes_on": bool(np.isfinite(after).all()),
        }
    )
    if ground.device == "cuda":
        for recompute in ("off", "blocks"):
            _largest(recipe, recompute, say)


def _large(recipe: Recipe, images: int) -> Batch:
    """Return a batch whose images are one image, repeated without taking memory on the host."""
    batch = held_batch(recipe, images=1)
    return Batch(np.repeat(batch.images, images, axis=0), np.zeros(images, np.int64))


def _said(engine: Any, batch: Batch) -> str:
    try:
        engine.fetch(engine.train([batch], 1))
    except BackendError as error:
        return str(error)
    except Exception as error:  # what a user would see instead
        return f"{type(error).__name__}: {error}"
    return f"nothing: {len(batch.labels)} images fit"


def _limit_address_space() -> None:
    """Let this process have little more memory than it has, so that a CPU runs out of it as a GPU
    does."""
    with open("/proc/self/statm", encoding="ascii") as file:  # noqa: PTH123
        used = int(file.read().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + SPARE_BYTES, hard))


def _largest(recipe: Recipe, recompute: str, say: Say) -> None:
    """Write the largest of some batches that fits in one step, without the compiler, which needs
    less."""
    fits = 0
    for images in BATCHES:
        changed = recipe.replace(global_batch_images=images)
        how = {"compile": "off", "recompute": recompute}
        with open_engine(changed, "cuda", deterministic=False, **how) as engine:
            if not _said(engine, _large(recipe, images)).startswith("nothing"):
                break
        fits = images
    about = {"compiled": False, "precision": recipe.precision, "recompute": recompute}
    say({"what": "largest batch", "of": list(BATCHES), "fits": fits} | about)
