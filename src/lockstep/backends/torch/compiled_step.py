"""When `torch.compile` pays on a CPU: the time it saves in an epoch against the time it takes
before the first step.

The time of a step was measured once by hand on an AMD EPYC with AVX2 alone, the time to compile on
a processor twice as fast (`benchmarks/cpu_layouts.py`, benchmarks/notes/layouts-and-compilers.md).
"""

import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from lockstep.recipes import Recipe
from lockstep.system.errors import BackendError
from lockstep.system.files import own_folder
from lockstep.system.machine import Arithmetic

_FOLDER = "TORCHINDUCTOR_CACHE_DIR"
COMPILE_SEC = 120.0
"""Seconds to compile the training step of a ResNet-50: twice the 60 s measured, for slower cores.
Most of it is serial."""
GAIN = 0.11
"""Share of a step's time that compiling saves in fp32 on processors with AVX2 and no AVX-512 (4.3
over 3.8 images/s). With AVX-512 the compiled step was between 8 % slower and 3 % faster, which does
not pay for compiling."""
GFLOPS_OF_A_CORE = 46.0
"""GFLOPS of a core in a training step in fp32 with AVX2: 3.8 images/s at 224 px, 24.3 GFLOP an
image, two cores."""


def settle_cache() -> None:
    """Keep what PyTorch compiles where only this user can write, unless a folder is chosen. Raises
    `BackendError` if there is no such place."""
    if _FOLDER in os.environ:
        return
    folder = Path(tempfile.gettempdir(), f"lockstep-torchinductor-{os.geteuid()}")
    try:
        with own_folder(folder):
            os.environ[_FOLDER] = str(folder)
    except OSError as error:
        raise BackendError(
            f"{folder} cannot keep compiled code: {error.strerror}; expected a folder that only you"
            f" can write. Set {_FOLDER} to one, or use --set compile=off"
        ) from None


def pays_on_cpu(
    recipe: Recipe,
    steps_per_epoch: int,
    *,
    ranks: int,
    cores: int,
    arithmetic: Arithmetic,
    environment: Mapping[str, str],
) -> bool:
    """Return whether compiling the step makes a run of one epoch shorter, on a processor with this
    arithmetic.

    An epoch decides, not the run: a run that is resumed with more epochs must decide as at its
    start, since a compiled step rounds differently. `cores` are the cores of one rank. A C++
    compiler must be installed. With several ranks the step is not compiled, since their exchange
    within a compiled step was not measured.
    """
    is_measured = (
        "AVX2" in arithmetic.extensions
        and "AVX-512" not in arithmetic.extensions
        and recipe.precision in ("fp32", "tf32")
    )
    if not is_measured or ranks > 1 or shutil.which(environment.get("CXX", "g++")) is None:
        return False
    return training_sec(recipe, steps_per_epoch, cores) * GAIN > COMPILE_SEC


def training_sec(recipe: Recipe, steps: int, cores: int) -> float:
    """Return the approximate seconds of `steps` steps on `cores` cores with AVX2, in fp32 and not
    compiled."""
    from lockstep.models.operations import work

    batch = recipe.global_batch_images
    image = work(
        recipe.spec,
        recipe.image_size,
        recipe.logits,
        precision="fp32",
        batch=batch,
        training=True,
    )
    return steps * batch * image.flops / (GFLOPS_OF_A_CORE * 1e9 * cores)
