"""Find the largest batch whose training step fits into memory. Each try is a new process."""

import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lockstep import backends
from lockstep.benchmark.failures import OUT_OF_MEMORY, count_kills, explain_failure
from lockstep.benchmark.step_process import FAILURE, RESULT, save_task
from lockstep.recipes import Execution, Recipe
from lockstep.recipes.image_sizes import fix_size, list_sizes
from lockstep.recipes.order import STRIDE
from lockstep.system.errors import EXIT_INTERRUPTED, BackendError, Interrupted, UserError
from lockstep.system.workers import carry_out

FIRST = 32
"""The first batch that is tried, in images."""
MOST = 16384
"""No larger batch is tried: its images of 224 px take 2.5 GB before the first layer."""
FINENESS = 16
"""The result is at most this share, 1 / FINENESS, below a batch that does not fit."""


@dataclass(frozen=True)
class Try:
    """Two training steps of a number of images, in a number of parts."""

    images: int
    parts: int
    fits: bool
    reason: str = ""
    """Why it does not fit."""
    is_short: bool = False
    """Whether the reason is known to be lack of memory. Some libraries only report that something
    failed."""
    images_per_sec: float | None = None
    """Speed of the second step; None if it does not fit."""
    peak_memory_bytes: int | None = None
    """The most main memory that the process used; None if it does not fit or is not known."""
    device: str = ""


@dataclass(frozen=True)
class Found:
    """The answer: the largest batch, and how the recipe's own batch is trained."""

    largest: int
    """Images that one process computes at once."""
    parts: int
    """The smallest number of `accumulation_steps` with which the recipe's global batch fits, on one
    process."""
    tries: list[Try]

    def fields(self) -> dict[str, Any]:
        """Return the fields as plain values."""
        return asdict(self)


def find_batch(
    recipe: Recipe,
    execution: Execution,
    *,
    memory_bytes: int | None = None,
    first: int = FIRST,
    listener: Callable[[Try], None] = lambda done: None,
) -> Found:
    """Return the largest batch of a recipe's training step that fits, on one process with this
    execution. Images have the largest size of the recipe.

    `memory_bytes` is what a try may allocate on a CPU; None: there is no limit. `listener` gets
    each try when it is done.

    Raises `UserError` if not even the smallest step fits, `BackendError` if the backend is missing
    or the smallest step fails for another reason, and `Interrupted` after Ctrl-C, or when the
    handler of a signal raises it.
    """
    backends.check_installed(execution.backend)
    recipe = fix_size(recipe, list_sizes(recipe)[-1])
    least = 1 if recipe.image_size > STRIDE else 2  # batch norm needs two values of a channel
    tries: list[Try] = []

    def fits(images: int, parts: int = 1) -> bool:
        result = _try_steps(recipe, execution, images, parts, memory_bytes)
        tries.append(result)
        listener(result)
        if not (result.is_short or any(other.fits for other in tries)):
            _check_smallest(_try_steps(recipe, execution, least, 1, memory_bytes))
        return result.fits

    try:
        largest = find_largest(fits, max(first, least), MOST, least)
        if largest == 0:
            raise UserError(
                f"no batch fits: {tries[-1].reason}\nUse a smaller image_size or model, or more"
                " memory"
            )
        images = recipe.global_batch_images
        divisors = _list_divisors(images, least, largest)
        parts = next((parts for parts in divisors if fits(images, parts)), None)
    except (KeyboardInterrupt, Interrupted) as stop:
        fitting = max((done.images for done in tries if done.fits and done.parts == 1), default=0)
        code = stop.exit_code if isinstance(stop, Interrupted) else EXIT_INTERRUPTED
        known = f"a batch of {fitting} fits, larger ones may" if fitting else "nothing is known yet"
        raise Interrupted(f"stopped after try {len(tries)}: {known}", code) from None
    if parts is None:
        raise UserError(
            f"a batch of {largest} fits, but not {images} in any number of parts:"
            f" {tries[-1].reason}\nUse a different global_batch_images"
        )
    return Found(largest, parts, tries)


def find_largest(fits: Callable[[int], bool], first: int, most: int, least: int = 1) -> int:
    """Return a number up to `most` that fits while 1 / FINENESS more does not; 0 if `least` does
    not fit.

    If n fits, everything below n counts as fitting. Numbers are doubled from `first`, or halved,
    and then bisected.

    >>> find_largest(lambda images: images <= 100, 32, 1024)
    100
    """
    low = 0
    high = min(first, most)
    while fits(high):
        low = high
        if low == most:
            return low
        high = min(2 * high, most)
    while not low and high > least:
        half = max(high // 2, least)
        low, high = (half, high) if fits(half) else (0, half)
    while low and high - low > max(low // FINENESS, 1):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _list_divisors(images: int, least: int, largest: int) -> list[int]:
    """Return in how many parts a batch can be computed, with `least` to `largest` images each."""
    divisors = [parts for parts in range(1, images + 1) if images % parts == 0]
    return [parts for parts in divisors if least <= images // parts <= largest]


def _try_steps(
    recipe: Recipe, execution: Execution, images: int, parts: int, memory_bytes: int | None
) -> Try:
    """Take two steps in a new process."""
    task = recipe.replace(global_batch_images=images)
    how = execution.replace(accumulation_steps=parts)
    python = backends.find_interpreter(execution.backend) or Path(sys.executable)
    with tempfile.TemporaryDirectory(prefix="lockstep-find-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        kills = count_kills()
        save_task(folder, task, how, memory_bytes)
        command: list[str | Path] = [python, "-P", "-m", "lockstep", "find", "step", folder]
        ended = carry_out(command, folder, lambda done, total: None)
        if (folder / RESULT).exists() and not ended.code:
            result = json.loads((folder / RESULT).read_text(encoding="utf-8"))
            return Try(images, parts, True, **result)
        failures = [json.loads(file.read_text("utf-8")) for file in folder.glob(FAILURE)]
        killed = count_kills() != kills
        status, reason = explain_failure(ended, failures, killed=killed, ranks=1)
    return Try(images, parts, False, reason, is_short=status == OUT_OF_MEMORY)


def _check_smallest(done: Try) -> None:
    """Raise `BackendError` if the smallest step fails for another reason than lack of memory."""
    if not (done.fits or done.is_short):
        raise BackendError(
            f"a step of {done.images} images failed, but not for lack of memory: {done.reason}"
        )
