"""The processes that measure one cell: a launcher of ranks, or a rank (see
`lockstep.benchmark.grid`, which starts them).

The folder holds `cell.json`, and `model.onnx` if a given model is measured. Every rank writes
`rank-<r>.json` or `failure-<r>.json` into it.
"""

import json
import os
import time
from pathlib import Path

from lockstep import backends
from lockstep.benchmark.cells import Cell, Plan
from lockstep.benchmark.failures import describe_error
from lockstep.benchmark.fingerprint import fingerprint
from lockstep.benchmark.measurement import measure
from lockstep.launch.launcher import LOCKSTEP, launch_ranks
from lockstep.launch.nodes import one_machine
from lockstep.recipes import Execution, Recipe
from lockstep.system.files import write_bytes, write_json
from lockstep.system.ranks import is_leading
from lockstep.system.workers import end_with_parent, tell

_MODEL = "model.onnx"


def save_task(
    folder: Path,
    cell: Cell,
    plan: Plan,
    recipe: Recipe,
    execution: Execution,
    exported: bytes | None = None,
) -> None:
    """Write the task of a worker that starts right after this: what to measure, and the current
    time.

    `exported` is the ONNX model that it measures; None: one of the initial weights.
    """
    if exported is not None:
        write_bytes(folder / _MODEL, exported, is_flushed=False)
    task = {
        "cell": cell.fields(),
        "plan": plan.fields(),
        "recipe": recipe.fields(),
        "execution": execution.fields(),
    }
    write_json(folder / "cell.json", task | {"started": time.perf_counter()})


def work(folder: Path) -> int:
    """Measure the cell in `folder` and return the exit code.

    If this process is a rank, or the only process, it measures. Otherwise it launches ranks that
    measure.
    """
    task = json.loads((folder / "cell.json").read_text(encoding="utf-8"))
    cell = Cell(**task["cell"])
    plan = Plan(**task["plan"])
    execution = Execution.of(task["execution"])
    if cell.ranks > 1 and "RANK" not in os.environ:
        end_with_parent()
        backend = backends.load(cell.backend)
        return launch_ranks(
            [*LOCKSTEP, "benchmark", "cell", str(folder)],
            lambda: backend.prepare_ranks(one_machine(cell.ranks), execution.distributed),
        )
    if cell.ranks == 1:
        end_with_parent()  # ranks end with their launcher
    rank = os.environ.get("RANK", "0")
    model = folder / _MODEL
    exported = model.read_bytes() if model.exists() else None
    try:
        listener = tell if is_leading() else _say_nothing
        measured = measure(cell, plan, Recipe.of(task["recipe"]), execution, listener, exported)
    except Exception as error:
        write_json(folder / f"failure-{rank}.json", describe_error(error))
        return 1
    about = {"environment": fingerprint(cell.computes), "started": task["started"]}
    write_json(folder / f"rank-{rank}.json", measured.fields() | about)
    return 0


def _say_nothing(done: int, total: int) -> None:
    pass
