"""Every installed engine against the reference: the same weights, images and recipe, each in a process of its own."""

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from lockstep import backends
from lockstep.errors import BackendError, LockstepError, RecipeError
from lockstep.recipes import Recipe
from lockstep.recorder import Listener, Recorder
from lockstep.verification import workload as workloads
from lockstep.verification.comparison import between, compare, compare_loaders, finite
from lockstep.verification.workload import Arrays

REFERENCE = "reference"


def verify(
    engines: Sequence[str] | None = None,
    *,
    recipe: str | Recipe = "resnet50-paddle-90ep",
    model: str | None = None,
    steps: int | None = None,
    precision: str = "fp32",
    full: bool = False,
    listener: Listener | None = None,
) -> dict[str, Any]:
    """Compare engines (by default all that are installed) with the NumPy reference in float64; return a report.

    Each carries out the same workload: logits, an evaluation, single steps, and a free run of `steps` steps (20; 3 of a full
    model) over the recipe's schedule, compressed to them. By default a narrow variant of the recipe's model (or of `model`)
    at 64 px; with `full` the model itself at its own size. `report["passed"]` says whether all differences are within the
    bounds of `lockstep.verification.bounds`; what an engine that failed said is in its `error`.

    Raises `BackendError` if an engine is unknown or missing, or if there is none to compare.

    >>> import lockstep
    >>> report = lockstep.verify(["torch"], steps=4)
    >>> report["passed"], [row["quantity"] for row in report["engines"]["torch"]["rows"]][:3]
    (True, ['logits', 'evaluation', 'loss'])
    """
    steps = steps or (3 if full else 20)
    if steps < 3:
        raise RecipeError(f"steps must be at least 3, so that the rate rises and falls, not {steps}")
    pythons = _interpreters(engines)
    recorder = Recorder(listener)
    with tempfile.TemporaryDirectory(prefix="lockstep-verify-") as name:
        folder = Path(name)
        work = workloads.build(folder, recipe, model, steps, precision, full)
        workloads.save(work, folder)
        found: dict[str, Arrays] = {}
        about: dict[str, dict[str, Any]] = {}
        for engine, python in pythons.items():
            about[engine] = _carried_out(engine, python, folder, recorder)
            if "error" not in about[engine]:
                found[engine] = workloads.load_arrays(folder / f"{engine}.npz")
    if REFERENCE not in found:
        raise LockstepError(f"the reference failed: {about[REFERENCE]['error']}")
    return _report(work, full, about, found)


def _interpreters(engines: Sequence[str] | None) -> dict[str, Path]:
    """Return the Python of every engine to run, the reference's first."""
    installed = {name: python for name in backends.FRAMEWORKS if (python := backends.interpreter(name)) is not None}
    asked = list(installed) if engines is None else list(engines)
    chosen = [name for name in dict.fromkeys(asked) if name != REFERENCE]
    for name in chosen:
        if name not in installed:
            backends.load(name)  # says what is missing and how to install it
    if not chosen:
        raise BackendError("there is no engine to compare with the reference; see `lockstep doctor`")
    return {name: installed[name] for name in (REFERENCE, *chosen)}


def _carried_out(engine: str, python: Path, folder: Path, recorder: Recorder) -> dict[str, Any]:
    """Run a worker; return what it ran on and how long it took, or its `error`."""
    progress, began = recorder.progress(engine), time.perf_counter()
    # A worker is no rank of anything, whatever this process is.
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    command: list[str | Path] = [python, "-m", "lockstep.verification.worker", folder, engine]
    with (folder / f"{engine}.stderr").open("w+", encoding="utf-8") as errors:
        with subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment
        ) as process:
            try:
                assert process.stdout is not None
                _follow(process.stdout, progress)
            except BaseException:
                process.kill()
                raise
        code = process.returncode
        if code:
            errors.seek(0)
            lines = errors.read().strip().splitlines()
            return {"error": lines[-1] if lines else f"it ended with exit code {code} and said nothing"}
    about = json.loads((folder / f"{engine}.json").read_text(encoding="utf-8"))
    return about | {"seconds": time.perf_counter() - began}


def _follow(lines: IO[str], progress: Any) -> None:
    for line in lines:
        if line.startswith('{"done"'):  # a framework may print lines of its own
            told = json.loads(line)
            progress(told["done"], told["total"])


def _report(
    work: workloads.Workload, full: bool, about: dict[str, dict[str, Any]], found: dict[str, Arrays]
) -> dict[str, Any]:
    engines, expected = {}, found[REFERENCE]
    for name, facts in about.items():
        if name == REFERENCE:
            continue
        if name not in found:
            engines[name] = facts | {"passed": False, "rows": []}
            continue
        rows = [row.fields() for row in compare(found[name], expected, work, full)]
        loader = compare_loaders(found[name], expected)
        passed = all(row["passed"] for row in rows) and loader["passed"]
        engines[name] = facts | {"rows": rows, "loader": loader, "passed": passed}
    others = {name: arrays for name, arrays in found.items() if name != REFERENCE}
    furthest = between(others, work.recipe, full).fields() if len(others) > 1 else None
    return {
        "recipe": work.recipe.fields(),
        "images": work.recipe.global_batch_images,
        "steps": len(work.batches),
        "full": full,
        "reference": about[REFERENCE],
        "engines": engines,
        "furthest_apart": furthest,
        "losses": {name: [finite(loss) for loss in arrays["losses"].tolist()] for name, arrays in found.items()},
        "passed": all(engine["passed"] for engine in engines.values()) and (furthest is None or furthest["passed"]),
    }
