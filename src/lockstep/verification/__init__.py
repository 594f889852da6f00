"""Compare every installed backend with the reference: same weights, images and recipe, each in a
separate process."""

import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lockstep.backends import FRAMEWORKS, find_interpreter, load
from lockstep.recipes import Recipe
from lockstep.runs.events import Listener
from lockstep.runs.recorder import Recorder
from lockstep.system.errors import BackendError, LockstepError, RecipeError
from lockstep.system.workers import carry_out
from lockstep.verification import workload as workloads
from lockstep.verification.comparison import compare, compare_backends, compare_loaders, make_finite
from lockstep.verification.workload import Arrays

REFERENCE = "reference"


def verify(
    backends: Sequence[str] | None = None,
    *,
    recipe: str | Recipe = "resnet50-paddle-90ep",
    model: str | None = None,
    steps: int | None = None,
    precision: str = "fp32",
    full: bool = False,
    listener: Listener | None = None,
) -> dict[str, Any]:
    """Compare backends with the NumPy reference in float64.

    Each computes logits, an evaluation, single steps, and a free run over the recipe's schedule.

    Args:
        backends: Names of backends; by default all that are installed.
        recipe: A name, a file or a `Recipe`.
        model: A network to use instead of the recipe's.
        steps: The number of steps of the free run; by default 20, or 3 with `full`.
        precision: The precision in which the backends compute.
        full: Whether to use the network at its own size, not a narrow variant at 64 px.
        listener: A function to call with notes and progress.

    Returns:
        A report: `passed` is whether all differences are within `lockstep.verification.bounds`;
        `engines` has the differences by backend, or the `error` of a backend that failed.

    Raises:
        BackendError: A backend is unknown or missing, or there is none to compare.
        RecipeError: The recipe, the model, the precision or the number of steps is wrong.
        LockstepError: The reference itself failed.

    >>> import lockstep
    >>> report = lockstep.verify(["torch"], steps=3)
    >>> report["passed"], [row["quantity"] for row in report["engines"]["torch"]["rows"]][:3]
    (True, ['logits', 'evaluation', 'loss'])
    """
    if steps is None:
        steps = 3 if full else 20
    if steps < 3:
        raise RecipeError(
            f"steps must be at least 3, so that the learning rate rises and falls; found {steps}"
        )
    pythons = _find_interpreters(backends)
    recorder = Recorder(listener)
    with tempfile.TemporaryDirectory(prefix="lockstep-verify-") as name:
        folder = Path(name)
        work = workloads.build(folder, recipe, model, steps, precision, full)
        workloads.save(work, folder)
        results: dict[str, Arrays] = {}
        about: dict[str, dict[str, Any]] = {}
        for backend, python in pythons.items():
            about[backend] = _run_worker(backend, python, folder, recorder)
            if "error" not in about[backend]:
                results[backend] = workloads.load_arrays(folder / f"{backend}.npz")
    if REFERENCE not in results:
        raise LockstepError(f"the reference failed: {about[REFERENCE]['error']}")
    return _build_report(work, full, about, results)


def _find_interpreters(names: Sequence[str] | None) -> dict[str, Path]:
    """Return the Python of every backend to run, the reference's first."""
    pythons: dict[str, Path] = {}
    for name in dict.fromkeys([REFERENCE, *(FRAMEWORKS if names is None else names)]):
        python = find_interpreter(name) if name in FRAMEWORKS else None
        if python is not None:
            pythons[name] = python
        elif names is not None:
            load(name)  # raises an error that says what is missing and how to install it
    if len(pythons) == 1:
        raise BackendError(
            "there is no backend to compare with the reference; see `lockstep doctor`"
        )
    return pythons


def _run_worker(backend: str, python: Path, folder: Path, recorder: Recorder) -> dict[str, Any]:
    """Run a worker; return what it ran on and how long it took, or its `error`."""
    progress = recorder.progress(backend)
    began = time.perf_counter()
    worker = ("-P", "-m", "lockstep.verification.backend_process")
    command: list[str | Path] = [python, *worker, folder, backend]
    result = folder / f"{backend}.json"
    try:
        ended = carry_out(command, folder, progress)
    except OSError as error:
        return {"error": f"cannot run {python}: {error.strerror}"}
    if ended.code or not result.is_file():
        output = f": {ended.errors}" if ended.errors else " and printed nothing"
        return {"error": f"{python} ended with exit code {ended.code}{output}"}
    return json.loads(result.read_text(encoding="utf-8")) | {"seconds": time.perf_counter() - began}


def _build_report(
    work: workloads.Workload,
    full: bool,
    about: dict[str, dict[str, Any]],
    results: dict[str, Arrays],
) -> dict[str, Any]:
    backends = {}
    expected = results[REFERENCE]
    for name, facts in about.items():
        if name not in results:
            backends[name] = facts | {"passed": False, "rows": []}
        elif name != REFERENCE:
            rows = [row.fields() for row in compare(results[name], expected, work, full)]
            loader = compare_loaders(results[name], expected)
            passed = all(row["passed"] for row in [*rows, loader])
            backends[name] = facts | {"rows": rows, "loader": loader, "passed": passed}
    others = {name: arrays for name, arrays in results.items() if name != REFERENCE}
    furthest = None
    if len(others) > 1:
        furthest = compare_backends(others, work.recipe, full).fields()
    losses = {}
    for name, arrays in results.items():
        losses[name] = list(map(make_finite, arrays["losses"].tolist()))
    return {
        "recipe": work.recipe.fields(),
        "images": work.recipe.global_batch_images,
        "steps": len(work.batches),
        "full": full,
        "reference": about[REFERENCE],
        "engines": backends,
        "furthest_apart": furthest,
        "losses": losses,
        "passed": all(row["passed"] for row in [*backends.values(), furthest] if row),
    }
